"""The report shows every total with the rows it sums, and every input with its source."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tierwise.core.report import Table, Text, render_html
from tierwise.tco.carbon import carbon_of
from tierwise.tco.compare import Comparison, compare, scaled
from tierwise.tco.facts import load_fact_set
from tierwise.tco.inputs import facts_of, resolve_inputs
from tierwise.tco.ledger import Category, opex_test, row_span
from tierwise.tco.model import run_strategy
from tierwise.tco.report import (
    category_table,
    cost_table,
    notes_of,
    report_of,
    sections_of,
    write_comparison,
)
from tierwise.tco.scenario import Scenario, load_preset, load_scenario


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(load_preset("modern-2026", ["horizon_years=15"]), samples=50, seed=1)


def spans(text: str) -> set[int]:
    rows: set[int] = set()
    for part in text.split(", "):
        first, _, last = part.partition("-")
        rows |= set(range(int(first), int(last or first) + 1))
    return rows


def test_each_category_names_exactly_its_rows(comparison: Comparison) -> None:
    item = comparison.of("tape")
    by_number = {row.row: row for row in item.ledger.rows}
    seen: set[int] = set()
    for category, row in zip(item.ledger.by_category(), category_table(item).rows, strict=False):
        numbers = spans(row[3])
        assert {by_number[n].category for n in numbers} == {category}
        total = sum(by_number[n].amount_usd for n in numbers)
        assert total == pytest.approx(item.ledger.by_category()[category])
        seen |= numbers
    assert seen == set(by_number)


def test_row_spans_are_short(comparison: Comparison) -> None:
    ledger = comparison.of("tape").ledger
    assert row_span(ledger, lambda row: row.category is Category.RENT).count(",") == 0
    assert row_span(ledger, opex_test("A"))
    assert row_span(ledger, lambda row: False) == ""


def test_the_files_agree_with_the_numbers(comparison: Comparison, tmp_path: Path) -> None:
    report = write_comparison(comparison, tmp_path)
    text = report.read_text(encoding="utf-8")
    assert "http-equiv" not in text
    assert "<script" not in text
    with (tmp_path / "ledger.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for item in comparison.strategies:
        mine = [row for row in rows if row["strategy"] == item.name]
        total = sum(float(row["amount_usd"]) for row in mine)
        assert total == pytest.approx(item.ledger.total())
    with (tmp_path / "assumptions.csv").open(newline="", encoding="utf-8") as stream:
        assumed = {row["input"]: row for row in csv.DictReader(stream)}
    assert assumed["tape.price"]["source"].startswith("https://")
    assert all(row["source"] for row in assumed.values())
    assert {p.suffix for p in (tmp_path / "figures").iterdir()} == {".svg", ".csv"}
    with (tmp_path / "yearly.csv").open(newline="", encoding="utf-8") as stream:
        yearly = [row for row in csv.DictReader(stream) if row["strategy"] == "hdd"]
    last = float(yearly[-1]["cumulative_present_usd"])
    assert last == pytest.approx(comparison.of("hdd").endowment_usd)


def test_the_written_scenario_gives_the_same_costs(comparison: Comparison, tmp_path: Path) -> None:
    write_comparison(comparison, tmp_path)
    again = compare(load_scenario(tmp_path / "config.toml"), samples=50, seed=1)
    for item in comparison.strategies:
        assert again.of(item.name).endowment_usd == item.endowment_usd


def test_the_same_comparison_gives_the_same_report(comparison: Comparison) -> None:
    assert render_html(report_of(comparison)) == render_html(report_of(comparison))


def test_the_migration_share_is_printed_under_every_definition(comparison: Comparison) -> None:
    sections = sections_of(comparison, prefix="x", details=False)
    tables = [b for s in sections for b in s.blocks if isinstance(b, Table)]
    (shares,) = [table for table in tables if table.caption.startswith("Migration as a share")]
    assert [row[0][0] for row in shares.rows] == ["A", "B", "C"]
    names = [b.name for s in sections for b in s.blocks if not isinstance(b, Table)
             and hasattr(b, "name")]  # fmt: skip
    assert names == ["x-cost-curves", "x-cost-categories"]


@pytest.mark.parametrize(
    "changes",
    [
        ['data.size="0 B"'],
        ['data.size="5 kB"', "horizon_years=1"],
        ['media=["tape"]', "horizon_years=2"],
        ["horizon_years=60", 'data.size="1 EB"', "data.growth=0.3"],
    ],
)
def test_extreme_scenarios_make_a_report(changes: list[str]) -> None:
    result = compare(load_preset("modern-2026", changes), samples=5)
    assert "<svg" not in render_html(report_of(result))  # figures are embedded as images


def test_scaling_keeps_the_mean_file_size() -> None:
    small = load_preset("modern-2026", ['data.size="1 TB"', "data.num_objects=1000"])
    big = scaled(small, size="1 PB")
    assert big.data.num_objects == 1_000_000
    assert big.name == "modern-2026 at 1 PB"


def test_a_tiny_archive_is_said_to_leave_units_empty() -> None:
    tiny = compare(load_preset("modern-2026", ["data.size=14 MB", "horizon_years=9"]), samples=0)
    notes = notes_of(tiny)
    assert any("a tenth of one unit of ssd, hdd, tape, optical" in note for note in notes), notes
    assert sum("emissions leave out" in note for note in notes) == 1
    prices = [row[3] for row in cost_table(tiny).rows]
    assert all(re.fullmatch(r"\$[0-9.]+\u00a0[KMB]|\$[0-9.]+", price) for price in prices), prices
    large = compare(load_preset("modern-2026", ["horizon_years=9"]), samples=0)
    assert not any("a tenth" in note for note in notes_of(large))


@pytest.mark.parametrize(("copies", "text"), [(1, "1 copy,"), (2, "2 copies,")])
def test_copies_are_counted_in_words(copies: int, text: str) -> None:
    changes = [f"data.copies={copies}.0", "horizon_years=2", 'media=["tape"]']
    sections = sections_of(compare(load_preset("modern-2026", changes), samples=0))
    first = sections[0].blocks[0]
    assert isinstance(first, Text)
    assert text in first.text


def test_carbon_counts_energy_and_what_is_bought() -> None:
    scenario = Scenario(
        media=("ssd",),
        horizon_years=1,
        overrides={"power": {"grid": 0.5, "pue": 1.0}, "data": {"size": 61.44 * 0.8}},
    )
    facts = facts_of(scenario)
    point = resolve_inputs(scenario, facts).point()
    carbon = carbon_of(run_strategy(scenario, scenario.plans[0], point, facts), point)
    assert carbon.embodied_kg[0] == pytest.approx(55 * 61.44)
    assert carbon.energy_kg[0] == pytest.approx(9 * 8.76 * 0.5)
    assert carbon.gaps == ()


def test_carbon_says_what_it_does_not_know() -> None:
    result = compare(load_preset("modern-2026", ["horizon_years=2"]), samples=0)
    gaps = {item.name: item.carbon.gaps for item in result.strategies}
    assert gaps["hdd"] == gaps["ssd"] == ()
    assert "embodied" in gaps["tape"][0]
    assert "provider" in gaps["cloud"][0]
    assert load_fact_set().facts["tape.embodied_unit"].value == 0
