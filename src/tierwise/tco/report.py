"""A comparison -> one report in which every number can be traced to its rows.

Each total names the ledger rows it sums (`ledger.csv` beside the report has them), each share
the tags it counts, and each input the source it came from. Left out: prose conclusions; a table
says how probable a winner is, and what would have to change for it to lose.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tierwise.core.config import dump_config
from tierwise.core.records import write_whole
from tierwise.core.report import Block, Report, Section, Table, Text, csv_of, write_report
from tierwise.core.units import format_size, format_usd
from tierwise.tco.compare import Comparison, StrategyCost
from tierwise.tco.figures import category_bars, cost_curves, tornado_bars, winner_map
from tierwise.tco.ledger import (
    DEFINITION_TEXT,
    DEFINITIONS,
    LEDGER_HEADER,
    Category,
    Ledger,
    ledger_rows,
    row_span,
)
from tierwise.tco.solve import WinnerMap, find_strategy, map_winners, spaced
from tierwise.tco.spread import tornado

MAP_POINTS = 21


def percent(share: float | None) -> str:
    """Return a share as a percentage with one decimal, `n/a` where it has no meaning.

    >>> percent(0.9664), percent(None)
    ('96.6 %', 'n/a')
    """
    return "n/a" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def usd(amount: float) -> str:
    """Return an amount of money that does not break across lines, `n/a` for NaN."""
    return "n/a" if math.isnan(amount) else format_usd(amount).replace(" ", "\u00a0")


def tonnes(item: StrategyCost) -> str:
    """Return emissions in tonnes; `>=` where some are not known, `n/a` where all are not."""
    total = f"{item.carbon.total_kg / 1000:,.1f}"
    if not item.carbon.gaps:
        return total
    return f"\u2265\u00a0{total}" if item.carbon.total_kg > 0 else "n/a"


def cost_table(comparison: Comparison) -> Table:
    """Return one row a strategy, cheapest first."""
    spread, year = comparison.spread, comparison.scenario.currency_year
    header = ["strategy", "paid-up (present value)", "cash", "per TB-year", "first year"]
    if spread is not None:
        header += ["p5", "p50", "p95", "cheapest in"]
    header += ["t CO2e", "ledger rows"]
    rows = []
    for item in comparison.ranking:
        row = [
            item.name,
            usd(item.endowment_usd),
            usd(item.cash_total_usd),
            usd(item.usd_per_tb_year),
            usd(float(item.cumulative_usd[0])),
        ]
        if spread is not None:
            row += [usd(value) for value in spread.percentiles(item.name)]
            row.append(percent(spread.p_cheapest[item.name]))
        row += [tonnes(item), f"1-{len(item.ledger.rows)}"]
        rows.append(tuple(row))
    caption = f"Cost of each strategy in {year} dollars, cheapest first"
    if spread is not None:
        caption += (
            ". Paid-up, cash and TB-year take every fact at its value; p5, p50 and p95 draw each "
            "from its range, so where ranges reach further to the dear side, p50 lies above"
        )
    return Table(
        caption=caption,
        header=tuple(header),
        rows=tuple(rows),
    )


def category_table(item: StrategyCost) -> Table:
    """Return undiscounted totals by category with the ledger rows behind each."""
    ledger = item.ledger
    rows = []
    for category, amount in ledger.by_category().items():
        span = row_span(ledger, lambda row, c=category: row.category is c)  # type: ignore[misc]
        share = percent(amount / ledger.total() if ledger.total() else None)
        rows.append((str(category).replace("_", " "), usd(amount), share, span))
    rows.append(("total", usd(ledger.total()), "100.0 %", f"1-{len(ledger.rows)}"))
    return Table(
        caption=f"{item.name}: what the money buys, undiscounted",
        header=("category", "USD", "share", f"rows of {item.name} in ledger.csv"),
        rows=tuple(rows),
    )


def cause_table(comparison: Comparison) -> Table:
    """Return undiscounted totals by cause, a column a strategy."""
    tables = [item.ledger.by_cause() for item in comparison.strategies]
    causes = list(dict.fromkeys(cause for table in tables for cause in table))
    return Table(
        caption="Why the money is spent, undiscounted (ledger.csv, column cause)",
        header=("cause", *(item.name for item in comparison.strategies)),
        rows=tuple(
            (str(cause), *(usd(table.get(cause, 0.0)) for table in tables)) for cause in causes
        ),
    )


def share_table(comparison: Comparison) -> Table:
    """Return the migration share of OPEX under each definition."""
    rows = []
    for name in DEFINITIONS:
        shares = (percent(item.migration_share[name]) for item in comparison.strategies)
        chosen = " (this scenario's)" if name == comparison.scenario.opex else ""
        rows.append((f"{name}{chosen}: {DEFINITION_TEXT[name]}", *shares))
    return Table(
        caption="Migration as a share of OPEX, which depends on what is called OPEX",
        header=("OPEX is", *(item.name for item in comparison.strategies)),
        rows=tuple(rows),
    )


def split_table(comparison: Comparison) -> Table:
    """Return CAPEX and OPEX under the scenario's definition."""
    name = comparison.scenario.opex
    return Table(
        caption=f"CAPEX and OPEX, definition {name}: OPEX is {DEFINITION_TEXT[name]}",
        header=("strategy", "CAPEX", "OPEX"),
        rows=tuple(
            (item.name, usd(item.ledger.capex(name)), usd(item.ledger.opex(name)))
            for item in comparison.strategies
        ),
    )


