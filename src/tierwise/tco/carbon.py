"""Energy and embodied emissions of a strategy, in kg CO2e by year.

Running emissions follow the grid's intensity, which falls at a rate of its own; embodied ones
are counted when a unit is bought. Left out, because no assessment was found: tape cartridges,
optical discs, libraries and buildings. A zero there is a gap in the facts, not a claim.

Source: spreading by unit and TB after https://github.com/DigitalPebble/spruce/issues/102.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tierwise.tco.inputs import Array, Point
from tierwise.tco.model import TierRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Carbon:
    """Emissions by year (T) of one sample, and what is missing from them."""

    energy_kg: Array
    embodied_kg: Array
    gaps: tuple[str, ...]

    @property
    def total_kg(self) -> float:
        """Return all of it."""
        return float(self.energy_kg.sum() + self.embodied_kg.sum())


def carbon_of(runs: Iterable[TierRun], point: Point) -> Carbon:
    """Return the emissions of a strategy's tiers, for the first sample."""
    runs = list(runs)
    num_years = runs[0].physical["kwh"].shape[0]
    years_T = np.arange(num_years, dtype=np.float64)
    grid_T = point["power.grid"][0] * (1.0 + point["power.grid_rate"][0]) ** years_T
    kwh_T = sum((run.physical["kwh"][:, 0] for run in runs), np.zeros(num_years))
    embodied_T = sum((run.physical["embodied_kg"][:, 0] for run in runs), np.zeros(num_years))
    gaps = []
    for run in runs:
        unit = point.get(f"{run.medium}.embodied_unit")
        if unit is None:
            gaps.append(f"the energy and hardware of the {run.medium} provider")
        elif unit[0] == 0 and point[f"{run.medium}.embodied_tb"][0] == 0:
            gaps.append(f"embodied emissions of {run.medium}")
    return Carbon(energy_kg=kwh_T * grid_T, embodied_kg=embodied_T, gaps=tuple(dict.fromkeys(gaps)))
