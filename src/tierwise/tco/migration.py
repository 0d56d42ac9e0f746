"""Data moved -> drive hours, labour, energy, the project's own price, and whether it can finish.

Moving data is three passes: read the old units, write the new, verify the new. Priced bottom-up
it costs the hours of the drives (their price spread over their life), the minutes of the people
who handle units, the energy of the drives, and a price per TB for planning, checking and
software; or, `flat`, the price per TB alone as in the precursor. The data is moved, not the
capacity: an almost empty cartridge costs its handling and little else. Left out: queues between
the passes, which a discrete-event simulation would see.

Legend: T years, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierwise.tco.inputs import Array, Point

HOURS_PER_YEAR = 8760.0
MB_PER_TB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """What moving costs, in USD by year and sample, and the work behind it.

    Attributes:
        handling: Labour of loading and unloading units.
        drive_hours_usd: Hire of the drives' time.
        energy_kwh: Energy of separate drives, before PUE.
        project: Price per TB for planning, checking, software.
        hours: Drive hours of all passes.
    """

    handling: Array
    drive_hours_usd: Array
    energy_kwh: Array
    project: Array
    hours: Array


def move(
    medium: str,
    point: Point,
    *,
    read_TS: Array,
    written_TS: Array,
    units_TS: Array,
    priced_TS: Array,
    wage_hour_TS: Array,
    flat: bool,
) -> Moving:
    """Return the cost of moving data off and onto a medium.

    Args:
        medium: The medium whose drives do the passes.
        point: Inputs.
        read_TS: TB read off old units.
        written_TS: TB written to new units; each is verified by a second pass.
        units_TS: Units handled, old and new.
        priced_TS: TB to which the project price per TB applies.
        wage_hour_TS: Cost of one working hour, by year.
        flat: Whether the price per TB is all there is.
    """
    passes_TS = read_TS + 2.0 * written_TS
    hours_TS = passes_TS * MB_PER_TB / point[f"{medium}.rate"] / 3600.0
    project_TS = priced_TS * point["migration.price"]
    if flat:
        zero = np.zeros_like(project_TS)
        return Moving(
            handling=zero, drive_hours_usd=zero, energy_kwh=zero, project=project_TS, hours=hours_TS
        )
    hire_usd_hour = point[f"{medium}.reader_price"] / (
        point[f"{medium}.reader_life"] * HOURS_PER_YEAR * point["migration.utilisation"]
    )
    return Moving(
        handling=units_TS * point[f"{medium}.handling"] / 60.0 * wage_hour_TS,
        drive_hours_usd=hours_TS * hire_usd_hour,
        energy_kwh=hours_TS * point[f"{medium}.reader_power"] / 1000.0,
        project=project_TS,
        hours=hours_TS,
    )


def drives_needed(hours_TS: Array, point: Point) -> Array:
    """Return how many drives finish the hours within the window; whole drives."""
    per_drive = HOURS_PER_YEAR * point["migration.utilisation"] * point["migration.window"]
    return np.ceil(hours_TS / per_drive - 1e-9)
