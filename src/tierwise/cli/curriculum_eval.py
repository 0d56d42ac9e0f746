"""`tierwise curriculum eval`: a model on a data set of one's own, or on one of six benchmarks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierwise.cli.options import InterruptedVerb, debug_option, json_option, print_result

if TYPE_CHECKING:
    from tierwise.curriculum.benchmarks.run import BenchmarkResult
    from tierwise.curriculum.server import ServerPool
    from tierwise.curriculum.training.evaluate import Difference, SampleScore


@click.command(name="eval")
@click.argument("model")
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="JSONL of scores.")
@click.option(
    "--against", type=click.Path(path_type=Path), help="Scores of another model, to compare with."
)
@click.option("--benchmark", metavar="NAME", help="Which benchmark DATA is, if not recognised.")
@click.option("--judge", "judge_url", metavar="URL", help="Base of a judge's OpenAI-style server.")
@click.option("--judge-model", metavar="NAME", help="The judge's name as its server knows it.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="One setting.")
@click.option("--seed", default=0, show_default=True, help="Of every token.")
@click.option("--device", default="cpu", show_default=True, help="Where the model runs: cuda, ...")
@click.option("--skip-bad", is_flag=True, help="Leave malformed rows out and count them.")
@json_option
@debug_option
def evaluate(
    *,
    model: str,
    data: Path,
    out: Path,
    against: Path | None,
    benchmark: str | None,
    judge_url: str | None,
    judge_model: str | None,
    overrides: tuple[str, ...],
    seed: int,
    device: str,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Ask MODEL (a folder, or tiny) every question of DATA: samples as JSONL, or a benchmark.

    Samples are answered greedily and by sampling. A benchmark (MathVista, MM-Vet, OCRBench,
    HallusionBench, MMMU, MMStar) is answered greedily and scored by its published metric; the same
    command goes on with a run that was stopped.
    """
    from tierwise.core.errors import UsageError
    from tierwise.core.extras import require_extra

    require_extra("curriculum")
    from tierwise.curriculum.benchmarks.catalogue import holds_benchmark

    if out.is_dir():
        raise UsageError(f"{out} is a folder", hint="--out names the file of scores")
    if (judge_url is None) != (judge_model is None):
        raise UsageError("--judge and --judge-model go together")
    if benchmark is not None or holds_benchmark(data):
        judge = _judge(judge_url, judge_model)
        try:
            _evaluate_benchmark(
                model, data, out, against=against, benchmark=benchmark, judge=judge,
                overrides=overrides, seed=seed, device=device, skip_bad=skip_bad, as_json=as_json,
            )  # fmt: skip
        except KeyboardInterrupt as error:
            raise InterruptedVerb("run the same command again to go on") from error
        return
    if judge_url is not None:
        raise UsageError("--judge is for benchmarks", hint="name one with --benchmark")
    _evaluate_samples(
        model, data, out, against=against, overrides=overrides, seed=seed, device=device,
        skip_bad=skip_bad, as_json=as_json,
    )  # fmt: skip


def _judge(url: str | None, model: str | None) -> ServerPool | None:
    """Return the judge; its key comes from OPENAI_API_KEY and is printed nowhere."""
    if url is None or model is None:
        return None
    from tierwise.curriculum.server import ServerPool

    return ServerPool(endpoints=(url,), model=model, api_key=os.environ.get("OPENAI_API_KEY", ""))


def _evaluate_samples(
    model: str,
    data: Path,
    out: Path,
    *,
    against: Path | None,
    overrides: tuple[str, ...],
    seed: int,
    device: str,
    skip_bad: bool,
    as_json: bool,
) -> None:
    from tierwise.core.config import parse_config
    from tierwise.core.progress import choose_progress
    from tierwise.curriculum.layouts import read_any
    from tierwise.curriculum.models import LocalModel
    from tierwise.curriculum.training import evaluate as evaluation
    from tierwise.curriculum.training.recipe import judged, model_path, read_strata

    settings = parse_config(evaluation.EvalConfig, "", overrides=overrides, name="--set")
    samples = read_any(data, skip_bad=skip_bad).samples
    before = None if against is None else evaluation.read_scores(against)
    out.parent.mkdir(parents=True, exist_ok=True)  # rather than find out after hours of answers
    scores = evaluation.evaluate(
        LocalModel.load(model_path(model, Path()), device=device),
        samples,
        judged,
        settings,
        seed=seed,
        strata={} if skip_bad or data.suffix == ".parquet" else read_strata(data),
        progress=choose_progress(as_json=as_json),
    )
    evaluation.write_scores(out, scores)
    record: dict[str, object] = {"scores": str(out), "samples": len(scores)}
    resamples = settings.num_resamples
    for one in evaluation.accuracies(scores, seed=seed, num_resamples=resamples):
        record[f"{one.group} {one.decoding.value}"] = (
            f"{one.value:.4f} [{one.low:.4f}, {one.high:.4f}] of {one.num_samples}"
        )
    for group, decoding, number in evaluation.unjudged(scores):
        record[f"{group} {decoding.value}"] = (
            f"not known: no answer to its {number} samples could be judged"
        )
    print_result(record | _changes(before, scores, seed, resamples), as_json=as_json)


