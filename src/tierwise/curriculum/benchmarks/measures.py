"""Marks of items -> measures with intervals: the mean of each group, and units all right.

A mean of right-or-wrong marks has a Wilson interval, any other a bootstrap over items. Where items
come in clusters (questions about the same pictures) the Wilson interval has the number of
independent items that would vary as much. An item without a mark is left out and counted; a unit
with one counts only if another of its items is wrong already. Units are counted for all items and
by category.

Left out: comparing two models, which is `evaluate.differences`.

Source: the effective sample size in the Wilson interval, C. Franco, R. Little, T. Louis and
E. Slud, "Comparative study of confidence intervals for proportions in complex sample surveys",
Journal of Survey Statistics and Methodology 7, 2019.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tierwise.curriculum.benchmarks.items import Item, Mark
from tierwise.curriculum.difficulty.passrate import wilson_interval
from tierwise.curriculum.training.evaluate import Floats, mean_interval

ALL = "all"
_CATEGORY = "category:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number of a benchmark with its 95 % interval.

    Attributes:
        metric: What was averaged, such as `accuracy` or `fAcc`.
        group: `all`, or `kind:value`.
        num_units: Questions, figures or pairs with a mark.
        num_unmarked: Those without, left out.
        value: The mean, 0 to 1.
        low: Lower end.
        high: Upper end.
        interval: `wilson`, `bootstrap`, or `clustered wilson`.
    """

    metric: str
    group: str
    num_units: int
    num_unmarked: int
    value: float
    low: float
    high: float
    interval: str


def measures(
    items: Sequence[Item],
    marks: Mapping[str, Mark],
    *,
    metric: str,
    seed: int,
    num_resamples: int = 2000,
) -> tuple[Measure, ...]:
    """Return every measure: of all items first, then of each group in the order of their names.

    Args:
        items: The benchmark's.
        marks: By sample id; an item that is missing has none.
        metric: Name of the mean.
        seed: Draws the resamples.
        num_resamples: Of the bootstrap.
    """
    groups: dict[str, list[Item]] = {ALL: list(items)}
    for name in sorted({group for item in items for group in item.groups}):
        groups[name] = [item for item in items if name in item.groups]
    made = []
    for group, members in groups.items():
        units: dict[str, dict[str, list[Item]]] = {
            metric: {item.sample.id: [item] for item in members}
        }
        for item in members if group == ALL or group.startswith(_CATEGORY) else ():
            for name, unit in item.units:
                units.setdefault(name, defaultdict(list))[unit].append(item)
        for name, parts in sorted(units.items()):
            found = _measure(
                name, group, list(parts.values()), marks, seed=seed, num_resamples=num_resamples
            )
            made += [found] if found is not None else []
    return tuple(made)


def _measure(
    metric: str,
    group: str,
    units: Sequence[Sequence[Item]],
    marks: Mapping[str, Mark],
    *,
    seed: int,
    num_resamples: int,
) -> Measure | None:
    values = [_value([marks.get(item.sample.id) for item in unit]) for unit in units]
    known = [
        (value, unit[0].cluster)
        for value, unit in zip(values, units, strict=True)
        if not math.isnan(value)
    ]
    if not known:
        return None
    value_N = np.array([value for value, _ in known])
    if any(cluster for _, cluster in known):
        clusters = [cluster for _, cluster in known]
        low, high = cluster_interval(value_N, clusters)
        kind = "clustered wilson"
    else:
        low, high, kind = mean_interval(value_N, seed=seed, num_resamples=num_resamples)
    return Measure(
        metric=metric,
        group=group,
        num_units=len(known),
        num_unmarked=len(values) - len(known),
        value=float(value_N.mean()),
        low=low,
        high=high,
        interval=kind,
    )


def _value(marks: Sequence[Mark | None]) -> float:
    """Return a unit's value: of one item its score, of several 1 if all are right; NaN unknown."""
    scores = [mark.score for mark in marks if mark is not None]
    if len(marks) == 1:
        return scores[0] if scores else math.nan
    if any(score < 1.0 for score in scores):
        return 0.0
    return 1.0 if len(scores) == len(marks) else math.nan


def cluster_interval(value_N: Floats, clusters: Sequence[str]) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share whose values come in clusters.

    The number of values is replaced by that of independent values of the same variance, at most
    the number there is; where nothing varies, by the number of clusters.

    Args:
        value_N: 0 or 1 each.
        clusters: The cluster of each.
    """
    _, place_N = np.unique(clusters, return_inverse=True)
    share, size = float(value_N.mean()), len(value_N)
    residual_C = np.bincount(place_N, weights=value_N - share)
    num_clusters = len(residual_C)
    spread = float((residual_C**2).sum()) * num_clusters / max(1, num_clusters - 1) / size**2
    effective = float(num_clusters)
    if num_clusters > 1 and spread > 0:
        effective = min(float(size), share * (1 - share) / spread)
    return wilson_interval(share * effective, effective)
