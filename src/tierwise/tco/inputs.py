"""Scenario and facts -> named numbers, one column for each sample.

A `Point` maps a dotted key (`tape.price`, `data.growth`) to an array of shape S, or of length
1 where all samples share it, so that one run of the model serves a single scenario, a Monte
Carlo, a sweep or a map. Left out: inputs that change the structure of a run (horizon, media,
strategies); those are the scenario's.

Legend: S samples.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierwise.core.errors import ConfigError
from tierwise.core.facts import Distribution, Fact
from tierwise.tco.facts import FactSet, MediumKind, facts_of_files
from tierwise.tco.scenario import Scenario, logical_tb

Array = NDArray[np.float64]
Point = Mapping[str, Array]

DRIVE_NAMES = (
    "price", "decline", "capacity", "capacity_rate", "ceiling", "life", "afr", "power",
    "power_rate", "units_per_rack", "slot_price", "slot_life", "service", "staff",
    "reader_price", "reader_life", "units_per_reader", "reader_power", "rate", "handling",
    "fill", "generation_gap", "read_back", "elapsed", "embodied_tb", "embodied_unit",
)  # fmt: skip
CLOUD_NAMES = (
    "storage", "min_days", "decline", "put", "retrieval", "egress_factor", "egress_10tb",
    "egress_50tb", "egress_150tb", "egress_beyond", "overhead_cold", "overhead_standard",
    "standard_rate", "object_size", "staff",
)  # fmt: skip
SITE_KEYS = (
    "power.tariff", "power.tariff_rate", "power.pue", "power.grid", "power.grid_rate",
    "site.rack_rent", "site.rack_parts", "site.network", "site.build_kw", "site.build_rack",
    "site.build_life",
    "staff.wage", "staff.wage_rate", "staff.hours", "migration.price", "migration.utilisation",
    "migration.window", "finance.discount", "finance.inflation",
)  # fmt: skip

# name (the last part of a key) -> (low, high, inclusive low); what no scenario may leave
_LIMITS: dict[str, tuple[float, float, bool]] = {
    "decline": (-10.0, 1.0, True),
    "capacity_rate": (-1.0, 10.0, False),
    "power_rate": (-1.0, 10.0, False),
    "tariff_rate": (-1.0, 10.0, False),
    "wage_rate": (-1.0, 10.0, False),
    "grid_rate": (-1.0, 10.0, False),
    "growth": (-1.0, 10.0, False),
    "discount": (-1.0, 10.0, False),
    "inflation": (-1.0, 10.0, False),
    "pue": (1.0, 10.0, True),
    "life": (0.5, 1e6, True),
    "slot_life": (0.5, 1e6, True),
    "reader_life": (0.5, 1e6, True),
    "build_life": (0.5, 1e6, True),
    "capacity": (0.0, 1e6, False),
    "fill": (0.0, 1.0, False),
    "afr": (0.0, 10.0, True),
    "units_per_rack": (0.0, 1e9, False),
    "rack_parts": (0.0, 1e6, False),
    "rate": (0.0, 1e9, False),
    "hours": (0.0, 8784.0, False),
    "utilisation": (0.0, 1.0, False),
    "window": (0.0, 10.0, False),
    "copies": (0.0, 1e3, False),
    "size": (0.0, 1e12, True),
    "read_share": (0.0, 1e3, True),
    "object_size": (0.0, 1e9, False),
    "min_days": (0.0, 365.0, True),
}
_LARGEST = 1e15  # of any other input; beyond it a typing error is likelier than a price
_MAX_TB = 1e15
_REASONS = {
    "decline": "a decline of 100 % a year or more makes the medium free",
    "pue": "the facility cannot use less power than what stands in it",
    "capacity": "a unit must hold something",
    "min_days": "yearly steps cannot see a minimum of more than a year",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """One input: its value, and what it is drawn from between low and high."""

    key: str
    value: float
    low: float
    high: float
    distribution: Distribution
    fact: Fact | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Every input of a scenario by key, in a fixed order that no choice of media changes."""

    ranges: Mapping[str, InputRange]
    warnings: tuple[str, ...]

    def point(self, changes: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return the base values as a point, with some keys replaced by columns of samples.

        Raises:
            ConfigError: An unknown key (with the nearest right one) or a value out of range.
        """
        point = {key: np.array([item.value]) for key, item in self.ranges.items()}
        for key, column in (changes or {}).items():
            self.require(key)
            check_range(key, column)
            point[key] = np.asarray(column, dtype=np.float64)
        return point

    def require(self, key: str) -> InputRange:
        """Return one input; an unknown key is an error naming the nearest."""
        if key not in self.ranges:
            near = difflib.get_close_matches(key, self.ranges, n=1, cutoff=0.5)
            raise ConfigError(
                f"no input {key}",
                hint=f"did you mean {near[0]}?" if near else "tierwise tco facts lists them",
            )
        return self.ranges[key]

    def uncertain(self) -> dict[str, InputRange]:
        """Return the inputs that are drawn when uncertainty is asked for, by key."""
        return {
            key: item
            for key, item in self.ranges.items()
            if item.distribution is not Distribution.FIXED and item.low < item.high
        }


def media_in(scenario: Scenario) -> list[str]:
    """Return the media a scenario's strategies use, sorted, each once."""
    return sorted({tier.medium for strategy in scenario.plans for tier in strategy.tiers})


def facts_of(scenario: Scenario) -> FactSet:
    """Return the shipped facts with the scenario's own files on top."""
    return facts_of_files(scenario.facts_files)


def resolve_inputs(scenario: Scenario, facts: FactSet | None = None) -> Inputs:
    """Return every input of a scenario in its currency year.

    Raises:
        ConfigError: An override of an unknown key, or out of range; a price year without index.
        DataError: A fact that the media need is missing.
    """
    facts = facts if facts is not None else facts_of(scenario)
    ranges: dict[str, InputRange] = {}
    for key, fact in _needed_facts(scenario, facts):
        value, low, high = facts.in_year(fact, scenario.currency_year)
        ranges[key] = InputRange(
            key=key, value=value, low=low, high=high, distribution=fact.distribution, fact=fact
        )
    for key, value in _scenario_numbers(scenario).items():
        ranges[key] = _fixed(key, value)
    for medium in _media_of_events(scenario):
        facts.medium(medium)
    if scenario.finance.discount_rate is not None:
        ranges["finance.discount"] = _fixed("finance.discount", scenario.finance.discount_rate)
    inputs = Inputs(ranges=dict(sorted(ranges.items())), warnings=())
    return _with_uncertainty(scenario, _with_overrides(scenario, inputs), facts)


def _media_of_events(scenario: Scenario) -> set[str]:
    """Return the media that shocks and ends of line name; those not compared may be named."""
    shocked = {medium for shock in scenario.shocks for medium in shock.media}
    return shocked | {end.medium for end in scenario.end_of_line}


def _fixed(key: str, value: float) -> InputRange:
    return InputRange(
        key=key, value=value, low=value, high=value, distribution=Distribution.FIXED, fact=None
    )


def _needed_facts(scenario: Scenario, facts: FactSet) -> Iterable[tuple[str, Fact]]:
    for key in SITE_KEYS:
        group, _, name = key.partition(".")
        yield key, facts.find(group, name)
    for medium in media_in(scenario):
        is_cloud = facts.medium(medium).kind is MediumKind.CLOUD
        for name in CLOUD_NAMES if is_cloud else DRIVE_NAMES:
            yield f"{medium}.{name}", facts.find(medium, name)


def _scenario_numbers(scenario: Scenario) -> dict[str, float]:
    size_tb, num_objects = logical_tb(scenario.data)
    return {
        "data.size": size_tb,
        "data.objects": num_objects,
        "data.growth": scenario.data.growth,
        "data.copies": scenario.data.copies,
        "data.parity": scenario.data.parity,
        "access.read_share": scenario.access.read_share,
        "access.drill_share": scenario.access.drill_share,
        "migration.overlap": scenario.migration.overlap_years,
    }


def _with_overrides(scenario: Scenario, inputs: Inputs) -> Inputs:
    ranges, warnings = dict(inputs.ranges), list(inputs.warnings)
    for group, table in scenario.overrides.items():
        for name, value in table.items():
            key = f"{group}.{name}"
            item = inputs.require(key)
            check_range(key, np.array([value]))
            if item.low < item.high and not item.low <= value <= item.high:
                warnings.append(_outside(key, value, item))
            ranges[key] = _fixed(key, float(value))
    for key, item in ranges.items():
        check_range(key, np.array([item.value]))
    growth = ranges["data.growth"].value
    _check_growth(growth, ranges["data.size"].value, scenario.horizon_years)
    if growth >= 0.15:
        times = (1 + growth) ** (scenario.horizon_years - 1)
        text = f"{times:,.0f}" if times < 1e9 else f"{times:.3g}"
        warnings.append(
            f"growth of {growth:.0%} a year multiplies the data by {text} by the last year; "
            "no price trend is known that far"
        )
    return Inputs(ranges=ranges, warnings=tuple(warnings))


def _check_growth(growth: float, size_tb: float, num_years: int) -> None:
    """Return if the data of the last year can be counted in whole units."""
    if size_tb > 0 and math.log10(size_tb) + (num_years - 1) * math.log10(1 + growth) > math.log10(
        _MAX_TB
    ):
        raise ConfigError(
            f"data.growth = {growth:g} makes more than {_MAX_TB:g} TB by the last year",
            hint="a lower growth, a shorter horizon_years or a smaller data.size",
        )


def _outside(key: str, value: float, item: InputRange) -> str:
    note = ""
    if key.endswith(".capacity") and 2.2 <= value / item.value <= 2.8:
        note = "; that looks like a compressed capacity, native is meant"
    return f"{key} = {value:g} is outside the sourced range {item.low:g} to {item.high:g}{note}"


def _with_uncertainty(scenario: Scenario, inputs: Inputs, facts: FactSet) -> Inputs:
    ranges = dict(inputs.ranges)
    for wish in scenario.uncertain:
        item = inputs.require(wish.key)
        if not wish.low <= wish.high:
            raise ConfigError(f"uncertain {wish.key}: low {wish.low:g} is above {wish.high:g}")
        if wish.key == "data.growth":
            _check_growth(wish.high, inputs.ranges["data.size"].value, scenario.horizon_years)
        ranges[wish.key] = InputRange(
            key=wish.key,
            value=item.value,
            low=wish.low,
            high=wish.high,
            distribution=wish.distribution,
            fact=item.fact,
        )
    for item in ranges.values():
        check_range(item.key, np.array([item.low, item.high]))
        if item.distribution is Distribution.LOG_UNIFORM and item.low <= 0 < item.high:
            raise ConfigError(f"{item.key}: a loguniform range must start above 0")
    for correlation in scenario.correlations:
        for key in correlation.keys:
            group = key.partition(".")[0]
            if group in media_in(scenario) or group not in facts.media:
                inputs.require(key)
    return Inputs(ranges=ranges, warnings=inputs.warnings)


def check_range(key: str, column: Array) -> None:
    """Return if every value of a column may be used for a key.

    Raises:
        ConfigError: Not finite, or outside what the key can mean.
    """
    name = key.rpartition(".")[2]
    values = np.asarray(column, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ConfigError(f"{key} is not a finite number")
    low, high, low_allowed = _LIMITS.get(name, (0.0, _LARGEST, True))
    too_low = values < low if low_allowed else values <= low
    too_high = values >= high if name == "decline" else values > high
    if too_low.any() or too_high.any():
        value = float(values[too_low | too_high][0])
        above = "at least" if low_allowed else "above"
        below = "below" if name == "decline" else "at most"
        limits = f"{above} {low:g}"
        if name in _LIMITS or value > high:
            limits += f" and {below} {high:g}"
        raise ConfigError(f"{key} = {value:g} must be {limits}", hint=_REASONS.get(name))
