"""What a study's cells say: accuracy by arm, every arm less a control, with intervals over both.

    held-out scores of every (arm, seed) -> mean by arm -+-> intervals over seeds and samples
                                                         +-> differences from base and control

Samples are resampled together for all arms (they were asked the same questions), the seeds of each
arm apart. A comparison reads as a difference only if its interval, widened for the number of
comparisons, leaves out zero. Left out: sentences and figures, which `study_report` makes.

Source: simultaneous intervals: C. E. Bonferroni, 1936; two-way resampling: A. Owen, 2007,
https://doi.org/10.1214/07-AOAS122.

Shapes: S seeds, N held-out samples, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierwise.curriculum.experiment.study import BASE, CellResult
from tierwise.curriculum.training.evaluate import Decoding, SampleScore, score_matrix, verdict_of

Floats = NDArray[np.float64]
_CHUNK = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmAccuracy:
    """An arm's mean accuracy over seeds and samples, with its 95 % interval over both."""

    arm: str
    decoding: Decoding
    num_seeds: int
    num_samples: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An arm less a control.

    Attributes:
        arm: The arm.
        control: What it is compared with.
        decoding: How the answers were drawn.
        difference: Mean over seeds and samples.
        low: Lower end of the 95 % interval.
        high: Upper end.
        wide_low: Lower end of the interval that holds for all comparisons of the study together.
        wide_high: Its upper end.
        verdict: What the wide interval says.
    """

    arm: str
    control: str
    decoding: Decoding
    difference: float
    low: float
    high: float
    wide_low: float
    wide_high: float
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAccuracy:
    """An arm's accuracy on the held-out samples of a stratum or a task, over seeds and samples."""

    arm: str
    group: str
    num_samples: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What the cells say."""

    accuracies: tuple[ArmAccuracy, ...]
    comparisons: tuple[Comparison, ...]


def analyse(
    cells: Sequence[CellResult], control: str, *, seed: int = 0, num_resamples: int = 10_000
) -> StudyResult:
    """Return accuracies by arm and every arm's difference from the base and from the control.

    Args:
        cells: Finished cells, all evaluated on the same samples.
        control: The second control, beside `base`.
        seed: Of the resampling.
        num_resamples: Of the bootstrap.
    """
    found: list[ArmAccuracy] = []
    comparisons: list[Comparison] = []
    for decoding in Decoding:
        scores = _scores_by_arm(cells, decoding)
        draws = _resampled_means(scores, seed=seed, num_resamples=num_resamples)
        for arm, matrix_SN in scores.items():
            low, high = np.quantile(draws[arm], (0.025, 0.975))
            found.append(
                ArmAccuracy(
                    arm=arm, decoding=decoding, num_seeds=matrix_SN.shape[0],
                    num_samples=matrix_SN.shape[1], value=float(np.nanmean(matrix_SN)),
                    low=float(low), high=float(high),
                )
            )  # fmt: skip
        pairs = [
            (arm, other)
            for other in (BASE, control)
            for arm in scores
            if other in scores and arm not in (other, BASE)
        ]
        total = len(pairs) * len(Decoding)
        comparisons += [
            _compare(scores, draws, pair, decoding=decoding, num_comparisons=total)
            for pair in pairs
        ]
    return StudyResult(accuracies=tuple(found), comparisons=tuple(comparisons))


def accuracy_by_group(
    cells: Sequence[CellResult],
    group_of: Callable[[SampleScore], str],
    *,
    decoding: Decoding = Decoding.SAMPLED,
    seed: int = 0,
    num_resamples: int = 2000,
) -> tuple[GroupAccuracy, ...]:
    """Return each arm's accuracy on each group of held-out samples, with 95 % intervals.

    A description beside the comparisons, not a test: nothing is widened for the number of groups.

    Args:
        cells: Finished cells, all evaluated on the same samples.
        group_of: Stratum or task of a sample; "" leaves it out.
        decoding: How the answers were drawn.
        seed: Of the resampling.
        num_resamples: Of the bootstrap.
    """
    if not cells:
        return ()
    scores = _scores_by_arm(cells, decoding)
    groups_N = np.array([group_of(row) for row in cells[0].scores])
    found = []
    for group in sorted(set(groups_N.tolist()) - {""}):
        part = {arm: matrix_SN[:, groups_N == group] for arm, matrix_SN in scores.items()}
        draws = _resampled_means(part, seed=seed, num_resamples=num_resamples)
        for arm, matrix_SN in part.items():
            low, high = np.nanquantile(draws[arm], (0.025, 0.975))
            found.append(
                GroupAccuracy(
                    arm=arm, group=group, num_samples=matrix_SN.shape[1],
                    value=float(np.nanmean(matrix_SN)), low=float(low), high=float(high),
                )
            )  # fmt: skip
    return tuple(found)


def _scores_by_arm(cells: Sequence[CellResult], decoding: Decoding) -> dict[str, Floats]:
    """Return each arm's (S, N) scores; arms without answers of this kind are left out."""
    by_arm: dict[str, list[CellResult]] = {}
    for cell in cells:
        by_arm.setdefault(cell.cell.arm, []).append(cell)
    found = {}
    for arm, members in by_arm.items():
        matrix_SN = score_matrix([member.scores for member in members], decoding)
        if matrix_SN is not None:
            found[arm] = matrix_SN
    return found


