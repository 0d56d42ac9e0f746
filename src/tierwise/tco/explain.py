"""The two published models, explained one change at a time.

For the precursor: its totals and the migration share of its operational expenditure (energy and
maintenance) as published, then as each defect is removed. Left out: defects that move no
number; `precursor.Defects` has them all as switches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tierwise.core.report import Table
from tierwise.tco.dshr import DshrConfig, Quirks, endowment_usd_per_tb
from tierwise.tco.ledger import Ledger
from tierwise.tco.precursor import MEDIA, Defects, PrecursorConfig, run_precursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One line: a change, and for each medium the total and the migration share it leaves."""

    change: str
    config: PrecursorConfig
    total_usd: Mapping[str, float]
    migration_share: Mapping[str, float | None]


def precursor_steps(config: PrecursorConfig) -> list[tuple[str, PrecursorConfig]]:
    """Return the chain of changes, each on top of the one before."""
    published = config.defects == Defects() and config.decline is None
    published = published and config.migration_usd_tb is None and config.library == "published"
    steps = [("as published" if published else "as given", config)]

    def then(change: str, **off: bool) -> None:
        last = steps[-1][1]
        steps.append((change, replace(last, defects=replace(last.defects, **off))))

    then("energy: a W-year is 8.76 kWh", kwh_unit=False)
    then("+ servers draw power", server_power_lost=False)
    then("+ PUE multiplies once", pue_plus_one=False)
    then("+ no purchase on the last day; floor, cooling and switch priced",
         fence_post=False, misspelt_names=False)  # fmt: skip
    steps.append(
        (
            "+ constant prices, media 5 % cheaper a year",
            replace(
                steps[-1][1],
                decline=0.05,
                defects=replace(steps[-1][1].defects, history_as_future=False),
            ),
        )
    )
    steps.append(("+ migration at 20 a TB", replace(steps[-1][1], migration_usd_tb=20.0)))
    steps.append(("+ a tape library of 1,000 slots", replace(steps[-1][1], library="sane")))
    then("+ servers and frames on their own lives", tied_lives=False)
    then("+ old media at their own capacity", this_years_racks=False)
    then("+ ceiling, decimal PB, whole racks",
         no_ceiling=False, binary_petabyte=False, fractional_racks=False)  # fmt: skip
    return steps


def explain_precursor(config: PrecursorConfig | None = None) -> list[Explanation]:
    """Return the totals and migration shares at every step."""
    lines = []
    for change, step in precursor_steps(config or PrecursorConfig(defects=Defects())):
        ledgers: dict[str, Ledger] = {medium: run_precursor(medium, step) for medium in MEDIA}
        lines.append(
            Explanation(
                change=change,
                config=step,
                total_usd={name: ledger.total() for name, ledger in ledgers.items()},
                migration_share={
                    name: ledger.migration_share("A") for name, ledger in ledgers.items()
                },
            )
        )
    return lines


def precursor_table(lines: list[Explanation]) -> Table:
    """Return the explanation as a table in millions and per cent."""
    rows = []
    for line in lines:
        totals = (f"{line.total_usd[name] / 1e6:,.1f}" for name in MEDIA)
        shares = (
            "n/a" if share is None else f"{100 * share:.1f} %"
            for share in (line.migration_share[name] for name in MEDIA)
        )
        rows.append((line.change, *totals, *shares))
    return Table(
        caption="Total in millions, and migration as a share of energy + maintenance",
        header=("change", *MEDIA, *(f"{name} share" for name in MEDIA)),
        rows=tuple(rows),
    )


def explain_dshr(config: DshrConfig | None = None) -> list[tuple[str, float]]:
    """Return the endowment per TB as published and as each quirk is removed."""
    base = config or DshrConfig()
    textbook = replace(base, quirks=Quirks(linear_discount=False))
    bought = replace(base, quirks=Quirks(current_capacity=False))
    both = replace(base, quirks=Quirks(linear_discount=False, current_capacity=False))
    published = base == DshrConfig()
    return [
        ("as published" if published else "as given", endowment_usd_per_tb(base)),
        ("two copies", endowment_usd_per_tb(replace(base, replication=2 * base.replication))),
        ("discounted by 1 / (1 + r) ** y", endowment_usd_per_tb(textbook)),
        ("running cost on the capacity bought", endowment_usd_per_tb(bought)),
        ("both", endowment_usd_per_tb(both)),
    ]
