"""Pass rates with their intervals: how often the model is right, and how sure that is.

Errors are not attempts: they are left out of both counts. Left out: pass@k estimators.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Right answers among judged ones, and errors beside them."""

    right: int
    judged: int
    errors: int = 0

    @property
    def rate(self) -> float | None:
        """Return the share of right answers, or None when nothing was judged."""
        return self.right / self.judged if self.judged else None


def wilson_interval(
    right: float, judged: float, *, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion; (0, 1) when nothing was judged.

    Counts need not be whole: an effective number of independent values may stand for them.

    >>> tuple(round(bound, 4) for bound in wilson_interval(0, 10))
    (0.0, 0.2775)

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    JASA 22, 1927.
    """
    from statistics import NormalDist

    if judged == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = right / judged
    scale = 1 + z * z / judged
    centre = (rate + z * z / (2 * judged)) / scale
    half = z * (rate * (1 - rate) / judged + z * z / (4 * judged * judged)) ** 0.5 / scale
    low = 0.0 if right == 0 else max(0.0, centre - half)
    return low, 1.0 if right == judged else min(1.0, centre + half)


def jeffreys_interval(right: int, judged: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Return the equal-tailed interval of a proportion under Jeffreys' prior Beta(1/2, 1/2).

    Source: L. D. Brown, T. T. Cai and A. DasGupta, "Interval estimation for a binomial
    proportion", Statistical Science 16, 2001, section 3.1.2, with its rule for 0 and all.
    """
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    first, second = right + 0.5, judged - right + 0.5
    low = 0.0 if right == 0 else float(betaincinv(first, second, tail))
    high = 1.0 if right == judged else float(betaincinv(first, second, 1 - tail))
    return low, high
