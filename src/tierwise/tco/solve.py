"""Questions about a comparison: sweep, break-even, winner map, waterfall.

All of them run the model on many points at once. A break-even is searched on a grid and then
narrowed, because whole units and whole years make costs jump: every crossing in the range is
returned, and where the costs jump past each other the crossing is the place of the jump. Left
out: several inputs at once; the winner map shows two.

Legend: S samples, Y and X points of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tierwise.core.errors import UsageError
from tierwise.tco.facts import FactSet
from tierwise.tco.inputs import Array, Inputs, facts_of, resolve_inputs
from tierwise.tco.scenario import Scenario, Strategy
from tierwise.tco.spread import present_totals

GRID_POINTS = 129
MAX_MAP_POINTS = 250_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Present value of every strategy over one input."""

    key: str
    values: Array
    total_usd: Mapping[str, Array]


def find_strategy(scenario: Scenario, name: str) -> Strategy:
    """Return a strategy of the scenario by name.

    Raises:
        UsageError: There is none; the message lists them.
    """
    for strategy in scenario.plans:
        if strategy.name == name:
            return strategy
    names = ", ".join(strategy.name for strategy in scenario.plans)
    raise UsageError(f"no strategy {name!r} in {scenario.name}", hint=f"strategies: {names}")


def spaced(low: float, high: float, num: int, *, log: bool) -> Array:
    """Return `num` points from low to high, evenly or by a constant factor."""
    if not low < high:
        raise UsageError(f"{low:g} is not below {high:g}")
    if not np.isfinite([low, high]).all():
        raise UsageError(f"a range from {low:g} to {high:g} has no end")
    if log and low <= 0:
        raise UsageError("a logarithmic range must start above 0")
    return np.geomspace(low, high, num) if log else np.linspace(low, high, num)


def sweep(
    scenario: Scenario,
    key: str,
    values: Sequence[float] | Array,
    *,
    inputs: Inputs | None = None,
    facts: FactSet | None = None,
) -> Sweep:
    """Return the present value of every strategy at each value of one input."""
    facts = facts if facts is not None else facts_of(scenario)
    inputs = inputs if inputs is not None else resolve_inputs(scenario, facts)
    inputs.require(key)
    column = np.asarray(values, dtype=np.float64)
    totals = {
        strategy.name: _spread_out(
            present_totals(scenario, strategy, inputs, {key: column}, facts), len(column)
        )
        for strategy in scenario.plans
    }
    return Sweep(key=key, values=column, total_usd=totals)


