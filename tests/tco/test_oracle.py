"""The vectorised model agrees with a plain one written apart from it, sample by sample."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from tierwise.tco.inputs import facts_of, resolve_inputs
from tierwise.tco.scenario import AccessSpec, DataSpec, load_preset
from tierwise.tco.spread import draw_inputs, present_totals

SAMPLES = 40


@pytest.mark.parametrize("growth", [-0.03, 0.0, 0.07])
@pytest.mark.parametrize("medium", ["ssd", "hdd", "tape", "lto9", "optical", "bdr", "cloud"])
def test_both_models_agree_to_a_billionth(
    medium: str, growth: float, plain_model: ModuleType
) -> None:
    scenario = replace(
        load_preset("modern-2026"),
        media=(medium,),
        horizon_years=60,
        data=DataSpec(size="37 PB", growth=growth, copies=2.0, parity=0.2),
        access=AccessSpec(read_share=0.05, drill_share=0.02, drill_every_years=3, exit=True),
    )
    facts = facts_of(scenario)
    inputs = resolve_inputs(scenario, facts)
    columns = draw_inputs(scenario, inputs, samples=SAMPLES, seed=11)
    fast = present_totals(scenario, scenario.plans[0], inputs, columns, facts)
    base = {key: item.value for key, item in inputs.ranges.items()}
    slow = [
        plain_model.present_value(
            medium,
            str(facts.medium(medium).kind),
            base | {key: float(column[sample]) for key, column in columns.items()},
            horizon=60,
            drill_every=3,
            leave=True,
        )
        for sample in range(SAMPLES)
    ]
    assert len(fast) == SAMPLES
    np.testing.assert_allclose(fast, slow, rtol=1e-9)
