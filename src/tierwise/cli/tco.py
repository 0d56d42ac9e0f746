"""`tierwise tco`: parse, call one function of `tierwise.tco`, print its records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tierwise.cli.options import debug_option, json_option, print_result
from tierwise.core.extras import require_extra

if TYPE_CHECKING:
    from tierwise.core.report import Figure, Table
    from tierwise.tco.answers import Answer
    from tierwise.tco.scenario import Scenario

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
    return argument(_preset_options(function))


def _preset_options(function: F) -> F:
    """Add --preset and --set."""
    preset = click.option("--preset", help="A preset instead of a file [modern-2026].")
    changes = click.option(
        "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a scenario key."
    )
    return preset(changes(function))


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


def _print(answer: Answer, *, as_json: bool, as_csv: bool) -> None:
    """Print a verb's answer: all of it as JSON, its records as CSV, or a table to read."""
    from tierwise.core.report import csv_of

    if as_json:
        print_result(answer.result, as_json=True)
    elif as_csv:
        header = list(answer.records[0]) if answer.records else []
        rows = [["" if r[name] is None else r[name] for name in header] for r in answer.records]
        click.echo(csv_of(header, rows), nl=False)
    else:
        click.echo(_text_table(answer.table))


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
    from tierwise.tco.answers import comparison_answer
    from tierwise.tco.compare import compare as run_compare
    from tierwise.tco.report import notes_of, share_table

    progress = choose_progress(as_json=as_json)
    result = run_compare(loaded, samples=samples, seed=seed, progress=progress)
    _print(comparison_answer(result), as_json=as_json, as_csv=as_csv)
    if not as_json and not as_csv:
        click.echo("\n" + _text_table(share_table(result)))
        for line in notes_of(result):
            click.echo(f"note: {line}")


@group.command()
@_scenario_options
@_draw_options
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write to.",
)
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
    from tierwise.tco.answers import comparison_answer
    from tierwise.tco.compare import compare as run_compare
    from tierwise.tco.report import write_comparison

    started = time.monotonic()
    progress = choose_progress(as_json=as_json)
    result = run_compare(loaded, samples=samples, seed=seed, progress=progress)
    record = RunRecord(out, clock=time.time)
    record.truncate(0)
    report = write_comparison(result, out)
    summary = dict(comparison_answer(result).result)
    record.event("tco", timing={"seconds": time.monotonic() - started}, seed=seed, **summary)
    sources = [*loaded.facts_files, *([loaded.data.inventory] if loaded.data.inventory else [])]
    write_manifest(
        out,
        seed=seed,
        versions={name: version(name) for name in ("tierwise", "numpy", "scipy", "matplotlib")},
        commit=None,
        inputs={name: hash_file(Path(name)) for name in sources},
    )
    print_result({"report": str(report), **summary}, as_json=as_json, text=str(report))


def _parse_range(text: str) -> tuple[str, float, float, int | None]:
    """Return (key, low, high, points or None) from `KEY=LOW:HIGH[:POINTS]`."""
    from tierwise.core.errors import UsageError

    key, _, numbers = text.partition("=")
    parts = numbers.split(":")
    try:
        low, high = float(parts[0]), float(parts[1])
        num = int(parts[2]) if len(parts) > 2 else None
    except (IndexError, ValueError):
        low = high = 0.0
        num = 0
    if num is not None and not 2 <= num <= 2000:
        raise UsageError(f"{text!r} is not a range", hint="write it like migration.price=1:600:60")
    return key.strip(), low, high, num


@group.command()
@_scenario_options
@click.option(
    "--vary", multiple=True, required=True, metavar="KEY=LOW:HIGH[:POINTS]",
    help="An input to change; twice for a map of the winner.",
)  # fmt: skip
@click.option("--log", is_flag=True, help="Space the points by a constant factor.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the figure and its CSV.",
)  # fmt: skip
@_output_options
def sweep(
    *, scenario: Path | None, preset: str | None, changes: tuple[str, ...], vary: tuple[str, ...],
    log: bool, out: Path | None, as_json: bool, as_csv: bool,
) -> None:  # fmt: skip
    """Print the cost over one input, or the winner over two."""
    loaded = _load(scenario, preset, changes)
    from tierwise.core.errors import UsageError
    from tierwise.tco import figures, solve
    from tierwise.tco.answers import map_answer, sweep_answer

    if out is not None:
        require_extra("report")
    if len(vary) > 2:
        raise UsageError("at most two inputs can be varied", hint="one for curves, two for a map")
    ranges = [_parse_range(text) for text in vary]
    points = [solve.spaced(low, high, num or 21, log=log) for _, low, high, num in ranges]
    if len(ranges) == 1:
        swept = solve.sweep(loaded, ranges[0][0], points[0])
        answer = sweep_answer(swept)
        draw: Callable[[], Figure] = partial(figures.sweep_curves, swept)
    else:
        mapped = solve.map_winners(loaded, ranges[0][0], points[0], ranges[1][0], points[1])
        answer = map_answer(mapped)
        draw = partial(figures.winner_map, mapped)
    if out is not None:
        _write_figure(draw(), out)
    _print(answer, as_json=as_json, as_csv=as_csv)


