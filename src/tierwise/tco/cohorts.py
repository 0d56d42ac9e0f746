"""A need per year -> whole units bought, their vintages, retirements and spares.

Every component of a store is such a population: media by capacity, slots, readers and racks by
count. A cohort is what was bought in one year; it keeps its own capacity, power and price, and
leaves as a whole when its life ends. Nothing is bought for a year at or past the horizon, so a
medium that lasts exactly as long as the scenario is never replaced.

Failures are spares bought beside the cohorts: a failed unit's successor takes its place and its
end of life, so a failure and an end of life never pay for the same unit twice. Expected
failures add up over years and whole spares are bought as they reach one. Left out: the age of a
unit in its failure rate (a bathtub curve), and buying ahead of need.

Legend: T years, S samples. Amounts are in the unit of the need (TB, slots, readers, kW).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierwise.tco.inputs import Array

# what rounding may lose, relative to the need: seven units of 0.1 TB cover 0.7 TB, and yet the
# smallest need of all takes one whole unit
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohorts:
    """What happened to one population, by year and sample (all arrays TS).

    Attributes:
        bought: Whole units bought, spares apart.
        growth_share: Part of `bought` that growth asked for; the rest replaces.
        retired: Units that left at the start of the year.
        retired_share: The amount that left over the amount that was there.
        installed: Units in service after buying.
        installed_weight: Sum of the weights (watts, purchase price) of installed units.
        retired_weight: Sum of the weights of units that left this year.
        spares: Whole units bought because others failed.
    """

    bought: Array
    growth_share: Array
    retired: Array
    retired_share: Array
    installed: Array
    installed_weight: Array
    retired_weight: Array
    spares: Array


def run_cohorts(
    need_TS: Array, per_unit_TS: Array, life_TS: NDArray[np.int64], weight_TS: Array, afr_S: Array
) -> Cohorts:
    """Return the history of a population that always covers its need with whole units.

    Args:
        need_TS: Amount needed each year.
        per_unit_TS: Amount one unit bought that year holds.
        life_TS: Years a unit bought that year stays; at least 1.
        weight_TS: What to add up over installed units, by year bought (watts, dollars).
        afr_S: Failures a year and unit.
    """
    num_years, num_samples = need_TS.shape
    out = Cohorts(**{name: np.zeros((num_years, num_samples)) for name in Cohorts.__slots__})
    leaving_amount = np.zeros((num_years, num_samples))
    leaves_TS = np.arange(num_years)[:, None] + life_TS
    may_fail = bool(np.any(afr_S > 0))
    units, amount, weight, failures, before = (np.zeros(num_samples) for _ in range(5))
    for year in range(num_years):
        need, per_unit = need_TS[year], per_unit_TS[year]
        retired, gone = out.retired[year], leaving_amount[year]
        if retired.any():
            np.divide(gone, amount, out=out.retired_share[year], where=amount > 0)
            units = units - retired
            some = units > 0
            weight = np.where(some, weight - out.retired_weight[year], 0.0)
            amount = np.where(some, amount - gone, 0.0)
        gap = need - amount
        gap = np.where(gap > ROUNDING * need, gap, 0.0)
        bought = out.bought[year]
        np.ceil(gap / per_unit * (1.0 - ROUNDING), out=bought)
        if bought.any():
            growth = np.minimum(gap, np.maximum(need - before, 0.0))
            np.divide(growth, gap, out=out.growth_share[year], where=gap > 0)
            added, heavier = bought * per_unit, bought * weight_TS[year]
            retirements = (out.retired, out.retired_weight, leaving_amount)
            _schedule(leaves_TS[year], retirements, (bought, heavier, added))
            units, amount, weight = units + bought, amount + added, weight + heavier
        if may_fail:
            failures += afr_S * units
            spares = out.spares[year]
            np.floor(failures + ROUNDING, out=spares)
            failures -= spares
        out.installed[year], out.installed_weight[year] = units, weight
        before = need
    return out


def _schedule(
    leaves: NDArray[np.int64], retirements: tuple[Array, ...], amounts: tuple[Array, ...]
) -> None:
    """Add what was bought to the year each sample's cohort leaves; past the horizon it stays."""
    num_years = retirements[0].shape[0]
    if (leaves == leaves[0]).all():  # one row for all samples: no scattering
        if leaves[0] < num_years:
            for held_TS, amount in zip(retirements, amounts, strict=True):
                held_TS[leaves[0]] += amount
        return
    stays = np.flatnonzero(leaves < num_years)
    at = (leaves[stays], stays)
    for held_TS, amount in zip(retirements, amounts, strict=True):
        held_TS[at] += amount[stays]
