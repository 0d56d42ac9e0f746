"""D. S. H. Rosenthal's endowment to keep a terabyte on disk for a hundred years.

A restatement of the published formula with its two quirks as switches: money in year y is worth
(1 - r) ** y rather than 1 / (1 + r) ** y, and running cost is spread over the capacity drives
would have this year rather than the one they had when bought. Left out, as in the original:
ingest, access, migration, and what is left at the end.

Source: https://github.com/dshrosenthal/EconomicModel (Apache-2.0, 2022-07-08); defaults in
facts/dshr.csv.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from tierwise.core.errors import ConfigError
from tierwise.core.facts import Fact, load_facts
from tierwise.tco.facts import FACTS_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """How the original departs from the textbook; True is as published."""

    linear_discount: bool = True
    current_capacity: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DshrConfig:
    """A run of the endowment model; None takes the published default.

    Attributes:
        model: Marks the preset as a model of its own.
        name: Name for reports.
        replication: Copies, not necessarily whole (erasure coding).
        discount_rate: Real interest earned by the endowment.
        quirks: Which quirks are on.
    """

    model: Literal["dshr"] = "dshr"
    name: str = "dshr"
    replication: float = 1.0
    discount_rate: float | None = None
    quirks: Quirks = field(default_factory=Quirks)


@lru_cache(maxsize=1)
def dshr_facts() -> Mapping[str, Fact]:
    """Return the published defaults by key."""
    return load_facts(FACTS_FOLDER / "dshr.csv")


def yearly_costs(config: DshrConfig) -> list[float]:
    """Return USD per TB for each year, before discounting."""
    value = {key: fact.value for key, fact in dshr_facts().items()}
    drive_life, slot_life = int(value["drive.life"]), int(value["slot.life"])
    spares = 1.0 + value["drive.failure"] * drive_life
    costs = []
    for year in range(int(value["horizon"])):
        capacity = value["drive.capacity"] * (1.0 + value["drive.kryder"]) ** year
        bought_year = year - year % drive_life
        bought = value["drive.capacity"] * (1.0 + value["drive.kryder"]) ** bought_year
        running = value["run.cost"] * (1.0 + value["run.rate"]) ** year
        cost = running / (capacity if config.quirks.current_capacity else bought)
        if year % drive_life == 0:
            cost += value["drive.price"] * spares / capacity
        if year % slot_life == 0:
            cost += value["slot.price"] / capacity
        costs.append(cost * config.replication)
    return costs


def endowment_usd_per_tb(config: DshrConfig) -> float:
    """Return the endowment per terabyte.

    >>> round(endowment_usd_per_tb(DshrConfig()), 2)
    324.88

    Raises:
        ConfigError: A parameter out of range.
    """
    rate = config.discount_rate
    if rate is None:
        rate = dshr_facts()["finance.discount"].value
    if not -0.5 <= rate < 1.0:
        raise ConfigError(f"discount_rate = {rate:g} must be at least -0.5 and below 1")
    if not 0.0 < config.replication <= 1000.0:
        raise ConfigError(f"replication = {config.replication:g} must be above 0, at most 1000")
    total = 0.0
    for year, cost in enumerate(yearly_costs(config)):
        linear = config.quirks.linear_discount
        total += cost * ((1.0 - rate) ** year if linear else (1.0 + rate) ** -year)
    return total
