"""What must hold for any scenario, whatever the prices."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierwise.tco.compare import StrategyCost, cost_of
from tierwise.tco.inputs import facts_of, resolve_inputs
from tierwise.tco.ledger import DEFINITIONS, Category, Cause
from tierwise.tco.scenario import DataSpec, FinanceSpec, Scenario, Strategy, Tier
from tierwise.tco.spread import present_totals

MEDIA = ("ssd", "hdd", "tape", "optical", "cloud")
media = st.sampled_from(MEDIA)
relaxed = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    medium = draw(media)
    overrides: dict[str, dict[str, float]] = {
        medium: {"decline": draw(st.floats(-0.1, 0.3))},
        "migration": {"price": draw(st.floats(0, 600))},
    }
    if medium != "cloud":
        overrides[medium] |= {
            "life": draw(st.floats(1, 60)),
            "capacity_rate": draw(st.floats(-0.05, 0.3)),
            "afr": draw(st.floats(0, 0.1)),
        }
    return Scenario(
        media=(medium,),
        horizon_years=draw(st.integers(1, 60)),
        data=DataSpec(
            size=f"{draw(st.integers(0, 10**6))} GB",
            growth=draw(st.floats(-0.1, 0.1)),
            copies=draw(st.floats(0.5, 4)),
        ),
        finance=FinanceSpec(discount_rate=draw(st.floats(0, 0.1))),
        overrides=overrides,
    )


def cost(scenario: Scenario) -> StrategyCost:
    facts = facts_of(scenario)
    point = resolve_inputs(scenario, facts).point()
    return cost_of(scenario, scenario.plans[0], point, facts)


@relaxed
@given(scenarios())
def test_every_total_is_the_sum_of_its_parts(scenario: Scenario) -> None:
    item = cost(scenario)
    total = item.ledger.total()
    close = {"rel_tol": 1e-12, "abs_tol": 1e-9}
    assert math.isclose(math.fsum(item.ledger.by_category().values()), total, **close)
    assert math.isclose(math.fsum(item.ledger.by_cause().values()), total, **close)
    assert math.isclose(math.fsum(item.ledger.by_year()), total, **close)
    for name in DEFINITIONS:
        assert item.ledger.capex(name) + item.ledger.opex(name) <= total * (1 + 1e-12) + 1e-9
    split = item.ledger.capex("A") + item.ledger.opex("A")
    assert math.isclose(split, total, **close)


@relaxed
@given(scenarios())
def test_the_ledger_and_the_vectorised_total_agree(scenario: Scenario) -> None:
    item = cost(scenario)
    inputs = resolve_inputs(scenario)
    total = present_totals(scenario, scenario.plans[0], inputs, {})
    assert math.isclose(float(total[0]), item.endowment_usd, rel_tol=1e-9, abs_tol=1e-9)


@relaxed
@given(scenarios())
def test_undiscounted_the_endowment_is_the_cash(scenario: Scenario) -> None:
    free = replace(scenario, finance=FinanceSpec(discount_rate=0.0))
    item = cost(free)
    assert math.isclose(item.endowment_usd, item.cash_total_usd, rel_tol=1e-9, abs_tol=1e-9)


@relaxed
@given(scenarios(), st.floats(1.0, 3.0))
def test_a_higher_price_never_costs_less(scenario: Scenario, factor: float) -> None:
    name = "storage" if scenario.media[0] == "cloud" else "price"
    inputs = resolve_inputs(scenario)
    key = f"{scenario.media[0]}.{name}"
    value = inputs.ranges[key].value
    column = np.array([value, value * factor])
    low, high = present_totals(scenario, scenario.plans[0], inputs, {key: column})
    assert high >= low * (1 - 1e-12)


@relaxed
@given(scenarios(), st.floats(1.0, 3.0))
def test_more_copies_never_cost_less(scenario: Scenario, factor: float) -> None:
    data = replace(scenario.data, growth=0.0)
    more = replace(scenario, data=replace(data, copies=data.copies * factor))
    fewer = cost(replace(scenario, data=data)).ledger.total()
    assert cost(more).ledger.total() >= fewer * (1 - 1e-9)


@relaxed
@given(scenarios())
def test_a_longer_horizon_never_costs_less(scenario: Scenario) -> None:
    longer = replace(scenario, horizon_years=scenario.horizon_years + 1)
    short, long = cost(scenario), cost(longer)
    np.testing.assert_allclose(
        long.ledger.by_year()[:-1], short.ledger.by_year(), rtol=1e-12, atol=1e-9
    )
    assert long.ledger.total() >= short.ledger.total() * (1 - 1e-12)


@relaxed
@given(media, st.integers(2, 20))
def test_large_archives_scale(medium: str, times: int) -> None:
    one = Scenario(media=(medium,), data=DataSpec(size="1 EB"))
    many = replace(one, data=DataSpec(size=f"{times} EB"))
    assert cost(many).ledger.total() == pytest.approx(times * cost(one).ledger.total(), rel=1e-3)


@relaxed
@given(scenarios())
def test_media_that_never_wear_out_never_migrate(scenario: Scenario) -> None:
    if scenario.media[0] == "cloud":
        return
    medium = scenario.media[0]
    forever = {**scenario.overrides[medium], "life": 1e6, "generation_gap": 0.0}
    item = cost(replace(scenario, overrides={**scenario.overrides, medium: forever}))
    assert item.ledger.total(lambda row: row.cause is Cause.MIGRATION) == 0
    assert item.migration_share["A"] in (0.0, None)


@relaxed
@given(media, st.integers(1, 5000))
def test_the_unit_of_the_size_changes_nothing(medium: str, petabytes: int) -> None:
    sizes = (f"{petabytes} PB", f"{petabytes * 1000} TB", f"{petabytes}{'0' * 15} B")
    costs = {
        cost(Scenario(media=(medium,), data=DataSpec(size=size))).endowment_usd for size in sizes
    }
    assert len(costs) == 1


@relaxed
@given(st.permutations(MEDIA))
def test_the_order_of_media_changes_nothing(order: list[str]) -> None:
    scenario = Scenario(media=tuple(order), horizon_years=30)
    facts = facts_of(scenario)
    point = resolve_inputs(scenario, facts).point()
    costs = {p.name: cost_of(scenario, p, point, facts).endowment_usd for p in scenario.plans}
    assert costs == {name: cost(replace(scenario, media=(name,))).endowment_usd for name in order}


@relaxed
@given(scenarios())
def test_identical_strategies_cost_the_same(scenario: Scenario) -> None:
    twins = tuple(
        Strategy(name=name, tiers=(Tier(medium=scenario.media[0]),)) for name in ("a", "b")
    )
    both = replace(scenario, media=(), strategies=twins)
    facts = facts_of(both)
    point = resolve_inputs(both, facts).point()
    first, second = (cost_of(both, plan, point, facts).endowment_usd for plan in both.plans)
    assert first == second == cost(scenario).endowment_usd


@relaxed
@given(scenarios())
def test_nothing_kept_costs_nothing(scenario: Scenario) -> None:
    empty = replace(scenario, data=replace(scenario.data, size="0 B"))
    assert cost(empty).ledger.rows == ()


@relaxed
@given(scenarios())
def test_needs_are_always_covered_by_whole_units(scenario: Scenario) -> None:
    if scenario.media[0] == "cloud":
        return
    item = cost(scenario)
    medium = scenario.media[0]
    bought = item.physical[f"{medium}.bought"]
    assert (bought == np.floor(bought)).all()
    assert (bought >= 0).all()
    held = item.physical[f"{medium}.stored_tb"] > 1e-9
    assert (item.physical[f"{medium}.units"][held] >= 1).all()
    assert all(row.amount_usd >= 0 for row in item.ledger.rows)
    initial = item.ledger.total(
        lambda row: row.category is Category.MEDIA and row.cause is Cause.INITIAL
    )
    assert (initial > 0) == bool(held[0])
