"""Adaptive PISM: ask where an answer can still change the stratum, and stop when none can.

The paper asks K times at every masked share, whatever the answers were. Here the answers so far
give, for each share, the probability that a large experiment would find the model failing there
(a Beta posterior with Jeffreys' prior); from these follow the probabilities of the strata, which
are what selection uses. Each round asks a few more answers of every undecided sample at the share
where its stratum is most in doubt. A sample is done when one stratum is probable enough, or when
its budget is spent.

The strata mean what they mean on the full grid, first crossing and all: the model has failed at
the least share whose posterior says so. Shares beyond the last limit (0.7 in the text) cannot
change a stratum and are not asked. Rounds depend on logged answers alone, so a resumed run goes
the same way.

Left out: sharing strength between samples; a monotone curve is not assumed, because measured
curves rise again where guessing sets in (see `fit` for that reading).

Source: our own; compare A. Wald, "Sequential tests of statistical hypotheses", Annals of
Mathematical Statistics 16, 1945.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tierwise.curriculum.attempts import AttemptKey, Probe
from tierwise.curriculum.passrate import Tally
from tierwise.curriculum.pism import Boundary, Difficulty, Stratum, stratum_of
from tierwise.curriculum.probes import Desk
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.verdicts import Verdict

NEVER = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """When to stop.

    Attributes:
        step: Answers asked of a sample in one round.
        confidence: Probability of the leading stratum at which a sample is done.
        budget: Most answers spent on one sample.
    """

    step: int = 5
    confidence: float = 0.97
    budget: int = 300


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
                permille=most_in_doubt(curves[identity], tau=tau, boundary=boundary),
                step=rule.step,
            )
        ]
        desk.run(keys, name=f"adaptive round {round_number}")
        for key in keys:
            _count(curves[key.sample_id], key.mask_permille, desk.log.verdict(key))
        asked += keys
        open_ids = [
            identity for identity in open_ids if not _done(curves[identity], tau, boundary, rule)
        ]
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


def _done(curve: Mapping[int, Tally], tau: float, boundary: Boundary, rule: Adaptive) -> bool:
    spent = sum(tally.judged + tally.errors for tally in curve.values())
    if spent >= rule.budget or any(tally.errors >= 2 * rule.step for tally in curve.values()):
        return True
    chances = strata_chances(curve, tau=tau, boundary=boundary)
    return curve[0].judged > 0 and max(chances.values()) >= rule.confidence


def most_in_doubt(curve: Mapping[int, Tally], *, tau: float, boundary: Boundary) -> int:
    """Return the share at which knowing more would tell most about the stratum.

    It is the share with the largest expected drop in the strata's entropy if it were known for
    certain whether the model fails there.
    """
    fails = {permille: chance_failing(tally, tau=tau) for permille, tally in curve.items()}
    now = _entropy(_strata(fails, boundary).values())

    def gain(permille: int) -> float:
        after = 0.0
        for outcome, chance in ((1.0, fails[permille]), (0.0, 1.0 - fails[permille])):
            known = {**fails, permille: outcome}
            after += chance * _entropy(_strata(known, boundary).values())
        return now - after

    return max(sorted(curve), key=gain)


def strata_chances(
    curve: Mapping[int, Tally], *, tau: float, boundary: Boundary
) -> dict[Stratum, float]:
    """Return the probability of each stratum in a large experiment, given the answers so far."""
    fails = {permille: chance_failing(tally, tau=tau) for permille, tally in curve.items()}
    return _strata(fails, boundary)


def _strata(fails: Mapping[int, float], boundary: Boundary) -> dict[Stratum, float]:
    chances = dict.fromkeys((Stratum.UNSOLVED, Stratum.HARD, Stratum.MEDIUM, Stratum.EASY), 0.0)
    standing = 1.0
    for permille in sorted(fails):
        chances[stratum_of(permille, boundary=boundary)] += standing * fails[permille]
        standing *= 1.0 - fails[permille]
    chances[Stratum.EASY] += standing
    return chances


def _entropy(chances: object) -> float:
    return -sum(chance * math.log(chance) for chance in chances if chance > 0)  # type: ignore[attr-defined]


def chance_failing(tally: Tally, *, tau: float) -> float:
    """Return the posterior probability that the true pass rate is below tau."""
    return _chance_failing(tally.right, tally.judged, tau)


@lru_cache(maxsize=1 << 14)
def _chance_failing(right: int, judged: int, tau: float) -> float:
    from scipy.special import betainc

    return float(betainc(right + 0.5, judged - right + 0.5, tau))


def difficulty_from_few(
    curve: Mapping[int, Tally], *, tau: float, boundary: Boundary
) -> Difficulty:
    """Return what the answers asked adaptively say of a sample.

    The stratum is the most probable one, and lambda* the most probable threshold within it.

    Args:
        curve: Masked share in 1/1000 -> counts; shares never asked may be absent.
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
    chances: dict[int, float] = {}
    standing = 1.0
    for permille in sorted(curve):
        fails = chance_failing(curve[permille], tau=tau)
        chances[permille] = standing * fails
        standing *= 1.0 - fails
    chances[NEVER] = standing

    def of(permille: int) -> Stratum:
        return stratum_of(None if permille == NEVER else permille, boundary=boundary)

    strata = strata_chances(curve, tau=tau, boundary=boundary)
    stratum = max(strata, key=lambda one: strata[one])
    star = max((one for one in chances if of(one) is stratum), key=lambda one: chances[one])
    cumulative = 0.0
    bounds = []
    for permille in sorted(chances):
        before, cumulative = cumulative, cumulative + chances[permille]
        bounds += [permille] * ((before < 0.05 <= cumulative) + (before < 0.95 <= cumulative))
    return Difficulty(
        star_permille=None if star == NEVER else star,
        low_permille=bounds[0] if bounds else 0,
        high_permille=bounds[-1] if len(bounds) > 1 else NEVER,
        stratum=stratum,
        confidence=min(1.0, strata[stratum]),
    )
