"""Scores -> arms: which samples to train on, and the controls to compare with.

An arm is a list of samples in the data set's order. The random arms are as large as the arms they
control for, because a smaller or larger one proves nothing; they are drawn from every sample that
could be scored. Left out: weights, and any order other than the data set's.

Source: the arms of Qi et al., https://arxiv.org/abs/2511.06722, Tables 1-4; the band of pass
rates is what practitioners use (https://github.com/verl-project/verl/issues/2791).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from tierwise.core.errors import DataError, UsageError
from tierwise.core.records import write_whole
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.difficulty.scores import Score, Scores
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.stored import file_of

By = Literal["pism", "cmab", "cmab_quantile", "rscore"]

BAND = (0.2, 0.8)
"""Pass rates of the band arm, both ends included."""


class Arm(StrEnum):
    """A choice of samples."""

    ALL = "all"
    MID_HARD = "mid+hard"
    RANDOM = "random"
    UNSOLVED = "unsolved"
    BAND = "band"
    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"
    RANDOM_MEDIUM = "random-medium"
    RANDOM_HARD = "random-hard"


PAPER_PAIRINGS: tuple[tuple[Arm, Arm], ...] = tuple(
    pairing
    for first, second in ((Arm.MEDIUM, Arm.HARD), (Arm.HARD, Arm.MEDIUM))
    for pairing in (
        (first, second),
        (first, Arm(f"random-{second.value}")),
        (Arm(f"random-{first.value}"), second),
        (Arm(f"random-{first.value}"), Arm(f"random-{second.value}")),
    )
)
"""Every SFT arm -> GRPO arm of the paper, in its order."""

_STRATA = {
    Arm.MID_HARD: {Stratum.MEDIUM, Stratum.HARD},
    Arm.UNSOLVED: {Stratum.UNSOLVED},
    Arm.EASY: {Stratum.EASY},
    Arm.MEDIUM: {Stratum.MEDIUM},
    Arm.HARD: {Stratum.HARD},
}
_SIZE_OF = {
    Arm.RANDOM: Arm.MID_HARD,
    Arm.RANDOM_MEDIUM: Arm.MEDIUM,
    Arm.RANDOM_HARD: Arm.HARD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """An arm's samples with their scores, in the data set's order."""

    arm: Arm
    by: By
    samples: tuple[Sample, ...]
    scores: tuple[Score, ...]


def select(
    samples: Sequence[Sample], scores: Scores, arm: Arm, *, seed: int, by: By = "pism"
) -> Selection:
    """Return the samples of an arm.

    Args:
        samples: The data set that was scored.
        scores: Its scores.
        arm: Which choice.
        seed: Of the random arms.
        by: Which difficulty the strata are taken from.

    Raises:
        DataError: Samples and scores are not of the same data set, or a sample has changed since.
    """
    scored = {row.id: row for row in scores.rows}
    missing = [sample.id for sample in samples if sample.id not in scored]
    if missing:
        raise DataError(
            f"{len(missing)} samples have no score, such as {missing[0]!r}",
            hint="score the whole data set first",
        )
    scores.refuse_changed(samples)
    kept = _ids(list(scored.values()), arm, seed=seed, by=by)
    chosen = tuple(sample for sample in samples if sample.id in kept)
    return Selection(
        arm=arm, by=by, samples=chosen, scores=tuple(scored[sample.id] for sample in chosen)
    )


def stratum(row: Score, by: By) -> Stratum:
    """Return a sample's stratum under one difficulty."""
    match by:
        case "pism":
            return row.pism_stratum
        case "cmab":
            return row.cmab_stratum
        case "cmab_quantile":
            return row.cmab_quantile_stratum
        case "rscore":
            return row.rscore_stratum


def _ids(rows: Sequence[Score], arm: Arm, *, seed: int, by: By) -> set[str]:
    if arm is Arm.ALL:
        return {row.id for row in rows}
    if arm is Arm.BAND:
        low, high = BAND
        return {
            row.id for row in rows if row.pass_rate is not None and low <= row.pass_rate <= high
        }
    if arm in _STRATA:
        return {row.id for row in rows if stratum(row, by) in _STRATA[arm]}
    size = len(_ids(rows, _SIZE_OF[arm], seed=seed, by=by))
    usable = sorted(row.id for row in rows if stratum(row, by) is not Stratum.ERROR)
    return set(random.Random(f"{arm.value}|{seed}").sample(usable, size))


def write_selection(selection: Selection, path: Path) -> None:
    """Write an arm as JSON Lines in the plain layout, which `read_samples` and the trainer read.

    Raises:
        UsageError: The arm is empty.
    """
    if not selection.samples:
        raise UsageError(f"the arm {selection.arm.value} is empty", hint="choose another arm")
    lines = []
    for sample, row in zip(selection.samples, selection.scores, strict=True):
        record = {
            "id": sample.id,
            "question": sample.question,
            "answer": sample.answer,
            "task": sample.task,
            "images": [_relative(file_of(image, path), path.parent) for image in sample.images],
            "source": sample.source,
            "stratum": stratum(row, selection.by).value,
            "pass_rate": row.pass_rate,
            "lambda_star": row.lambda_star,
        }
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    write_whole(path, "".join(lines))


def _relative(image: Path, folder: Path) -> str:
    return Path(os.path.relpath(os.path.realpath(image), os.path.realpath(folder))).as_posix()
