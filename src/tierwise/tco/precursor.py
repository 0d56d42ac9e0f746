"""The public 2017 model that LT-TCO very probably grew out of, each defect a switch.

A restatement from facts and formulas, not a port: the original has no licence and none of its
code is here. With all defects on, it gives the published totals to four digits and more; taking
them off one by one shows what the claims "migration exceeds 96 % of operational expenditure"
and "optical is cheapest" rest on. The history that the original replays as future inflation is
the US consumer price index of 1967-2016 in yearly steps rounded to a tenth of a per cent.

Left out: its ninth defect, a rack count remembered between methods, which functions without
state cannot have; and its thirteenth, a flat price for migration, which is an input here.

Source: parameters of https://github.com/sfireworks/Data-center-TCO-calculation-model (2017-10-23);
W. Yan et al., LT-TCO, IEEE NAS 2019, abstract.

Legend: y is a year from 0; money is the original's, of 2017 and of no stated currency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Literal

from tierwise.core.errors import ConfigError
from tierwise.core.facts import Fact, load_facts
from tierwise.tco.facts import FACTS_FOLDER, load_fact_set
from tierwise.tco.ledger import CashFlow, Category, Cause, Ledger

MEDIA = ("disc", "hdd", "ssd", "tape")
FIRST_INFLATION_YEAR = 1966


@dataclass(frozen=True, slots=True, kw_only=True)
class Defects:
    """The published model's defects; True is as published.

    Attributes:
        kwh_unit: A W-year is 87.6 kWh instead of 8.76.
        server_power_lost: A server draws 1 W, whatever is in it.
        pue_plus_one: Energy is multiplied by 1 + PUE.
        misspelt_names: Floor area is 1 m2 in all, cooling and the switch cost 1 a rack.
        fence_post: Years run from 0 to T inclusive, so a medium of life T is replaced at T.
        tied_lives: Servers are replaced only in years in which media are.
        this_years_racks: Old media are counted at this year's capacity.
        no_ceiling: Capacity grows past the stated ceiling.
        binary_petabyte: A PB has 1024 TB while media are decimal.
        history_as_future: Prices follow the inflation of 1967-2016, undiscounted.
        fractional_racks: Racks come in fractions.
    """

    kwh_unit: bool = True
    server_power_lost: bool = True
    pue_plus_one: bool = True
    misspelt_names: bool = True
    fence_post: bool = True
    tied_lives: bool = True
    this_years_racks: bool = True
    no_ceiling: bool = True
    binary_petabyte: bool = True
    history_as_future: bool = True
    fractional_racks: bool = True


NO_DEFECTS = Defects(**{item.name: False for item in fields(Defects)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecursorConfig:
    """A run of the precursor; None takes the published parameter.

    Attributes:
        model: Marks the preset as a model of its own.
        name: Name for reports.
        defects: Which defects are on.
        decline: Yearly price decline of media (published 0.4, alternative 0.05).
        migration_usd_tb: Price of moving a TB (published 600).
        library: The published tape rack of 32 slots and 24 drives, or 1,000 slots and 10.
    """

    model: Literal["precursor"] = "precursor"
    name: str = "precursor-2017"
    defects: Defects = field(default_factory=Defects)
    decline: float | None = None
    migration_usd_tb: float | None = None
    library: Literal["published", "sane"] = "published"


@lru_cache(maxsize=1)
def precursor_facts() -> Mapping[str, Fact]:
    """Return the published parameters by key."""
    return load_facts(FACTS_FOLDER / "precursor_2017.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rack:
    """One medium's parameters, by the names of facts/precursor_2017.csv."""

    price: float
    capacity: float
    life: float
    rate: float
    afr: float
    decline: float
    capacity_rate: float
    power: float
    units_per_server: float
    readers: float
    reader_price: float
    server_life: float
    server_price: float
    server_power: float
    servers_per_rack: float
    rack_power: float
    idle: float
    cooling: float
    ceiling: float


