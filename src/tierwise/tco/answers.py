"""Results -> what the command line prints: a table to read, JSON with everything, CSV records.

One function a verb, so that the shell only parses and prints. Numbers in JSON and CSV keep all
their digits; the table rounds. Left out: drawing, which is `figures`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierwise.core.facts import load_facts
from tierwise.core.report import Table
from tierwise.tco.compare import Comparison
from tierwise.tco.explain import Explanation, precursor_table
from tierwise.tco.facts import all_fact_files, describe, load_fact_set
from tierwise.tco.report import cost_table, usd
from tierwise.tco.scenario import PRESETS_FOLDER
from tierwise.tco.solve import BreakEven, Sweep, Waterfall, WinnerMap
from tierwise.tco.spread import SobolIndex, TornadoBar

Record = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One result in three shapes: read, parsed, and put into a spreadsheet."""

    table: Table
    result: Mapping[str, object]
    records: Sequence[Record]


def strategy_records(comparison: Comparison) -> list[dict[str, object]]:
    """Return everything about each strategy, cheapest first."""
    records = []
    for item in comparison.ranking:
        price = item.usd_per_tb_year
        record: dict[str, object] = {
            "name": item.name,
            "title": item.title,
            "endowment_usd": item.endowment_usd,
            "cash_usd": item.cash_total_usd,
            "usd_per_tb_year": None if math.isnan(price) else price,
            "by_category_usd": {str(k): v for k, v in item.ledger.by_category().items()},
            "by_cause_usd": {str(k): v for k, v in item.ledger.by_cause().items()},
            "migration_share_of_opex": dict(item.migration_share),
            "carbon_kg": item.carbon.total_kg,
            "carbon_gaps": list(item.carbon.gaps),
            "warnings": list(item.warnings),
        }
        if comparison.spread is not None:
            low, middle, high = comparison.spread.percentiles(item.name)
            record |= {"p5_usd": low, "p50_usd": middle, "p95_usd": high}
            record["p_cheapest"] = comparison.spread.p_cheapest[item.name]
        records.append(record)
    return records


def comparison_answer(comparison: Comparison) -> Answer:
    """Return a comparison; nested tables are in the JSON only."""
    strategies = strategy_records(comparison)
    flat = [
        {key: value for key, value in record.items() if not isinstance(value, dict | list)}
        for record in strategies
    ]
    result = {
        "scenario": comparison.scenario.name,
        "currency_year": comparison.scenario.currency_year,
        "horizon_years": comparison.scenario.horizon_years,
        "warnings": list(comparison.inputs.warnings),
        "strategies": strategies,
    }
    return Answer(table=cost_table(comparison), result=result, records=flat)


def sweep_answer(swept: Sweep) -> Answer:
    """Return the cost of each strategy at each value of an input."""
    names = list(swept.total_usd)
    totals = {name: [float(v) for v in swept.total_usd[name]] for name in names}
    values = [float(value) for value in swept.values]
    table = Table(
        caption=f"Present value over {swept.key}",
        header=(swept.key, *names),
        rows=tuple(
            (f"{value:g}", *(usd(totals[name][i]) for name in names))
            for i, value in enumerate(values)
        ),
    )
    records = [
        {swept.key: value, **{f"{name}_usd": totals[name][i] for name in names}}
        for i, value in enumerate(values)
    ]
    result = {"key": swept.key, "values": values, "total_usd": totals}
    return Answer(table=table, result=result, records=records)


def map_answer(mapped: WinnerMap) -> Answer:
    """Return the winner at every point of a map."""
    winner = [[mapped.names[int(i)] for i in row] for row in mapped.winner_YX]
    lead = [[float(v) for v in row] for row in mapped.lead_YX]
    x_values, y_values = ([float(v) for v in axis] for axis in (mapped.x_values, mapped.y_values))
    table = Table(
        caption=f"Cheapest strategy; {mapped.x_key} across, {mapped.y_key} down",
        header=(mapped.y_key, *(f"{x:.4g}" for x in x_values)),
        rows=tuple((f"{y:.4g}", *winner[j]) for j, y in enumerate(y_values)),
    )
    records = [
        {
            mapped.x_key: x,
            mapped.y_key: y,
            "winner": winner[j][i],
            "runner_up_over_winner": lead[j][i],
        }
        for j, y in enumerate(y_values)
        for i, x in enumerate(x_values)
    ]
    result = {
        "x_key": mapped.x_key,
        "y_key": mapped.y_key,
        "x_values": x_values,
        "y_values": y_values,
        "winner": winner,
        "runner_up_over_winner": lead,
    }
    return Answer(table=table, result=result, records=records)


def break_even_answer(found: BreakEven) -> Answer:
    """Return who is cheaper between the crossings."""
    bounds = [found.low, *found.crossings, found.high]
    cheaper = [found.cheaper_at_low]
    for _ in found.crossings:
        cheaper.append(found.second if cheaper[-1] == found.first else found.first)
    records = [
        {"from": bounds[i], "to": bounds[i + 1], "cheaper": name} for i, name in enumerate(cheaper)
    ]
    note = "" if found.crossings else ": no break-even in this range"
    table = Table(
        caption=f"{found.first} against {found.second} over {found.key}{note}",
        header=("from", "to", "cheaper"),
        rows=tuple(
            (f"{bounds[i]:.4g}", f"{bounds[i + 1]:.4g}", name) for i, name in enumerate(cheaper)
        ),
    )
    result = {
        "key": found.key,
        "first": found.first,
        "second": found.second,
        "low": found.low,
        "high": found.high,
        "crossings": list(found.crossings),
        "cheaper_at_low": found.cheaper_at_low,
        "cheaper_at_high": found.cheaper_at_high,
    }
    return Answer(table=table, result=result, records=records)


