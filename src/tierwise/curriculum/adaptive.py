"""Adaptive PISM: ask where an answer can still change the stratum, and stop when none can.

The paper asks K times at every masked share, whatever the answers were. Here a prior over curves
P_c(lambda) is weighted by the answers so far; from the weights follow the probabilities of lambda*
and of the strata, which are what selection uses. Each round asks a few more answers of every
undecided sample at the share from which most is to be learned about its stratum. A sample is done
when one stratum is probable enough, or when its budget is spent.

The strata mean what they mean on the full grid, first crossing and all. Shares beyond the last
limit (0.7 in the text) cannot change a stratum and are not asked. Rounds depend on logged answers
alone, so a resumed run goes the same way.

The prior is a bank of drawn curves. Nearly all are smooth, so that neighbouring shares tell about
each other; they may rise again, as measured curves do where guessing sets in. One in a thousand,
by weight, is not: its shares are unrelated. So a dip at one single share between high neighbours
is found only when that share was asked often, which asking guided by smooth curves may not do;
use the grid where such dips matter. Left out: sharing strength between samples.

Source: our own; compare A. Wald, "Sequential tests of statistical hypotheses", Annals of
Mathematical Statistics 16, 1945, and D. V. Lindley, "On a measure of the information provided by
an experiment", Annals of Mathematical Statistics 27, 1956 (where to ask next). The prior's numbers
are our estimates, tried on one set of curves and reported on others (docs/curriculum.md).

Shapes: C curves of the bank, P masked shares, O outcomes of one round, G strata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np

from tierwise.curriculum.attempts import AttemptKey, Probe
from tierwise.curriculum.passrate import Tally
from tierwise.curriculum.pism import Boundary, Difficulty, Stratum, stratum_of
from tierwise.curriculum.probes import Desk
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.verdicts import Verdict

NEVER = 1000
STRATA = (Stratum.UNSOLVED, Stratum.HARD, Stratum.MEDIUM, Stratum.EASY)

Array = np.ndarray[Any, np.dtype[np.float64]]

_NUM_SMOOTH, _NUM_ROUGH, _ROUGH_WEIGHT = 8000, 4000, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """When to stop.

    Attributes:
        step: Answers asked of a sample in one round.
        confidence: Probability of the leading stratum at which a sample is done.
        budget: Most answers spent on one sample.
    """

    step: int = 5
    confidence: float = 0.98
    budget: int = 600


def ask_adaptively(
    desk: Desk,
    samples: Sequence[Sample],
    *,
    permilles: Sequence[int],
    tau: float,
    boundary: Boundary,
    rule: Adaptive,
) -> list[AttemptKey]:
    """Ask until every sample is decided or out of budget; return the keys that were asked.

    Args:
        desk: Where to ask.
        samples: Samples with pictures.
        permilles: The grid, in 1/1000; shares that cannot change a stratum are left out.
        tau: Pass rate below which the model has failed.
        boundary: Which of the paper's rules decides at 0.7.
        rule: When to stop.
    """
    grid = deciding(permilles, boundary)
    prior = curve_prior(grid, tau=tau, boundary=boundary)
    curves = {
        sample.id: {permille: Tally(right=0, judged=0) for permille in grid} for sample in samples
    }
    asked: list[AttemptKey] = []
    open_ids = [sample.id for sample in samples]
    round_number = 0
    while open_ids:
        round_number += 1
        keys = [
            key
            for identity in open_ids
            for key in _next_keys(
                desk,
                identity,
                curves[identity],
                permille=prior.most_telling(curves[identity], step=rule.step),
                step=rule.step,
            )
        ]
        desk.run(keys, name=f"adaptive round {round_number}")
        for key in keys:
            _count(curves[key.sample_id], key.mask_permille, desk.log.verdict(key))
        asked += keys
        open_ids = [identity for identity in open_ids if not _done(curves[identity], prior, rule)]
    return asked


def deciding(permilles: Sequence[int], boundary: Boundary) -> tuple[int, ...]:
    """Return the shares whose failure can change a stratum: those before the easy ones.

    >>> deciding(range(0, 1000, 100), Boundary.TEXT)
    (0, 100, 200, 300, 400, 500, 600)
    """
    return tuple(
        permille
        for permille in permilles
        if stratum_of(permille, boundary=boundary) is not Stratum.EASY
    )


def _next_keys(
    desk: Desk, identity: str, curve: Mapping[int, Tally], *, permille: int, step: int
) -> list[AttemptKey]:
    start = curve[permille].judged + curve[permille].errors
    return [
        desk.key(identity, Probe.MASKED, permille=permille, k=k) for k in range(start, start + step)
    ]


def _count(curve: dict[int, Tally], permille: int, verdict: Verdict) -> None:
    old = curve[permille]
    curve[permille] = Tally(
        right=old.right + (verdict is Verdict.RIGHT),
        judged=old.judged + (verdict is not Verdict.ERROR),
        errors=old.errors + (verdict is Verdict.ERROR),
    )


def _done(curve: Mapping[int, Tally], prior: CurvePrior, rule: Adaptive) -> bool:
    spent = sum(tally.judged + tally.errors for tally in curve.values())
    if spent >= rule.budget or any(tally.errors >= 2 * rule.step for tally in curve.values()):
        return True
    return curve[0].judged > 0 and max(prior.strata_chances(curve).values()) >= rule.confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePrior:
    """A weighted bank of curves P_c(lambda), from `curve_prior`.

    Attributes:
        grid: Masked shares in 1/1000, P of them, rising.
        rates_CP: Pass rates, strictly between 0 and 1.
        log_right_CP: Logarithms of the pass rates.
        log_wrong_CP: Logarithms of one minus the pass rates.
        log_weights_C: Logarithms of the prior weights.
        stars_C: Place of the first rate below tau in the grid; P stands for never.
        strata_CG: 1 where the curve belongs to the stratum, in the order of `STRATA`.
    """

    grid: tuple[int, ...]
    rates_CP: Array
    log_right_CP: Array
    log_wrong_CP: Array
    log_weights_C: Array
    stars_C: np.ndarray[Any, np.dtype[np.int64]]
    strata_CG: Array

    def weights(self, curve: Mapping[int, Tally]) -> Array:
        """Return the (C,) posterior weights of the bank's curves, given counts by masked share."""
        tallies = [curve.get(permille, Tally(right=0, judged=0)) for permille in self.grid]
        right_P = np.array([tally.right for tally in tallies], dtype=np.float64)
        wrong_P = np.array([tally.judged - tally.right for tally in tallies], dtype=np.float64)
        log_C = self.log_weights_C + self.log_right_CP @ right_P + self.log_wrong_CP @ wrong_P
        weights_C = np.exp(log_C - log_C.max())
        result: Array = weights_C / weights_C.sum()
        return result

    def strata_chances(self, curve: Mapping[int, Tally]) -> dict[Stratum, float]:
        """Return the probability of each stratum, given the answers so far."""
        chances_G = self.weights(curve) @ self.strata_CG
        return {
            stratum: round(float(chance), 9)
            for stratum, chance in zip(STRATA, chances_G, strict=True)
        }

    def star_chances(self, curve: Mapping[int, Tally]) -> dict[int, float]:
        """Return the probability of each lambda* in 1/1000; `NEVER` stands for never."""
        chances = np.bincount(
            self.stars_C, weights=self.weights(curve), minlength=len(self.grid) + 1
        )
        places = (*self.grid, NEVER)
        return {place: round(float(one), 9) for place, one in zip(places, chances, strict=True)}

    def most_telling(self, curve: Mapping[int, Tally], *, step: int) -> int:
        """Return the share at which `step` more answers tell most about the stratum.

        It is the share that leaves the least expected entropy of the strata.

        Args:
            curve: Counts by masked share in 1/1000.
            step: Answers to be asked there.
        """
        weights_C = self.weights(curve)
        kept_C = weights_C > 1e-9 * weights_C.max()
        joint_GC = (weights_C[kept_C, None] * self.strata_CG[kept_C]).T
        rates_CP = self.rates_CP[kept_C]
        left = []
        for place in range(len(self.grid)):
            joint_GO = joint_GC @ _outcome_chances(rates_CP[:, place], step)
            chances_O = joint_GO.sum(axis=0)
            given_GO = joint_GO / np.maximum(chances_O, 1e-300)
            entropy_O = -(given_GO * np.log(np.maximum(given_GO, 1e-300))).sum(axis=0)
            left.append(round(float(chances_O @ entropy_O), 9))  # rounded: the same everywhere
        return self.grid[left.index(min(left))]


