"""Budgets: how much training an arm gets, in samples, in tokens or in seconds.

Arms that take equally many samples do not generate equally many tokens, nor take equally long, so
"the same budget" has to name its unit. A stage ends after the step in which its budget is reached,
so it may go over by a step; what was really spent is reported beside it. Seconds are wall time and
differ between runs: a study that is equal in them cannot be repeated number by number.

Left out: floating-point operations, which no stage counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tierwise.core.errors import ConfigError


class Unit(StrEnum):
    """What a budget counts."""

    SAMPLES = "samples"
    TOKENS = "tokens"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much a stage may take.

    Attributes:
        unit: `samples`: drawn, a sample as often as it is drawn; `tokens`: of completions sampled
            and of targets learned; `seconds`: sampling, rewards and updates, as recorded.
        amount: How many; the stage's `steps` stay the most it may take.
    """

    unit: Unit
    amount: float

    def __post_init__(self) -> None:
        if not 0 < self.amount < math.inf:
            raise ConfigError("budget.amount must be above 0")

    def less(self, rows: Iterable[Mapping[str, Any]]) -> Budget:
        """Return what is left after a stage before.

        Raises:
            ConfigError: Nothing is.
        """
        taken = spent(rows, self.unit)
        if taken >= self.amount:
            raise ConfigError(
                f"the supervised stage alone takes {taken:,.0f} of {self.amount:,.0f} {self.unit}",
                hint="raise budget.amount or lower sft.steps",
            )
        return replace(self, amount=self.amount - taken)


class Meter:
    """What a stage has spent so far of its budget; without one it is never full."""

    def __init__(self, budget: Budget | None, rows: Iterable[Mapping[str, Any]]) -> None:
        self._budget, self._spent = budget, 0.0
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a step's row of the record."""
        if self._budget is not None:
            self._spent += spent([row], self._budget.unit)

    @property
    def is_full(self) -> bool:
        """Return whether the budget is spent."""
        return self._budget is not None and self._spent >= self._budget.amount


def spent(rows: Iterable[Mapping[str, Any]], unit: Unit) -> float:
    """Return what steps took, from their rows of the record.

    >>> row = {"prompts": 4, "completions": 8, "completion_tokens": 2.5, "timing": {"a_s": 1.5}}
    >>> [spent([row], unit) for unit in Unit]
    [4.0, 20.0, 1.5]

    Args:
        rows: Steps of either stage.
        unit: What to count.
    """
    total = 0.0
    for row in rows:
        match unit:
            case Unit.SAMPLES:
                total += row["prompts"]
            case Unit.TOKENS:
                total += row["completions"] * row["completion_tokens"]
            case Unit.SECONDS:
                total += sum(value for name, value in row["timing"].items() if name.endswith("_s"))
    return total
