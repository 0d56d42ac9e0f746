"""`tierwise tco`: parse, call one function of `tierwise.tco`, print its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tierwise.cli.options import debug_option, json_option, print_result
from tierwise.core.extras import require_extra

if TYPE_CHECKING:
    from tierwise.core.report import Figure, Table
    from tierwise.tco.compare import Comparison
    from tierwise.tco.scenario import Scenario
    from tierwise.tco.solve import Sweep, WinnerMap

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def group() -> None:
    """Which generation: what keeping data costs."""


def _output_options(function: F) -> F:
    """Add --json, --csv and --debug."""
    with_csv = click.option("--csv", "as_csv", is_flag=True, help="Print CSV instead of text.")
    return debug_option(json_option(with_csv(function)))


def _scenario_options(function: F) -> F:
    """Add SCENARIO, --preset and --set."""
    argument = click.argument("scenario", required=False, type=click.Path(path_type=Path))
    preset = click.option("--preset", help="A preset instead of a file [modern-2026].")
    changes = click.option(
        "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a scenario key."
    )
    return argument(preset(changes(function)))


def _draw_options(function: F) -> F:
    """Add --samples and --seed."""
    samples = click.option("--samples", default=1000, show_default=True, help="Draws; 0 for none.")
    seed = click.option("--seed", default=0, show_default=True, help="Seed of the draws.")
    return samples(seed(function))


def _load(path: Path | None, preset: str | None, changes: Sequence[str]) -> Scenario:
    require_extra("tco")
    from tierwise.core.errors import UsageError
    from tierwise.tco.scenario import DEFAULT_PRESET, load_preset, load_scenario

    if path is not None and preset is not None:
        raise UsageError("give a scenario file or --preset, not both")
    if path is not None:
        return load_scenario(path, changes)
    return load_preset(preset or DEFAULT_PRESET, changes)


Records = Sequence[Mapping[str, object]]


def _print_table(
    table: Table, result: dict[str, object], records: Records, *, as_json: bool, as_csv: bool
) -> None:
    """Print a verb's result: the whole of it as JSON, its records as CSV, or a table to read."""
    from tierwise.core.report import csv_of

    if as_json:
        print_result(result, as_json=True)
    elif as_csv:
        header = list(records[0]) if records else []
        rows = [["" if row[name] is None else row[name] for name in header] for row in records]
        click.echo(csv_of(header, rows), nl=False)
    else:
        click.echo(_text_table(table))


def _text_table(table: Table) -> str:
    lines = [table.header, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.header))]
    text = "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
    return f"{table.caption}\n\n{text}"


def _flat(row: Mapping[str, object]) -> dict[str, object]:
    """Return a strategy's numbers as one CSV row; nested tables are in --json."""
    return {key: value for key, value in row.items() if not isinstance(value, dict | list)}


def _summary(comparison: Comparison) -> dict[str, Any]:
    strategies = []
    for item in comparison.ranking:
        row: dict[str, object] = {
            "name": item.name,
            "title": item.title,
            "endowment_usd": item.endowment_usd,
            "cash_usd": item.cash_total_usd,
            "usd_per_tb_year": _number(item.usd_per_tb_year),
            "by_category_usd": {str(k): v for k, v in item.ledger.by_category().items()},
            "by_cause_usd": {str(k): v for k, v in item.ledger.by_cause().items()},
            "migration_share_of_opex": dict(item.migration_share),
            "carbon_kg": item.carbon.total_kg,
            "carbon_gaps": list(item.carbon.gaps),
            "warnings": list(item.warnings),
        }
        if comparison.spread is not None:
            low, middle, high = comparison.spread.percentiles(item.name)
            row |= {"p5_usd": low, "p50_usd": middle, "p95_usd": high}
            row["p_cheapest"] = comparison.spread.p_cheapest[item.name]
        strategies.append(row)
    return {
        "scenario": comparison.scenario.name,
        "currency_year": comparison.scenario.currency_year,
        "horizon_years": comparison.scenario.horizon_years,
        "warnings": list(comparison.inputs.warnings),
        "strategies": strategies,
    }


def _number(value: float) -> float | None:
    return None if value != value else value  # noqa: PLR0124  NaN has no JSON


