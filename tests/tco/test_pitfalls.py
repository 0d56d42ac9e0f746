"""The known ways to get storage cost wrong, each shown not to happen here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierwise.core.errors import ConfigError, DataError
from tierwise.core.facts import Distribution, load_facts
from tierwise.tco.cloud import EGRESS_BOUNDS_TB, banded_cost
from tierwise.tco.compare import StrategyCost, compare, cost_of
from tierwise.tco.facts import load_fact_set
from tierwise.tco.inputs import facts_of, resolve_inputs
from tierwise.tco.ledger import Category, Cause
from tierwise.tco.report import percent
from tierwise.tco.scenario import (
    AccessSpec,
    Correlation,
    DataSpec,
    EndOfLine,
    FinanceSpec,
    MigrationSpec,
    Scenario,
    Shock,
    Strategy,
    Tier,
    Uncertain,
    check_scenario,
    load_preset,
    logical_tb,
)
from tierwise.tco.spread import monte_carlo, probability_cheapest
from tierwise.tco.value import discount_factors, fisher_nominal

Make = Callable[..., Scenario]
Cost = Callable[..., StrategyCost]
EVERLASTING = {"tape.generation_gap": 0.0}


def bought_years(item: StrategyCost, category: Category, cause: Cause) -> list[int]:
    return sorted({r.year for r in item.ledger.rows if (r.category, r.cause) == (category, cause)})


def migration(item: StrategyCost) -> float:
    return item.ledger.total(lambda row: row.cause is Cause.MIGRATION)


def media_replaced(item: StrategyCost) -> float:
    return item.ledger.total(
        lambda row: row.category is Category.MEDIA and row.cause is Cause.REPLACEMENT
    )


def test_01_a_horizon_below_the_life_replaces_nothing(make: Make, cost: Cost) -> None:
    item = cost(make("optical", years=20))
    assert media_replaced(item) == 0
    assert migration(item) == 0
    assert item.ledger.total(lambda row: row.cause is Cause.INITIAL) > 0


@pytest.mark.parametrize("times", [1, 2, 3])
def test_02_nothing_is_replaced_on_the_last_day(make: Make, cost: Cost, times: int) -> None:
    facts = {**EVERLASTING, "tape.life": 10.0}
    item = cost(make("tape", years=10 * times, facts=facts))
    expected = [10 * n for n in range(1, times)]
    assert bought_years(item, Category.MEDIA, Cause.REPLACEMENT) == expected


def test_02_one_year_more_costs_a_whole_migration(make: Make, cost: Cost) -> None:
    flat = {"migration": MigrationSpec(method="flat"), "facts": {"migration.price": 600.0}}
    fifty = cost(make("optical", size="100 PB", years=50, **flat))
    one_more = cost(make("optical", size="100 PB", years=51, **flat))
    assert migration(fifty) == 0
    assert migration(one_more) == pytest.approx(600 * 100_000)
    assert one_more.ledger.total() > 3 * fifty.ledger.total()


def test_03_growth_of_zero_and_below_zero(make: Make, cost: Cost) -> None:
    still = cost(make("hdd", data={"growth": 0.0}))
    assert still.ledger.total(lambda row: row.cause is Cause.GROWTH) == 0
    shrinking = cost(make("hdd", data={"growth": -0.2}))
    assert all(row.amount_usd >= 0 for row in shrinking.ledger.rows)
    assert shrinking.ledger.total() < still.ledger.total()
    assert (shrinking.physical["hdd.bought"] >= 0).all()


def test_03_growth_past_counting_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="more than 1e\\+15 TB by the last year"):
        resolve_inputs(make("tape", data={"growth": 1.0}))
    wish = Uncertain(key="data.growth", low=0.0, high=1.0)
    with pytest.raises(ConfigError, match="by the last year"):
        resolve_inputs(make("tape", uncertain=(wish,)))


def test_03_huge_growth_is_said_aloud(make: Make) -> None:
    inputs = resolve_inputs(make("tape", data={"growth": 0.2}))
    assert any("multiplies the data by 7,58" in text for text in inputs.warnings), inputs.warnings
    assert resolve_inputs(make("tape", data={"growth": 0.02})).warnings == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("capacity_rate", 0.0), ("capacity_rate", -0.05), ("decline", -0.3), ("decline", 0.99)],
)
def test_04_rates_of_either_sign_are_allowed(
    make: Make, cost: Cost, key: str, value: float
) -> None:
    assert cost(make("hdd", facts={f"hdd.{key}": value})).ledger.total() > 0


def test_04_a_rising_price_costs_more(make: Make, cost: Cost) -> None:
    falling = cost(make("ssd", facts={"ssd.decline": 0.1})).ledger.total()
    rising = cost(make("ssd", facts={"ssd.decline": -0.1})).ledger.total()
    assert rising > falling


@pytest.mark.parametrize("decline", [1.0, 1.5])
def test_04_a_decline_of_everything_is_refused(make: Make, decline: float) -> None:
    with pytest.raises(ConfigError, match=r"hdd\.decline = .* below 1"):
        resolve_inputs(make("hdd", facts={"hdd.decline": decline}))


def test_04_a_shock_hits_its_years_and_no_other(make: Make, cost: Cost) -> None:
    calm = make("hdd", years=12, facts={"hdd.life": 5.0})
    hit = replace(calm, shocks=(Shock(media=("hdd",), year=5, factor=2.0),))
    before, after = (
        cost(s).ledger.by_year(lambda row: row.category is Category.MEDIA) for s in (calm, hit)
    )
    assert after[5] == pytest.approx(2 * before[5])
    assert after[:5] == before[:5]
    assert after[6:] == before[6:]


def test_05_capacity_stops_at_its_ceiling(make: Make, cost: Cost) -> None:
    capped = cost(
        make("hdd", size="1 PB", data={"growth": 0.1}, facts={"hdd.ceiling": 40.0, "hdd.afr": 0.0})
    )
    units, data = capped.physical["hdd.units"], capped.physical["hdd.stored_tb"]
    assert data[-1] / 0.8 / units[-1] <= 40.0
    free = cost(make("hdd", size="1 PB", data={"growth": 0.1}, facts={"hdd.afr": 0.0}))
    assert free.physical["hdd.units"][-1] < units[-1]


@pytest.mark.parametrize(("size", "tapes"), [("10 TB", 1), ("100 TB", 4), ("0 B", 0), ("1 B", 1)])
def test_06_units_are_whole(make: Make, cost: Cost, size: str, tapes: int) -> None:
    item = cost(make("tape", size=size, years=3))
    assert item.physical["tape.bought"][0] == tapes
    assert item.physical["tape.readers"][0] == (1 if tapes else 0)


def test_06_a_need_of_exactly_whole_units_buys_no_extra(make: Make, cost: Cost) -> None:
    facts = {"optical.fill": 1.0, "optical.capacity": 0.1}
    item = cost(make("optical", size="0.7 TB", years=1, facts=facts))
    assert item.physical["optical.bought"][0] == 7


@pytest.mark.parametrize(("size", "units", "racks"), [("24 TB", 1, 0.1), ("2424 TB", 101, 0.2)])
def test_06_rack_space_is_leased_in_whole_parts(
    make: Make, cost: Cost, size: str, units: int, racks: float
) -> None:
    facts = {"hdd.units_per_rack": 1000.0, "site.rack_parts": 10.0, "site.rack_rent": 6000.0}
    item = cost(make("hdd", size=size, years=1, facts=facts))
    rent = item.ledger.total(lambda row: row.category is Category.RENT)
    assert item.physical["hdd.units"][0] == units
    assert item.physical["hdd.racks"][0] == pytest.approx(racks)
    assert rent == pytest.approx(6000 * racks)


def test_07_data_is_moved_and_not_capacity(make: Make, cost: Cost) -> None:
    item = cost(make("tape", size="10 TB", years=12, facts={**EVERLASTING, "tape.life": 10.0}))
    assert item.physical["tape.moved_tb"][10] == pytest.approx(10.0)
    assert item.physical["tape.bought"][0] * 30 == 30


def test_08_decimal_and_binary_sizes_differ(make: Make) -> None:
    sizes = {s: logical_tb(make("tape", size=s).data)[0] for s in ("1 PB", "1 PiB", "1 TiB")}
    assert sizes["1 PB"] == 1000
    assert sizes["1 PiB"] / sizes["1 PB"] == pytest.approx(1.126, abs=5e-4)
    assert sizes["1 TiB"] == pytest.approx(1.0995, abs=5e-5)


def test_08_a_compressed_capacity_is_noticed(make: Make) -> None:
    inputs = resolve_inputs(make("tape", facts={"tape.capacity": 75.0}))
    assert any("compressed" in text for text in inputs.warnings)


def test_09_watts_become_kilowatt_hours_by_8_76(make: Make, cost: Cost) -> None:
    item = cost(make("hdd", size="24 TB", years=1, facts={"hdd.power": 10.0, "power.pue": 1.5,
                                                           "power.tariff": 0.1}))  # fmt: skip
    energy = item.ledger.total(lambda row: row.category is Category.ENERGY)
    assert item.physical["hdd.units"][0] == 1
    assert energy == pytest.approx(10 * 8.76 * 1.5 * 0.1)


def test_10_pue_multiplies(make: Make, cost: Cost) -> None:
    def energy(pue: float) -> float:
        item = cost(make("hdd", facts={"power.pue": pue}))
        return item.ledger.total(lambda row: row.category is Category.ENERGY)

    assert energy(1.5) == pytest.approx(1.5 * energy(1.0))


def test_10_a_pue_below_one_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"power\.pue = 0\.9 must be at least 1") as caught:
        resolve_inputs(make("hdd", facts={"power.pue": 0.9}))
    assert "less power" in (caught.value.hint or "")


def test_11_start_and_end_of_year_are_told_apart() -> None:
    rate = np.array([0.03])
    assert discount_factors(rate, 50, "start").sum() == pytest.approx(26.5, abs=0.05)
    assert discount_factors(rate, 50, "end").sum() == pytest.approx(25.7, abs=0.05)
    linear = float(sum(0.97**y for y in range(50)))
    assert linear == pytest.approx(26.1, abs=0.05)
    assert discount_factors(rate, 1, "start")[0, 0] == 1.0


def test_12_nominal_cash_at_a_real_rate_is_refused() -> None:
    mixed = FinanceSpec(cash_basis="nominal", discount_basis="real", discount_rate=0.03)
    with pytest.raises(ConfigError, match="nominal cash flows cannot be discounted at a real"):
        check_scenario(Scenario(finance=mixed))
    with pytest.raises(ConfigError, match=r"needs finance\.discount_rate"):
        check_scenario(Scenario(finance=replace(mixed, discount_basis="nominal",
                                                discount_rate=None)))  # fmt: skip


@pytest.mark.parametrize("timing", ["start", "mid", "end"])
def test_12_real_and_nominal_give_the_same_present_value(
    make: Make, cost: Cost, timing: str
) -> None:
    real = cost(make("tape", finance={"discount_rate": 0.03, "timing": timing}))
    nominal = cost(
        make(
            "tape",
            finance={
                "discount_rate": fisher_nominal(0.03, 0.025),
                "discount_basis": "nominal",
                "cash_basis": "nominal",
                "timing": timing,
            },
            facts={"finance.inflation": 0.025},
        )
    )
    assert nominal.endowment_usd == pytest.approx(real.endowment_usd, rel=1e-12)
    assert nominal.cash_total_usd > real.cash_total_usd


def test_12_mixing_the_bases_would_be_wrong_by_two_thirds() -> None:
    level = 1.025 ** np.arange(50.0)
    factors = discount_factors(np.array([0.03]), 50)[:, 0]
    assert (level * factors).sum() / factors.sum() == pytest.approx(1.68, abs=0.01)


@pytest.mark.parametrize("rate", [0, -0.01, 1])
def test_13_whole_zero_and_negative_rates(make: Make, cost: Cost, rate: float) -> None:
    assert np.isfinite(discount_factors(np.array([rate]), 50)).all()
    item = cost(make("hdd", finance={"discount_rate": rate}))
    assert np.isfinite(item.endowment_usd)
    if rate == 0:
        assert item.endowment_usd == pytest.approx(item.ledger.total(), rel=1e-12)


@pytest.mark.parametrize(
    ("rate", "life", "understated"), [(0.01, 5, 0.02), (0.10, 5, 0.17), (0.10, 50, 0.78)]
)
def test_14_running_cost_follows_what_is_installed(
    make: Make, cost: Cost, rate: float, life: int, understated: float
) -> None:
    facts = {
        "hdd.capacity_rate": rate,
        "hdd.life": float(life),
        "hdd.ceiling": 1e5,
        "hdd.fill": 1.0,
        "hdd.afr": 0.0,
    }
    item = cost(make("hdd", size="3 EB", facts=facts))
    installed = item.physical["hdd.units"].sum()
    by_this_years_capacity = sum(3e6 / (30 * (1 + rate) ** y) for y in range(50))
    assert 1 - by_this_years_capacity / installed == pytest.approx(understated, abs=0.012)


def test_15_components_have_lives_of_their_own(make: Make, cost: Cost) -> None:
    item = cost(
        make("optical", years=50, facts={"optical.slot_life": 15.0, "optical.reader_life": 7.0})
    )
    assert bought_years(item, Category.MEDIA, Cause.REPLACEMENT) == []
    assert bought_years(item, Category.SLOTS, Cause.REPLACEMENT) == [15, 30, 45]
    assert bought_years(item, Category.READERS, Cause.REPLACEMENT) == [7, 14, 21, 28, 35, 42, 49]


def test_16_failures_and_end_of_life_do_not_pay_twice(make: Make, cost: Cost) -> None:
    def run(afr: float) -> StrategyCost:
        return cost(make("hdd", size="240 PB", years=10, facts={"hdd.afr": afr, "hdd.life": 5.0}))

    safe, failing = run(0.0), run(0.02)
    assert media_replaced(failing) == media_replaced(safe)
    spares = failing.ledger.total(lambda row: row.cause is Cause.FAILURE)
    assert safe.ledger.total(lambda row: row.cause is Cause.FAILURE) == 0
    first_year = failing.ledger.by_year(lambda row: row.cause is Cause.FAILURE)[0]
    assert first_year == pytest.approx(0.02 * 10_000 * 30 * 22)
    assert spares < 0.02 * 10 * 10_000 * 30 * 22


def test_16_rare_failures_add_up_to_whole_spares(make: Make, cost: Cost) -> None:
    item = cost(make("optical", size="4.5 TB", years=50, facts={"optical.afr": 0.01}))
    assert item.physical["optical.bought"].sum() == 10
    prices = item.ledger.by_year(lambda row: row.cause is Cause.FAILURE)
    assert [year for year, amount in enumerate(prices) if amount] == [9, 19, 29, 39, 49]


def test_17_without_read_back_a_tape_leaves_with_its_drives(make: Make, cost: Cost) -> None:
    bound = cost(make("tape", facts={"tape.life": 30.0}))
    free = cost(make("tape", facts={"tape.life": 30.0, **EVERLASTING}))
    one_back = cost(make("tape", facts={"tape.life": 30.0, "tape.read_back": 1.0}))
    first = [bought_years(i, Category.MEDIA, Cause.REPLACEMENT)[0] for i in (bound, one_back, free)]
    # LTO-10 is sold until 3.5 years after it appeared, 1.5 of them gone; drives live 7
    assert first == [9, 12, 30]


def test_17_a_medium_no_longer_made_cannot_be_bought(make: Make, cost: Cost) -> None:
    scenario = make("tape", end_of_line=(EndOfLine(medium="tape", production_year=5),))
    with pytest.raises(ConfigError, match="tape would have to be bought in year") as caught:
        cost(scenario)
    assert "hands over" in (caught.value.hint or "")


def test_17_readers_gone_mean_the_data_must_move(make: Make, cost: Cost) -> None:
    gone = (EndOfLine(medium="optical", reader_year=10),)
    with pytest.raises(ConfigError, match="optical would have to be read in year 17"):
        cost(make("optical", end_of_line=gone))
    handed_over = Strategy(
        name="optical then tape",
        tiers=(Tier(medium="optical", until_year=16), Tier(medium="tape", from_year=16)),
    )
    scenario = make("tape", end_of_line=gone, strategies=(handed_over,), media=())
    item = cost(scenario)
    assert item.physical["optical.units"][16:].sum() == 0
    assert item.physical["tape.units"][:16].sum() == 0
    assert item.physical["tape.units"][16] > 0
    moved = [row for row in item.ledger.rows if row.cause is Cause.MIGRATION and row.year == 16]
    assert {row.medium for row in moved} == {"optical", "tape"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (a, b)
        for a in ("hdd", "optical", "cloud", "tape")
        for b in ("ssd", "tape", "cloud")
        if a != b
    ],
)
def test_17_a_hand_over_pays_for_both_sides(make: Make, cost: Cost, old: str, new: str) -> None:
    plan = Strategy(name="plan", tiers=(Tier(medium=old, until_year=4),
                                        Tier(medium=new, from_year=4)))  # fmt: skip
    facts = {"optical.rate": 1000.0} if old == "optical" else {}
    scenario = make(old, size="1 PB", years=6, media=(), strategies=(plan,), facts=facts)
    item = cost(scenario)
    project = [r for r in item.ledger.rows if r.category is Category.PROJECT]
    assert [(r.medium, r.year, r.cause) for r in project] == [(new, 4, Cause.MIGRATION)]
    assert project[0].amount_usd == pytest.approx(1000 * 2.0)
    left = [r for r in item.ledger.rows if r.medium == old and r.year > 4]
    assert left == []
    moving = {r.medium for r in item.ledger.rows if r.cause is Cause.MIGRATION and r.year == 4}
    assert moving == {old, new}
    assert item.warnings == ()


def test_18_egress_bands_change_exactly_at_their_bounds() -> None:
    rates = [np.array([r]) for r in (90.0, 85.0, 70.0, 50.0)]
    volumes = np.array([0.0, 10.0, 11.0, 50.0, 150.0, 151.0])
    cost = banded_cost(volumes, EGRESS_BOUNDS_TB, rates)
    at_150 = 10 * 90 + 40 * 85 + 100 * 70
    assert cost.tolist() == [0, 900, 985, 900 + 3400, at_150, at_150 + 50]


def test_18_small_objects_pay_for_their_overhead(make: Make, cost: Cost) -> None:
    def storage(num_objects: float) -> float:
        item = cost(make("cloud", size="1 TB", years=1, data={"num_objects": num_objects}))
        return item.ledger.by_category()[Category.CLOUD_STORAGE]

    base = 12 * 1000 * 0.00099
    per_object = 12 * (32e-6 * 0.00099 + 8e-6 * 0.023)
    assert storage(1e6) == pytest.approx(base + 1e6 * per_object)
    assert storage(1e6) / base == pytest.approx(1.22, abs=0.01)


def test_18_meters_are_decimal(make: Make, cost: Cost) -> None:
    item = cost(make("cloud", size="100 PB", years=50))
    assert item.ledger.by_category()[Category.CLOUD_STORAGE] == pytest.approx(59.4e6, rel=2e-3)


def test_18_a_minimum_beyond_the_yearly_step_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="min_days"):
        resolve_inputs(make("cloud", facts={"cloud.min_days": 730.0}))


def test_18_leaving_a_cloud_costs_retrieval_and_egress(make: Make, cost: Cost) -> None:
    stay = make("cloud", size="1 PB", years=10)
    out = cost(replace(stay, access=AccessSpec(exit=True)))
    exit_usd = out.ledger.total(lambda row: row.cause is Cause.EXIT)
    retrieval = 1e6 * 0.0025
    month = 1000 / 12
    egress = 12 * (10 * 90 + 40 * 85 + (month - 50) * 70)
    assert exit_usd == pytest.approx(retrieval + egress)
    assert {r.year for r in out.ledger.rows if r.cause is Cause.EXIT} == {9}


def test_19_a_migration_too_big_for_its_drives_is_flagged(make: Make, cost: Cost) -> None:
    slow = {**EVERLASTING, "tape.life": 10.0, "tape.rate": 20.0}
    item = cost(make("tape", size="100 PB", years=20, facts=slow))
    (warning,) = item.warnings
    hours = 3 * 1e5 * 1e6 / 20 / 3600
    needed = int(np.ceil(hours / (8760 * 0.7)))
    assert f"year 10 needs {needed} drives" in warning
    strict = make("tape", size="100 PB", years=20, facts=slow,
                  migration=MigrationSpec(strict=True))  # fmt: skip
    with pytest.raises(ConfigError, match=f"needs {needed} drives"):
        cost(strict)
    fast = cost(make("tape", size="100 PB", years=20, facts={**slow, "tape.rate": 4000.0}))
    assert fast.warnings == ()


def test_20_old_and_new_units_overlap(make: Make, cost: Cost) -> None:
    def energy(overlap: float) -> list[float]:
        spec = MigrationSpec(overlap_years=overlap)
        item = cost(make("hdd", years=12, migration=spec, facts={"hdd.capacity_rate": 0.0,
                                                                  "hdd.afr": 0.0}))  # fmt: skip
        return item.ledger.by_year(lambda row: row.category is Category.ENERGY)

    none, full = energy(0.0), energy(1.0)
    assert full[5] == pytest.approx(2 * none[5])
    assert full[4] == none[4]


def test_21_prices_of_another_year_are_converted(tmp_path: Path, make: Make) -> None:
    rows = Path(tmp_path / "old.csv")
    rows.write_text(
        "key,value,low,high,unit,currency_year,source,retrieved,kind\n"
        "tape.price,10,,,USD/TB,2017,a price list,2026-11-30,vendor\n"
    )
    scenario = make("tape", facts_files=(str(rows),))
    index = load_fact_set().price_index
    price = resolve_inputs(scenario).ranges["tape.price"].value
    assert price == pytest.approx(10 * index[2026] / index[2017])
    assert price > 13


def test_21_a_year_without_an_index_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="no price index for 2090"):
        resolve_inputs(replace(make("tape"), currency_year=2090))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("tape.price,10,,,USD/TB,2017,,2026-11-30,vendor", "no source"),
        ("tape.price,10,,,USD/TB,,a list,2026-11-30,vendor", "without a currency_year"),
    ],
)
def test_21_money_without_source_or_year_is_refused(tmp_path: Path, row: str, what: str) -> None:
    path = tmp_path / "facts.csv"
    path.write_text(
        f"key,value,low,high,unit,currency_year,source,retrieved,kind\n{row}\n", encoding="utf-8"
    )
    with pytest.raises(DataError, match=what):
        load_facts(path)


def test_22_prices_that_rise_together_widen_the_range() -> None:
    mix = Strategy(
        name="mix", tiers=(Tier(medium="ssd", share=0.06), Tier(medium="hdd", share=0.94))
    )
    keys = ("ssd.price", "hdd.price", "ssd.decline", "hdd.decline")
    alone = Scenario(horizon_years=10, media=(), strategies=(mix,))
    together = replace(alone, correlations=(Correlation(keys=keys[:2], rho=0.95),
                                            Correlation(keys=keys[2:], rho=0.95)))  # fmt: skip

    def spread(scenario: Scenario) -> float:
        result = monte_carlo(scenario, resolve_inputs(scenario), samples=4000, seed=3)
        totals = result.total_usd["mix"]
        return float(totals.std() / totals.mean())

    assert spread(together) > 1.03 * spread(alone)


def test_23_what_is_left_at_the_end_can_be_counted(make: Make, cost: Cost) -> None:
    facts = {"hdd.life": 5.0, "hdd.afr": 0.0}
    gone = cost(make("hdd", years=6, facts=facts))
    kept = cost(make("hdd", years=6, facts=facts, finance={"residual": "straight_line"}))
    credit = kept.ledger.total(lambda row: row.cause is Cause.RESIDUAL)
    assert credit < 0
    assert kept.ledger.total() == pytest.approx(gone.ledger.total() + credit)
    media = kept.ledger.total(
        lambda row: row.cause is Cause.RESIDUAL and row.category is Category.MEDIA
    )
    assert media == pytest.approx(-0.8 * media_replaced(gone))


def test_24_neither_order_nor_company_changes_a_cost() -> None:
    base = load_preset("modern-2026")
    one = compare(base, samples=50, seed=5)
    other = compare(replace(base, media=("cloud", "tape", "ssd")), samples=50, seed=5)
    again = compare(base, samples=50, seed=5)
    for name in ("tape", "ssd", "cloud"):
        assert one.of(name).endowment_usd == other.of(name).endowment_usd
        assert one.of(name).ledger == again.of(name).ledger
        assert one.spread is not None
        assert other.spread is not None
        assert (one.spread.total_usd[name] == other.spread.total_usd[name]).all()


def test_25_no_data_gives_no_price_rather_than_an_error(make: Make, cost: Cost) -> None:
    for medium in ("tape", "cloud"):
        item = cost(make(medium, size="0 B"))
        assert item.ledger.total() == 0
        assert np.isnan(item.usd_per_tb_year)
        assert np.isnan(item.pay_as_you_go_usd).all()
        assert item.migration_share == {"A": None, "B": None, "C": None}
    assert percent(None) == "n/a"


def test_26_ties_are_shared_and_ranks_are_stable() -> None:
    same = np.array([1.0, 2.0, 3.0])
    assert probability_cheapest({"a": same, "b": same}) == {"a": 0.5, "b": 0.5}
    base = load_preset("modern-2026", ["horizon_years=20"])
    orders = {
        tuple(item.name for item in compare(base, samples=200, seed=seed).ranking)
        for seed in range(3)
    }
    assert len(orders) == 1
    shares = [monte_carlo(base, resolve_inputs(base), samples=500, seed=s) for s in range(3)]
    winners = {max(s.p_cheapest, key=lambda n: s.p_cheapest[n]) for s in shares}
    assert winners == {"tape"}


def test_identical_strategies_cost_the_same(make: Make) -> None:
    twin = Strategy(name="twin", tiers=(Tier(medium="tape"),))
    scenario = make("tape", strategies=(twin,))
    facts = facts_of(scenario)
    point = resolve_inputs(scenario, facts).point()
    first, second = (cost_of(scenario, plan, point, facts) for plan in scenario.plans)
    assert first.endowment_usd == second.endowment_usd


def test_an_inventory_sets_size_and_files(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "inventory.json"
    path.write_text(json.dumps({"logical_bytes": 5 * 10**12, "num_files": 7, "discs": []}))
    scenario = make("cloud", data={"inventory": str(path)})
    assert logical_tb(scenario.data) == (5.0, 7.0)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"logical_bytes": 1.5, "num_files": 1}',
        '{"logical_bytes": 1}',
        f'{{"logical_bytes": {10**400}, "num_files": 1}}',
    ],
    ids=range(6),
)
def test_a_broken_inventory_is_refused(make: Make, tmp_path: Path, text: str) -> None:
    path = tmp_path / "inventory.json"
    path.write_text(text)
    with pytest.raises(DataError, match="inventory"):
        logical_tb(make("cloud", data={"inventory": str(path)}).data)


@pytest.mark.parametrize("name", ["silica", "dna", "cerabyte"])
def test_announced_media_say_why_they_cannot_be_costed(make: Make, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be costed: .*no product"):
        resolve_inputs(make(name))


def test_a_strategy_must_hold_all_the_data(make: Make) -> None:
    gap = Strategy(name="gap", tiers=(Tier(medium="hdd", until_year=5),))
    with pytest.raises(ConfigError, match="gap holds only 0% of the data in year 5"):
        make("tape", strategies=(gap,))


def test_a_front_tier_adds_to_what_stands_behind_it(make: Make, cost: Cost) -> None:
    front = Strategy(
        name="front", tiers=(Tier(medium="hdd", share=0.1), Tier(medium="tape", share=1.0))
    )
    scenario = make("tape", strategies=(front,))
    both, alone = cost(scenario, "front"), cost(scenario, "tape")
    cache = both.ledger.total(lambda row: row.medium == "hdd")
    assert cache > 0
    assert both.ledger.total() == pytest.approx(alone.ledger.total() + cache)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"horizon_years": 0}, "horizon_years"),
        ({"shocks": (Shock(media=("hdd",), year=1, factor=0.0),)}, "shocks"),
        ({"media": ()}, "must name at least one"),
        ({"media": ("tape", "tape")}, "different names"),
        ({"correlations": (Correlation(keys=("hdd.price",), rho=1.5),)}, "rho"),
        ({"shocks": (Shock(media=("hdd",), year=1, factor=float("inf")),)}, "shocks need"),
        ({"start_year": -5}, "start_year must be"),
        (
            {"strategies": (Strategy(name="x", tiers=(Tier(medium="hdd", share=float("inf")),)),)},
            "not a finite number",
        ),
    ],
)
def test_scenarios_that_make_no_sense_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check_scenario(replace(Scenario(), **changes))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"shocks": (Shock(media=("tpae",), year=1, factor=2.0),)}, "no medium 'tpae'"),
        ({"end_of_line": (EndOfLine(medium="tpae", reader_year=9),)}, "no medium 'tpae'"),
        ({"correlations": (Correlation(keys=("tpae.price",), rho=0.5),)}, "no input tpae.price"),
        (
            {
                "uncertain": (
                    Uncertain(
                        key="tape.price", low=0.0, high=2.0, distribution=Distribution.LOG_UNIFORM
                    ),
                )
            },
            "must start above 0",
        ),
        ({"overrides": {"tape": {"price": 1e300}}}, "at most 1e"),
        ({"data": DataSpec(size="9999999999999 EB")}, "data.size is above"),
        ({"data": DataSpec(size=f"{10**400} B")}, "data.size is above"),
    ],
)
def test_inputs_that_make_no_sense_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        resolve_inputs(replace(Scenario(media=("tape", "hdd")), **changes))


def test_events_may_name_media_that_are_not_compared() -> None:
    shock = Shock(media=("ssd",), year=1, factor=2.0)
    tied = Correlation(keys=("ssd.price", "hdd.price"), rho=0.5)
    scenario = Scenario(media=("tape",), shocks=(shock,), correlations=(tied,))
    assert "tape.price" in resolve_inputs(scenario).ranges


def test_a_cost_too_large_for_a_number_is_refused(make: Make, cost: Cost) -> None:
    with pytest.raises(ConfigError, match="too large"):
        cost(make("tape", years=300, finance={"discount_rate": -0.99}))


def test_a_folder_is_no_inventory(make: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        logical_tb(make("cloud", data={"inventory": str(tmp_path)}).data)
