"""Cash flows by (medium, year, category, cause), and every table and share as a sum over them.

A category says what was bought, a cause says why. Nothing is ever added up anywhere else, so
the meaning of "operational expenditure" is a choice of tags, made in the open:

- A: running + migration; buying equipment again is capital.
- B: running + migration + replacement purchases at the end of equipment's life.
- C: energy + migration + replacement purchases; staff, rent and contracts left out, as the
  precursor does. Only this reading gives a migration share above 96 %.

Buildings and the spares for failed units are capital under all three. Left out: accounting
depreciation; a purchase is cash in its year.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np

from tierwise.tco.inputs import Array


class Category(StrEnum):
    """What the money bought."""

    MEDIA = "media"
    SLOTS = "slots"
    READERS = "readers"
    BUILDING = "building"
    RENT = "rent"
    NETWORK = "network"
    ENERGY = "energy"
    STAFF = "staff"
    SERVICE = "service"
    HANDLING = "handling"
    DRIVE_HOURS = "drive_hours"
    PROJECT = "project"
    CLOUD_STORAGE = "cloud_storage"
    CLOUD_REQUESTS = "cloud_requests"
    CLOUD_RETRIEVAL = "cloud_retrieval"
    CLOUD_EGRESS = "cloud_egress"
    MAINTENANCE = "maintenance"
    IT = "it"


class Cause(StrEnum):
    """Why it was bought."""

    INITIAL = "initial"
    GROWTH = "growth"
    REPLACEMENT = "replacement"
    FAILURE = "failure"
    RUN = "run"
    MIGRATION = "migration"
    ACCESS = "access"
    EXIT = "exit"
    RESIDUAL = "residual"


Definition = Literal["A", "B", "C"]
DEFINITIONS: tuple[Definition, ...] = ("A", "B", "C")
DEFINITION_TEXT: dict[Definition, str] = {
    "A": "running + migration",
    "B": "running + migration + replacement purchases",
    "C": "energy + migration + replacement purchases (no staff, rent or contracts)",
}
_RUNNING = frozenset({Cause.RUN, Cause.ACCESS, Cause.EXIT})

Flows = dict[tuple[Category, Cause], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class CashFlow:
    """One row of the ledger; `row` numbers rows from 1 in the ledger's order."""

    row: int
    strategy: str
    medium: str
    year: int
    category: Category
    cause: Cause
    amount_usd: float


Test = Callable[[CashFlow], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All cash flows of one strategy, undiscounted."""

    strategy: str
    horizon_years: int
    rows: tuple[CashFlow, ...]

    def total(self, test: Test | None = None) -> float:
        """Return the sum of the rows that pass a test; of all rows without one."""
        return math.fsum(row.amount_usd for row in self.rows if test is None or test(row))

    def by_year(self, test: Test | None = None) -> list[float]:
        """Return the sum of each year."""
        sums: list[list[float]] = [[] for _ in range(self.horizon_years)]
        for row in self.rows:
            if test is None or test(row):
                sums[row.year].append(row.amount_usd)
        return [math.fsum(amounts) for amounts in sums]

    def by_category(self) -> dict[Category, float]:
        """Return the total of each category that occurs, in the enumeration's order."""
        found = {row.category for row in self.rows}
        return {
            category: self.total(lambda row, c=category: row.category is c)  # type: ignore[misc]
            for category in Category
            if category in found
        }

    def by_cause(self) -> dict[Cause, float]:
        """Return the total of each cause that occurs, in the enumeration's order."""
        found = {row.cause for row in self.rows}
        return {
            cause: self.total(lambda row, c=cause: row.cause is c)  # type: ignore[misc]
            for cause in Cause
            if cause in found
        }

    def opex(self, definition: Definition) -> float:
        """Return the operational expenditure under a definition."""
        return self.total(opex_test(definition))

    def capex(self, definition: Definition) -> float:
        """Return what that definition calls capital: purchases outside its OPEX.

        Under C, running costs other than energy are in neither.
        """
        operational = opex_test(definition)
        return self.total(lambda row: not operational(row) and row.cause not in _RUNNING)

    def migration_share(self, definition: Definition) -> float | None:
        """Return migration over OPEX, as the definition counts both; None if OPEX is 0.

        B and C count buying media again as part of migration, A does not.
        """
        opex = self.opex(definition)
        if opex == 0:
            return None
        bought_again = definition != "A"
        return (
            self.total(
                lambda row: row.cause is Cause.MIGRATION or (bought_again and _is_again(row))
            )
            / opex
        )


def _is_again(row: CashFlow) -> bool:
    return row.cause is Cause.REPLACEMENT and row.category is not Category.BUILDING


def opex_test(definition: Definition) -> Test:
    """Return which rows a definition calls operational.

    Source: the three readings of "operational expenditure" that the LT-TCO abstract allows;
    ours to name, since the paper's own formula is not public.
    """
    if definition == "A":
        return lambda row: row.cause in _RUNNING or row.cause is Cause.MIGRATION
    if definition == "B":
        return lambda row: row.cause in _RUNNING or row.cause is Cause.MIGRATION or _is_again(row)
    return lambda row: (
        row.cause is Cause.MIGRATION
        or _is_again(row)
        or (row.category is Category.ENERGY and row.cause in _RUNNING)
    )


def ledger_of(strategy: str, parts: Mapping[str, Flows], *, horizon_years: int) -> Ledger:
    """Return the ledger of one sample; rows of zero are left out.

    Rows are in the order medium, category, cause, year, so that most sums are one span of rows.

    Args:
        strategy: Its name.
        parts: Medium -> flows, arrays of shape (T, 1).
        horizon_years: T.
    """
    order = {name: place for place, name in enumerate((*Category, *Cause))}
    rows = sorted(_entries(parts), key=lambda e: (e[0], order[e[2]], order[e[3]], e[1]))
    return Ledger(
        strategy=strategy,
        horizon_years=horizon_years,
        rows=tuple(
            CashFlow(
                row=number,
                strategy=strategy,
                medium=medium,
                year=year,
                category=category,
                cause=cause,
                amount_usd=amount,
            )
            for number, (medium, year, category, cause, amount) in enumerate(rows, start=1)
        ),
    )


def _entries(
    parts: Mapping[str, Flows],
) -> Iterator[tuple[str, int, Category, Cause, float]]:
    for medium, flows in parts.items():
        for (category, cause), amounts_TS in flows.items():
            for year in np.flatnonzero(amounts_TS[:, 0]):
                yield medium, int(year), category, cause, float(amounts_TS[year, 0])


LEDGER_HEADER = ("row", "strategy", "medium", "year", "category", "cause", "amount_usd")


def ledger_rows(ledgers: Iterable[Ledger]) -> list[tuple[object, ...]]:
    """Return the ledgers as rows under `LEDGER_HEADER`, for CSV."""
    return [
        (row.row, row.strategy, row.medium, row.year, str(row.category), str(row.cause),
         row.amount_usd)
        for ledger in ledgers
        for row in ledger.rows
    ]  # fmt: skip


def row_span(ledger: Ledger, test: Test) -> str:
    """Return the row numbers behind a sum, as ranges: `"1-3, 7"`."""
    numbers = [row.row for row in ledger.rows if test(row)]
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
