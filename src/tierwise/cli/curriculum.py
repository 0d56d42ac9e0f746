"""`tierwise curriculum`: parse, call one function of `tierwise.curriculum`, print its records."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierwise.cli.curriculum_eval import evaluate
from tierwise.cli.curriculum_train import study, train
from tierwise.cli.options import InterruptedVerb, debug_option, json_option, print_result

if TYPE_CHECKING:
    from tierwise.curriculum.difficulty.scoring import ScoreConfig
    from tierwise.curriculum.models import LocalModel
    from tierwise.curriculum.samples import SampleSet
    from tierwise.curriculum.server import ServerPool, Serving

_ARMS = (
    "all", "mid+hard", "random", "unsolved", "band", "easy", "medium", "hard", "random-medium",
    "random-hard",
)  # fmt: skip
_question_option = click.option(
    "--question",
    default="",
    metavar="TEXT",
    help="What is asked in rows without a question, such as pictures in folders named by label.",
)


@click.group()
def group() -> None:
    """Which sample: score, select, train, audit."""


group.add_command(train)
group.add_command(evaluate)
group.add_command(study)


@group.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option(
    "--model",
    required=True,
    help="A model folder or downloaded hub id; 'tiny' is the one that ships; with --server, "
    "the name it is served as.",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="URL",
    help="Base of an OpenAI-compatible server, such as http://host:8000/v1; repeat for more.",
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder of the log and scores."
)
@click.option("--config", type=click.Path(path_type=Path), help="TOML; the paper's by default.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="One setting.")
@click.option("--seed", default=0, show_default=True, help="Of every mask and token.")
@click.option("--device", default="cpu", show_default=True, help="Where a local model runs.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the attempts in the folder, and without --config and --set with its settings.",
)
@_question_option
@click.option("--skip-bad", is_flag=True, help="Leave malformed rows out and count them.")
@json_option
@debug_option
def score(
    *,
    data: Path,
    model: str,
    servers: tuple[str, ...],
    out: Path,
    config: Path | None,
    overrides: tuple[str, ...],
    seed: int,
    device: str,
    resume: bool,
    question: str,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Ask a model each question of DATA many times and score how hard each is for it."""
    from tierwise.core.errors import StateError
    from tierwise.core.extras import require_extra

    require_extra("curriculum")
    from tierwise.core.progress import choose_progress
    from tierwise.curriculum.difficulty.attempts import LOG_NAME
    from tierwise.curriculum.difficulty.scores import CONFIG_NAME

    if resume and config is None and not overrides and (out / CONFIG_NAME).exists():
        config = out / CONFIG_NAME  # go on with what was asked, not with the defaults
    settings = _settings(config, overrides)
    samples = _read(data, question=question, skip_bad=skip_bad)
    if (out / LOG_NAME).exists() and not resume:
        raise StateError(
            f"{out} holds attempts already", hint="add --resume to go on, or choose another --out"
        )
    from tierwise.curriculum.difficulty.scores import SCORES_NAME
    from tierwise.curriculum.difficulty.scoring import score as run

    answerer = _answerer(model, servers, settings.server, device)
    try:
        found = run(
            samples,
            answerer,
            config=settings,
            folder=out,
            seed=seed,
            progress=choose_progress(as_json=as_json),
        )
    except KeyboardInterrupt as error:
        raise InterruptedVerb("run it again with --resume to go on") from error
    from tierwise.curriculum.difficulty.pism import Stratum, strata_counts

    counts = strata_counts([row.pism_stratum for row in found.rows])
    result: dict[str, object] = {
        "scores": str(out / SCORES_NAME),
        "samples": len(found.rows),
        "rows_skipped": len(samples.skipped),
        "attempts": int(found.spent["attempts"]),
        "errors": int(found.spent["errors"]),
        **{one.value: count for one, count in counts.items() if one is not Stratum.ERROR},
        "without_stratum": counts[Stratum.ERROR],
    }
    if classes := [row.error for row in found.rows if row.error]:
        result["commonest_error"] = max(sorted(classes), key=classes.count)
    print_result(result, as_json=as_json)


