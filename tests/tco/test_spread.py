"""Draws, bands, probabilities and sensitivities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import kstest, spearmanr

from tierwise.core.errors import ConfigError, UsageError
from tierwise.core.facts import Distribution
from tierwise.tco.compare import compare
from tierwise.tco.inputs import InputRange, resolve_inputs
from tierwise.tco.scenario import Correlation, Scenario, Uncertain, load_preset
from tierwise.tco.spread import _quantile, draw_inputs, monte_carlo, sobol, tornado


def uncertain(distribution: Distribution, low: float, high: float, value: float) -> InputRange:
    return InputRange(
        key="x", value=value, low=low, high=high, distribution=distribution, fact=None
    )


@pytest.mark.parametrize(
    ("distribution", "median"),
    [
        (Distribution.UNIFORM, 5.5),
        (Distribution.LOG_UNIFORM, np.sqrt(10.0)),
        (Distribution.TRIANGULAR, 10 - np.sqrt(0.5 * 9 * 8)),
        (Distribution.FIXED, 2.0),
    ],
)
def test_quantiles_of_each_distribution(distribution: Distribution, median: float) -> None:
    item = uncertain(distribution, 1.0, 10.0, 2.0)
    low, middle, high = _quantile(item, np.array([0.0, 0.5, 1.0]))
    assert middle == pytest.approx(median)
    if distribution is not Distribution.FIXED:
        assert (low, high) == (pytest.approx(1.0), pytest.approx(10.0))


def test_draws_follow_their_distribution_and_seed() -> None:
    scenario = replace(
        load_preset(), uncertain=(Uncertain(key="tape.price", low=4, high=14),), correlations=()
    )
    inputs = resolve_inputs(scenario)
    draws = draw_inputs(scenario, inputs, samples=4000, seed=1)
    assert kstest((draws["tape.price"] - 4) / 10, "uniform").pvalue > 0.01
    again = draw_inputs(scenario, inputs, samples=4000, seed=1)
    other = draw_inputs(scenario, inputs, samples=4000, seed=2)
    assert all((draws[key] == again[key]).all() for key in draws)
    assert (draws["tape.price"] != other["tape.price"]).all()


def test_correlated_draws_have_their_correlation() -> None:
    keys = ("ssd.price", "hdd.price")
    scenario = replace(load_preset(), correlations=(Correlation(keys=keys, rho=0.8),))
    draws = draw_inputs(scenario, resolve_inputs(scenario), samples=20_000, seed=4)
    found = spearmanr(draws[keys[0]], draws[keys[1]]).statistic
    assert found == pytest.approx(6 / np.pi * np.arcsin(0.4), abs=0.02)
    assert abs(spearmanr(draws["ssd.price"], draws["tape.price"]).statistic) < 0.03


def test_bands_are_ordered_and_end_at_the_totals() -> None:
    result = compare(load_preset("modern-2026", ["horizon_years=30"]), samples=300, seed=2)
    spread = result.spread
    assert spread is not None
    for name, band in spread.bands_usd.items():
        assert band.shape == (30, 3)
        assert (np.diff(band, axis=1) >= 0).all()
        assert (np.diff(band, axis=0) >= 0).all()
        np.testing.assert_allclose(band[-1], spread.percentiles(name))
    assert sum(spread.p_cheapest.values()) == pytest.approx(1.0)


def test_what_nothing_makes_uncertain_has_no_spread() -> None:
    scenario = Scenario(media=("tape",), horizon_years=5)
    inputs = resolve_inputs(scenario)
    still = replace(inputs, ranges={k: replace(v, low=v.value, high=v.value)
                                    for k, v in inputs.ranges.items()})  # fmt: skip
    spread = monte_carlo(scenario, still, samples=20, seed=0)
    assert np.ptp(spread.total_usd["tape"]) == 0


def test_neither_too_many_samples_nor_a_negative_seed() -> None:
    scenario = load_preset("modern-2026")
    for samples in (-1, 10**9):
        with pytest.raises(UsageError, match="samples cannot be drawn"):
            compare(scenario, samples=samples)
    with pytest.raises(UsageError, match="seed"):
        compare(scenario, samples=5, seed=-1)


def test_a_strategy_has_no_ratio_to_itself_or_to_nothing() -> None:
    scenario = load_preset("modern-2026")
    tape, hdd = (item for item in scenario.plans if item.name in ("tape", "hdd"))
    with pytest.raises(UsageError, match="against itself"):
        tornado(scenario, resolve_inputs(scenario), tape, against=tape)
    empty = load_preset("modern-2026", ["data.size=0 B"])
    with pytest.raises(UsageError, match="no ratio"):
        tornado(empty, resolve_inputs(empty), tape, against=hdd)


def test_no_samples_are_refused() -> None:
    scenario = Scenario(media=("tape",))
    with pytest.raises(UsageError, match="0 samples"):
        monte_carlo(scenario, resolve_inputs(scenario), samples=0, seed=0)


def test_with_dear_migration_optical_wins_a_third() -> None:
    """The reference model of the notes: one input dominates who is cheapest."""
    cheap = replace(
        load_preset(),
        uncertain=(Uncertain(key="migration.price", low=1, high=50,
                             distribution=Distribution.LOG_UNIFORM),),
    )  # fmt: skip
    dear = replace(cheap, uncertain=(replace(cheap.uncertain[0], high=600),))
    shares = [
        monte_carlo(s, resolve_inputs(s), samples=600, seed=1).p_cheapest for s in (cheap, dear)
    ]
    assert shares[0]["tape"] > 0.9
    assert 0.15 < shares[1]["optical"] < 0.5
    assert shares[1]["ssd"] == 0


def test_the_tornado_is_sorted_and_led_by_migration() -> None:
    scenario = load_preset()
    inputs = resolve_inputs(scenario)
    plans = {plan.name: plan for plan in scenario.plans}
    bars = tornado(scenario, inputs, plans["tape"], against=plans["optical"])
    assert bars[0].key == "migration.price"
    assert [bar.swing for bar in bars] == sorted((bar.swing for bar in bars), reverse=True)
    assert not any(bar.key.startswith("ssd.") for bar in bars)
    alone = tornado(scenario, inputs, plans["tape"])
    assert not any(bar.key.startswith("optical.") for bar in alone)


def test_sobol_indices_of_a_cost_known_in_closed_form() -> None:
    """Storage alone in a cloud: cost = rate * (1 + factor), variance split by hand."""
    scenario = replace(
        Scenario(media=("cloud",), horizon_years=1),
        uncertain=(
            Uncertain(key="cloud.storage", low=0.001, high=0.003),
            Uncertain(key="data.size", low=1000, high=2000),
            Uncertain(key="cloud.egress_factor", low=0, high=1),
        ),
        overrides={"cloud": {"staff": 0.0, "put": 0.0, "overhead_standard": 0.0,
                             "overhead_cold": 0.0, "decline": 0.0}},
    )  # fmt: skip
    inputs = resolve_inputs(scenario)
    kept = {"cloud.storage", "data.size", "cloud.egress_factor"}
    inputs = replace(
        inputs,
        ranges={k: v if k in kept else replace(v, low=v.value, high=v.value)
                for k, v in inputs.ranges.items()},
    )  # fmt: skip
    found = {i.key: i for i in sobol(scenario, inputs, scenario.plans[0], base_samples=2048)}
    mean_a, var_a, mean_b, var_b = 0.002, 0.002**2 / 12, 1500.0, 1000.0**2 / 12
    total = mean_a**2 * var_b + mean_b**2 * var_a + var_a * var_b
    storage = (mean_b**2 * var_a + var_a * var_b) / total
    assert found["cloud.storage"].total == pytest.approx(storage, abs=0.03)
    assert found["cloud.storage"].first == pytest.approx(mean_b**2 * var_a / total, abs=0.03)
    assert found["cloud.egress_factor"].total == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("base", [0, 3, 100])
def test_sobol_needs_a_power_of_two(base: int) -> None:
    scenario = Scenario(media=("tape",))
    with pytest.raises(UsageError, match="power of two"):
        sobol(scenario, resolve_inputs(scenario), scenario.plans[0], base_samples=base)


def test_an_unknown_input_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no input tape\.prise") as caught:
        resolve_inputs(replace(Scenario(media=("tape",)), overrides={"tape": {"prise": 1.0}}))
    assert caught.value.hint == "did you mean tape.price?"
