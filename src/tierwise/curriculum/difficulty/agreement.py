"""Do two readings of difficulty agree: between probes, between seeds, between boundaries.

Cohen's kappa for strata, with and without weights for their order, and Spearman's rank correlation
for the measures behind them. Samples that are an error in either reading are left out and counted.

Source: J. Cohen, "A coefficient of agreement for nominal scales", Educational and Psychological
Measurement 20, 1960, and "Weighted kappa", Psychological Bulletin 70, 1968; C. Spearman, "The
proof and measurement of association between two things", American Journal of Psychology 15, 1904.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tierwise.core.report import Table
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.difficulty.scores import Score

_ORDER = (Stratum.EASY, Stratum.MEDIUM, Stratum.HARD, Stratum.UNSOLVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two readings agree.

    Attributes:
        first: Name of one reading.
        second: Name of the other.
        num_samples: Samples that have a stratum in both.
        same: Share of them with the same stratum.
        kappa: Cohen's kappa; None when either reading has one stratum only.
        weighted_kappa: The same with linear weights for easy < medium < hard < unsolved.
        rank_correlation: Spearman's rho of the measures, or None where it is undefined.
    """

    first: str
    second: str
    num_samples: int
    same: float | None
    kappa: float | None
    weighted_kappa: float | None
    rank_correlation: float | None


def agreement(
    first: Sequence[Stratum],
    second: Sequence[Stratum],
    *,
    measures: tuple[Sequence[float | None], Sequence[float | None]] | None = None,
    names: tuple[str, str] = ("first", "second"),
) -> Agreement:
    """Return how far two readings of the same samples agree.

    Args:
        first: Strata of each sample, by one reading.
        second: By the other, in the same order.
        measures: The numbers behind them; samples where either is None are left out of the rank
            correlation.
        names: What the readings are called.
    """
    pairs = [
        (_ORDER.index(one), _ORDER.index(other))
        for one, other in zip(first, second, strict=True)
        if one in _ORDER and other in _ORDER
    ]
    same = sum(one == other for one, other in pairs) / len(pairs) if pairs else None
    return Agreement(
        first=names[0],
        second=names[1],
        num_samples=len(pairs),
        same=same,
        kappa=kappa(pairs),
        weighted_kappa=kappa(pairs, weighted=True),
        rank_correlation=None if measures is None else rank_correlation(*measures),
    )


def kappa(pairs: Sequence[tuple[int, int]], *, weighted: bool = False) -> float | None:
    """Return Cohen's kappa of pairs of classes; None where chance alone would agree.

    >>> kappa([(0, 0), (1, 1), (0, 1), (1, 0)]), kappa([(0, 0), (0, 0)])
    (0.0, None)
    """
    if not pairs:
        return None

    def distance(one: int, other: int) -> float:
        return float(abs(one - other)) if weighted else float(one != other)

    seen = sum(distance(one, other) for one, other in pairs) / len(pairs)
    by_chance = sum(distance(one, other) for one, _ in pairs for _, other in pairs)
    expected = by_chance / len(pairs) ** 2
    return None if expected == 0 else 1.0 - seen / expected


def rank_correlation(first: Sequence[float | None], second: Sequence[float | None]) -> float | None:
    """Return Spearman's rho over the places where both have a value; ties share their rank."""
    both = [
        (one, other)
        for one, other in zip(first, second, strict=True)
        if one is not None and other is not None
    ]
    if len(both) < 3:
        return None
    ranks = [_ranks([pair[side] for pair in both]) for side in (0, 1)]
    means = [sum(one) / len(one) for one in ranks]
    left, right = ([value - mean for value in one] for one, mean in zip(ranks, means, strict=True))
    spread = math.sqrt(sum(one * one for one in left) * sum(one * one for one in right))
    if spread == 0:
        return None
    return sum(one * other for one, other in zip(left, right, strict=True)) / spread


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda place: values[place])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            ranks[place] = (start + end) / 2
        start = end + 1
    return ranks


def between_probes(rows: Sequence[Score]) -> tuple[Agreement, ...]:
    """Return how far PISM, CMAB and their readings agree on one run's samples."""
    stars = [_star(row) for row in rows]
    ratios = [row.cmab_mean if row.greedy_right else None for row in rows]
    rates = [row.pass_rate for row in rows]
    pism = [row.pism_stratum for row in rows]
    readings: list[tuple[str, list[Stratum], list[float | None]]] = [
        ("CMAB, paper's limits", [row.cmab_stratum for row in rows], ratios),
        ("CMAB, quantiles", [row.cmab_quantile_stratum for row in rows], ratios),
        ("PISM above guessing", [row.pism_stratum_corrected for row in rows], rates),
    ]
    trees = [row.r_score for row in rows]
    if any(score is not None for score in trees):
        readings.append(("r-score, thirds", [row.rscore_stratum for row in rows], trees))
    return tuple(
        agreement(pism, strata, measures=(stars, numbers), names=("PISM", name))
        for name, strata, numbers in readings
    )


def between_runs(first: Sequence[Score], second: Sequence[Score]) -> Agreement:
    """Return how far two runs of PISM agree, for instance under two seeds."""
    by_id = {row.id: row for row in second}
    pairs = [(row, by_id[row.id]) for row in first if row.id in by_id]
    return agreement(
        [one.pism_stratum for one, _ in pairs],
        [other.pism_stratum for _, other in pairs],
        measures=([_star(one) for one, _ in pairs], [_star(other) for _, other in pairs]),
        names=("first run", "second run"),
    )


def _star(row: Score) -> float | None:
    """Return lambda* with "never" as 1, or None for an error."""
    if row.pism_stratum is Stratum.ERROR:
        return None
    return 1.0 if row.lambda_star is None else row.lambda_star


def agreement_table(found: Sequence[Agreement]) -> Table:
    """Return agreements as a table for a report."""

    def show(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return Table(
        caption="Agreement between readings of difficulty; kappa is 0 for chance and 1 for full "
        "agreement; the rank correlation is of lambda* with the attention balance "
        "(or pass rate, or r-score)",
        header=("between", "and", "samples", "same", "kappa", "weighted", "rank corr."),
        rows=tuple(
            (
                one.first,
                one.second,
                str(one.num_samples),
                show(one.same),
                show(one.kappa),
                show(one.weighted_kappa),
                show(one.rank_correlation),
            )
            for one in found
        ),
    )
