"""What is kept, how, where and for how long: TOML -> frozen dataclasses.

A scenario names the data, the horizon, the strategies to compare and the events to survive;
every number it does not give is a sourced fact, and any fact can be overridden by key. Left
out: anything monthly (the step is a year), and taxes and depreciation schedules, which differ
by country and owner.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tierwise.core.config import load_config
from tierwise.core.errors import ConfigError, DataError, MissingFileError
from tierwise.core.facts import Distribution
from tierwise.core.units import parse_size

PRESETS_FOLDER = Path(__file__).parent / "presets"
DEFAULT_PRESET = "modern-2026"
MAX_HORIZON_YEARS = 300
MAX_SHOCK = 1e6
MAX_BYTES = 10**24  # whole units can still be counted exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What is kept.

    Attributes:
        size: Logical size, as in "1 PB" (10**15 bytes) or "1 PiB"; ignored with `inventory`.
        inventory: JSON file of the archive; its `logical_bytes` and `num_files` are used.
        num_objects: Files or objects, 0 when not known (then cloud.object_size decides).
        growth: Yearly growth as a fraction, may be negative.
        copies: Whole copies of everything.
        parity: Redundancy on top of each copy, as a fraction of the data (4 on 12 is 0.333).
    """

    size: str = "100 PB"
    inventory: str = ""
    num_objects: float = 0.0
    growth: float = 0.0
    copies: float = 1.0
    parity: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSpec:
    """How much is read: share of the data a year, restore drills, and leaving at the end."""

    read_share: float = 0.0
    drill_share: float = 0.0
    drill_every_years: int = 1
    exit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FinanceSpec:
    """Discounting; cash and rate must both be real or both nominal.

    Attributes:
        discount_rate: Yearly rate; None takes the fact finance.discount (a real rate).
        discount_basis: Whether that rate is real or nominal.
        cash_basis: Whether cash flows are in constant prices or grow with inflation.
        timing: When in its year a cash flow falls.
        residual: Value left at the horizon: none, or straight-line over the remaining life.
    """

    discount_rate: float | None = None
    discount_basis: Literal["real", "nominal"] = "real"
    cash_basis: Literal["real", "nominal"] = "real"
    timing: Literal["start", "mid", "end"] = "start"
    residual: Literal["none", "straight_line"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSpec:
    """How moving data to new media is priced.

    Attributes:
        method: `bottom_up` adds labour, drive hours, energy and the project price per TB;
            `flat` is the price per TB alone, as in the precursor.
        overlap_years: Part of a year old and new units run side by side.
        strict: Refuse a migration that the drives at hand cannot finish in time.
    """

    method: Literal["bottom_up", "flat"] = "bottom_up"
    overlap_years: float = 1.0
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A share of the data on one medium, from a year until (not including) another."""

    medium: str
    share: float = 1.0
    from_year: int = 0
    until_year: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A named way of keeping everything: one medium, a mix, or a hand-over between media."""

    name: str
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shock:
    """A price shock: unit prices of `media` times `factor` in years [year, year + years)."""

    media: tuple[str, ...]
    year: int
    years: int = 1
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfLine:
    """A medium (or its reader) that can no longer be bought from a year on."""

    medium: str
    production_year: int | None = None
    reader_year: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertain:
    """A range for any input, in place of the fact's own."""

    key: str
    low: float
    high: float
    distribution: Distribution = Distribution.UNIFORM


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """Inputs that move together: a one-factor Gaussian copula with correlation `rho`."""

    keys: tuple[str, ...]
    rho: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything a comparison needs besides the facts; see docs/formats/scenario.md."""

    name: str = "scenario"
    start_year: int = 2026
    currency_year: int = 2026
    horizon_years: int = 50
    opex: Literal["A", "B", "C"] = "A"
    facility: Literal["rent", "build"] = "rent"
    media: tuple[str, ...] = ("ssd", "hdd", "tape", "optical", "cloud")
    data: DataSpec = field(default_factory=DataSpec)
    access: AccessSpec = field(default_factory=AccessSpec)
    finance: FinanceSpec = field(default_factory=FinanceSpec)
    migration: MigrationSpec = field(default_factory=MigrationSpec)
    strategies: tuple[Strategy, ...] = ()
    shocks: tuple[Shock, ...] = ()
    end_of_line: tuple[EndOfLine, ...] = ()
    uncertain: tuple[Uncertain, ...] = ()
    correlations: tuple[Correlation, ...] = ()
    facts_files: tuple[str, ...] = ()
    overrides: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def plans(self) -> tuple[Strategy, ...]:
        """Return the strategies to compare: one for each medium, then the named ones."""
        alone = (Strategy(name=name, tiers=(Tier(medium=name),)) for name in self.media)
        return (*alone, *self.strategies)


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Return a scenario from a TOML file, checked; paths in it are relative to the file."""
    scenario = load_config(Scenario, path, overrides)
    folder = path.parent
    data = scenario.data
    if data.inventory and not Path(data.inventory).is_absolute():
        data = replace(data, inventory=str(folder / data.inventory))
    files = tuple(
        name if Path(name).is_absolute() else str(folder / name) for name in scenario.facts_files
    )
    return check_scenario(replace(scenario, data=data, facts_files=files))


def load_preset(name: str = DEFAULT_PRESET, overrides: Sequence[str] = ()) -> Scenario:
    """Return the scenario of a preset.

    Raises:
        ConfigError: No such preset, or one that is a model of its own (precursor-2017, dshr).
    """
    path = PRESETS_FOLDER / f"{name}.toml"
    known = sorted(item.stem for item in PRESETS_FOLDER.glob("*.toml"))
    if name not in known:
        raise ConfigError(f"no preset {name!r}", hint=f"presets: {', '.join(known)}")
    if model_of(path) is not None:
        raise ConfigError(
            f"preset {name} is a model of its own, not a scenario",
            hint=f"tierwise tco explain {name}",
        )
    return load_scenario(path, overrides)


def model_of(path: Path) -> str | None:
    """Return the restated model a file is for (`precursor`, `dshr`); None for a scenario.

    A file that is absent or not TOML is left for the loader to refuse.
    """
    try:
        model = tomllib.loads(path.read_text(encoding="utf-8")).get("model")
    except (OSError, ValueError):
        return None
    return model if model in ("precursor", "dshr") else None


def check_scenario(scenario: Scenario) -> Scenario:
    """Return the scenario if it makes sense.

    Raises:
        ConfigError: A number out of range, cash and rate on different bases, or data without
            a home in some year.
    """
    data, finance = scenario.data, scenario.finance
    _require(1 <= scenario.horizon_years <= MAX_HORIZON_YEARS, "horizon_years",
             f"must be 1 to {MAX_HORIZON_YEARS}")  # fmt: skip
    _require(1 <= scenario.start_year <= 9999, "start_year", "must be 1 to 9999")
    _require(data.growth > -1, "data.growth", "must be above -1")
    _require(data.copies > 0, "data.copies", "must be above 0")
    _require(data.parity >= 0, "data.parity", "must not be negative")
    _require(scenario.access.read_share >= 0, "access.read_share", "must not be negative")
    _require(0 <= scenario.access.drill_share <= 1, "access.drill_share", "must be 0 to 1")
    _require(
        scenario.access.drill_every_years >= 1, "access.drill_every_years", "must be 1 or more"
    )
    _require(
        0 <= scenario.migration.overlap_years <= 5, "migration.overlap_years", "must be 0 to 5"
    )
    if finance.cash_basis != finance.discount_basis:
        raise ConfigError(
            f"{finance.cash_basis} cash flows cannot be discounted at a {finance.discount_basis} "
            "rate",
            hint="set finance.cash_basis and finance.discount_basis alike; a nominal rate is "
            "(1 + real) * (1 + inflation) - 1",
        )
    if finance.discount_basis == "nominal" and finance.discount_rate is None:
        raise ConfigError(
            "a nominal calculation needs finance.discount_rate",
            hint="the fact finance.discount is a real rate",
        )
    if finance.discount_rate is not None:
        _require(finance.discount_rate > -1, "finance.discount_rate", "must be above -1")
    for shock in scenario.shocks:
        _require(0 < shock.factor <= MAX_SHOCK and shock.years >= 1, "shocks",
                 f"need factor above 0 and at most {MAX_SHOCK:g}, and years >= 1")  # fmt: skip
    for correlation in scenario.correlations:
        _require(0 <= correlation.rho <= 1, "correlations.rho", "must be 0 to 1")
    for strategy in scenario.plans:
        _check_strategy(strategy, scenario.horizon_years)
    names = [strategy.name for strategy in scenario.plans]
    _require(len(names) == len(set(names)), "strategies", "must have different names")
    _require(bool(names), "media", "must name at least one medium or strategy")
    return scenario


def _require(condition: bool, key: str, what: str) -> None:
    if not condition:
        raise ConfigError(f"{key} {what}")


def _check_strategy(strategy: Strategy, horizon_years: int) -> None:
    for tier in strategy.tiers:
        until = horizon_years if tier.until_year is None else tier.until_year
        _require(tier.share > 0, f"strategy {strategy.name}", "has a tier with share 0 or less")
        _require(math.isfinite(tier.share), f"strategy {strategy.name}",
                 "has a tier whose share is not a finite number")  # fmt: skip
        _require(0 <= tier.from_year < until, f"strategy {strategy.name}",
                 f"keeps {tier.medium} for no year")  # fmt: skip
    for year in range(horizon_years):
        held = sum(
            tier.share
            for tier in strategy.tiers
            if tier.from_year <= year and (tier.until_year is None or year < tier.until_year)
        )
        if held < 1 - 1e-9:
            raise ConfigError(
                f"strategy {strategy.name} holds only {held:.0%} of the data in year {year}",
                hint="the shares of its tiers must add up to 1 or more in every year",
            )


def logical_tb(data: DataSpec) -> tuple[float, float]:
    """Return (decimal terabytes, number of objects or 0) that a scenario keeps.

    Raises:
        MissingFileError, DataError: The inventory is absent or malformed.
    """
    if not data.inventory:
        num_bytes = parse_size(data.size)
        if num_bytes > MAX_BYTES:
            raise ConfigError(f"data.size is above {MAX_BYTES:g} bytes")
        return num_bytes / 1e12, data.num_objects
    inventory = read_inventory(Path(data.inventory))
    return inventory.logical_bytes / 1e12, float(inventory.num_files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The part of an archive's inventory that costs money; docs/formats/inventory.md."""

    logical_bytes: int
    num_files: int


def read_inventory(path: Path) -> Inventory:
    """Return what an archive says it holds; further keys are the archive's own.

    Raises:
        MissingFileError: The file does not exist.
        DataError: Not JSON, or without whole `logical_bytes` and `num_files`.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(f"no inventory {path}") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder, not an inventory") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    values = {}
    for key in ("logical_bytes", "num_files"):
        value = tree.get(key) if isinstance(tree, dict) else None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise DataError(f"{path} has no whole number {key}")
        if value > MAX_BYTES:
            raise DataError(f"{path}: {key} is above {MAX_BYTES:g}")
        values[key] = value
    return Inventory(**values)