@group.command()
@_scenario_options
@_draw_options
@_output_options
def compare(
    *, scenario: Path | None, preset: str | None, changes: tuple[str, ...], samples: int, seed: int,
    as_json: bool, as_csv: bool,
) -> None:  # fmt: skip
    """Print what each strategy costs, cheapest first, with bands."""
    loaded = _load(scenario, preset, changes)
    from tierwise.core.progress import choose_progress
    from tierwise.tco.compare import compare as run_compare
    from tierwise.tco.report import cost_table, share_table

    progress = choose_progress(as_json=as_json)
    result = run_compare(loaded, samples=samples, seed=seed, progress=progress)
    summary = _summary(result)
    records = [_flat(row) for row in summary["strategies"]]
    _print_table(cost_table(result), summary, records, as_json=as_json, as_csv=as_csv)
    if not as_json and not as_csv:
        click.echo("\n" + _text_table(share_table(result)))
        for line in _warnings(result):
            click.echo(f"note: {line}")


def _warnings(comparison: Comparison) -> list[str]:
    return [
        *comparison.inputs.warnings,
        *(text for item in comparison.strategies for text in item.warnings),
    ]


@group.command()
@_scenario_options
@_draw_options
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write to.")
@json_option
@debug_option
def run(
    *, scenario: Path | None, preset: str | None, changes: tuple[str, ...], samples: int, seed: int,
    out: Path, as_json: bool,
) -> None:  # fmt: skip
    """Write a comparison's report, ledger and tables into a folder."""
    loaded = _load(scenario, preset, changes)
    require_extra("report")
    import time
    from importlib.metadata import version

    from tierwise.core.progress import choose_progress
    from tierwise.core.records import RunRecord, hash_file, write_manifest
    from tierwise.tco.compare import compare as run_compare
    from tierwise.tco.report import write_comparison

    started = time.monotonic()
    record = RunRecord(out, clock=time.time)
    record.truncate(0)
    progress = choose_progress(as_json=as_json)
    result = run_compare(loaded, samples=samples, seed=seed, progress=progress)
    report = write_comparison(result, out)
    summary = _summary(result)
    record.event("tco", timing={"seconds": time.monotonic() - started}, seed=seed, **summary)
    sources = [*loaded.facts_files, *([loaded.data.inventory] if loaded.data.inventory else [])]
    names = ("tierwise", "numpy", "scipy", "matplotlib")
    write_manifest(
        out,
        seed=seed,
        versions={name: version(name) for name in names},
        commit=None,
        inputs={name: hash_file(Path(name)) for name in sources},
    )
    print_result({"report": str(report), **summary}, as_json=as_json, text=str(report))


def _parse_range(text: str) -> tuple[str, float, float, int | None]:
    from tierwise.core.errors import UsageError

    key, equals, numbers = text.partition("=")
    parts = numbers.split(":")
    try:
        low, high = float(parts[0]), float(parts[1])
        num = int(parts[2]) if len(parts) > 2 else None
    except (IndexError, ValueError):
        equals = ""
        low = high = 0.0
        num = None
    if not equals or (num is not None and not 2 <= num <= 2000):
        raise UsageError(f"{text!r} is not a range", hint="write it like migration.price=1:600:60")
    return key.strip(), low, high, num


@group.command()
@_scenario_options
@click.option(
    "--vary", multiple=True, required=True, metavar="KEY=LOW:HIGH[:POINTS]",
    help="An input to change; twice for a map of the winner.",
)  # fmt: skip
@click.option("--log", is_flag=True, help="Space the points by a constant factor.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the figure and its CSV.")
@_output_options
def sweep(
    *, scenario: Path | None, preset: str | None, changes: tuple[str, ...], vary: tuple[str, ...],
    log: bool, out: Path | None, as_json: bool, as_csv: bool,
) -> None:  # fmt: skip
    """Print the cost over one input, or the winner over two."""
    loaded = _load(scenario, preset, changes)
    from tierwise.core.errors import UsageError
    from tierwise.tco import solve

    if len(vary) > 2:
        raise UsageError("at most two inputs can be varied", hint="one for curves, two for a map")
    ranges = [_parse_range(text) for text in vary]
    default = 25 if len(ranges) == 1 else 21
    points = [solve.spaced(low, high, num or default, log=log) for _, low, high, num in ranges]
    if len(ranges) == 1:
        swept = solve.sweep(loaded, ranges[0][0], points[0])
        table, result, records = _sweep_table(swept)
    else:
        mapped = solve.map_winners(loaded, ranges[0][0], points[0], ranges[1][0], points[1])
        table, result, records = _map_table(mapped)
    if out is not None:
        require_extra("report")
        from tierwise.tco import figures

        figure = figures.sweep_curves(swept) if len(ranges) == 1 else figures.winner_map(mapped)
        result["figure"] = _write_figure(figure, out)
    _print_table(table, result, records, as_json=as_json, as_csv=as_csv)