def _outcome_chances(rate_C: Array, step: int) -> Array:
    """Return (C, step + 1): the binomial chance of each number of right answers."""
    counts = np.arange(step + 1)
    ways = np.array([comb(step, count) for count in counts], dtype=np.float64)
    chances: Array = ways * rate_C[:, None] ** counts * (1 - rate_C[:, None]) ** (step - counts)
    return chances


@lru_cache(maxsize=8)
def curve_prior(grid: tuple[int, ...], *, tau: float, boundary: Boundary) -> CurvePrior:
    """Return the prior over curves on a grid; the same one for the same arguments.

    A smooth curve's logit is a line (level 0.8 +- 2 without a mask, slope -2.5 +- 2 over the whole
    range) plus a Gaussian process of deviation 1 and length 0.25, plus 0.2 of noise a share; the
    shares of a rough one are independent with Jeffreys' prior.

    Args:
        grid: Masked shares in 1/1000, rising.
        tau: Pass rate below which the model has failed.
        boundary: Which of the paper's rules decides at 0.7.
    """
    rng = np.random.default_rng(1)
    shares_P = np.array(grid) / 1000
    level_C1 = 0.8 + 2.0 * rng.standard_normal((_NUM_SMOOTH, 1))
    slope_C1 = -2.5 + 2.0 * rng.standard_normal((_NUM_SMOOTH, 1))
    distance_PP = (shares_P[:, None] - shares_P) / 0.25
    spread_PP = np.exp(-(distance_PP**2) / 2) + 0.2**2 * np.eye(len(grid))
    wiggle_CP = rng.standard_normal((_NUM_SMOOTH, len(grid))) @ np.linalg.cholesky(spread_PP).T
    smooth_CP = 1 / (1 + np.exp(-(level_C1 + slope_C1 * shares_P + wiggle_CP)))
    rough_CP = rng.beta(0.5, 0.5, (_NUM_ROUGH, len(grid)))
    rates_CP = np.concatenate([smooth_CP, rough_CP]).clip(1e-6, 1 - 1e-6)
    weights_C = np.repeat(
        [(1 - _ROUGH_WEIGHT) / _NUM_SMOOTH, _ROUGH_WEIGHT / _NUM_ROUGH], [_NUM_SMOOTH, _NUM_ROUGH]
    )
    fails_CP = rates_CP < tau
    stars_C = np.where(fails_CP.any(axis=1), fails_CP.argmax(axis=1), len(grid)).astype(np.int64)
    of_place = [stratum_of(permille, boundary=boundary) for permille in grid] + [Stratum.EASY]
    codes = np.array([STRATA.index(stratum) for stratum in of_place])
    return CurvePrior(
        grid=grid,
        rates_CP=rates_CP,
        log_right_CP=np.log(rates_CP),
        log_wrong_CP=np.log1p(-rates_CP),
        log_weights_C=np.log(weights_C),
        stars_C=stars_C,
        strata_CG=np.eye(len(STRATA))[codes[stars_C]],
    )