def _compare(
    scores: Mapping[str, Floats],
    draws: Mapping[str, Floats],
    pair: tuple[str, str],
    *,
    decoding: Decoding,
    num_comparisons: int,
) -> Comparison:
    arm, control = pair
    delta = draws[arm] - draws[control]
    tail = 0.025 / num_comparisons
    low, high, wide_low, wide_high = np.quantile(delta, (0.025, 0.975, tail, 1 - tail))
    return Comparison(
        arm=arm,
        control=control,
        decoding=decoding,
        difference=float(np.nanmean(scores[arm]) - np.nanmean(scores[control])),
        low=float(low),
        high=float(high),
        wide_low=float(wide_low),
        wide_high=float(wide_high),
        verdict=verdict_of(float(wide_low), float(wide_high)),
    )


def _resampled_means(
    scores: Mapping[str, Floats], *, seed: int, num_resamples: int
) -> dict[str, Floats]:
    """Return each arm's mean under resampling: the samples together, the seeds of an arm apart."""
    if not scores:
        return {}
    num_samples = next(iter(scores.values())).shape[1]
    rng = np.random.default_rng(seed)
    draws: dict[str, list[Floats]] = {arm: [] for arm in scores}
    for start in range(0, num_resamples, _CHUNK):
        turns = min(_CHUNK, num_resamples - start)
        weight_RN = _counts(rng, turns, num_samples)
        for arm, matrix_SN in scores.items():
            weight_RS = _counts(rng, turns, len(matrix_SN))
            known_SN = ~np.isnan(matrix_SN)
            sum_R = (weight_RS @ np.where(known_SN, matrix_SN, 0.0) * weight_RN).sum(axis=1)
            draws[arm].append(sum_R / (weight_RS @ known_SN * weight_RN).sum(axis=1))
    return {arm: np.concatenate(parts) for arm, parts in draws.items()}


def _counts(rng: np.random.Generator, turns: int, size: int) -> Floats:
    """Return how often each of `size` things is drawn in `size` draws, (turns, size)."""
    drawn = rng.integers(0, size, (turns, size)) + size * np.arange(turns)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=turns * size)
    return counts.reshape(turns, size).astype(np.float64)


def spent_by_arm(cells: Sequence[CellResult]) -> dict[str, dict[str, Any]]:
    """Return samples, draws, completions, tokens and seconds of each arm, mean over its seeds."""
    by_arm: dict[str, list[CellResult]] = {}
    for cell in cells:
        by_arm.setdefault(cell.cell.arm, []).append(cell)
    return {
        arm: {
            name: float(np.mean([getattr(member, name) for member in members]))
            for name in (
                "num_samples",
                "num_drawn",
                "completions",
                "completion_tokens",
                "target_tokens",
                "seconds",
                "budget_reached",
            )
        }
        for arm, members in by_arm.items()
    }
