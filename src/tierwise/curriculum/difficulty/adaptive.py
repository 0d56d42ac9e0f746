"""Adaptive PISM: the stratum that the whole grid would give, from the first few of its answers.

The paper asks K times at every masked share, whatever the answers were. Here a grid of a large K
(100 by default) is asked in the order that tells most, and left unfinished as soon as it is
probable enough what its stratum would have been: its answers are the first ones of that grid, with
the same masks and the same seed, so that more patience ends in the grid itself. This is curtailed
sampling. The grid's stratum is a random thing even for a model known exactly, because K is finite
(a share right 12 times in 100 fails by chance now and then); that too is predicted.

Shares beyond the last limit (0.7 in the text) cannot change a stratum and are not asked. Rounds
depend on logged answers alone, so a resumed run goes the same way.

The prediction is exact under its model: pass rates along the grid form a Markov chain on
`NUM_RATES` levels of the logit (`_chain`). Mostly neighbours are alike and the rate drifts
down; sometimes it jumps anywhere, so that a dip at one single share is possible and gets asked
about. Left out: sharing strength between samples.

Source: our own; compare A. Wald, "Sequential tests of statistical hypotheses", Annals of
Mathematical Statistics 16, 1945 (stopping when enough is known), D. V. Lindley, "On a measure of
the information provided by an experiment", Annals of Mathematical Statistics 27, 1956 (where to ask
next) and L. R. Rabiner, "A tutorial on hidden Markov models", Proceedings of the IEEE 77, 1989 (the
recursion). The prior's numbers are our estimates.

Shapes: P masked shares, R levels of the rate, N hypotheses looked at together, O outcomes of a
round, G strata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np

from tierwise.curriculum.difficulty.attempts import AttemptKey, Probe
from tierwise.curriculum.difficulty.passrate import Tally
from tierwise.curriculum.difficulty.pism import Boundary, Difficulty, Stratum, stratum_of
from tierwise.curriculum.difficulty.probes import Desk
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.verdicts import Verdict

NEVER = 1000
STRATA = (Stratum.UNSOLVED, Stratum.HARD, Stratum.MEDIUM, Stratum.EASY)
NUM_RATES = 49

Array = np.ndarray[Any, np.dtype[np.float64]]

_EMPTY = Tally(right=0, judged=0)
_LOGITS_R: Array = np.linspace(-6.0, 6.0, NUM_RATES)
_RATES_R: Array = 1 / (1 + np.exp(-_LOGITS_R))
_LOG_RIGHT_R: Array = np.log(_RATES_R)
_LOG_WRONG_R: Array = np.log1p(-_RATES_R)
_LEVEL, _LEVEL_SPREAD = 0.0, 2.5
_DRIFT, _SPREAD, _JUMP = -0.3, 0.6, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """Which grid is predicted, and when that is enough.

    Attributes:
        num_attempts: K of the grid whose stratum is predicted; no share is asked more often.
        step: Answers asked of a sample in one round.
        confidence: Probability of the leading stratum at which a sample is done.
    """

    num_attempts: int = 100
    step: int = 5
    confidence: float = 0.98


def ask_adaptively(
    desk: Desk,
    samples: Sequence[Sample],
    *,
    permilles: Sequence[int],
    tau: float,
    boundary: Boundary,
    rule: Adaptive,
) -> list[AttemptKey]:
    """Ask until the whole grid's stratum is known well enough of all; return the keys asked.

    Args:
        desk: Where to ask.
        samples: Samples with pictures.
        permilles: The grid, in 1/1000; shares that cannot change a stratum are left out.
        tau: Pass rate below which the model has failed.
        boundary: Which of the paper's rules decides at 0.7.
        rule: Which grid is predicted, and when to stop.
    """
    grid = Grid.of(permilles, tau=tau, boundary=boundary, num_attempts=rule.num_attempts)
    curves = {sample.id: dict.fromkeys(grid.permilles, _EMPTY) for sample in samples}
    asked: list[AttemptKey] = []
    open_ids = [sample.id for sample in samples]
    round_number = 0
    while open_ids:
        round_number += 1
        keys = [
            key
            for identity in open_ids
            for key in _next_keys(desk, identity, curves[identity], grid, rule.step)
        ]
        desk.run(keys, name=f"adaptive round {round_number}")
        for key in keys:
            _count(curves[key.sample_id], key.mask_permille, desk.log.verdict(key))
        asked += keys
        open_ids = [identity for identity in open_ids if not _done(curves[identity], grid, rule)]
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
    desk: Desk, identity: str, curve: Mapping[int, Tally], grid: Grid, step: int
) -> list[AttemptKey]:
    permille = grid.next_share(curve, step=step)
    start = _asked(curve[permille])
    return [
        desk.key(identity, Probe.MASKED, permille=permille, k=k)
        for k in range(start, min(start + step, grid.num_attempts))
    ]


def _asked(tally: Tally) -> int:
    return tally.judged + tally.errors


def _count(curve: dict[int, Tally], permille: int, verdict: Verdict) -> None:
    old = curve[permille]
    curve[permille] = Tally(
        right=old.right + (verdict is Verdict.RIGHT),
        judged=old.judged + (verdict is not Verdict.ERROR),
        errors=old.errors + (verdict is Verdict.ERROR),
    )


def _done(curve: Mapping[int, Tally], grid: Grid, rule: Adaptive) -> bool:
    if any(tally.errors >= 2 * rule.step for tally in curve.values()):
        return True
    if all(_asked(tally) >= grid.num_attempts for tally in curve.values()):
        return True
    stratum, star = grid.leading(curve)
    return (
        grid.strata_chances(curve)[stratum] >= rule.confidence
        and grid.untried(curve, before=star, least=rule.step) is None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A grid of K answers a share, of which some are known.

    Attributes:
        permilles: Masked shares in 1/1000, rising: those that decide.
        tau: Pass rate below which the model has failed.
        num_attempts: K.
        strata: The stratum of a first failure at each share, and last that of none.
    """

    permilles: tuple[int, ...]
    tau: float
    num_attempts: int
    strata: tuple[Stratum, ...]

    @classmethod
    def of(
        cls, permilles: Sequence[int], *, tau: float, boundary: Boundary, num_attempts: int
    ) -> Grid:
        """Return the grid of the deciding ones among the shares."""
        grid = deciding(permilles, boundary)
        strata = [stratum_of(permille, boundary=boundary) for permille in grid]
        return cls(
            permilles=grid,
            tau=tau,
            num_attempts=num_attempts,
            strata=(*strata, Stratum.EASY),
        )

    def star_chances(self, curve: Mapping[int, Tally]) -> dict[int, float]:
        """Return the probability of each lambda* of the whole grid; `NEVER` stands for never."""
        tallies = [curve.get(permille, _EMPTY) for permille in self.permilles]
        weights_NP1, _ = self._star_weights([tallies])
        stars_P1 = weights_NP1[0] / weights_NP1[0].sum()
        places = (*self.permilles, NEVER)
        return {place: round(float(one), 9) for place, one in zip(places, stars_P1, strict=True)}

    def strata_chances(self, curve: Mapping[int, Tally]) -> dict[Stratum, float]:
        """Return the probability of each stratum of the whole grid."""
        chances = dict.fromkeys(STRATA, 0.0)
        for stratum, chance in zip(self.strata, self.star_chances(curve).values(), strict=True):
            chances[stratum] += chance
        return chances

    def leading(self, curve: Mapping[int, Tally]) -> tuple[Stratum, int]:
        """Return the most probable stratum and, within it, the most probable lambda*."""
        stars, strata = self.star_chances(curve), self.strata_chances(curve)
        stratum = max(strata, key=lambda one: strata[one])
        of_stratum = [star for star, one in zip(stars, self.strata, strict=True) if one is stratum]
        return stratum, max(of_stratum, key=lambda star: stars[star])

    def untried(self, curve: Mapping[int, Tally], *, before: int, least: int) -> int | None:
        """Return the first share up to a lambda* with fewer than `least` judged answers, if any."""
        for permille in self.permilles:
            tally = curve.get(permille, _EMPTY)
            if permille <= before and tally.judged < least and _asked(tally) < self.num_attempts:
                return permille
        return None

    def next_share(self, curve: Mapping[int, Tally], *, step: int) -> int:
        """Return where to ask next: the most telling share once the likely lambda* was tried.

        No share up to the likely lambda* is taken on trust in the prior: the whole picture comes
        first, and a dip at one share is looked for.

        Args:
            curve: Counts by masked share in 1/1000.
            step: Answers to be asked there, and least number asked of each share before.
        """
        _, star = self.leading(curve)
        untried = self.untried(curve, before=star, least=step)
        return self.most_telling(curve, step=step) if untried is None else untried

    def most_telling(self, curve: Mapping[int, Tally], *, step: int) -> int:
        """Return the share at which `step` more answers tell most about the stratum.

        It is the share that leaves the least expected entropy of the strata, among those not yet
        asked K times.

        Args:
            curve: Counts by masked share in 1/1000.
            step: Answers to be asked there.
        """
        tallies = [curve.get(permille, _EMPTY) for permille in self.permilles]
        open_places = [
            place for place, tally in enumerate(tallies) if _asked(tally) < self.num_attempts
        ]
        outcomes, owners = [], []
        for place in open_places:
            size = min(step, self.num_attempts - _asked(tallies[place]))
            for right in range(size + 1):
                after = _with(tallies[place], right=right, judged=size)
                outcomes.append([*tallies[:place], after, *tallies[place + 1 :]])
                owners.append((place, comb(size, right)))
        star_NP1, log_evidence_N = self._star_weights(outcomes)
        ways_N = np.array([ways for _, ways in owners], dtype=np.float64)
        weights_N = ways_N * np.exp(log_evidence_N - log_evidence_N.max())
        of_star_P1G = np.array([[one is stratum for stratum in STRATA] for one in self.strata])
        chances_NG = star_NP1 / star_NP1.sum(axis=1, keepdims=True) @ of_star_P1G.astype(float)
        entropy_N = -(chances_NG * np.log(np.maximum(chances_NG, 1e-300))).sum(axis=1)
        left = []
        for place in open_places:
            mine = np.array([owner == place for owner, _ in owners])
            expected = (weights_N[mine] @ entropy_N[mine]) / weights_N[mine].sum()
            left.append(round(float(expected), 9))  # rounded: the same everywhere
        return self.permilles[open_places[left.index(min(left))]]

    def _star_weights(self, rows: Sequence[Sequence[Tally]]) -> tuple[Array, Array]:
        """Return (N, P + 1) weights of each lambda*, summing to the evidence, and (N,) its logs."""
        start_R, move_RR = _chain()
        found = [[_likelihood(one.right, one.judged - one.right) for one in row] for row in rows]
        peak_NP = np.array([[peak for peak, _ in row] for row in found])
        seen_PNR = np.array([[seen_R for _, seen_R in row] for row in found]).swapaxes(0, 1)
        fails_PNR = np.array(
            [[_fails(one, self.num_attempts, self.tau) for one in row] for row in rows]
        ).swapaxes(0, 1)
        later_PNR = np.ones_like(seen_PNR)  # what later shares say, whatever fails before them
        for place in range(len(seen_PNR) - 2, -1, -1):
            later_PNR[place] = (seen_PNR[place + 1] * later_PNR[place + 1]) @ move_RR.T
        standing_NR = np.broadcast_to(start_R, seen_PNR[0].shape)
        weights = []
        for seen_NR, fails_NR, later_NR in zip(seen_PNR, fails_PNR, later_PNR, strict=True):
            here_NR = standing_NR * seen_NR
            weights.append((here_NR * fails_NR * later_NR).sum(axis=1))
            last_NR = here_NR * (1 - fails_NR)
            standing_NR = last_NR @ move_RR
        weights_NP1 = np.stack([*weights, last_NR.sum(axis=1)], axis=1)
        return weights_NP1, peak_NP.sum(axis=1) + np.log(weights_NP1.sum(axis=1))


