"""Step 4, which generation: the archive's inventory, and the same scaled up, over decades."""

from __future__ import annotations

from dataclasses import replace

from tierwise.cli.demo.settings import CostSettings
from tierwise.cli.steps import StepContext
from tierwise.core.report import Section
from tierwise.tco.compare import Comparison, compare, scaled
from tierwise.tco.report import sections_of, write_data
from tierwise.tco.scenario import Scenario, load_preset

INVENTORY = ("3-archive", "inventory.json")
FOLDERS = ("as-is", "scaled")


def run_cost(context: StepContext, settings: CostSettings, seed: int) -> None:
    """Cost both archives on five media; leave ledgers and the answers."""
    for folder, (name, scenario) in zip(FOLDERS, _scenarios(context, settings), strict=True):
        result = _compare(scenario, settings, seed, context)
        write_data(result, context.folder / folder)
        context.record.event(
            "tco.compared",
            scenario=name,
            years=scenario.horizon_years,
            ranking=[strategy.name for strategy in result.ranking],
            endowment_usd={s.name: round(s.endowment_usd, 2) for s in result.ranking},
            usd_per_tb_year={s.name: round(s.usd_per_tb_year, 4) for s in result.ranking},
            p_cheapest={} if result.spread is None else dict(result.spread.p_cheapest),
            migration_share_of_opex={s.name: dict(s.migration_share) for s in result.ranking},
        )


def cost_sections(context: StepContext, settings: CostSettings, seed: int) -> list[Section]:
    """Return the report's sections about cost."""
    sections: list[Section] = []
    for name, scenario in _scenarios(context, settings):
        result = _compare(scenario, settings, seed, context)
        sections += sections_of(result, prefix=name, details=False)
    return sections


def _scenarios(context: StepContext, settings: CostSettings) -> list[tuple[str, Scenario]]:
    base = load_preset(settings.preset)
    inventory = context.run_folder.joinpath(*INVENTORY)
    small = replace(base, name="this archive", data=replace(base.data, inventory=str(inventory)))
    large = scaled(small, size=settings.scaled_to, name=f"this archive at {settings.scaled_to}")
    return [("this archive", small), (f"at {settings.scaled_to}", large)]


def _compare(
    scenario: Scenario, settings: CostSettings, seed: int, context: StepContext
) -> Comparison:
    return compare(scenario, samples=settings.num_draws, seed=seed, progress=context.progress)
