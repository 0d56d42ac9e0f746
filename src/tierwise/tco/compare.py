"""Strategies side by side: the front door of the cost model.

`compare` runs every strategy of a scenario once on the facts' values and, if asked, many times
over their ranges, and returns plain values that the report, the command line and the page all
print from. Left out: choosing for the user; a winner is only ever named with its probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tierwise.core.errors import ConfigError
from tierwise.core.progress import SILENT, Progress
from tierwise.tco.carbon import Carbon, carbon_of
from tierwise.tco.facts import FactSet
from tierwise.tco.inputs import Array, Inputs, Point, facts_of, resolve_inputs
from tierwise.tco.ledger import DEFINITIONS, Definition, Ledger, ledger_of
from tierwise.tco.model import TierRun, merge_flows, run_strategy
from tierwise.tco.scenario import Scenario, Strategy, check_scenario
from tierwise.tco.spread import Spread, check_draws, monte_carlo
from tierwise.tco.value import (
    cost_per_tb_year,
    discount_factors,
    pay_as_you_go,
    present_values,
    price_level,
)

DEFAULT_SAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCost:
    """What one strategy costs on the facts' values.

    Attributes:
        name: The strategy.
        title: Its media in words.
        ledger: Every cash flow, undiscounted, in constant prices.
        cash_total_usd: Sum of the cash flows as they will be paid (nominal if so asked).
        endowment_usd: Their present value: the paid-up price.
        usd_per_tb_year: Level price per TB-year with that present value; NaN without data.
        cumulative_usd: Present value up to and including each year (T).
        pay_as_you_go_usd: Cash over TB held, each year (T).
        migration_share: Definition -> share of OPEX, None where OPEX is 0.
        carbon: Emissions.
        warnings: What a reader must know before using the numbers.
        physical: Named yearly series of one sample (T): units, drives, TB moved.
    """

    name: str
    title: str
    ledger: Ledger
    cash_total_usd: float
    endowment_usd: float
    usd_per_tb_year: float
    cumulative_usd: Array
    pay_as_you_go_usd: Array
    migration_share: Mapping[Definition, float | None]
    carbon: Carbon
    warnings: tuple[str, ...]
    physical: Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All strategies of a scenario, cheapest first in `ranking`."""

    scenario: Scenario
    inputs: Inputs
    strategies: tuple[StrategyCost, ...]
    spread: Spread | None

    @property
    def ranking(self) -> tuple[StrategyCost, ...]:
        """Return the strategies by present value; ties by name."""
        return tuple(sorted(self.strategies, key=lambda item: (item.endowment_usd, item.name)))

    def of(self, name: str) -> StrategyCost:
        """Return one strategy's cost."""
        for item in self.strategies:
            if item.name == name:
                return item
        raise ConfigError(f"no strategy {name!r}")


def compare(
    scenario: Scenario,
    *,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    facts: FactSet | None = None,
    progress: Progress = SILENT,
) -> Comparison:
    """Return what every strategy of a scenario costs, with bands over the uncertain inputs.

    Args:
        scenario: What is kept, how and for how long.
        samples: Monte Carlo draws; 0 leaves the bands out.
        seed: Seed of the draws.
        facts: Fact set; the shipped one with the scenario's files when None.
        progress: Told of the draws.

    Raises:
        ConfigError: The scenario makes no sense, or (strict) a migration cannot finish.
        UsageError: So many samples cannot be drawn.
    """
    check_scenario(scenario)
    if samples != 0:
        check_draws(samples, seed)
    facts = facts if facts is not None else facts_of(scenario)
    inputs = resolve_inputs(scenario, facts)
    point = inputs.point()
    costs = tuple(cost_of(scenario, strategy, point, facts) for strategy in scenario.plans)
    spread = None
    if samples > 0:
        spread = monte_carlo(
            scenario, inputs, samples=samples, seed=seed, facts=facts, progress=progress
        )
    return Comparison(scenario=scenario, inputs=inputs, strategies=costs, spread=spread)


def cost_of(scenario: Scenario, strategy: Strategy, point: Point, facts: FactSet) -> StrategyCost:
    """Return what one strategy costs at one point (arrays of length 1)."""
    with np.errstate(over="ignore", invalid="ignore"):  # present_values refuses the result
        runs = run_strategy(scenario, strategy, point, facts)
    ledger = ledger_of(strategy.name, merge_flows(runs), horizon_years=scenario.horizon_years)
    flow_TS = np.array(ledger.by_year())[:, None]
    cash_TS = flow_TS * price_level(scenario.finance, point, scenario.horizon_years)
    present_TS = present_values(flow_TS, scenario.finance, point)
    logical_TS = (
        point["data.size"]
        * (1.0 + point["data.growth"])
        ** np.arange(scenario.horizon_years, dtype=np.float64)[:, None]
    )
    factors_TS = discount_factors(
        point["finance.discount"], scenario.horizon_years, scenario.finance.timing
    )
    return StrategyCost(
        name=strategy.name,
        title=" + ".join(dict.fromkeys(facts.medium(tier.medium).title for tier in strategy.tiers)),
        ledger=ledger,
        cash_total_usd=float(cash_TS.sum()),
        endowment_usd=float(present_TS.sum()),
        usd_per_tb_year=float(cost_per_tb_year(present_TS, logical_TS, factors_TS)[0]),
        cumulative_usd=np.cumsum(present_TS[:, 0]),
        pay_as_you_go_usd=pay_as_you_go(cash_TS, logical_TS)[:, 0],
        migration_share={name: ledger.migration_share(name) for name in DEFINITIONS},
        carbon=carbon_of(runs, point),
        warnings=_feasibility(scenario, runs),
        physical=_physical(runs),
    )


def _physical(runs: list[TierRun]) -> dict[str, Array]:
    return {
        f"{run.medium}.{name}": series_TS[:, 0]
        for run in runs
        for name, series_TS in sorted(run.physical.items())
    }


def _feasibility(scenario: Scenario, runs: list[TierRun]) -> tuple[str, ...]:
    """Return one sentence for each medium whose drives cannot finish a migration in time.

    Raises:
        ConfigError: The scenario is strict about it.
    """
    warnings = []
    for run in runs:
        if "drives_needed" not in run.physical:
            continue
        needed_T = run.physical["drives_needed"][:, 0]
        at_hand_T = run.physical["drives_at_hand"][:, 0]
        short = np.flatnonzero(needed_T > at_hand_T)
        if len(short):
            year = int(short[0])
            sentence = (
                f"{run.medium}: the migration of year {year} needs {needed_T[year]:.0f} drives to "
                f"finish in its window and {at_hand_T[year]:.0f} are there"
            )
            if scenario.migration.strict:
                raise ConfigError(
                    sentence,
                    hint="allow a longer migration.window, more readers, or migration.strict=false",
                )
            warnings.append(f"{sentence}; the rest is hired by the hour")
    return tuple(warnings)


def scaled(scenario: Scenario, *, size: str, name: str | None = None) -> Scenario:
    """Return the scenario for another amount of data, with the same mean file size.

    Args:
        scenario: Possibly with an inventory, whose file count is scaled along.
        size: New logical size, as in "1 PB".
        name: New name; the old one with the size when None.
    """
    from tierwise.tco.scenario import logical_tb

    old_tb, objects = logical_tb(scenario.data)
    data = replace(scenario.data, size=size, inventory="", num_objects=0.0)
    new_tb, _ = logical_tb(data)
    if objects > 0 and old_tb > 0:
        data = replace(data, num_objects=objects * new_tb / old_tb)
    return replace(scenario, data=data, name=name or f"{scenario.name} at {size}")
