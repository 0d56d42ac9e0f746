"""Sweeps, break-evens, winner maps and waterfalls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tierwise.core.errors import ConfigError, UsageError
from tierwise.tco.compare import compare
from tierwise.tco.scenario import load_preset
from tierwise.tco.solve import break_even, map_winners, spaced, sweep, waterfall


def test_a_break_even_is_where_both_cost_the_same() -> None:
    scenario = load_preset()
    found = break_even(scenario, "migration.price", "tape", "optical", low=1, high=600)
    (price,) = found.crossings
    assert found.cheaper_at_low == "tape"
    assert found.cheaper_at_high == "optical"
    assert 20 < price < 60
    at = replace(scenario, overrides={"migration": {"price": price}})
    result = compare(at, samples=0)
    assert result.of("tape").endowment_usd == pytest.approx(
        result.of("optical").endowment_usd, rel=1e-6
    )


def test_a_break_even_needs_two_strategies_that_differ() -> None:
    scenario = load_preset("modern-2026", ["data.size=0 B"])
    with pytest.raises(UsageError, match="tape twice"):
        break_even(scenario, "migration.price", "tape", "tape", low=1, high=9)
    with pytest.raises(UsageError, match="cost the same from 1 to 9"):
        break_even(scenario, "migration.price", "tape", "hdd", low=1, high=9)


def test_a_map_of_nothing_has_a_lead_of_one() -> None:
    scenario = load_preset("modern-2026", ["data.size=0 B"])
    axis = spaced(1.0, 9.0, 3, log=False)
    mapped = map_winners(scenario, "migration.price", axis, "tape.decline", axis / 20)
    assert (mapped.lead_YX == 1).all()


def test_a_map_too_fine_is_refused() -> None:
    axis = spaced(0.0, 0.1, 2000, log=False)
    with pytest.raises(UsageError, match="too fine"):
        map_winners(load_preset("modern-2026"), "migration.price", axis, "tape.decline", axis)


def test_no_break_even_says_who_leads_throughout() -> None:
    found = break_even(load_preset(), "power.tariff", "tape", "ssd", low=0.05, high=0.3)
    assert found.crossings == ()
    assert found.cheaper_at_low == found.cheaper_at_high == "tape"


def test_a_jump_is_found_where_it_happens() -> None:
    """A disc that lives 25 years instead of 24 saves one of two migrations in 50."""
    scenario = load_preset("modern-2026", ["overrides.migration.price=45"])
    found = break_even(scenario, "optical.life", "optical", "tape", low=10, high=60)
    (life,) = found.crossings
    assert life == pytest.approx(24.5, abs=1e-6)
    assert (found.cheaper_at_low, found.cheaper_at_high) == ("tape", "optical")


def test_a_sweep_matches_single_runs() -> None:
    scenario = load_preset("modern-2026", ["horizon_years=25"])
    swept = sweep(scenario, "tape.price", [4.0, 9.3, 14.0])
    for place, price in enumerate(swept.values):
        single = compare(replace(scenario, overrides={"tape": {"price": float(price)}}), samples=0)
        for item in single.strategies:
            assert swept.total_usd[item.name][place] == pytest.approx(item.endowment_usd)
    assert np.ptp(swept.total_usd["hdd"]) == 0


def test_the_winner_map_has_tape_below_and_optical_above() -> None:
    scenario = load_preset()
    result = map_winners(
        scenario,
        "migration.price", np.array([5.0, 20.0, 80.0, 200.0]),
        "tape.decline", np.array([0.0, 0.1]),
    )  # fmt: skip
    names = [[result.names[i] for i in row] for row in result.winner_YX]
    assert [row[0] for row in names] == ["tape", "tape"]
    assert [row[-1] for row in names] == ["optical", "optical"]
    assert (result.lead_YX >= 1).all()


@pytest.mark.parametrize(
    ("low", "high", "log", "what"),
    [(2.0, 1.0, False, "not below"), (0.0, 1.0, True, "above 0")],
)
def test_ranges_that_make_no_sense(low: float, high: float, log: bool, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        spaced(low, high, 5, log=log)


def test_a_map_needs_two_inputs_and_known_names() -> None:
    values = np.array([1.0, 2.0])
    with pytest.raises(UsageError, match="two different"):
        map_winners(load_preset(), "tape.price", values, "tape.price", values)
    with pytest.raises(ConfigError, match=r"no input tape\.prce"):
        sweep(load_preset(), "tape.prce", values)
    with pytest.raises(UsageError, match="no strategy 'tapes'"):
        break_even(load_preset(), "tape.price", "tapes", "hdd", low=1, high=2)


def test_a_waterfall_adds_up() -> None:
    before = load_preset()
    after = load_preset(
        "modern-2026",
        ["overrides.tape.price=14", "data.copies=2", "horizon_years=60", "name=after"],
    )
    fall = waterfall(before, after, "tape")
    assert fall.start_usd + sum(s.change_usd for s in fall.steps) == pytest.approx(fall.end_usd)
    labels = [step.label for step in fall.steps]
    assert labels[0].startswith("data.copies 1 to 2")
    assert labels[-1] == "structure"
    assert fall.start_usd == pytest.approx(compare(before, samples=0).of("tape").endowment_usd)
    assert fall.end_usd == pytest.approx(compare(after, samples=0).of("tape").endowment_usd)
    assert waterfall(before, before, "tape").steps == ()