def year_header(ledger: Ledger) -> tuple[Category, ...]:
    """Return the categories of a year-by-category table."""
    return tuple(ledger.by_category())


def year_rows(item: StrategyCost, start_year: int) -> list[tuple[object, ...]]:
    """Return (year, total, by category...) in dollars."""
    ledger = item.ledger
    columns = [
        ledger.by_year(lambda row, c=category: row.category is c)  # type: ignore[misc]
        for category in year_header(ledger)
    ]
    total = ledger.by_year()
    return [
        (start_year + year, total[year], *(column[year] for column in columns))
        for year in range(ledger.horizon_years)
    ]


def year_table(item: StrategyCost, start_year: int) -> Table:
    """Return the year-by-category table of one strategy."""
    names = [str(category).replace("_", " ") for category in year_header(item.ledger)]
    return Table(
        caption=f"{item.name}: cash by year and category, undiscounted; filter ledger.csv by "
        "strategy, year and category for the rows of a cell",
        header=("year", "total", *names),
        rows=tuple(
            (str(row[0]), *(usd(float(str(cell))) if cell else "-" for cell in row[1:]))
            for row in year_rows(item, start_year)
        ),
    )


ASSUMPTION_HEADER = (
    "input", "value", "low", "high", "unit", "drawn from", "kind", "source", "retrieved", "note",
)  # fmt: skip


def assumption_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return every input with its range and source; the scenario's own are named as such."""
    rows: list[tuple[str, ...]] = []
    for item in comparison.inputs.ranges.values():
        fact = item.fact
        rows.append(
            (
                item.key,
                f"{item.value:g}",
                f"{item.low:g}",
                f"{item.high:g}",
                fact.unit if fact else "",
                str(item.distribution),
                str(fact.kind) if fact else "scenario",
                fact.source if fact else "the scenario",
                fact.retrieved.isoformat() if fact else "",
                fact.note if fact else "",
            )
        )
    return rows


def sections_of(comparison: Comparison, *, prefix: str = "", details: bool = True) -> list[Section]:
    """Return a comparison as report sections.

    Args:
        comparison: What to show.
        prefix: Put before titles and figure names, to tell several comparisons in one report.
        details: Whether to add year tables and the assumptions.
    """
    scenario = comparison.scenario
    stem = "".join(c if c.isalnum() else "-" for c in prefix.lower()).strip("-")
    stem = f"{stem}-" if stem else ""
    title = f"{prefix}: " if prefix else ""
    logical = comparison.inputs.ranges["data.size"].value * 1e12
    copies = comparison.inputs.ranges["data.copies"].value
    intro = (
        f"{format_size(logical)} kept for {scenario.horizon_years} years from "
        f"{scenario.start_year}, {copies:g} {'copy' if copies == 1 else 'copies'}, growth "
        f"{comparison.inputs.ranges['data.growth'].value:.1%} a year, discounted at "
        f"{comparison.inputs.ranges['finance.discount'].value:.1%} "
        f"({scenario.finance.discount_basis})."
    )
    blocks: list[Block] = [
        Text(text=intro),
        cost_table(comparison),
        cost_curves(comparison, name=f"{stem}cost-curves"),
    ]
    blocks += [Text(text=f"Note: {note}.") for note in notes_of(comparison)]
    sections = [
        Section(title=f"{title}what it costs", blocks=tuple(blocks)),
        Section(
            title=f"{title}where the money goes",
            blocks=(
                category_bars(comparison, name=f"{stem}cost-categories"),
                cause_table(comparison),
                split_table(comparison),
                share_table(comparison),
            ),
        ),
    ]
    if details:
        sections += _details(comparison, title, stem)
    return sections


def notes_of(comparison: Comparison) -> list[str]:
    """Return what a reader must know before using the numbers, a sentence each."""
    notes = list(comparison.inputs.warnings)
    if empty := _mostly_empty(comparison):
        notes.append(
            f"the data fill less than a tenth of one unit of {', '.join(empty)}; units are whole, "
            "so costs and bands are those of a unit bought again and again"
        )
    for item in comparison.strategies:
        notes += item.warnings
    gaps = dict.fromkeys(gap for item in comparison.strategies for gap in item.carbon.gaps)
    if gaps:
        notes.append(f"emissions leave out {', '.join(gaps)}")
    return notes


