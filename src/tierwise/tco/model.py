"""One strategy over its horizon -> cash flows by medium, category and cause, for all samples.

The order of a year: units at the end of their life leave, data moves off them, whole units are
bought to cover the need, slots, readers and racks follow, spares replace failures, and the year
is run. Nothing is remembered between media or between runs, so their order does not matter.

Departures from the precursor of LT-TCO: no event at the horizon; whole units; running cost by
what is installed, vintage by vintage; component lives independent of the media's; power of
drives and servers counted once; PUE multiplies; prices real unless said otherwise; migration
priced by what it takes.

Simplifications: drives of an old generation and a new one are one population of readers; old
units give their slots to new ones as they leave, so the overlap doubles power and rack space
but no slots.

Legend: T years, S samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierwise.core.errors import ConfigError
from tierwise.tco.cloud import bill_cloud
from tierwise.tco.cohorts import Cohorts, run_cohorts
from tierwise.tco.facts import FactSet, MediumKind
from tierwise.tco.inputs import Array, Point, facts_of
from tierwise.tco.ledger import Category, Cause, Flows
from tierwise.tco.migration import HOURS_PER_YEAR, drives_needed, move
from tierwise.tco.scenario import Scenario, Strategy, Tier
from tierwise.tco.vintages import vintages_of, whole_life

TB_PER_PB = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRun:
    """What one tier cost and did, by year and sample (all arrays TS)."""

    medium: str
    flows: Flows = field(default_factory=dict)
    physical: dict[str, Array] = field(default_factory=dict)

    def add(self, category: Category, cause: Cause, amount_TS: Array) -> None:
        """Add an amount to a flow."""
        key = (category, cause)
        self.flows[key] = self.flows[key] + amount_TS if key in self.flows else amount_TS

    def count(self, name: str, amount_TS: Array) -> None:
        """Add an amount to a physical series."""
        held = self.physical.get(name)
        self.physical[name] = amount_TS if held is None else held + amount_TS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """What every step of a tier's run looks at.

    Attributes:
        zeros: Shape of a result (TS).
        years_T1: 0 to T - 1.
        wage_hour_TS: USD an hour of work.
        kwh_usd_TS: USD a kWh, before PUE.
        logical_TS: TB of data the tier holds.
        added_TS: TB of data that came in.
        read_TS: TB read by users and drills.
        first_T1: True in the tier's first year.
        run: Where results go.
    """

    scenario: Scenario
    tier: Tier
    point: Point
    zeros: Array
    years_T1: Array
    wage_hour_TS: Array
    kwh_usd_TS: Array
    logical_TS: Array
    added_TS: Array
    read_TS: Array
    first_T1: NDArray[np.bool_]
    run: TierRun

    def fact(self, name: str) -> Array:
        """Return an input of the tier's medium."""
        return self.point[f"{self.tier.medium}.{name}"]

    @property
    def stored_factor(self) -> Array:
        """Return TB stored per TB of data."""
        return self.point["data.copies"] * (1.0 + self.point["data.parity"])


def run_strategy(
    scenario: Scenario, strategy: Strategy, point: Point, facts: FactSet | None = None
) -> list[TierRun]:
    """Return what each tier of a strategy costs, in its order.

    Args:
        scenario: Structure: horizon, events, methods.
        strategy: Which media hold what share, when.
        point: Inputs; arrays of length 1 or S.
        facts: The fact set the media come from; the scenario's when None.

    Raises:
        ConfigError: Units would have to be bought or read after production ended.
    """
    facts = facts if facts is not None else facts_of(scenario)
    return [_run_tier(scenario, tier, point, facts) for tier in strategy.tiers]


def merge_flows(runs: Iterable[TierRun]) -> dict[str, Flows]:
    """Return flows by medium, tiers on the same medium added up."""
    merged: dict[str, Flows] = {}
    for run in runs:
        flows = merged.setdefault(run.medium, {})
        for key, amount_TS in run.flows.items():
            flows[key] = flows[key] + amount_TS if key in flows else amount_TS
    return merged


def total_flow(runs: Iterable[TierRun], shape: tuple[int, int]) -> Array:
    """Return the sum of all flows by year and sample."""
    total = np.zeros(shape)
    for run in runs:
        for amount_TS in run.flows.values():
            total += amount_TS
    return total


def _run_tier(scenario: Scenario, tier: Tier, point: Point, facts: FactSet) -> TierRun:
    context = _context(scenario, tier, point)
    context.run.count("logical_tb", context.logical_TS)
    if facts.medium(tier.medium).kind is MediumKind.CLOUD:
        _run_cloud(context)
    else:
        _run_units(context)
    return context.run


