"""What a unit bought in a given year holds, costs, draws, and how long it stays.

Capacity grows at its own rate up to a ceiling, and the unit price follows from the decline of
the price per TB; keeping the two apart lets a price per TB rise. The life of a unit is the
least of the medium's own, the read-back rule (drives that read its generation are sold for so
long and kept alive for so long), the end of reader production, and the tier's end. Left out:
re-reading a generation on second-hand drives.

Legend: T years, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierwise.tco.inputs import Array, Point
from tierwise.tco.scenario import Scenario, Tier

LONGEST_LIFE_YEARS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Vintages:
    """One row a year bought (all TS): TB and USD a unit, whole years of life, watts."""

    capacity_TS: Array
    price_TS: Array
    life_TS: NDArray[np.int64]
    watts_TS: Array


def vintages_of(scenario: Scenario, tier: Tier, point: Point, num_samples: int) -> Vintages:
    """Return what a tier's units are, by year bought."""
    years_T1 = np.arange(scenario.horizon_years, dtype=np.float64)[:, None]
    zeros = np.zeros((scenario.horizon_years, num_samples))
    medium = tier.medium
    watts_TS = point[f"{medium}.power"] * (1.0 + point[f"{medium}.power_rate"]) ** years_T1
    return Vintages(
        capacity_TS=zeros + _capacity(medium, point, years_T1),
        price_TS=zeros + _unit_price(scenario, medium, point, years_T1),
        life_TS=whole_life(tier, _life(scenario, medium, point, years_T1) + zeros),
        watts_TS=zeros + watts_TS,
    )


def whole_life(tier: Tier, life_TS: Array) -> NDArray[np.int64]:
    """Return lives as whole years, at least one, none past the end of the tier."""
    years_T1 = np.arange(life_TS.shape[0], dtype=np.float64)[:, None]
    whole_TS = np.maximum(np.floor(life_TS + 0.5), 1.0)
    if tier.until_year is not None:
        whole_TS = np.minimum(whole_TS, np.maximum(tier.until_year - years_T1, 1.0))
    return np.minimum(whole_TS, LONGEST_LIFE_YEARS).astype(np.int64)


def _capacity(medium: str, point: Point, years_T1: Array) -> Array:
    """Return TB per unit by year bought: growth up to a ceiling."""
    start = point[f"{medium}.capacity"]
    grown_TS = start * (1.0 + point[f"{medium}.capacity_rate"]) ** years_T1
    ceiling = np.maximum(point[f"{medium}.ceiling"], start)
    capped_TS: Array = np.minimum(grown_TS, ceiling)
    return capped_TS


def _unit_price(scenario: Scenario, medium: str, point: Point, years_T1: Array) -> Array:
    """Return USD per unit by year: the price per TB declines while capacity grows.

    The unit price rate e follows from 1 - decline = (1 + e) / (1 + capacity rate). Past the
    ceiling a rate above 0 stops, unless the price per TB was rising anyway.
    """
    decline, growth = point[f"{medium}.decline"], point[f"{medium}.capacity_rate"]
    start, ceiling = point[f"{medium}.capacity"], point[f"{medium}.ceiling"]
    rate = (1.0 - decline) * (1.0 + growth) - 1.0
    rising = growth > 1e-9
    headroom = np.log(np.maximum(ceiling / start, 1.0)) / np.log1p(np.where(rising, growth, 1.0))
    until = np.where(rising, headroom, np.inf)
    past_rate = np.minimum(rate, np.maximum(-decline, 0.0))
    before_TS = np.minimum(years_T1, until)
    past_TS = np.maximum(years_T1 - until, 0.0)
    price_TS: Array = (
        point[f"{medium}.price"] * start * (1.0 + rate) ** before_TS * (1.0 + past_rate) ** past_TS
    )
    for shock in scenario.shocks:
        if medium in shock.media:
            hit_T1 = (years_T1 >= shock.year) & (years_T1 < shock.year + shock.years)
            price_TS = price_TS * np.where(hit_T1, shock.factor, 1.0)
    return price_TS


def _life(scenario: Scenario, medium: str, point: Point, years_T1: Array) -> Array:
    """Return years a unit bought in each year stays, the tier's end apart."""
    life_TS = np.floor(point[f"{medium}.life"] + 0.5) + 0.0 * years_T1
    reader_life = point[f"{medium}.reader_life"]
    gap, back = point[f"{medium}.generation_gap"], point[f"{medium}.read_back"]
    elapsed = point[f"{medium}.elapsed"]
    has_rule = gap > 0
    safe_gap = np.where(has_rule, gap, 1.0)
    generation_TS = np.floor((years_T1 + elapsed) / safe_gap + 1e-9)
    sold_until_TS = (generation_TS + 1.0 + np.floor(back + 0.5)) * safe_gap - elapsed
    readable_TS = np.floor(sold_until_TS - years_T1 + reader_life + 1e-9)
    life_TS = np.where(has_rule, np.minimum(life_TS, readable_TS), life_TS)
    for event in scenario.end_of_line:
        if event.medium == medium and event.reader_year is not None:
            left_TS = np.floor(event.reader_year + reader_life - years_T1 + 1e-9)
            life_TS = np.minimum(life_TS, left_TS)
    return life_TS
