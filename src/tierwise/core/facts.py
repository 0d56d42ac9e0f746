"""Numbers taken from the world, each with its source: CSV rows -> `Fact`.

Columns: `key,value,low,high,unit,currency_year,source,retrieved,kind,note`, and `distribution`
where a fact is drawn from in uncertainty analysis. A row without a source is refused. Left out:
converting units or years; the row's reader does that in the open.
"""

from __future__ import annotations

import csv
import datetime
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tierwise.core.errors import DataError, MissingFileError

_REQUIRED = ("key", "value", "low", "high", "unit", "currency_year", "source", "retrieved", "kind")


class FactKind(StrEnum):
    """How a fact came to be known."""

    MEASURED = "measured"
    STANDARD = "standard"
    VENDOR = "vendor"
    ESTIMATE = "estimate"


class Distribution(StrEnum):
    """What a fact is drawn from between `low` and `high` when uncertainty is asked for."""

    FIXED = "fixed"
    UNIFORM = "uniform"
    LOG_UNIFORM = "loguniform"
    TRIANGULAR = "triangular"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One sourced number; `value` is in `unit`, `currency_year` is set for money."""

    key: str
    value: float
    low: float
    high: float
    unit: str
    currency_year: int | None
    source: str
    retrieved: datetime.date
    kind: FactKind
    note: str = ""
    distribution: Distribution = Distribution.FIXED
    line: int = 0


def load_facts(path: Path) -> dict[str, Fact]:
    """Return the facts of a CSV file by key, in file order.

    An empty `low` or `high` means the value itself; a fact with a range and no `distribution`
    column is triangular.

    Raises:
        MissingFileError: The file does not exist.
        DataError: A column is missing, or a row is malformed, unsourced or repeated.
    """
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in _REQUIRED if name not in (reader.fieldnames or [])]
            if missing:
                raise DataError(f"{path} has no column {missing[0]}")
            facts: dict[str, Fact] = {}
            for row in reader:
                fact = _parse_row(path, reader.line_num, row)
                if fact.key in facts:
                    raise DataError(f"{path}:{fact.line}: fact {fact.key} is given twice")
                facts[fact.key] = fact
    except FileNotFoundError as error:
        raise MissingFileError(f"no facts file {path}") from error
    except (IsADirectoryError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8") from error
    return facts


def _parse_row(path: Path, line: int, row: dict[str, str | None]) -> Fact:
    cells = {name: (cell or "").strip() for name, cell in row.items() if name is not None}
    key = cells["key"]
    where = f"{path}:{line}: fact {key or '(no key)'}"
    if not key or not cells["source"]:
        raise DataError(f"{where} has no {'source' if key else 'key'}")
    try:
        value = float(cells["value"])
        low = float(cells["low"] or value)
        high = float(cells["high"] or value)
        ranged = "triangular" if low < high else "fixed"
        fact = Fact(
            key=key,
            value=value,
            low=low,
            high=high,
            unit=cells["unit"],
            currency_year=int(cells["currency_year"]) if cells["currency_year"] else None,
            source=cells["source"],
            retrieved=datetime.date.fromisoformat(cells["retrieved"]),
            kind=FactKind(cells["kind"]),
            note=cells.get("note", ""),
            distribution=Distribution(cells.get("distribution") or ranged),
            line=line,
        )
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if not (math.isfinite(value) and low <= value <= high):
        raise DataError(f"{where}: value {value} is not between low {low} and high {high}")
    if "USD" in fact.unit and fact.currency_year is None:
        raise DataError(f"{where} is money without a currency_year")
    return fact