def _mostly_empty(comparison: Comparison) -> list[str]:
    """Return the media of which the data never fill a tenth of one unit."""
    found: dict[str, None] = {}
    for item in comparison.strategies:
        for key, series_T in item.physical.items():
            medium, _, name = key.rpartition(".")
            capacity = comparison.inputs.ranges.get(f"{medium}.capacity")
            if name == "stored_tb" and capacity and 0 < series_T.max() < 0.1 * capacity.value:
                found[medium] = None
    return list(found)


def _details(comparison: Comparison, title: str, stem: str) -> list[Section]:
    sections = []
    ranking = comparison.ranking
    if len(ranking) > 1 and ranking[0].endowment_usd > 0:
        scenario = comparison.scenario
        first, second = (find_strategy(scenario, item.name) for item in ranking[:2])
        bars = tornado(scenario, comparison.inputs, first, against=second)
        heading = f"{first.name} over {second.name}"
        blocks: list[Block] = [
            tornado_bars(bars, title=heading, ratio=True, name=f"{stem}tornado"),
            winner_map(_default_map(comparison), name=f"{stem}winner-map"),
        ]
        sections.append(Section(title=f"{title}what decides", blocks=tuple(blocks)))
    start_year = comparison.scenario.start_year
    for item in comparison.strategies:
        tables = (category_table(item), year_table(item, start_year))
        sections.append(Section(title=f"{title}{item.name} by year", blocks=tables))
    table = Table(
        caption="Every input, its range and its source",
        header=ASSUMPTION_HEADER,
        rows=tuple(assumption_rows(comparison)),
    )
    sections.append(Section(title=f"{title}assumptions", blocks=(table,)))
    return sections


def _default_map(comparison: Comparison) -> WinnerMap:
    """Return the winner over the price of moving a TB and the discount rate."""
    return map_winners(
        comparison.scenario,
        "migration.price",
        spaced(0.0, 100.0, MAP_POINTS, log=False),
        "finance.discount",
        spaced(0.0, 0.1, MAP_POINTS, log=False),
    )


def report_of(comparison: Comparison) -> Report:
    """Return the whole report of one comparison."""
    best = comparison.ranking[0]
    summary = [("cheapest on these facts", best.name), ("paid-up price", usd(best.endowment_usd))]
    if comparison.spread is not None:
        summary.append(
            ("cheapest in", percent(comparison.spread.p_cheapest[best.name]) + " of the draws")
        )
    shares = ", ".join(f"{name} {percent(best.migration_share[name])}" for name in DEFINITIONS)
    summary.append(("its migration share of OPEX", shares))
    return Report(
        title=f"What keeping {comparison.scenario.name} costs",
        summary=tuple(summary),
        sections=tuple(sections_of(comparison)),
    )


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write the report and its data into a folder; return the path of report.html.

    Files: report.html, report.md, figures/, ledger.csv, yearly.csv, assumptions.csv,
    config.toml (the resolved scenario).
    """
    write_data(comparison, folder)
    return write_report(report_of(comparison), folder)


def write_data(comparison: Comparison, folder: Path) -> None:
    """Write ledger.csv, yearly.csv, assumptions.csv and config.toml of a comparison."""
    ledgers = [item.ledger for item in comparison.strategies]
    write_whole(folder / "ledger.csv", csv_of(LEDGER_HEADER, ledger_rows(ledgers)))
    write_whole(folder / "yearly.csv", csv_of(*yearly_table(comparison)))
    write_whole(folder / "assumptions.csv", csv_of(ASSUMPTION_HEADER, assumption_rows(comparison)))
    write_whole(folder / "config.toml", dump_config(comparison.scenario))


def yearly_table(comparison: Comparison) -> tuple[list[str], list[list[object]]]:
    """Return header and rows of cumulative and yearly cost, with bands where drawn."""
    header = ["strategy", "year", "cash_usd", "cumulative_present_usd", "pay_as_you_go_usd_per_tb"]
    if comparison.spread is not None:
        header += ["p5_usd", "p50_usd", "p95_usd"]
    rows: list[list[object]] = []
    for item in comparison.strategies:
        cash = item.ledger.by_year()
        for year in range(item.ledger.horizon_years):
            go = float(item.pay_as_you_go_usd[year])
            row: list[object] = [
                item.name, comparison.scenario.start_year + year, cash[year],
                float(item.cumulative_usd[year]), "" if np.isnan(go) else go,
            ]  # fmt: skip
            if comparison.spread is not None:
                row += [float(v) for v in comparison.spread.bands_usd[item.name][year]]
            rows.append(row)
    return header, rows