@group.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option(
    "--scores", "folder", required=True, type=click.Path(path_type=Path), help="Scored folder."
)
@click.option("--arm", type=click.Choice(_ARMS), default="mid+hard", show_default=True)
@click.option(
    "--by",
    type=click.Choice(["pism", "cmab", "cmab_quantile", "rscore"]),
    default="pism",
    show_default=True,
    help="Which difficulty the strata are taken from.",
)
@click.option("--seed", default=0, show_default=True, help="Of the random arms.")
@click.option(
    "--layout",
    type=click.Choice(["plain", "ms-swift", "sharegpt", "trl", "easyr1", "verl"]),
    default="plain",
    show_default=True,
    help="Whose trainer is to read it.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write.")
@_question_option
@click.option("--skip-bad", is_flag=True, help="Leave malformed rows out and count them.")
@json_option
@debug_option
def select(
    *,
    data: Path,
    folder: Path,
    arm: str,
    by: str,
    seed: int,
    layout: str,
    out: Path,
    question: str,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Write the samples of DATA that an arm chooses, by their scores."""
    from tierwise.core.extras import require_extra

    require_extra("curriculum")
    from tierwise.curriculum.difficulty.scores import SCORES_NAME, read_scores
    from tierwise.curriculum.difficulty.select import Arm, write_selection
    from tierwise.curriculum.difficulty.select import select as choose

    samples = _read(data, question=question, skip_bad=skip_bad)
    chosen = choose(
        samples.samples,
        read_scores(folder / SCORES_NAME),
        Arm(arm),
        seed=seed,
        by=by,  # type: ignore[arg-type]
    )
    if layout == "plain":
        write_selection(chosen, out)
    else:
        from tierwise.curriculum.layouts import Layout, write_any

        write_any(chosen.samples, out, Layout(layout))
    print_result({"arm": arm, "samples": len(chosen.samples), "file": str(out)}, as_json=as_json)


@group.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option(
    "--scores", "folder", required=True, type=click.Path(path_type=Path), help="Scored folder."
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Report folder.")
@_question_option
@click.option("--skip-bad", is_flag=True, help="Leave malformed rows out and count them.")
@json_option
@debug_option
def report(
    *, data: Path, folder: Path, out: Path, question: str, skip_bad: bool, as_json: bool
) -> None:
    """Write report.html about a scored DATA: strata, curves, pictures at their lambda*, cost."""
    from tierwise.core.extras import require_extra

    require_extra("curriculum")
    require_extra("report")
    from tierwise.core.report import Report, write_report
    from tierwise.curriculum.difficulty.attempts import LOG_NAME, AttemptLog
    from tierwise.curriculum.difficulty.cost import cost_section, costs_of
    from tierwise.curriculum.difficulty.evidence import audit_section, looking_section
    from tierwise.curriculum.difficulty.figures import report_section
    from tierwise.curriculum.difficulty.scores import CONFIG_NAME, SCORES_NAME, Scores, read_scores
    from tierwise.curriculum.duplicates import find_duplicates

    samples = _read(data, question=question, skip_bad=skip_bad)
    config = folder / CONFIG_NAME
    settings = _settings(config if config.exists() else None, ())
    scores: Scores | None = None
    if (folder / SCORES_NAME).exists() or not (folder / LOG_NAME).exists():
        scores = read_scores(folder / SCORES_NAME)
    run = None if scores is None else (scores.model_hash, scores.seed)
    rows = () if scores is None else scores.rows
    twice = find_duplicates(samples.samples)
    sections = []
    if scores is not None:
        sections.append(
            report_section(
                scores,
                samples.samples,
                masking=settings.masking,
                seed=scores.seed,
                duplicates=twice,
            )
        )
    if (folder / LOG_NAME).exists():
        with AttemptLog(folder / LOG_NAME) as log:
            run = run or log.main_model() or ("", 0)
            costs = costs_of(
                log,
                samples.samples,
                settings,
                model_hash=run[0],
                seed=run[1],
                scored={row.id for row in rows},
            )
        sections.append(cost_section(costs, num_samples=len(samples.samples)))
    model, seed = run or ("", 0)
    sections.append(looking_section(rows, samples.samples, twice))
    sections.append(audit_section(samples.samples, seed=seed))
    page = write_report(
        Report(
            title=f"How hard is {data.name}",
            summary=(
                ("samples", str(len(samples.samples))),
                ("scored", str(len(rows))),
                ("malformed rows", str(len(samples.skipped))),
                ("model", model),
                ("seed", str(seed)),
            ),
            sections=tuple(sections),
        ),
        out,
    )
    print_result({"report": str(page)}, as_json=as_json)


@group.command("audit-reward")
@click.argument("data", type=click.Path(path_type=Path))
@click.option(
    "--reward",
    default="ours",
    show_default=True,
    metavar="MODULE:NAME",
    help="A Python callable (gold, completion, task) -> score, in a module of this folder or an "
    "installed one; 'ours' is tierwise's own.",
)
@click.option("--trl", is_flag=True, help="The callable takes and returns lists, as TRL's do.")
@click.option("--seed", default=0, show_default=True, help="Of the answers chosen, near misses.")
@_question_option
@click.option("--skip-bad", is_flag=True, help="Leave malformed rows out and count them.")
@json_option
@debug_option
def audit_reward(
    *,
    data: Path,
    reward: str,
    trl: bool,
    seed: int,
    question: str,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Say by class what a reward gets wrong on the answers of DATA; exit 0 either way."""
    from tierwise.core.extras import require_extra

    require_extra("curriculum")
    from tierwise.curriculum.audit import audit_reward as audit
    from tierwise.curriculum.audit import from_trl, load_reward

    samples = _read(data, question=question, skip_bad=skip_bad)
    sys.path.insert(0, str(Path.cwd()))  # where a user's module lies, as with `python -m`
    function = load_reward(reward)
    found = audit(from_trl(function) if trl else function, samples.samples, seed=seed)
    result: dict[str, object] = {
        "reward": reward,
        "probes": sum(found.num_probes.values()),
        "wrong": len(found.findings),
        "classes": {
            fault.value: {"probes": count, "wrong": found.num_wrong(fault)}
            for fault, count in found.num_probes.items()
        },
        "examples": [
            {
                "class": one.probe.fault.value,
                "kind": one.kind,
                "gold": one.probe.gold,
                "completion": one.probe.completion,
                "score": one.score,
            }
            for one in found.examples()
        ],
    }
    print_result(result, as_json=as_json, text=None if as_json else found.text())


def _settings(config: Path | None, overrides: tuple[str, ...]) -> ScoreConfig:
    from tierwise.core.config import load_config, parse_config
    from tierwise.curriculum.difficulty.scoring import ScoreConfig

    if config is None:
        settings = parse_config(ScoreConfig, "", overrides=overrides, name="--set")
    else:
        settings = load_config(ScoreConfig, config, overrides)
    settings.check()
    return settings


def _read(data: Path, *, question: str, skip_bad: bool) -> SampleSet:
    from tierwise.curriculum.layouts import read_any

    return read_any(data, skip_bad=skip_bad, question=question)


def _answerer(
    model: str, servers: tuple[str, ...], serving: Serving, device: str
) -> LocalModel | ServerPool:
    from tierwise.curriculum.models import LocalModel
    from tierwise.curriculum.server import ServerPool

    if servers:
        key = os.environ.get("OPENAI_API_KEY", "")
        return ServerPool(
            endpoints=servers,
            model=model,
            api_key=key,
            per_endpoint=serving.per_endpoint,
            timeout_s=serving.timeout_s,
            retries=serving.retries,
        )
    if model != "tiny":
        return LocalModel.load(model, device=device)
    from tierwise.curriculum.tiny.build import tiny_model_path

    return LocalModel.load(tiny_model_path(), device=device)