def difficulty_from_few(
    curve: Mapping[int, Tally], *, permilles: Sequence[int], tau: float, boundary: Boundary
) -> Difficulty:
    """Return what the answers asked adaptively say of a sample.

    The stratum is the most probable one, and lambda* the most probable threshold within it.

    Args:
        curve: Masked share in 1/1000 -> counts; shares never asked may be absent.
        permilles: The whole grid, in 1/1000.
        tau: Pass rate below which the model has failed.
        boundary: Which of the paper's rules decides at 0.7.
    """
    whole = curve.get(0)
    if (
        whole is None
        or whole.judged == 0
        or any(tally.judged == 0 and tally.errors for tally in curve.values())
    ):
        return Difficulty(
            star_permille=None,
            low_permille=0,
            high_permille=NEVER,
            stratum=Stratum.ERROR,
            confidence=0.0,
        )
    prior = curve_prior(deciding(permilles, boundary), tau=tau, boundary=boundary)
    chances, strata = prior.star_chances(curve), prior.strata_chances(curve)
    stratum = max(strata, key=lambda one: strata[one])
    star = max(
        (one for one in chances if _stratum(one, boundary) is stratum), key=lambda one: chances[one]
    )
    return Difficulty(
        star_permille=None if star == NEVER else star,
        low_permille=min(star, _quantile(chances, 0.05)),
        high_permille=max(star, _quantile(chances, 0.95)),
        stratum=stratum,
        confidence=min(1.0, strata[stratum]),
    )


def _stratum(star_permille: int, boundary: Boundary) -> Stratum:
    return stratum_of(None if star_permille == NEVER else star_permille, boundary=boundary)


def _quantile(chances: Mapping[int, float], share: float) -> int:
    total = 0.0
    for permille in sorted(chances):
        total += chances[permille]
        if total >= share:
            return permille
    return NEVER
