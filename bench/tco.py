"""The vectorised Monte Carlo against the same model run sample by sample in plain Python.

10,000 samples x 5 media x 100 years. The plain model (tests/tco/plain_model.py, the tests'
oracle) runs a slice of the samples and is scaled up, since all of it would take minutes; both
results are compared on that slice first. Processor time is measured, on one thread.

Run: python bench/tco.py
"""

from __future__ import annotations

import importlib.util
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import harness
from tierwise.tco.inputs import facts_of, resolve_inputs
from tierwise.tco.scenario import load_preset
from tierwise.tco.spread import draw_inputs, monte_carlo

SAMPLES, YEARS, SLICE, RUNS = 10_000, 100, 12, 5
ORACLE = Path(__file__).parents[1] / "tests" / "tco" / "plain_model.py"


def load_plain_model() -> ModuleType:
    """Return the plain model as a module."""
    spec = importlib.util.spec_from_file_location("plain_model", ORACLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def processor_seconds(function: Callable[[], object]) -> float:
    """Return the processor time of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    """Time both models in turn, check that they agree, and write the result."""
    plain = load_plain_model()
    scenario = load_preset("modern-2026", [f"horizon_years={YEARS}"])
    facts = facts_of(scenario)
    inputs = resolve_inputs(scenario, facts)
    columns = draw_inputs(scenario, inputs, samples=SAMPLES, seed=1)
    base = {key: item.value for key, item in inputs.ranges.items()}

    def vectorised() -> object:
        return monte_carlo(scenario, inputs, samples=SAMPLES, seed=1, facts=facts)

    def one_by_one() -> dict[str, list[float]]:
        points = [
            base | {key: float(column[sample]) for key, column in columns.items()}
            for sample in range(SLICE)
        ]
        return {
            medium: [
                plain.present_value(medium, str(facts.medium(medium).kind), point, horizon=YEARS)
                for point in points
            ]
            for medium in scenario.media
        }

    fast = monte_carlo(scenario, inputs, samples=SAMPLES, seed=1, facts=facts)
    largest = 0.0
    for medium, totals in one_by_one().items():
        difference = np.abs(fast.total_usd[medium][:SLICE] / np.array(totals) - 1.0)
        largest = max(largest, float(difference.max()))
    quick, slow = [], []
    for _ in range(RUNS):
        quick.append(processor_seconds(vectorised))
        slow.append(processor_seconds(one_by_one) * SAMPLES / SLICE)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    rows = [
        harness.row_of("vectorised", quick, unit="s", note="processor time, bands included"),
        harness.row_of("sample by sample", slow, unit="s", note=f"scaled from {SLICE} samples"),
        harness.ratio_row("sample by sample / vectorised", slow, quick),
        harness.row_of("peak memory", [peak_gb], unit="GB", note="whole process"),
        harness.row_of("largest difference", [largest], unit="relative"),
    ]
    config = {"samples": SAMPLES, "years": YEARS, "media": list(scenario.media), "slice": SLICE}
    harness.write_results("tco", rows, config=config, packages=("tierwise", "numpy", "scipy"))


if __name__ == "__main__":
    main()
