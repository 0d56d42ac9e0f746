"""A need per year -> what a cloud's cold tier bills: storage, requests, retrieval, egress.

Meters are decimal: a provider's GB-month is 10**9 bytes here, and a scenario in PiB is converted
before it arrives. The provider keeps the copies, so a scenario's `copies` and `parity` do not
multiply the bill. Left out: moving between providers (write it as two tiers with a hand-over
year), and early deletion, which yearly steps never trigger because minimum durations above a
year are refused.

Legend: T years, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierwise.tco.inputs import Array, Point

GB_PER_TB = 1000.0
# bounds of the egress bands in TB a month, as the price list draws them
EGRESS_BOUNDS_TB = (10.0, 50.0, 150.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudBill:
    """Yearly charges in USD, all TS."""

    storage: Array
    requests: Array
    retrieval: Array
    egress: Array


def banded_cost(volume: Array, bounds: Sequence[float], rates: Sequence[Array]) -> Array:
    """Return the cost of a volume where each band is billed at its own rate.

    Args:
        volume: Amount, in the unit of the bounds.
        bounds: Upper ends of all bands but the last, rising.
        rates: Price per unit in each band; one more than the bounds.

    >>> import numpy as np
    >>> banded_cost(np.array([12.0]), [10.0], [np.array([2.0]), np.array([1.0])])
    array([22.])
    """
    cost = np.zeros(np.broadcast_shapes(volume.shape, rates[0].shape))
    lower = 0.0
    for upper, rate in zip((*bounds, np.inf), rates, strict=True):
        cost = cost + np.clip(volume - lower, 0.0, upper - lower) * rate
        lower = upper
    return cost


def bill_cloud(
    medium: str, point: Point, *, stored_TS: Array, added_TS: Array, read_TS: Array
) -> CloudBill:
    """Return a cloud's yearly bill.

    Args:
        medium: The cloud medium's name, for its fact keys.
        point: Inputs.
        stored_TS: Logical TB stored in each year.
        added_TS: Logical TB written in each year.
        read_TS: Logical TB retrieved and downloaded in each year.
    """
    years_T1 = np.arange(stored_TS.shape[0], dtype=np.float64)[:, None]
    trend_TS = (1.0 - point[f"{medium}.decline"]) ** years_T1
    size = point["data.size"]
    objects_per_tb = np.where(
        size > 0, objects_in(medium, point) / np.where(size > 0, size, 1.0), 0.0
    )
    overhead_usd_month = (
        point[f"{medium}.overhead_cold"] * point[f"{medium}.storage"]
        + point[f"{medium}.overhead_standard"] * point[f"{medium}.standard_rate"]
    ) * 1e-6  # KB -> GB
    storage_usd_tb_month = (
        GB_PER_TB * point[f"{medium}.storage"] + objects_per_tb * overhead_usd_month
    )
    rates = [
        point[f"{medium}.egress_{band}"] * GB_PER_TB for band in ("10tb", "50tb", "150tb", "beyond")
    ]
    egress_TS = 12.0 * banded_cost(read_TS / 12.0, EGRESS_BOUNDS_TB, rates)
    return CloudBill(
        storage=stored_TS * 12.0 * storage_usd_tb_month * trend_TS,
        requests=added_TS * objects_per_tb * point[f"{medium}.put"] / 1000.0 * trend_TS,
        retrieval=read_TS * GB_PER_TB * point[f"{medium}.retrieval"] * trend_TS,
        egress=egress_TS * point[f"{medium}.egress_factor"] * trend_TS,
    )


def objects_in(medium: str, point: Point) -> Array:
    """Return the number of objects in year 0: the scenario's, or by the mean object size."""
    by_size = point["data.size"] * GB_PER_TB / point[f"{medium}.object_size"]
    return np.where(point["data.objects"] > 0, point["data.objects"], by_size)