def _write_figure(figure: Figure, folder: Path) -> None:
    from tierwise.core.records import write_whole

    write_whole(folder / f"{figure.name}.svg", figure.svg)
    write_whole(folder / f"{figure.name}.csv", figure.csv)


@group.command()
@click.argument("key")
@click.argument("first")
@click.argument("second")
@click.option("--range", "span", required=True, metavar="LOW:HIGH", help="Where to search.")
@click.option("--scenario", type=click.Path(path_type=Path), help="Scenario file.")
@_preset_options
@_output_options
def breakeven(
    *, key: str, first: str, second: str, span: str, scenario: Path | None, preset: str | None,
    changes: tuple[str, ...], as_json: bool, as_csv: bool,
) -> None:  # fmt: skip
    """Print where input KEY makes strategies FIRST and SECOND cost the same."""
    loaded = _load(scenario, preset, changes)
    from tierwise.tco.answers import break_even_answer
    from tierwise.tco.solve import break_even

    _, low, high, _ = _parse_range(f"{key}={span}")
    found = break_even(loaded, key, first, second, low=low, high=high)
    _print(break_even_answer(found), as_json=as_json, as_csv=as_csv)


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
    from tierwise.core.errors import UsageError
    from tierwise.tco.answers import waterfall_answer
    from tierwise.tco.compare import compare as run_compare
    from tierwise.tco.scenario import PRESETS_FOLDER, model_of
    from tierwise.tco.solve import waterfall

    path = Path(what) if what.endswith(".toml") else PRESETS_FOLDER / f"{what}.toml"
    is_named = what.endswith(".toml") or path.parent == PRESETS_FOLDER
    model = model_of(path) if is_named else None
    if model is not None and (other, strategy, against, base_samples) != (None,) * 4:
        raise UsageError(f"{what} is a model of its own", hint="only --set goes with it")
    if other is not None and (against, base_samples) != (None, None):
        raise UsageError("--against and --sobol explain one scenario, not two")
    if model is not None:
        answer = _explain_model(model, path, changes)
    elif other is not None:
        before, after = _named(what, changes), _named(other, ())
        name = strategy or run_compare(before, samples=0).ranking[0].name
        answer = waterfall_answer(waterfall(before, after, name))
    else:
        scenario = _named(what, changes)
        answer = _explain_inputs(scenario, (strategy, against), base_samples, seed)
    _print(answer, as_json=as_json, as_csv=as_csv)


def _named(what: str, changes: Sequence[str]) -> Scenario:
    if what.endswith(".toml"):
        return _load(Path(what), None, changes)
    return _load(None, what, changes)


def _explain_model(model: str, path: Path, changes: Sequence[str]) -> Answer:
    from tierwise.core.config import load_config
    from tierwise.tco import answers
    from tierwise.tco.dshr import DshrConfig
    from tierwise.tco.explain import explain_dshr, explain_precursor
    from tierwise.tco.precursor import PrecursorConfig

    if model == "dshr":
        lines = explain_dshr(load_config(DshrConfig, path, changes))
        return answers.dshr_answer(path.stem, lines)
    explained = explain_precursor(load_config(PrecursorConfig, path, changes))
    return answers.precursor_answer(path.stem, explained)


def _explain_inputs(
    scenario: Scenario, pair: tuple[str | None, str | None], base_samples: int | None, seed: int
) -> Answer:
    from tierwise.tco import answers
    from tierwise.tco.compare import compare as run_compare
    from tierwise.tco.inputs import resolve_inputs
    from tierwise.tco.solve import find_strategy
    from tierwise.tco.spread import sobol, tornado

    inputs = resolve_inputs(scenario)
    name = pair[0] or run_compare(scenario, samples=0).ranking[0].name
    plan = find_strategy(scenario, name)
    rival = find_strategy(scenario, pair[1]) if pair[1] else None
    subject = f"ln({name} / {pair[1]})" if rival else f"the present value of {name}"
    if base_samples is None:
        bars = tornado(scenario, inputs, plan, against=rival)
        return answers.tornado_answer(subject, bars, ratio=rival is not None)
    indices = sobol(scenario, inputs, plan, against=rival, base_samples=base_samples, seed=seed)
    return answers.sobol_answer(subject, indices)


@group.command()
@click.argument("pattern", required=False, default="")
@_output_options
def facts(pattern: str, as_json: bool, as_csv: bool) -> None:
    """List the numbers the model runs on, with their sources; PATTERN filters by key."""
    require_extra("tco")
    from tierwise.tco.answers import facts_answer
    from tierwise.tco.facts import load_fact_set

    _print(facts_answer(pattern), as_json=as_json, as_csv=as_csv)
    if not as_json and not as_csv:
        for medium in load_fact_set().media.values():
            if medium.why_disabled and pattern in medium.name:
                click.echo(
                    f"{medium.name} is announced and cannot be costed: {medium.why_disabled}"
                )


@group.command()
@_output_options
def presets(as_json: bool, as_csv: bool) -> None:
    """List the presets and what each is for."""
    require_extra("tco")
    from tierwise.tco.answers import presets_answer

    _print(presets_answer(), as_json=as_json, as_csv=as_csv)


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