def _context(scenario: Scenario, tier: Tier, point: Point) -> _Context:
    zeros = np.zeros((scenario.horizon_years, max(len(column) for column in point.values())))
    years_T1 = np.arange(scenario.horizon_years, dtype=np.float64)[:, None]
    until = scenario.horizon_years if tier.until_year is None else tier.until_year
    active_T1 = (years_T1 >= tier.from_year) & (years_T1 < until)
    size_TS = point["data.size"] * (1.0 + point["data.growth"]) ** years_T1
    logical_TS = zeros + size_TS * tier.share * active_T1
    every = scenario.access.drill_every_years
    drill_T1 = years_T1 % every == every - 1
    wage_TS = point["staff.wage"] * (1.0 + point["staff.wage_rate"]) ** years_T1
    return _Context(
        scenario=scenario,
        tier=tier,
        point=point,
        zeros=zeros,
        years_T1=years_T1,
        wage_hour_TS=wage_TS / point["staff.hours"],
        kwh_usd_TS=point["power.tariff"] * (1.0 + point["power.tariff_rate"]) ** years_T1,
        logical_TS=logical_TS,
        added_TS=np.maximum(logical_TS - _shifted(logical_TS), 0.0),
        read_TS=logical_TS * (point["access.read_share"] + point["access.drill_share"] * drill_T1),
        first_T1=years_T1 == tier.from_year,
        run=TierRun(medium=tier.medium),
    )


def _shifted(array_TS: Array) -> Array:
    """Return the value of the year before; 0 before the first."""
    return np.vstack([np.zeros((1, array_TS.shape[1])), array_TS[:-1]])


def _leaving(context: _Context) -> list[tuple[Cause, Array]]:
    """Return what is read out when a tier hands over, and when everything leaves at the end."""
    out: list[tuple[Cause, Array]] = []
    until = context.tier.until_year
    if until is not None and until < context.scenario.horizon_years:
        moved_TS = context.zeros.copy()
        moved_TS[until] = context.logical_TS[until - 1]
        out.append((Cause.MIGRATION, moved_TS))
    if context.scenario.access.exit:
        exit_TS = context.zeros.copy()
        exit_TS[-1] = context.logical_TS[-1]
        out.append((Cause.EXIT, exit_TS))
    return out


def _run_cloud(context: _Context) -> None:
    run, medium, nothing = context.run, context.tier.medium, context.zeros
    bill = bill_cloud(
        medium,
        context.point,
        stored_TS=context.logical_TS,
        added_TS=context.added_TS,
        read_TS=context.read_TS,
    )
    run.add(Category.CLOUD_STORAGE, Cause.RUN, bill.storage)
    start = Cause.INITIAL if context.tier.from_year == 0 else Cause.MIGRATION
    run.add(Category.CLOUD_REQUESTS, start, bill.requests * context.first_T1)
    if start is Cause.MIGRATION:
        taken_over_TS = context.added_TS * context.first_T1
        run.add(Category.PROJECT, start, taken_over_TS * context.point["migration.price"])
    run.add(Category.CLOUD_REQUESTS, Cause.GROWTH, bill.requests * ~context.first_T1)
    run.add(Category.CLOUD_RETRIEVAL, Cause.ACCESS, bill.retrieval)
    run.add(Category.CLOUD_EGRESS, Cause.ACCESS, bill.egress)
    for cause, out_TS in _leaving(context):
        out = bill_cloud(medium, context.point, stored_TS=nothing, added_TS=nothing, read_TS=out_TS)
        run.add(Category.CLOUD_RETRIEVAL, cause, out.retrieval)
        run.add(Category.CLOUD_EGRESS, cause, out.egress)
    _book_staff(context, context.logical_TS)
    run.count("kwh", nothing)
    run.count("embodied_kg", nothing)


def _run_units(context: _Context) -> None:
    run = context.run
    stored_TS = context.logical_TS * context.stored_factor
    units = vintages_of(context.scenario, context.tier, context.point, context.zeros.shape[1])
    media = run_cohorts(
        stored_TS / context.fact("fill"),
        units.capacity_TS,
        units.life_TS,
        units.watts_TS,
        context.fact("afr"),
    )
    _check_available(context, media)
    run.count("stored_tb", stored_TS)
    run.count("bought", media.bought)
    run.count("units", media.installed)
    _book_purchases(context, Category.MEDIA, media, units.price_TS, units.life_TS)
    run.add(Category.MEDIA, Cause.FAILURE, media.spares * units.price_TS)
    _book_moves(context, media, stored_TS)
    _book_hardware(context, media)
    _book_staff(context, stored_TS)
    per_unit = context.fact("embodied_unit") + context.fact("embodied_tb") * units.capacity_TS
    run.count("embodied_kg", (media.bought + media.spares) * per_unit)