@lru_cache(maxsize=1)
def _chain() -> tuple[Array, Array]:
    """Return (R,) the chances of the first rate and (R, R) from one share's rate to the next's.

    The first logit is normal around `_LEVEL`; a neighbour 0.1 further is normal around `_DRIFT`
    below it, or, with chance `_JUMP`, anywhere that the first one could be.
    """
    start_R = _normal(_LOGITS_R, _LEVEL, _LEVEL_SPREAD)
    step_RR = _normal(_LOGITS_R[None, :], (_LOGITS_R + _DRIFT)[:, None], _SPREAD)
    return start_R, (1 - _JUMP) * step_RR + _JUMP * start_R


def _normal(at: Array, mean: float | Array, deviation: float) -> Array:
    density: Array = np.exp(-(((at - mean) / deviation) ** 2) / 2)
    chances: Array = density / density.sum(axis=-1, keepdims=True)
    return chances


@lru_cache(maxsize=20_000)
def _likelihood(right: int, wrong: int) -> tuple[float, Array]:
    """Return the log of the answers' likelihood at its best level, and (R,) the rest relative."""
    log_R = right * _LOG_RIGHT_R + wrong * _LOG_WRONG_R
    peak = float(log_R.max())
    return peak, np.exp(log_R - peak)


@lru_cache(maxsize=20_000)
def _fails(tally: Tally, num_attempts: int, tau: float) -> Array:
    """Return (R,): the chance that the finished share's pass rate is below tau.

    The answers still to come are binomial; those that ended in an error will not be repeated.
    """
    judged = num_attempts - tally.errors
    allowed = math.ceil(Fraction(str(tau)) * judged) - 1 - tally.right
    ahead = num_attempts - tally.errors - tally.judged
    if allowed < 0:
        return np.zeros(NUM_RATES)
    if allowed >= ahead:
        return np.ones(NUM_RATES)
    from scipy.special import bdtr

    chances: Array = bdtr(allowed, ahead, _RATES_R)
    return chances


