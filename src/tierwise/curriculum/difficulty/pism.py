"""PISM: at which masked share of its picture does the model stop answering a question.

P_c(lambda) is the share of right answers over K masks of share lambda; the failure threshold
lambda* is the least lambda of the grid with P_c(lambda) < tau. Counts are compared as whole
numbers (with K = 10 and tau = 0.1, below tau means none of ten), and *unsolved* (lambda* = 0) is
decided before *hard*.

The paper contradicts itself at lambda* = 0.7: its text calls that easy, its Table A medium
(`Boundary`). It gives lambda* without an interval; here a sample also carries the distribution of
lambda* in a repetition of the experiment. Errors are left out of the counts, where the released
code counts them as wrong. The cheaper, sequential form is `adaptive`.

Source: Qi et al., https://arxiv.org/abs/2511.06722, section on progressive image semantic masking
and Table A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import lgamma

from tierwise.curriculum.difficulty.passrate import Tally

PAPER_PERMILLES = tuple(range(0, 1000, 100))
"""The grid 0.0, 0.1, ..., 0.9, in 1/1000."""
PAPER_ATTEMPTS = 10
PAPER_TAU = 0.1


class Stratum(StrEnum):
    """How hard a sample is for the model."""

    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"
    UNSOLVED = "unsolved"
    ERROR = "error"


class Boundary(StrEnum):
    """Which of the paper's two rules decides at lambda* = 0.7: easy in the text, else medium."""

    TEXT = "text"
    TABLE = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """What PISM says of one sample.

    Attributes:
        star_permille: lambda* in 1/1000, or None when P_c never falls below tau (or on errors).
        low_permille: lambda* is at least this in 95 % of repetitions; 1000 stands for never.
        high_permille: lambda* is at most this in 95 % of repetitions; 1000 stands for never.
        stratum: By the chosen boundary.
        confidence: Probability that a repetition gives the same stratum.
    """

    star_permille: int | None
    low_permille: int
    high_permille: int
    stratum: Stratum
    confidence: float


def below(tally: Tally, tau: float) -> bool:
    """Return whether the pass rate is below tau, decided in whole numbers.

    >>> below(Tally(right=1, judged=10), 0.1), below(Tally(right=0, judged=10), 0.1)
    (False, True)
    """
    return tally.right < Fraction(str(tau)) * tally.judged


def failure_threshold(curve: Mapping[int, Tally], *, tau: float = PAPER_TAU) -> int | None:
    """Return lambda* in 1/1000: the least masked share whose pass rate is below tau, or None."""
    for permille in sorted(curve):
        if below(curve[permille], tau):
            return permille
    return None


def stratum_of(star_permille: int | None, *, boundary: Boundary = Boundary.TEXT) -> Stratum:
    """Return the stratum of a failure threshold.

    >>> stratum_of(700).value, stratum_of(700, boundary=Boundary.TABLE).value
    ('easy', 'medium')
    """
    if star_permille is None:
        return Stratum.EASY
    if star_permille == 0:
        return Stratum.UNSOLVED
    if star_permille <= 400:
        return Stratum.HARD
    if star_permille < 700 or (star_permille == 700 and boundary is Boundary.TABLE):
        return Stratum.MEDIUM
    return Stratum.EASY


def difficulty(
    curve: Mapping[int, Tally], *, tau: float = PAPER_TAU, boundary: Boundary = Boundary.TEXT
) -> Difficulty:
    """Return what PISM says of a sample whose whole grid was tried.

    Args:
        curve: Masked share in 1/1000 -> tally; a share with no judged attempt makes it an error.
        tau: Pass rate below which the model has failed.
        boundary: Which of the paper's rules decides at 0.7.
    """
    if not curve or any(tally.judged == 0 for tally in curve.values()):
        return Difficulty(
            star_permille=None,
            low_permille=0,
            high_permille=1000,
            stratum=Stratum.ERROR,
            confidence=0.0,
        )
    star = failure_threshold(curve, tau=tau)
    stratum = stratum_of(star, boundary=boundary)
    chances = star_distribution(curve, tau=tau)
    same = sum(
        chance
        for permille, chance in chances.items()
        if stratum_of(None if permille == 1000 else permille, boundary=boundary) is stratum
    )
    return Difficulty(
        star_permille=star,
        low_permille=_quantile(chances, 0.05),
        high_permille=_quantile(chances, 0.95),
        stratum=stratum,
        confidence=min(1.0, same),
    )


def star_distribution(curve: Mapping[int, Tally], *, tau: float) -> dict[int, float]:
    """Return the probability of each lambda* in a repetition with fresh masks; 1000 is "never".

    Each point of the grid fails with the beta-binomial probability that its fresh count is below
    tau, given the counts seen and Jeffreys' prior; points are taken as independent, as they are
    in the paper's experiment.
    """
    chances: dict[int, float] = {}
    standing = 1.0
    for permille in sorted(curve):
        fails = chance_below(curve[permille], tau=tau)
        chances[permille] = standing * fails
        standing *= 1.0 - fails
    chances[1000] = standing
    return chances


def chance_below(tally: Tally, *, tau: float) -> float:
    """Return the probability that a fresh tally of the same size is below tau.

    >>> round(chance_below(Tally(right=0, judged=10), tau=0.1), 3)
    0.712
    """
    size = tally.judged
    return sum(
        math.exp(_log_beta_binomial(count, size, tally.right + 0.5, size - tally.right + 0.5))
        for count in range(size + 1)
        if below(Tally(right=count, judged=size), tau)
    )


def _log_beta_binomial(count: int, size: int, first: float, second: float) -> float:
    choose = lgamma(size + 1) - lgamma(count + 1) - lgamma(size - count + 1)
    return choose + _log_beta(count + first, size - count + second) - _log_beta(first, second)


def _log_beta(first: float, second: float) -> float:
    return lgamma(first) + lgamma(second) - lgamma(first + second)


def _quantile(chances: Mapping[int, float], share: float) -> int:
    total = 0.0
    for permille in sorted(chances):
        total += chances[permille]
        if total >= share - 1e-12:
            return permille
    return 1000


def strata_counts(strata: Sequence[Stratum]) -> dict[Stratum, int]:
    """Return how many samples each stratum has, all five named."""
    return {stratum: sum(found is stratum for found in strata) for stratum in Stratum}