def _changes(
    before: tuple[SampleScore, ...] | None,
    after: tuple[SampleScore, ...],
    seed: int,
    num_resamples: int,
) -> dict[str, object]:
    from tierwise.curriculum.training.evaluate import differences

    if before is None:
        return {}
    return {
        f"change {one.group} {one.decoding.value}": _difference(one)
        for one in differences(before, after, seed=seed, num_resamples=num_resamples)
    }


def _difference(one: Difference) -> str:
    return f"{one.difference:+.4f} [{one.low:+.4f}, {one.high:+.4f}] {one.verdict}"


def _evaluate_benchmark(
    model: str,
    data: Path,
    out: Path,
    *,
    against: Path | None,
    benchmark: str | None,
    judge: ServerPool | None,
    overrides: tuple[str, ...],
    seed: int,
    device: str,
    skip_bad: bool,
    as_json: bool,
) -> None:
    from tierwise.core.config import parse_config
    from tierwise.core.progress import choose_progress
    from tierwise.curriculum.answerers import LocalAnswerer
    from tierwise.curriculum.benchmarks import run
    from tierwise.curriculum.benchmarks.catalogue import find_benchmark, read_items
    from tierwise.curriculum.models import LocalModel
    from tierwise.curriculum.training.evaluate import read_scores, write_scores
    from tierwise.curriculum.training.recipe import model_path

    settings = parse_config(run.BenchmarkConfig, "", overrides=overrides, name="--set")
    chosen, files = find_benchmark(data, benchmark)
    scoring = run.scoring_of(chosen, judge)
    before = None
    if against is not None:
        before = read_scores(against)
        run.refuse_unlike(against, scoring)
    answerer = LocalAnswerer(LocalModel.load(model_path(model, Path()), device=device))
    folder = run.work_folder(out)
    items = read_items(
        chosen, data, files, pictures_folder=folder / "pictures", seed=seed, skip_bad=skip_bad
    )
    result = run.run_benchmark(
        answerer, chosen, items, settings,
        folder=folder, seed=seed, judge=judge, progress=choose_progress(as_json=as_json),
    )  # fmt: skip
    write_scores(out, result.scores)
    changes = _changes(before, result.scores, seed, settings.num_resamples)
    record = {"scores": str(out), **result.record(), **changes}
    print_result(record, as_json=as_json, text=None if as_json else _table(result, changes))


def _table(result: BenchmarkResult, changes: dict[str, object]) -> str:
    """Return a benchmark's measures in points, one a line, under what they may be compared with."""
    record = result.record()
    lines = [f"{result.benchmark.title}: {result.num_items} questions, {result.scoring}"]
    if "right" in record:
        kind = "" if record["is_published_size"] else " (the published score is of 1000)"
        lines.append(f"score {record['right']} of {record['of']}{kind}")
    lines += [f"without a mark, left out: {count} {name}" for name, count in result.errors.items()]
    if result.num_guessed:
        lines.append(f"drawn at random, as the published rule does: {result.num_guessed}")
    if result.num_skipped:
        lines.append(f"malformed rows left out: {result.num_skipped}")
    width = max((len(f"{one.metric} {one.group}") for one in result.measures), default=0)
    lines += [
        f"{f'{one.metric} {one.group}':<{width}}  {100 * one.value:6.2f} "
        f"[{100 * one.low:.2f}, {100 * one.high:.2f}] of {one.num_units}"
        for one in result.measures
    ]
    return "\n".join([*lines, *(f"{name}  {said}" for name, said in changes.items())])