def _rack(medium: str, config: PrecursorConfig) -> _Rack:
    facts = precursor_facts()
    rack = _Rack(**{item.name: facts[f"{medium}.{item.name}"].value for item in fields(_Rack)})
    if config.decline is not None:
        rack = replace(rack, decline=config.decline)
    if medium == "tape" and config.library == "sane":
        rack = replace(
            rack,
            units_per_server=facts["sane_library.units_per_server"].value,
            readers=facts["sane_library.readers"].value,
        )
    return rack


@lru_cache(maxsize=1)
def inflation_history() -> tuple[float, ...]:
    """Return the cumulative inflation the original replays: 51 entries from 1 to 7.408.

    Source: US CPI-U annual averages 1966-2016, yearly steps rounded to 0.1 %.
    """
    index = load_fact_set().price_index
    level, levels = 1.0, [1.0]
    for year in range(FIRST_INFLATION_YEAR + 1, FIRST_INFLATION_YEAR + 51):
        level *= 1.0 + round(index[year] / index[year - 1] - 1.0, 3)
        levels.append(level)
    return tuple(levels)


def run_precursor(medium: str, config: PrecursorConfig) -> Ledger:
    """Return every cash flow of one medium's data centre.

    The original's five columns are sums over tags: infrastructure is category building, energy
    is energy, maintenance is maintenance and project (migration), IT is it.

    Args:
        medium: disc, hdd, ssd or tape.
        config: Defects and parameters.

    Raises:
        ConfigError: A parameter out of range.
    """
    if config.decline is not None and not -1.0 <= config.decline < 1.0:
        raise ConfigError(f"decline = {config.decline:g} must be at least -1 and below 1")
    if config.migration_usd_tb is not None and not 0.0 <= config.migration_usd_tb <= 1e9:
        price = config.migration_usd_tb
        raise ConfigError(f"migration_usd_tb = {price:g} must be 0 to 1e9")
    horizon = int(precursor_facts()["horizon"].value)
    last = horizon + 1 if config.defects.fence_post else horizon
    entries = []
    for year in range(last):
        factor = inflation_history()[year] if config.defects.history_as_future else 1.0
        for category, cause, amount in _year(medium, config, year):
            if amount:
                entries.append((year, category, cause, amount * factor))
    return Ledger(
        strategy=medium,
        horizon_years=last,
        rows=tuple(
            CashFlow(
                row=number,
                strategy=medium,
                medium=medium,
                year=year,
                category=category,
                cause=cause,
                amount_usd=amount,
            )
            for number, (year, category, cause, amount) in enumerate(entries, start=1)
        ),
    )


def _year(medium: str, config: PrecursorConfig, year: int) -> list[tuple[Category, Cause, float]]:
    facts, defects, rack = precursor_facts(), config.defects, _rack(medium, config)
    data_tb = facts["data.size"].value * (1024.0 if defects.binary_petabyte else 1000.0)
    first = _num_racks(rack, defects, data_tb, 0)
    bought = _num_racks(rack, defects, data_tb, year)
    installed = bought
    if not defects.this_years_racks:
        installed = _num_racks(rack, defects, data_tb, year - year % int(rack.life))
    again = Cause.REPLACEMENT if year else Cause.INITIAL
    flows = [
        (Category.ENERGY, Cause.RUN, _energy(rack, defects, installed)),
        (Category.IT, Cause.FAILURE, rack.afr * installed * _rack_price(rack, defects, year)),
        (Category.IT, again, _purchases(rack, defects, year, bought, installed)),
    ]
    if year % int(facts["site.build_life"].value) == 0:
        flows.append((Category.BUILDING, again, _building(rack, defects, first)))
    if year > 0:
        price = facts["migration.price"].value
        if config.migration_usd_tb is not None:
            price = config.migration_usd_tb
        moved = rack.afr * data_tb + (data_tb if year % int(rack.life) == 0 else 0.0)
        people = installed * facts["staff.per_rack"].value * facts["staff.wage"].value
        flows.append((Category.MAINTENANCE, Cause.RUN, people))
        flows.append((Category.PROJECT, Cause.MIGRATION, moved * price))
    return flows