def precursor_answer(name: str, lines: Sequence[Explanation]) -> Answer:
    """Return the precursor's totals and migration shares, a defect fewer at a time."""
    steps = [
        {
            "change": line.change,
            "total": dict(line.total_usd),
            "migration_share": dict(line.migration_share),
        }
        for line in lines
    ]
    records = [
        {
            "change": line.change,
            "medium": medium,
            "total": total,
            "migration_share": line.migration_share[medium],
        }
        for line in lines
        for medium, total in line.total_usd.items()
    ]
    result = {"preset": name, "steps": steps}
    return Answer(table=precursor_table(list(lines)), result=result, records=records)


def dshr_answer(name: str, lines: Sequence[tuple[str, float]]) -> Answer:
    """Return the endowment per TB, a quirk fewer at a time."""
    records = [{"change": change, "usd_per_tb": amount} for change, amount in lines]
    table = Table(
        caption="Endowment per TB for 100 years",
        header=("change", "USD/TB"),
        rows=tuple((change, f"{amount:.2f}") for change, amount in lines),
    )
    return Answer(table=table, result={"preset": name, "steps": records}, records=records)


def waterfall_answer(fall: Waterfall) -> Answer:
    """Return the steps between two scenarios."""
    rows = [
        (fall.start_name, usd(fall.start_usd)),
        *((step.label, usd(step.change_usd)) for step in fall.steps),
        (fall.end_name, usd(fall.end_usd)),
    ]
    table = Table(
        caption=f"{fall.strategy}: from {fall.start_name} to {fall.end_name}, present value",
        header=("step", "USD"),
        rows=tuple(rows),
    )
    steps = [{"label": s.label, "change_usd": s.change_usd} for s in fall.steps]
    result = {
        "strategy": fall.strategy,
        "start_usd": fall.start_usd,
        "end_usd": fall.end_usd,
        "steps": steps,
    }
    return Answer(table=table, result=result, records=steps)


def sobol_answer(subject: str, indices: Sequence[SobolIndex]) -> Answer:
    """Return Sobol indices of a subject named in words."""
    records = [{"key": i.key, "first": i.first, "total": i.total} for i in indices]
    table = Table(
        caption=f"Sobol indices of {subject}",
        header=("input", "alone", "total"),
        rows=tuple((i.key, f"{i.first:.3f}", f"{i.total:.3f}") for i in indices),
    )
    return Answer(table=table, result={"of": subject, "sobol": records}, records=records)


def tornado_answer(subject: str, bars: Sequence[TornadoBar], *, ratio: bool) -> Answer:
    """Return how far each input moves a subject named in words."""
    digits = ".3f" if ratio else ",.0f"
    table = Table(
        caption=f"Inputs that move {subject}, one at a time from low to high",
        header=("input", "low", "high", "at low", "at high"),
        rows=tuple(
            (b.key, f"{b.low:g}", f"{b.high:g}", f"{b.at_low:{digits}}", f"{b.at_high:{digits}}")
            for b in bars
        ),
    )
    records = [
        {"key": b.key, "low": b.low, "high": b.high, "at_low": b.at_low, "at_high": b.at_high}
        for b in bars
    ]
    return Answer(table=table, result={"of": subject, "tornado": records}, records=records)


def facts_answer(pattern: str) -> Answer:
    """Return the shipped facts whose key contains a pattern, and the announced media."""
    records: list[dict[str, object]] = [
        {"file": path.name, **record}
        for path in all_fact_files()
        for record in describe(load_facts(path).values())
        if pattern in str(record["key"])
    ]
    announced = {
        medium.name: medium.why_disabled
        for medium in load_fact_set().media.values()
        if medium.why_disabled and pattern in medium.name
    }
    names = ("file", "key", "value", "low", "high", "unit", "currency_year", "kind", "source")
    table = Table(
        caption=f"{len(records)} facts",
        header=names,
        rows=tuple(
            tuple("" if record[name] is None else f"{record[name]}" for name in names)
            for record in records
        ),
    )
    return Answer(table=table, result={"facts": records, "announced": announced}, records=records)


def presets_answer() -> Answer:
    """Return the presets and what each is for."""
    records = [
        {"name": path.stem, "what": _heading(path), "path": str(path)}
        for path in sorted(PRESETS_FOLDER.glob("*.toml"))
    ]
    table = Table(
        caption=f"{len(records)} presets",
        header=("preset", "what"),
        rows=tuple((record["name"], record["what"]) for record in records),
    )
    return Answer(table=table, result={"presets": records}, records=records)


def _heading(path: Path) -> str:
    """Return the comment a file begins with, as one line."""
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words.append(line.removeprefix("#").strip())
    return " ".join(words)