def _write_figure(figure: Figure, folder: Path) -> str:
    from tierwise.core.records import write_whole

    write_whole(folder / f"{figure.name}.svg", figure.svg)
    write_whole(folder / f"{figure.name}.csv", figure.csv)
    return str(folder / f"{figure.name}.svg")


def _sweep_table(swept: Sweep) -> tuple[Table, dict[str, object], Records]:
    from tierwise.core.report import Table
    from tierwise.tco.report import usd

    names = list(swept.total_usd)
    rows = tuple(
        (f"{value:g}", *(usd(float(swept.total_usd[name][i])) for name in names))
        for i, value in enumerate(swept.values)
    )
    table = Table(caption=f"Present value over {swept.key}", header=(swept.key, *names), rows=rows)
    totals = {name: [float(v) for v in swept.total_usd[name]] for name in names}
    values = [float(value) for value in swept.values]
    records = [
        {swept.key: value, **{f"{name}_usd": totals[name][i] for name in names}}
        for i, value in enumerate(values)
    ]
    return table, {"key": swept.key, "values": values, "total_usd": totals}, records


def _map_table(mapped: WinnerMap) -> tuple[Table, dict[str, object], Records]:
    from tierwise.core.report import Table

    rows = tuple(
        (f"{y:.4g}", *(mapped.names[int(i)] for i in mapped.winner_YX[j]))
        for j, y in enumerate(mapped.y_values)
    )
    table = Table(
        caption=f"Cheapest strategy; {mapped.x_key} across, {mapped.y_key} down",
        header=(mapped.y_key, *(f"{x:.4g}" for x in mapped.x_values)),
        rows=rows,
    )
    winner = [[mapped.names[int(i)] for i in row] for row in mapped.winner_YX]
    lead = [[float(v) for v in row] for row in mapped.lead_YX]
    records = [
        {
            mapped.x_key: float(x),
            mapped.y_key: float(y),
            "winner": winner[j][i],
            "runner_up_over_winner": lead[j][i],
        }
        for j, y in enumerate(mapped.y_values)
        for i, x in enumerate(mapped.x_values)
    ]
    result: dict[str, object] = {
        "x_key": mapped.x_key,
        "y_key": mapped.y_key,
        "x_values": [float(v) for v in mapped.x_values],
        "y_values": [float(v) for v in mapped.y_values],
        "winner": winner,
        "runner_up_over_winner": lead,
    }
    return table, result, records


@group.command()
@click.argument("key")
@click.argument("first")
@click.argument("second")
@click.option("--range", "span", required=True, metavar="LOW:HIGH", help="Where to search.")
@click.option("--scenario", type=click.Path(path_type=Path), help="Scenario file.")
@click.option("--preset", help="A preset instead of a file [modern-2026].")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a scenario key.")
@_output_options
def breakeven(
    *, key: str, first: str, second: str, span: str, scenario: Path | None, preset: str | None,
    changes: tuple[str, ...], as_json: bool, as_csv: bool,
) -> None:  # fmt: skip
    """Print where input KEY makes strategies FIRST and SECOND cost the same."""
    loaded = _load(scenario, preset, changes)
    from tierwise.core.report import Table
    from tierwise.tco.solve import break_even

    _, low, high, _ = _parse_range(f"{key}={span}")
    found = break_even(loaded, key, first, second, low=low, high=high)
    between = [low, *found.crossings, high]
    cheaper = [found.cheaper_at_low]
    for _ in found.crossings:
        cheaper.append(second if cheaper[-1] == first else first)
    table = Table(
        caption=f"{first} against {second} over {key}"
        + ("" if found.crossings else ": no break-even in this range"),
        header=("from", "to", "cheaper"),
        rows=tuple(
            (f"{between[i]:.4g}", f"{between[i + 1]:.4g}", name) for i, name in enumerate(cheaper)
        ),
    )
    result: dict[str, object] = {
        "key": key,
        "first": first,
        "second": second,
        "low": low,
        "high": high,
        "crossings": list(found.crossings),
        "cheaper_at_low": found.cheaper_at_low,
        "cheaper_at_high": found.cheaper_at_high,
    }
    records = [
        {"from": between[i], "to": between[i + 1], "cheaper": name}
        for i, name in enumerate(cheaper)
    ]
    _print_table(table, result, records, as_json=as_json, as_csv=as_csv)


