"""The published models come out to the digit, and each defect is a switch that does something."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tierwise.core.config import load_config
from tierwise.core.errors import ConfigError
from tierwise.tco.compare import compare
from tierwise.tco.dshr import DshrConfig, Quirks, endowment_usd_per_tb, yearly_costs
from tierwise.tco.explain import explain_dshr, explain_precursor, precursor_table
from tierwise.tco.ledger import Category, Cause
from tierwise.tco.precursor import (
    MEDIA,
    NO_DEFECTS,
    Defects,
    PrecursorConfig,
    _num_racks,
    _rack,
    five_columns,
    inflation_history,
    run_precursor,
)
from tierwise.tco.scenario import PRESETS_FOLDER, load_preset

PUBLISHED = {"disc": 487.9, "hdd": 4002.4, "ssd": 5441.6, "tape": 3821.1}

# change -> totals in millions, migration over (energy + maintenance) in per cent
TABLE = {
    "as published": ((487.9, 4002.4, 5441.6, 3821.1), (95.5, 93.2, 74.2, 73.7)),
    "energy: a W-year is 8.76 kWh": ((468.5, 3784, 4567, 3293), (99.5, 99.3, 96.6, 96.5)),
    "+ servers draw power": ((470.7, 4322, 5999, 3370), (99.1, 85.6, 64.7, 92.3)),
    "+ PUE multiplies once": ((469.0, 4097, 5387, 3315), (99.4, 90.8, 75.3, 95.3)),
    "+ no purchase on the last day; floor, cooling and switch priced": (
        (19.3, 3600, 4820, 2754), (71.3, 89.7, 72.4, 93.7),
    ),
    "+ constant prices, media 5 % cheaper a year": (
        (9.5, 931, 1539, 790), (69.4, 88.9, 70.6, 93.2),
    ),
    "+ migration at 20 a TB": ((8.0, 255, 987, 509), (7.0, 21.0, 7.4, 31.4)),
    "+ a tape library of 1,000 slots": ((8.0, 255, 987, 20.7), (7.0, 21.0, 7.4, None)),
}  # fmt: skip


@pytest.mark.parametrize("medium", MEDIA)
def test_the_published_totals_to_five_digits(medium: str) -> None:
    config = load_config(PrecursorConfig, PRESETS_FOLDER / "precursor-2017.toml")
    total = run_precursor(medium, config).total() / 1e6
    assert round(total, 1) == PUBLISHED[medium]


def test_each_row_of_the_table_as_defects_go() -> None:
    lines = {line.change: line for line in explain_precursor()}
    for change, (totals, shares) in TABLE.items():
        line = lines[change]
        for medium, total, share in zip(MEDIA, totals, shares, strict=True):
            digit = 0.6 if isinstance(total, int) else 0.06
            assert line.total_usd[medium] / 1e6 == pytest.approx(total, abs=digit)
            if share is not None:
                found = line.migration_share[medium]
                assert found is not None
                assert 100 * found == pytest.approx(share, abs=0.06)


def test_the_headline_number_is_the_least_share_with_one_unit_fixed() -> None:
    line = explain_precursor()[1]
    shares = [share for share in line.migration_share.values() if share is not None]
    assert 0.96 < min(shares) < 0.97


def test_counting_media_bought_again_as_migration() -> None:
    fixed = explain_precursor()[4].config
    shares = [run_precursor(medium, fixed).migration_share("B") for medium in MEDIA]
    assert [round(100 * (share or 0)) for share in shares] == [71, 91, 80, 97]


def test_inflation_history_is_the_consumer_price_index() -> None:
    history = inflation_history()
    assert len(history) == 51
    assert history[0] == 1.0
    assert history[-1] == pytest.approx(7.408, abs=5e-4)


@pytest.mark.parametrize("name", [item.name for item in fields(Defects)])
def test_every_defect_moves_a_total(name: str) -> None:
    """Against all others off, and for at least one medium (a ceiling needs growth to be met)."""
    clean = PrecursorConfig(defects=NO_DEFECTS)
    dirty = PrecursorConfig(defects=replace(NO_DEFECTS, **{name: True}))
    changed = [
        medium
        for medium in MEDIA
        if run_precursor(medium, dirty).total() != run_precursor(medium, clean).total()
    ]
    if name == "no_ceiling":  # at 1 % a year no capacity meets its ceiling in 50 years
        assert changed == []
    else:
        assert changed, name


def energy(medium: str, defects: Defects) -> float:
    ledger = run_precursor(medium, PrecursorConfig(defects=defects))
    return ledger.total(lambda row: row.category is Category.ENERGY)


def test_defect_01_is_a_factor_of_ten() -> None:
    ratio = energy("hdd", replace(NO_DEFECTS, kwh_unit=True)) / energy("hdd", NO_DEFECTS)
    assert ratio == pytest.approx(10)


def test_defect_02_loses_the_servers() -> None:
    ratio = energy("hdd", replace(NO_DEFECTS, server_power_lost=True)) / energy("hdd", NO_DEFECTS)
    server_w = 350 + 24 * 9.45
    assert ratio == pytest.approx((200 + 8) / (200 + 8 * server_w))


def test_defect_03_counts_the_load_twice() -> None:
    ratio = energy("ssd", replace(NO_DEFECTS, pue_plus_one=True)) / energy("ssd", NO_DEFECTS)
    assert ratio == pytest.approx(2.5 / 1.5)


def test_defect_04_prices_floor_and_cooling_at_nothing() -> None:
    def building(misspelt: bool) -> float:
        defects = replace(NO_DEFECTS, misspelt_names=misspelt)
        ledger = run_precursor("tape", PrecursorConfig(defects=defects))
        return ledger.total(lambda row: row.category is Category.BUILDING)

    assert building(misspelt=True) < building(misspelt=False) / 10_000


def test_defect_05_migrates_on_the_last_day() -> None:
    def last_year(fence_post: bool) -> int:
        defects = replace(NO_DEFECTS, fence_post=fence_post)
        rows = run_precursor("disc", PrecursorConfig(defects=defects)).rows
        return max(row.year for row in rows if row.cause is Cause.REPLACEMENT)

    assert last_year(fence_post=True) == 50
    assert last_year(fence_post=False) < 50


def test_defect_06_buys_tape_servers_at_the_common_multiple() -> None:
    def years(tied: bool) -> set[int]:
        defects = replace(NO_DEFECTS, tied_lives=tied)
        rows = run_precursor("tape", PrecursorConfig(defects=defects)).rows
        return {
            row.year
            for row in rows
            if row.category is Category.IT and row.cause is Cause.REPLACEMENT
        }

    assert 15 not in years(tied=True)
    assert {15, 45} <= years(tied=False)


def test_defect_07_counts_old_media_at_this_years_capacity() -> None:
    tied = energy("disc", replace(NO_DEFECTS, this_years_racks=True, fractional_racks=True))
    own = energy("disc", replace(NO_DEFECTS, fractional_racks=True))
    assert own / tied == pytest.approx(50 / sum(1.01**-year for year in range(50)))


def test_defect_08_is_met_when_capacity_grows() -> None:
    fast = replace(_rack("ssd", PrecursorConfig()), capacity_rate=0.2)
    capped = _num_racks(fast, replace(NO_DEFECTS, fractional_racks=True), 1e5, 40)
    free = _num_racks(fast, replace(NO_DEFECTS, fractional_racks=True, no_ceiling=True), 1e5, 40)
    assert capped == pytest.approx(1e5 / (30 * 24 * 8))
    assert free == pytest.approx(1e5 / (1.2**40 * 24 * 8))


def test_defect_09_no_state_survives_a_run() -> None:
    config = PrecursorConfig()
    first = run_precursor("tape", config)
    for medium in reversed(MEDIA):
        run_precursor(medium, config)
    assert run_precursor("tape", config) == first


def test_defect_10_has_a_petabyte_of_1024() -> None:
    def moved(binary: bool) -> float:
        defects = replace(NO_DEFECTS, binary_petabyte=binary)
        ledger = run_precursor("hdd", PrecursorConfig(defects=defects))
        return ledger.total(lambda row: row.cause is Cause.MIGRATION)

    assert moved(binary=True) / moved(binary=False) == pytest.approx(1.024)


def test_defect_11_replays_inflation_undiscounted() -> None:
    plain = run_precursor("tape", PrecursorConfig(defects=NO_DEFECTS)).by_year()
    defects = replace(NO_DEFECTS, history_as_future=True)
    inflated = run_precursor("tape", PrecursorConfig(defects=defects)).by_year()
    ratios = [high / low for high, low in zip(inflated, plain, strict=True) if low]
    assert ratios == pytest.approx(inflation_history()[: len(ratios)])
    assert ratios[-1] > 7


def test_defect_12_has_racks_in_fractions() -> None:
    facts = _rack("disc", PrecursorConfig())
    whole = _num_racks(facts, NO_DEFECTS, 1e5, 0)
    part = _num_racks(facts, replace(NO_DEFECTS, fractional_racks=True), 1e5, 0)
    assert whole == 30
    assert part == pytest.approx(1e5 / (0.3 * 11240))


def test_defect_13_migration_is_an_input() -> None:
    half = PrecursorConfig(migration_usd_tb=300.0)
    for medium in MEDIA:
        full = run_precursor(medium, PrecursorConfig())
        moved = full.total(lambda row: row.cause is Cause.MIGRATION)
        assert run_precursor(medium, half).total() == pytest.approx(full.total() - moved / 2)


def test_the_five_columns_add_up() -> None:
    rows = five_columns(run_precursor("hdd", PrecursorConfig()))
    assert [row["year"] for row in rows] == list(range(51))
    for row in rows:
        parts = row["infrastructure"] + row["energy"] + row["maintenance"] + row["it"]
        assert parts == pytest.approx(row["total"])


def test_the_explanation_has_a_line_a_change() -> None:
    lines = explain_precursor()
    assert len(precursor_table(lines).rows) == len(lines) == 11


@pytest.mark.parametrize(("copies", "usd"), [(1.0, 324.88), (2.0, 649.76)])
def test_dshr_to_the_cent(copies: float, usd: float) -> None:
    config = load_config(DshrConfig, PRESETS_FOLDER / "dshr.toml", [f"replication={copies}"])
    assert round(endowment_usd_per_tb(config), 2) == usd


@pytest.mark.parametrize(
    ("rate", "quirks", "usd"),
    [
        (None, Quirks(linear_discount=False), 326.19),
        (0.05, Quirks(), 251.10),
        (0.05, Quirks(linear_discount=False), 255.54),
        (None, Quirks(current_capacity=False), 353.18),
    ],
)
def test_dshr_quirks(rate: float | None, quirks: Quirks, usd: float) -> None:
    assert round(endowment_usd_per_tb(DshrConfig(discount_rate=rate, quirks=quirks)), 2) == usd


def test_dshr_costs_a_hundred_years() -> None:
    assert len(yearly_costs(DshrConfig())) == 100
    assert [name for name, _ in explain_dshr()][:2] == ["as published", "two copies"]


def test_modern_2026_has_no_golden_totals_but_an_order() -> None:
    result = compare(load_preset("modern-2026"), samples=0)
    names = [item.name for item in result.ranking]
    assert names[0] == "tape"
    assert names[-1] == "ssd"
    shares = {item.name: item.migration_share for item in result.strategies}
    assert all((share["A"] or 0) < 0.25 for share in shares.values())
    assert (shares["tape"]["C"] or 0) > 0.96
    assert (shares["ssd"]["C"] or 0) > 0.96


def test_the_claim_needs_a_flat_price_far_above_any_observed() -> None:
    for price, low, high in ((20.0, 0.4, 0.7), (600.0, 0.95, 1.0)):
        flat = load_preset(
            "modern-2026",
            [f"overrides.migration.price={price}", "migration.method=flat",
             "finance.discount_rate=0.0"],
        )  # fmt: skip
        share = compare(flat, samples=0).of("hdd").migration_share["A"]
        assert share is not None
        assert low < share < high


@pytest.mark.parametrize(
    "config",
    [
        PrecursorConfig(decline=float("nan")),
        PrecursorConfig(decline=1.0),
        PrecursorConfig(migration_usd_tb=-1.0),
        PrecursorConfig(migration_usd_tb=float("nan")),
    ],
)
def test_a_precursor_out_of_range_is_refused(config: PrecursorConfig) -> None:
    with pytest.raises(ConfigError, match="must be"):
        run_precursor("tape", config)


@pytest.mark.parametrize(
    "config",
    [
        DshrConfig(replication=0.0),
        DshrConfig(replication=float("nan")),
        DshrConfig(discount_rate=1.0),
        DshrConfig(discount_rate=float("nan")),
    ],
)
def test_an_endowment_out_of_range_is_refused(config: DshrConfig) -> None:
    with pytest.raises(ConfigError, match="must be"):
        endowment_usd_per_tb(config)


@pytest.mark.parametrize("name", ["precursor-2017", "dshr"])
def test_a_model_of_its_own_is_not_a_scenario(name: str) -> None:
    with pytest.raises(ConfigError, match="model of its own"):
        load_preset(name)


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        load_preset("modern")
    assert "modern-2026" in (caught.value.hint or "")