def _check_available(context: _Context, media: Cohorts) -> None:
    """Refuse a plan that buys what is no longer made, or keeps what can no longer be read."""
    bought_T = np.any(media.bought + media.spares > 0, axis=1, keepdims=True)
    held_T = np.any(media.installed > 0, axis=1, keepdims=True)
    for event in context.scenario.end_of_line:
        if event.medium != context.tier.medium:
            continue
        if event.production_year is not None:
            _refuse(event.medium, bought_T, event.production_year, "bought", "it is not made")
        if event.reader_year is not None:
            last = event.reader_year + int(np.min(context.fact("reader_life")))
            _refuse(event.medium, held_T, last, "read", "no reader is left alive")


def _refuse(medium: str, wanted_T1: NDArray[np.bool_], ended: int, what: str, why: str) -> None:
    late = np.flatnonzero(wanted_T1[max(ended, 0) :, 0])
    if len(late):
        raise ConfigError(
            f"{medium} would have to be {what} in year {max(ended, 0) + int(late[0])}, but from "
            f"year {ended} on {why}",
            hint="add a strategy that hands over to another medium (until_year, from_year)",
        )


def _book_purchases(
    context: _Context,
    category: Category,
    cohorts: Cohorts,
    price_TS: Array,
    life_TS: NDArray[np.int64],
) -> None:
    """Book a population's purchases by cause, and what they are worth at the horizon."""
    run, first = context.run, context.first_T1
    cost_TS = cohorts.bought * price_TS
    start = Cause.INITIAL if context.tier.from_year == 0 else Cause.REPLACEMENT
    run.add(category, start, cost_TS * first)
    run.add(category, Cause.GROWTH, cost_TS * cohorts.growth_share * ~first)
    run.add(category, Cause.REPLACEMENT, cost_TS * (1.0 - cohorts.growth_share) * ~first)
    if context.scenario.finance.residual == "straight_line":
        ends_TS = context.years_T1 + life_TS
        left_TS = np.maximum(ends_TS - context.scenario.horizon_years, 0.0) / life_TS
        residual_TS = context.zeros.copy()
        residual_TS[-1] = -(cost_TS * left_TS).sum(axis=0)
        run.add(category, Cause.RESIDUAL, residual_TS)


def _book_moves(context: _Context, media: Cohorts, stored_TS: Array) -> None:
    """Book filling at first and for growth, moving at end of life, handing over, and reading."""
    run, first, nothing = context.run, context.first_T1, context.zeros
    moved_TS = np.minimum(_shifted(stored_TS), stored_TS) * media.retired_share
    added_TS = context.added_TS * context.stored_factor
    grown_TS = media.bought * media.growth_share
    takes_over = context.tier.from_year > 0
    run.count("moved_tb", moved_TS)
    run.count("migration_hours", nothing)
    run.count("kwh", nothing)
    _book_move(
        context,
        Cause.MIGRATION if takes_over else Cause.INITIAL,
        written_TS=added_TS * first,
        units_TS=media.bought * first,
        priced_TS=added_TS * first if takes_over else nothing,
    )
    _book_move(context, Cause.GROWTH, written_TS=added_TS * ~first, units_TS=grown_TS * ~first)
    _book_move(
        context,
        Cause.MIGRATION,
        read_TS=moved_TS,
        written_TS=moved_TS,
        units_TS=media.retired + (media.bought - grown_TS) * ~first,
        priced_TS=moved_TS,
    )
    for cause, out_TS in _leaving(context):
        _book_move(context, cause, read_TS=out_TS)
    _book_move(context, Cause.ACCESS, read_TS=context.read_TS)
    run.count("drives_needed", drives_needed(run.physical["migration_hours"], context.point))


def _book_move(
    context: _Context,
    cause: Cause,
    *,
    read_TS: Array | None = None,
    written_TS: Array | None = None,
    units_TS: Array | None = None,
    priced_TS: Array | None = None,
) -> None:
    """Book one movement of data; what is not given is nothing."""
    run, point, nothing = context.run, context.point, context.zeros
    moving = move(
        context.tier.medium,
        point,
        read_TS=nothing if read_TS is None else read_TS,
        written_TS=nothing if written_TS is None else written_TS,
        units_TS=nothing if units_TS is None else units_TS,
        priced_TS=nothing if priced_TS is None else priced_TS,
        wage_hour_TS=context.wage_hour_TS,
        flat=context.scenario.migration.method == "flat" and cause is Cause.MIGRATION,
    )
    kwh_TS = moving.energy_kwh * point["power.pue"]
    run.add(Category.HANDLING, cause, moving.handling)
    run.add(Category.DRIVE_HOURS, cause, moving.drive_hours_usd)
    run.add(Category.ENERGY, cause, kwh_TS * context.kwh_usd_TS)
    run.add(Category.PROJECT, cause, moving.project)
    run.count("kwh", kwh_TS)
    if cause is Cause.MIGRATION:
        run.count("migration_hours", moving.hours)


