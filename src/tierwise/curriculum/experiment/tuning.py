"""Which learning rate an arm gets: the one whose runs answer best on a validation split.

    scores of every (rate, tuning run) -> mean sampled accuracy by rate -> the best, if tied the
    smallest

The validation split is neither trained on nor tested on, and the tuning runs are not among those
that are compared afterwards. Left out: searching outside the rates given; a choice at an end of
them says so, because a better one may lie beyond.

Shapes: S tuning runs, N validation samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tierwise.core.errors import DataError
from tierwise.curriculum.training.evaluate import Decoding, SampleScore, score_matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRate:
    """The learning rate of an arm, and what it was chosen from.

    Attributes:
        arm: The arm.
        rate: The chosen rate.
        tried: (rate, mean sampled accuracy on the validation split), by rising rate.
        num_runs: Training runs behind each accuracy.
        num_samples: Validation samples.
    """

    arm: str
    rate: float
    tried: tuple[tuple[float, float], ...]
    num_runs: int
    num_samples: int

    @property
    def at_the_edge(self) -> bool:
        """Return whether the chosen rate is the smallest or the largest tried."""
        return len(self.tried) > 1 and self.rate in (self.tried[0][0], self.tried[-1][0])


def choose_rate(arm: str, runs: Mapping[float, Sequence[Sequence[SampleScore]]]) -> ArmRate:
    """Return the rate of the best mean sampled accuracy.

    Args:
        arm: The arm, to say so.
        runs: Rate -> validation scores of each of its tuning runs.

    Raises:
        DataError: No sampled answer of any run has a verdict.
    """
    tried = []
    for rate, scores in sorted(runs.items()):
        matrix_SN = score_matrix(scores, Decoding.SAMPLED)
        if matrix_SN is None or bool(np.isnan(matrix_SN).all()):
            raise DataError(f"no sampled answer of {arm} at rate {rate:g} could be judged")
        tried.append((rate, float(np.nanmean(matrix_SN))))
    best, _ = max(tried, key=lambda pair: (pair[1], -pair[0]))
    first = next(iter(runs.values()))
    return ArmRate(
        arm=arm, rate=best, tried=tuple(tried), num_runs=len(first), num_samples=len(first[0])
    )