def _with(tally: Tally, *, right: int, judged: int) -> Tally:
    return Tally(right=tally.right + right, judged=tally.judged + judged, errors=tally.errors)


def difficulty_from_few(
    curve: Mapping[int, Tally],
    *,
    permilles: Sequence[int],
    tau: float,
    boundary: Boundary,
    num_attempts: int,
) -> Difficulty:
    """Return what the answers asked adaptively say of the whole grid.

    The stratum is the most probable one, and lambda* the most probable threshold within it.

    Args:
        curve: Masked share in 1/1000 -> counts; shares never asked may be absent.
        permilles: The whole grid, in 1/1000.
        tau: Pass rate below which the model has failed.
        boundary: Which of the paper's rules decides at 0.7.
        num_attempts: K of the grid that is predicted.
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
    grid = Grid.of(permilles, tau=tau, boundary=boundary, num_attempts=num_attempts)
    chances = grid.star_chances(curve)
    stratum, star = grid.leading(curve)
    return Difficulty(
        star_permille=None if star == NEVER else star,
        low_permille=min(star, _quantile(chances, 0.05)),
        high_permille=max(star, _quantile(chances, 0.95)),
        stratum=stratum,
        confidence=min(1.0, grid.strata_chances(curve)[stratum]),
    )


def _quantile(chances: Mapping[int, float], share: float) -> int:
    total = 0.0
    for permille in sorted(chances):
        total += chances[permille]
        if total >= share:
            return permille
    return NEVER