def _book_hardware(context: _Context, media: Cohorts) -> None:
    """Book slots, readers, racks, energy and contracts of the installed units."""
    run, point = context.run, context.point
    slots = _component(context, media.installed, Category.SLOTS, "slot")
    readers = _component(context, _readers_wanted(context, media), Category.READERS, "reader")
    run.count("readers", readers.installed)
    run.count("drives_at_hand", _drives_at_hand(context, media, readers))
    overlap = point["migration.overlap"]
    there_TS = media.installed + overlap * media.retired
    parts = point["site.rack_parts"]
    racks_TS = np.ceil(there_TS / context.fact("units_per_rack") * parts - 1e-9) / parts
    watts_TS = (
        media.installed_weight
        + overlap * media.retired_weight
        + readers.installed * context.fact("reader_power")
    )
    kwh_TS = watts_TS * HOURS_PER_YEAR / 1000.0 * point["power.pue"]
    run.count("kwh", kwh_TS)
    run.count("racks", racks_TS)
    run.add(Category.ENERGY, Cause.RUN, kwh_TS * context.kwh_usd_TS)
    run.add(Category.NETWORK, Cause.RUN, racks_TS * point["site.network"])
    if context.scenario.facility == "rent":
        run.add(Category.RENT, Cause.RUN, racks_TS * point["site.rack_rent"])
    else:
        _book_building(context, racks_TS, watts_TS)
    hardware_TS = slots.installed_weight + readers.installed_weight
    run.add(Category.SERVICE, Cause.RUN, hardware_TS * context.fact("service"))


def _drives_at_hand(context: _Context, media: Cohorts, readers: Cohorts) -> Array:
    """Return drives that can take part in a year's moves: last year's readers are still there.

    A medium that carries its own reader is read on old units and written on new ones, pairwise;
    where only one side is this tier's (a hand-over), on that side.
    """
    pairs_TS = np.minimum(media.retired, media.bought)
    one_side_TS = np.maximum(media.retired, media.bought)
    own_TS = np.where(pairs_TS > 0, pairs_TS, one_side_TS)
    readers_TS = np.maximum(readers.installed, _shifted(readers.installed))
    return np.where(context.fact("units_per_reader") > 0, readers_TS, own_TS) + context.zeros


def _component(context: _Context, need_TS: Array, category: Category, name: str) -> Cohorts:
    """Run and book slots or readers: whole pieces with a life and price of their own."""
    price_TS = context.fact(f"{name}_price") + context.zeros
    life_TS = whole_life(context.tier, context.fact(f"{name}_life") + context.zeros)
    return _pieces(context, need_TS, category, price_TS, life_TS)


def _pieces(
    context: _Context,
    need_TS: Array,
    category: Category,
    price_TS: Array,
    life_TS: NDArray[np.int64],
) -> Cohorts:
    one_TS = context.zeros + 1.0
    cohorts = run_cohorts(need_TS, one_TS, life_TS, price_TS, np.zeros(1))
    _book_purchases(context, category, cohorts, price_TS, life_TS)
    return cohorts


def _readers_wanted(context: _Context, media: Cohorts) -> Array:
    """Return readers for the units and for the year's reading, whichever asks for more."""
    per_reader = context.fact("units_per_reader")
    separate = per_reader > 0
    for_units_TS = np.ceil(media.installed / np.where(separate, per_reader, 1.0) - 1e-9)
    hours_TS = context.read_TS * 1e6 / context.fact("rate") / 3600.0
    hours_each = HOURS_PER_YEAR * context.point["migration.utilisation"]
    for_reading_TS = np.ceil(hours_TS / hours_each - 1e-9)
    wanted_TS = np.maximum(for_units_TS, for_reading_TS)
    return np.where(separate, wanted_TS, 0.0) + context.zeros


def _book_building(context: _Context, racks_TS: Array, watts_TS: Array) -> None:
    """Book an own building in two parts: dollars per kW and dollars per rack.

    Source: Uptime Institute, "Dollars per kW plus dollars per square foot" (2006).
    """
    point = context.point
    life_TS = whole_life(context.tier, point["site.build_life"] + context.zeros)
    for need_TS, key in ((watts_TS / 1000.0, "site.build_kw"), (racks_TS, "site.build_rack")):
        price_TS = point[key] + context.zeros
        _pieces(context, need_TS + context.zeros, Category.BUILDING, price_TS, life_TS)


def _book_staff(context: _Context, stored_TS: Array) -> None:
    people_TS = stored_TS / TB_PER_PB * context.fact("staff")
    wage_TS = context.wage_hour_TS * context.point["staff.hours"]
    context.run.add(Category.STAFF, Cause.RUN, people_TS * wage_TS)