@group.command()
@click.argument("what", required=False, default="modern-2026")
@click.argument("other", required=False)
@click.option("--strategy", help="Whose cost to explain [the cheapest].")
@click.option("--against", help="Explain the ratio to this strategy instead.")
@click.option("--sobol", "base_samples", type=int, help="Sobol indices with this base (2^n).")
@click.option("--seed", default=0, show_default=True, help="Seed of the Sobol sequence.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key of WHAT.")
@_output_options
def explain(
    *, what: str, other: str | None, strategy: str | None, against: str | None,
    base_samples: int | None, seed: int, changes: tuple[str, ...], as_json: bool, as_csv: bool,
) -> None:  # fmt: skip
    """Print what a result rests on.

    WHAT is a preset or a file. precursor-2017: the migration share as each defect is removed
    (or some, with --set defects.NAME=false). dshr: the endowment as each quirk is removed. A
    scenario: which inputs move its cost. Two scenarios: what changed between them.
    """
    require_extra("tco")
    from tierwise.tco.scenario import PRESETS_FOLDER, model_of

    path = Path(what) if what.endswith(".toml") else PRESETS_FOLDER / f"{what}.toml"
    model = model_of(path)
    if model is not None:
        table, result, records = _explain_model(model, path, changes)
    elif other is not None:
        before, after = _named(what, changes), _named(other, ())
        table, result, records = _explain_change(before, after, strategy)
    else:
        scenario = _named(what, changes)
        table, result, records = _explain_inputs(scenario, strategy, against, base_samples, seed)
    _print_table(table, result, records, as_json=as_json, as_csv=as_csv)


def _named(what: str, changes: Sequence[str]) -> Scenario:
    if what.endswith(".toml"):
        return _load(Path(what), None, changes)
    return _load(None, what, changes)


def _explain_model(
    model: str, path: Path, changes: Sequence[str]
) -> tuple[Table, dict[str, object], Records]:
    from tierwise.core.config import load_config
    from tierwise.core.report import Table
    from tierwise.tco import explain as explaining
    from tierwise.tco.dshr import DshrConfig
    from tierwise.tco.precursor import PrecursorConfig

    what = path.stem
    if model == "dshr":
        lines = explaining.explain_dshr(load_config(DshrConfig, path, changes))
        table = Table(
            caption="Endowment per TB for 100 years",
            header=("change", "USD/TB"),
            rows=tuple((change, f"{amount:.2f}") for change, amount in lines),
        )
        rows = [{"change": change, "usd_per_tb": amount} for change, amount in lines]
        return table, {"preset": what, "steps": rows}, rows
    explained = explaining.explain_precursor(load_config(PrecursorConfig, path, changes))
    steps = [
        {
            "change": line.change,
            "total": dict(line.total_usd),
            "migration_share": dict(line.migration_share),
        }
        for line in explained
    ]
    records = [
        {"change": line.change, "medium": name, "total": total,
         "migration_share": line.migration_share[name]}
        for line in explained
        for name, total in line.total_usd.items()
    ]  # fmt: skip
    return explaining.precursor_table(explained), {"preset": what, "steps": steps}, records


def _explain_change(
    before: Scenario, after: Scenario, strategy: str | None
) -> tuple[Table, dict[str, object], Records]:
    from tierwise.core.report import Table
    from tierwise.tco.report import usd
    from tierwise.tco.solve import waterfall

    fall = waterfall(before, after, strategy or before.plans[0].name)
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
    result: dict[str, object] = {
        "strategy": fall.strategy,
        "start_usd": fall.start_usd,
        "end_usd": fall.end_usd,
        "steps": steps,
    }
    return table, result, steps


