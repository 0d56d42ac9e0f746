"""A monotone curve through noisy pass rates, and a tau that allows for guessing.

P_c(lambda) should not rise with the masked share; measured on few answers it does, and the first
crossing of tau is then mostly noise. The monotone fit pools neighbours until the curve falls. A
question that can be guessed in a share g of tries never falls below g: the corrected tau asks for
tau of what is left above guessing. Both are ours, not the paper's, and stand beside its lambda*.

Source: M. Ayer et al., "An empirical distribution function for sampling with incomplete
information", Annals of Mathematical Statistics 26, 1955 (pool adjacent violators); W. S. Abbott,
"A method of computing the effectiveness of an insecticide", J. Econ. Entomol. 18, 1925 (the
correction for a floor).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from tierwise.curriculum.difficulty.passrate import Tally


def monotone_rates(curve: Mapping[int, Tally]) -> dict[int, Fraction]:
    """Return the falling curve nearest to the pass rates, weighted by their counts.

    Args:
        curve: Masked share in 1/1000 -> counts; shares with nothing judged are left out.

    >>> rates = monotone_rates({0: Tally(right=9, judged=10), 100: Tally(right=0, judged=10),
    ...     200: Tally(right=4, judged=10)})
    >>> [str(rate) for rate in rates.values()]
    ['9/10', '1/5', '1/5']
    """
    blocks: list[tuple[int, int, list[int]]] = []
    for permille in sorted(curve):
        right, judged, members = curve[permille].right, curve[permille].judged, [permille]
        if judged == 0:
            continue
        while blocks and blocks[-1][0] * judged < right * blocks[-1][1]:
            above = blocks.pop()
            right, judged, members = right + above[0], judged + above[1], above[2] + members
        blocks.append((right, judged, members))
    return {
        permille: Fraction(right, judged)
        for right, judged, members in blocks
        for permille in members
    }


def monotone_threshold(curve: Mapping[int, Tally], *, tau: float) -> int | None:
    """Return the least masked share whose monotone pass rate is below tau, or None."""
    limit = Fraction(str(tau))
    return next(
        (permille for permille, rate in monotone_rates(curve).items() if rate < limit), None
    )


def corrected_tau(tau: float, floor: Tally) -> float:
    """Return the tau that is as far above guessing as `tau` is above nothing.

    Args:
        tau: The uncorrected pass rate below which the model has failed.
        floor: Answers to the question without its picture; with none judged tau stays.

    >>> corrected_tau(0.1, Tally(right=5, judged=20))
    0.325
    """
    if floor.judged == 0:
        return tau
    return float(
        round(
            Fraction(floor.right, floor.judged) * (1 - Fraction(str(tau))) + Fraction(str(tau)), 9
        )
    )