def _spread_out(total: Array, samples: int) -> Array:
    return np.repeat(total, samples) if len(total) == 1 and samples > 1 else total


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Where two strategies cost the same as one input changes.

    Attributes:
        key: The input.
        first: One strategy.
        second: The other.
        low: Start of the range searched.
        high: End of it.
        crossings: Each value at which the cheaper one changes, rising.
        cheaper_at_low: Name of the cheaper one at `low`.
        cheaper_at_high: Name of the cheaper one at `high`.
    """

    key: str
    first: str
    second: str
    low: float
    high: float
    crossings: tuple[float, ...]
    cheaper_at_low: str
    cheaper_at_high: str


def break_even(
    scenario: Scenario,
    key: str,
    first: str,
    second: str,
    *,
    low: float,
    high: float,
    facts: FactSet | None = None,
) -> BreakEven:
    """Return every value of one input at which two strategies cost the same.

    Args:
        scenario: What is compared.
        key: Which input changes; all others keep their value.
        first: A strategy's name.
        second: The other's.
        low: Start of the range.
        high: End of the range.
        facts: Fact set.

    Raises:
        UsageError: The two are one, or cost the same over the whole range.
    """
    if first == second:
        raise UsageError(f"a break-even needs two strategies, not {first} twice")
    facts = facts if facts is not None else facts_of(scenario)
    inputs = resolve_inputs(scenario, facts)
    inputs.require(key)
    pair = (find_strategy(scenario, first), find_strategy(scenario, second))

    def lead(values: Array) -> Array:
        """Return first minus second at each value."""
        a, b = (
            _spread_out(
                present_totals(scenario, strategy, inputs, {key: values}, facts), len(values)
            )
            for strategy in pair
        )
        return a - b

    grid = spaced(low, high, GRID_POINTS, log=low > 0 and high / low > 50)
    leads = lead(grid)
    apart = np.flatnonzero(leads)  # ties are no change unless the lead changes over them
    if not len(apart):
        raise UsageError(f"{first} and {second} cost the same from {low:g} to {high:g}")
    crossings = [
        _narrow(lead, grid[i], grid[j], leads[i]) if j == i + 1 else float(grid[i + 1])
        for i, j in pairwise(apart)
        if np.sign(leads[i]) != np.sign(leads[j])
    ]
    return BreakEven(
        key=key,
        first=first,
        second=second,
        low=low,
        high=high,
        crossings=tuple(crossings),
        cheaper_at_low=first if leads[apart[0]] < 0 else second,
        cheaper_at_high=first if leads[apart[-1]] < 0 else second,
    )


def _narrow(lead: Callable[[Array], Array], low: float, high: float, at_low: float) -> float:
    """Return the crossing between two points of different sign, to a millionth of the range.

    Sixteen points a round, since a round of many points costs the model hardly more than one.
    """
    width = high - low
    while high - low > 1e-9 * max(abs(high), abs(low), width):
        points = np.linspace(low, high, 17)
        if points[1] <= low or points[-2] >= high:
            break
        signs = np.sign(lead(points)) * np.sign(at_low)
        change = int(np.flatnonzero(signs[1:] <= 0)[0]) if (signs[1:] <= 0).any() else 15
        low, high = float(points[change]), float(points[change + 1])
    return 0.5 * (low + high)


@dataclass(frozen=True, slots=True, kw_only=True)
class WinnerMap:
    """The cheapest strategy over two inputs.

    Attributes:
        x_key: Input along x.
        y_key: Input along y.
        x_values: Points along x (X).
        y_values: Points along y (Y).
        names: Strategies; `winner_YX` indexes them.
        winner_YX: Index of the cheapest.
        lead_YX: Cost of the runner-up over the winner's; 1 where nothing costs anything.
    """

    x_key: str
    y_key: str
    x_values: Array
    y_values: Array
    names: tuple[str, ...]
    winner_YX: NDArray[np.int64]
    lead_YX: Array


def map_winners(
    scenario: Scenario,
    x_key: str,
    x_values: Array,
    y_key: str,
    y_values: Array,
    *,
    facts: FactSet | None = None,
) -> WinnerMap:
    """Return which strategy is cheapest at every point of a grid over two inputs."""
    if x_key == y_key:
        raise UsageError(f"a map needs two different inputs, not {x_key} twice")
    if len(x_values) * len(y_values) > MAX_MAP_POINTS:
        raise UsageError(
            f"a map of {len(x_values)} x {len(y_values)} points is too fine",
            hint=f"take at most {MAX_MAP_POINTS:,} points in all",
        )
    facts = facts if facts is not None else facts_of(scenario)
    inputs = resolve_inputs(scenario, facts)
    grid_x, grid_y = np.meshgrid(x_values, y_values)
    columns = {x_key: grid_x.ravel(), y_key: grid_y.ravel()}
    for key in columns:
        inputs.require(key)
    totals = np.stack(
        [
            _spread_out(present_totals(scenario, strategy, inputs, columns, facts), grid_x.size)
            for strategy in scenario.plans
        ]
    )
    ordered = np.sort(totals, axis=0)
    lead = np.ones(grid_x.size)
    if len(totals) > 1:
        np.divide(ordered[1], ordered[0], out=lead, where=ordered[0] > 0)
    return WinnerMap(
        x_key=x_key,
        y_key=y_key,
        x_values=np.asarray(x_values, dtype=np.float64),
        y_values=np.asarray(y_values, dtype=np.float64),
        names=tuple(strategy.name for strategy in scenario.plans),
        winner_YX=totals.argmin(axis=0).reshape(grid_x.shape).astype(np.int64),
        lead_YX=lead.reshape(grid_x.shape),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change on the way from one scenario to another."""

    label: str
    change_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """From one scenario's present value to another's, change by change; steps add up exactly."""

    strategy: str
    start_name: str
    end_name: str
    start_usd: float
    end_usd: float
    steps: tuple[Step, ...]


def waterfall(
    before: Scenario,
    after: Scenario,
    strategy: str,
    *,
    after_strategy: str | None = None,
    facts: FactSet | None = None,
) -> Waterfall:
    """Return what changed a strategy's cost between two scenarios, input by input.

    Differing inputs are changed one after another in the order of their keys; what is left
    (horizon, events, methods, other media) is the last step. The order matters where inputs
    act together, as in any such attribution.

    Args:
        before: Scenario to start from.
        after: Scenario to arrive at.
        strategy: Strategy in `before`.
        after_strategy: Strategy in `after`; the same name when None.
        facts: Fact set; each scenario's own when None.
    """
    old = resolve_inputs(before, facts if facts is not None else facts_of(before))
    new = resolve_inputs(after, facts if facts is not None else facts_of(after))
    plan = find_strategy(before, strategy)
    goal = find_strategy(after, after_strategy or strategy)
    changed = [
        key
        for key, item in old.ranges.items()
        if key in new.ranges and new.ranges[key].value != item.value
    ]
    start = float(present_totals(before, plan, old, {}, facts)[0])
    end = float(present_totals(after, goal, new, {}, facts)[0])
    steps, level = [], start
    columns: dict[str, Array] = {}
    for key in changed:
        columns[key] = np.array([new.ranges[key].value])
        total = float(present_totals(before, plan, old, dict(columns), facts)[0])
        if total != level:
            label = f"{key} {old.ranges[key].value:g} to {new.ranges[key].value:g}"
            steps.append(Step(label=label, change_usd=total - level))
        level = total
    if abs(end - level) > 1e-9 * max(abs(end), abs(start)):
        steps.append(Step(label="structure", change_usd=end - level))
    return Waterfall(
        strategy=strategy,
        start_name=before.name,
        end_name=after.name,
        start_usd=start,
        end_usd=end,
        steps=tuple(steps),
    )