def _explain_inputs(
    scenario: Scenario,
    strategy: str | None,
    against: str | None,
    base_samples: int | None,
    seed: int,
) -> tuple[Table, dict[str, object], Records]:
    from tierwise.core.report import Table
    from tierwise.tco.compare import compare as run_compare
    from tierwise.tco.inputs import resolve_inputs
    from tierwise.tco.solve import find_strategy
    from tierwise.tco.spread import sobol, tornado

    inputs = resolve_inputs(scenario)
    name = strategy or run_compare(scenario, samples=0).ranking[0].name
    plan = find_strategy(scenario, name)
    rival = find_strategy(scenario, against) if against else None
    subject = f"ln({name} / {against})" if against else f"the present value of {name}"
    if base_samples is not None:
        indices = sobol(scenario, inputs, plan, against=rival, base_samples=base_samples, seed=seed)
        table = Table(
            caption=f"Sobol indices of {subject}",
            header=("input", "alone", "total"),
            rows=tuple((i.key, f"{i.first:.3f}", f"{i.total:.3f}") for i in indices),
        )
        found = [{"key": i.key, "first": i.first, "total": i.total} for i in indices]
        return table, {"of": subject, "sobol": found}, found
    bars = tornado(scenario, inputs, plan, against=rival)
    digits = ".3f" if against else ",.0f"
    table = Table(
        caption=f"Inputs that move {subject}, one at a time from low to high",
        header=("input", "low", "high", "at low", "at high"),
        rows=tuple(
            (b.key, f"{b.low:g}", f"{b.high:g}", f"{b.at_low:{digits}}", f"{b.at_high:{digits}}")
            for b in bars
        ),
    )
    moved = [
        {"key": b.key, "low": b.low, "high": b.high, "at_low": b.at_low, "at_high": b.at_high}
        for b in bars
    ]
    return table, {"of": subject, "tornado": moved}, moved


@group.command()
@click.argument("pattern", required=False, default="")
@_output_options
def facts(pattern: str, as_json: bool, as_csv: bool) -> None:
    """List the numbers the model runs on, with their sources; PATTERN filters by key."""
    require_extra("tco")
    from tierwise.core.facts import load_facts
    from tierwise.core.report import Table
    from tierwise.tco.facts import all_fact_files, describe, load_fact_set

    rows = [
        {"file": path.name, **row}
        for path in all_fact_files()
        for row in describe(load_facts(path).values())
        if pattern in str(row["key"])
    ]
    disabled = {
        medium.name: medium.why_disabled
        for medium in load_fact_set().media.values()
        if medium.why_disabled and pattern in medium.name
    }
    names = ("file", "key", "value", "low", "high", "unit", "currency_year", "kind", "source")
    table = Table(
        caption=f"{len(rows)} facts",
        header=names,
        rows=tuple(
            tuple("" if row[name] is None else f"{row[name]}" for name in names) for row in rows
        ),
    )
    result: dict[str, object] = {"facts": rows, "announced": disabled}
    _print_table(table, result, rows, as_json=as_json, as_csv=as_csv)
    if not as_json and not as_csv:
        for name, why in disabled.items():
            click.echo(f"{name} is announced and cannot be costed: {why}")


@group.command()
@_output_options
def presets(as_json: bool, as_csv: bool) -> None:
    """List the presets and what each is for."""
    from tierwise.core.report import Table
    from tierwise.tco.scenario import PRESETS_FOLDER

    found = []
    for path in sorted(PRESETS_FOLDER.glob("*.toml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        comment = [line[1:].strip() for line in lines if line.startswith("#")]
        head = " ".join(comment[: lines.index(next(s for s in lines if not s.startswith("#")))])
        found.append({"name": path.stem, "what": head, "path": str(path)})
    table = Table(
        caption=f"{len(found)} presets",
        header=("preset", "what"),
        rows=tuple((row["name"], row["what"]) for row in found),
    )
    _print_table(table, {"presets": found}, found, as_json=as_json, as_csv=as_csv)


@group.command()
@_scenario_options
@click.option("--port", default=8765, show_default=True, help="Port; 0 takes a free one.")
@click.option("--seed", default=0, show_default=True, help="Seed of the draws.")
@debug_option
def serve(
    *, scenario: Path | None, preset: str | None, changes: tuple[str, ...], port: int, seed: int
) -> None:
    """Open the cost model as a page on this machine; Ctrl-C ends it."""
    loaded = _load(scenario, preset, changes)
    require_extra("report")
    require_extra("serve")
    from tierwise.tco.page.server import serve_page

    serve_page(loaded, port=port, seed=seed, ready=lambda url: click.echo(f"serving {url}"))