def _num_racks(rack: _Rack, defects: Defects, data_tb: float, year: int) -> float:
    capacity = rack.capacity * (1.0 + rack.capacity_rate) ** year
    if not defects.no_ceiling:
        capacity = min(capacity, rack.ceiling)
    racks = data_tb / (capacity * rack.units_per_server * rack.servers_per_rack)
    return racks if defects.fractional_racks else float(math.ceil(racks))


def _energy(rack: _Rack, defects: Defects, racks: float) -> float:
    facts = precursor_facts()
    server_w = 1.0
    if not defects.server_power_lost:
        server_w = rack.server_power + rack.units_per_server * rack.power
    watts = rack.rack_power + rack.servers_per_rack * server_w
    use = facts["power.use"].value
    load = use + (1.0 - use) * rack.idle
    pue = facts["power.pue"].value + (1.0 if defects.pue_plus_one else 0.0)
    kwh_per_w_year = 87.6 if defects.kwh_unit else 8.76
    return racks * watts * load * pue * kwh_per_w_year * facts["power.tariff"].value


def _frame_price(defects: Defects) -> float:
    facts = precursor_facts()
    switch = 1.0 if defects.misspelt_names else facts["rack.switch"].value
    return facts["rack.controller"].value + switch


def _rack_price(rack: _Rack, defects: Defects, year: int) -> float:
    """Return the price of one rack's contents in a year, parts only in years of their own life."""
    server = rack.units_per_server * rack.price * (1.0 - rack.decline) ** year
    server += rack.readers * rack.reader_price
    if year % int(rack.server_life) == 0:
        server += rack.server_price
    frame_life = int(precursor_facts()["rack.life"].value)
    frame = _frame_price(defects) if year % frame_life == 0 else 0.0
    return rack.servers_per_rack * server + frame


def _purchases(rack: _Rack, defects: Defects, year: int, bought: float, installed: float) -> float:
    """Return what is bought for end of life: media, readers, servers, frames."""
    if year % int(rack.life) == 0:
        return bought * _rack_price(rack, defects, year)
    if defects.tied_lives:
        return 0.0
    amount = 0.0
    if year % int(rack.server_life) == 0:
        amount += installed * rack.servers_per_rack * rack.server_price
    if year % int(precursor_facts()["rack.life"].value) == 0:
        amount += installed * _frame_price(defects)
    return amount


def _building(rack: _Rack, defects: Defects, racks: float) -> float:
    """Return building and cooling, sized for the racks of the first year."""
    facts = precursor_facts()
    area_m2 = 1.0 if defects.misspelt_names else racks * facts["site.rack_area"].value
    cooling = 1.0 if defects.misspelt_names else rack.cooling
    return area_m2 * facts["site.build_area"].value + racks * cooling


COLUMNS: dict[str, frozenset[Category]] = {
    "infrastructure": frozenset({Category.BUILDING}),
    "energy": frozenset({Category.ENERGY}),
    "maintenance": frozenset({Category.MAINTENANCE, Category.PROJECT}),
    "it": frozenset({Category.IT}),
}


def five_columns(ledger: Ledger) -> list[dict[str, float]]:
    """Return the original's table: year, four cost columns and their total."""
    columns = {
        name: ledger.by_year(lambda row, c=categories: row.category in c)  # type: ignore[misc]
        for name, categories in COLUMNS.items()
    }
    total = ledger.by_year()
    return [
        {"year": float(year), **{name: column[year] for name, column in columns.items()},
         "total": total[year]}
        for year in range(ledger.horizon_years)
    ]  # fmt: skip
