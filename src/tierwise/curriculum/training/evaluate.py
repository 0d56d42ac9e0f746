"""How often is it right, greedy and sampled, by task and stratum, with intervals; did it change?

    model, samples -> answers (greedy, k draws) -> scores by sample -> accuracies with intervals
    scores before, scores after (same samples, same seeds) -> paired differences with intervals

The unit of chance is the sample: the draws of one sample are averaged first, and resampling takes
whole samples. A difference whose interval holds zero is reported as "no difference seen", which is
not "no difference". An answer without a verdict (NaN) is left out and counted.

Left out: judges and benchmark layouts (`benchmarks`), chance from training seeds (`study`).

Source: the Wilson interval is in `passrate`; percentile bootstrap: B. Efron, 1979,
https://doi.org/10.1214/aos/1176344552.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierwise.core.errors import DataError, TrainingError, UsageError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import read_jsonl, write_whole
from tierwise.curriculum.difficulty.passrate import wilson_interval
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, load_image
from tierwise.curriculum.training.experience import Reward
from tierwise.curriculum.training.memory import memory_told
from tierwise.curriculum.training.rollouts import sample_rollouts

Floats = NDArray[np.float64]
NO_DIFFERENCE = "no difference seen"


class Decoding(StrEnum):
    """How an answer is drawn."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """How a model is evaluated.

    Attributes:
        num_draws: Sampled answers a sample; 0 evaluates greedy only.
        temperature: Of the sampled answers.
        max_new_tokens: Where an answer is cut.
        prompts_per_pass: Samples of one forward pass.
        share_prompts: See `SamplingConfig`.
        num_resamples: Of the bootstrap.
    """

    num_draws: int = 4
    temperature: float = 1.0
    max_new_tokens: int = 1024
    prompts_per_pass: int = 64
    share_prompts: bool = True
    num_resamples: int = 2000

    def __post_init__(self) -> None:
        if self.num_draws < 0 or min(self.prompts_per_pass, self.max_new_tokens) < 1:
            raise UsageError("num_draws must be 0 or more, the pass and max_new_tokens 1 or more")
        if not 0 < self.temperature < math.inf:
            raise UsageError("temperature must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScore:
    """Scores of one sample, 0 to 1 each; NaN where there is no verdict."""

    id: str
    task: str
    stratum: str
    greedy: float
    sampled: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """A mean score with its 95 % interval.

    Attributes:
        group: `all`, `task:NAME` or `stratum:NAME`.
        decoding: How the answers were drawn.
        num_samples: Samples with a verdict.
        num_unscored: Samples without.
        value: The mean, 0 to 1.
        low: Lower end.
        high: Upper end.
        interval: `wilson` (right-or-wrong answers, one a sample) or `bootstrap` (over samples).
    """

    group: str
    decoding: Decoding
    num_samples: int
    num_unscored: int
    value: float
    low: float
    high: float
    interval: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """After less before on the same samples, with the 95 % bootstrap interval over samples.

    `verdict` is `higher`, `lower` or "no difference seen".
    """

    group: str
    decoding: Decoding
    num_samples: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    verdict: str


def evaluate(
    model: LocalModel,
    samples: Sequence[Sample],
    reward: Reward,
    config: EvalConfig,
    *,
    seed: int,
    strata: Mapping[str, str] | None = None,
    progress: Progress = SILENT,
) -> tuple[SampleScore, ...]:
    """Return the scores of every sample; the same seed draws the same answers of the same model.

    Args:
        model: The model; left as it was.
        samples: What to ask.
        reward: Score of an answer, 0 to 1; one that raises gives NaN.
        config: How.
        seed: With the sample's id, seeds each draw.
        strata: Sample id -> stratum.
        progress: Where to say how far it is.

    Raises:
        TrainingError: Out of memory.
    """
    rows: list[SampleScore] = []
    was_training = model.model.training
    model.model.eval()
    with progress.task("evaluating", len(samples)) as task:
        for start in range(0, len(samples), config.prompts_per_pass):
            part = samples[start : start + config.prompts_per_pass]
            try:
                with memory_told():
                    rows += _score_pass(model, part, reward, config, seed=seed, strata=strata or {})
            except torch.OutOfMemoryError as error:
                raise TrainingError(
                    f"out of memory while evaluating {len(part)} samples a pass",
                    hint="set a smaller prompts_per_pass or max_new_tokens for the evaluation",
                ) from error
            task.advance(len(part))
    model.model.train(was_training)
    return tuple(rows)


def _score_pass(
    model: LocalModel,
    part: Sequence[Sample],
    reward: Reward,
    config: EvalConfig,
    *,
    seed: int,
    strata: Mapping[str, str],
) -> Iterator[SampleScore]:
    prompts = model.encode(part, [[load_image(path) for path in s.images] for s in part])

    def answers(num_draws: int, temperature: float) -> tuple[str, ...]:
        seeds = [key_seed("evaluate", seed, s.id, k) for s in part for k in range(num_draws)]
        prompt_B = torch.arange(len(part), device=model.device).repeat_interleave(num_draws)
        return sample_rollouts(
            model,
            prompts,
            prompt_B,
            seeds=seeds,
            temperature=temperature,
            max_new_tokens=config.max_new_tokens,
            share_prompts=config.share_prompts,
        ).texts

    greedy = answers(1, 0.0)
    draws = config.num_draws
    sampled = answers(draws, config.temperature) if draws else ()
    for place, sample in enumerate(part):
        texts = sampled[place * draws : (place + 1) * draws]
        yield SampleScore(
            id=sample.id,
            task=sample.task,
            stratum=strata.get(sample.id, ""),
            greedy=_score(reward, sample, greedy[place]),
            sampled=tuple(_score(reward, sample, text) for text in texts),
        )


def _score(reward: Reward, sample: Sample, text: str) -> float:
    try:
        return float(reward(sample, text))
    except Exception:  # a user's function: no verdict is not a wrong answer
        return math.nan


def accuracies(
    scores: Sequence[SampleScore], *, seed: int, num_resamples: int = 2000
) -> tuple[Accuracy, ...]:
    """Return the accuracy of all samples, of each task and of each stratum, greedy and sampled.

    A group without one verdict is left out: see `unjudged`.
    """
    made = []
    for group, members in _groups(scores).items():
        for decoding, value_N in _values(members).items():
            known_N = value_N[~np.isnan(value_N)]
            if len(known_N) == 0:
                continue
            low, high, interval = mean_interval(
                known_N,
                seed=seed,
                num_resamples=num_resamples,
                one_draw=decoding is Decoding.GREEDY,
            )
            made.append(
                Accuracy(
                    group=group,
                    decoding=decoding,
                    num_samples=len(known_N),
                    num_unscored=len(value_N) - len(known_N),
                    value=float(known_N.mean()),
                    low=low,
                    high=high,
                    interval=interval,
                )
            )
    return tuple(made)


def unjudged(scores: Sequence[SampleScore]) -> tuple[tuple[str, Decoding, int], ...]:
    """Return (group, decoding, samples) of every group without one verdict: it has no accuracy."""
    return tuple(
        (group, decoding, len(members))
        for group, members in _groups(scores).items()
        for decoding, value_N in _values(members).items()
        if bool(np.isnan(value_N).all())
    )


def differences(
    before: Sequence[SampleScore],
    after: Sequence[SampleScore],
    *,
    seed: int,
    num_resamples: int = 2000,
) -> tuple[Difference, ...]:
    """Return after less before, paired by sample, for all samples, each task and each stratum.

    Groups are those of `before`. Samples without a verdict on either side are left out.

    Raises:
        UsageError: The two are not scores of the same samples in the same order.
    """
    if [row.id for row in before] != [row.id for row in after]:
        raise UsageError("the two evaluations are not of the same samples in the same order")
    place = {row.id: number for number, row in enumerate(before)}
    made = []
    for group, members in _groups(before).items():
        places = [place[row.id] for row in members]
        changed = _values([after[number] for number in places])
        for decoding, before_N in _values(members).items():
            if decoding not in changed:
                continue
            delta_N = changed[decoding] - before_N
            known_N = ~np.isnan(delta_N)
            if not known_N.any():
                continue
            low, high = bootstrap_interval(delta_N[known_N], seed=seed, num_resamples=num_resamples)
            made.append(
                Difference(
                    group=group,
                    decoding=decoding,
                    num_samples=int(known_N.sum()),
                    before=float(before_N[known_N].mean()),
                    after=float(changed[decoding][known_N].mean()),
                    difference=float(delta_N[known_N].mean()),
                    low=low,
                    high=high,
                    verdict=verdict_of(low, high),
                )
            )
    return tuple(made)


def verdict_of(low: float, high: float) -> str:
    """Return what an interval of a difference says.

    >>> verdict_of(0.01, 0.05), verdict_of(-0.01, 0.05), verdict_of(-0.2, -0.1)
    ('higher', 'no difference seen', 'lower')
    """
    if low > 0:
        return "higher"
    return "lower" if high < 0 else NO_DIFFERENCE


def mean_interval(
    value_N: Floats, *, seed: int, num_resamples: int, one_draw: bool = True
) -> tuple[float, float, str]:
    """Return the 95 % interval of a mean and its kind.

    It is `wilson` for right-or-wrong values of one draw a sample, else `bootstrap` over samples.
    """
    if one_draw and bool(np.isin(value_N, (0.0, 1.0)).all()):
        return (*wilson_interval(int(value_N.sum()), len(value_N)), "wilson")
    return (*bootstrap_interval(value_N, seed=seed, num_resamples=num_resamples), "bootstrap")


def bootstrap_interval(
    value_N: Floats, *, seed: int, num_resamples: int = 2000
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a mean under resampling of its terms.

    Args:
        value_N: One number a sample.
        seed: Draws the resamples.
        num_resamples: How many; the ends are good to about 1/sqrt of it.
    """
    rng = np.random.default_rng(seed)
    means = [
        value_N[rng.integers(0, len(value_N), (min(100, num_resamples), len(value_N)))].mean(axis=1)
        for _ in range(math.ceil(num_resamples / 100))
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def _groups(scores: Sequence[SampleScore]) -> dict[str, list[SampleScore]]:
    groups: dict[str, list[SampleScore]] = {"all": list(scores)} if scores else {}
    keys: tuple[tuple[str, Callable[[SampleScore], str]], ...] = (
        ("task", lambda row: row.task),
        ("stratum", lambda row: row.stratum),
    )
    for name, key in keys:
        for value in sorted({key(row) for row in scores} - {""}):
            groups[f"{name}:{value}"] = [row for row in scores if key(row) == value]
    return groups


def _values(rows: Sequence[SampleScore]) -> dict[Decoding, Floats]:
    """Return one number a sample for each decoding; the draws of a sample are averaged."""
    values = {Decoding.GREEDY: np.array([row.greedy for row in rows], dtype=np.float64)}
    if all(row.sampled for row in rows):
        values[Decoding.SAMPLED] = np.array(
            [_mean_of_known(row.sampled) for row in rows], dtype=np.float64
        )
    return values


def score_matrix(evaluations: Sequence[Sequence[SampleScore]], decoding: Decoding) -> Floats | None:
    """Return scores of shape (evaluations, samples), NaN without a verdict; None if none drawn.

    Raises:
        UsageError: The evaluations are not of the same samples in the same order.
    """
    ids = [row.id for row in evaluations[0]]
    if any([row.id for row in rows] != ids for rows in evaluations):
        raise UsageError("the evaluations are not of the same samples in the same order")
    rows = [_values(scores).get(decoding) for scores in evaluations]
    known = [row for row in rows if row is not None]
    return np.stack(known) if len(known) == len(rows) else None


def _mean_of_known(draws: Sequence[float]) -> float:
    known = [value for value in draws if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def write_scores(path: Path, scores: Sequence[SampleScore]) -> None:
    """Write one JSON line a sample, whole or not at all; no verdict is null."""
    lines = [
        json.dumps(
            {
                "id": row.id,
                "task": row.task,
                "stratum": row.stratum,
                "greedy": _or_none(row.greedy),
                "sampled": [_or_none(value) for value in row.sampled],
            }
        )
        for row in scores
    ]
    write_whole(path, "".join(line + "\n" for line in lines))


def read_scores(path: Path) -> tuple[SampleScore, ...]:
    """Return what `write_scores` wrote.

    Raises:
        MissingFileError: No such file.
        DataError: A malformed line.
    """
    rows = []
    for number, row in read_jsonl(path):
        try:
            rows.append(
                SampleScore(
                    id=row["id"],
                    task=row["task"],
                    stratum=row["stratum"],
                    greedy=_or_nan(row["greedy"]),
                    sampled=tuple(_or_nan(value) for value in row["sampled"]),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}:{number}: not an evaluated sample") from error
    return tuple(rows)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)
