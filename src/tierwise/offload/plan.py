"""Which parameters stay on the device, how long a step then takes, and how far that is from best.

With units 1..n in forward order, f, b, c the forward, backward and host update times, and X the
host time of what stays resident, no schedule has a shorter period than

    P* = T_fwd + T_bwd + max_i (C_i - X - RD_i)^+        C_i = c_1 + ... + c_i

where RD_i, the reuse distance, is the time from unit i's gradient to its next forward: what the
host may use for units 1..i together. It is reached by keeping the *first* X of the forward order
resident and always updating the lowest unit that is ready. The link's two directions obey the same
test with their own times and windows: new weights leave the host only when the norm is known. The
three schedules are the optimizer's: `speculate` with `overlap_forward`, `defer`, and `barrier`:
`speculate` without `overlap_forward`. docs/offload.md has the proof.

Left out: choosing whole units (a subset sum; units are split instead, and the boundary costs at
most one chunk), the third place (states streamed through the device), NVMe.

Source: reuse distance: CoTrain, https://dl.acm.org/doi/10.1145/3605573.3605647 (abstract); the
theorem is ours; its two parts are Jackson 1955 and the test of nested windows (earliest deadline).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tierwise.core.errors import UsageError
from tierwise.core.units import format_size
from tierwise.offload.workload import STATE_BYTES, WEIGHT_BYTES, Unit

Schedule = Literal["speculate", "defer", "barrier"]
Place = Literal["host", "down", "up"]
PLACES: tuple[Place, ...] = ("host", "down", "up")


def reuse_distances(units: Sequence[Unit], schedule: Schedule, place: Place) -> list[float]:
    """Return RD_i in seconds: the window that a place has for units 1..i together.

    It opens when unit i's backward ends (for uploads, and for updates in `defer`, when the whole
    backward has: the norm must be known) and closes when unit i's next forward begins (in
    `barrier`, when the next step does).
    """
    opens_early = place == "down" or (place == "host" and schedule != "defer")
    closes_late = schedule != "barrier"
    before, windows = 0.0, []
    for unit in units:
        windows.append(before)
        before += opens_early * unit.backward_s + closes_late * unit.forward_s
    return windows


def time_at(unit: Unit, place: Place) -> float:
    """Return what the unit takes at the host or in one direction of the link."""
    return {"host": unit.update_s, "down": unit.down_s, "up": unit.up_s}[place]


def stall(
    units: Sequence[Unit], shares: Sequence[float], schedule: Schedule, place: Place = "host"
) -> float:
    """Return the least device stall a step, when `shares` of the units' parameters stay resident.

    This is max_i (W_i - RD_i)^+, W_i the work of units 1..i that is not resident.
    """
    work, worst = 0.0, 0.0
    for unit, share, window in zip(
        units, shares, reuse_distances(units, schedule, place), strict=True
    ):
        work += (1.0 - share) * time_at(unit, place)
        worst = max(worst, work - window)
    return worst


def prefix_shares(units: Sequence[Unit], resident_parameters: float) -> list[float]:
    """Return each unit's resident share when the first `resident_parameters` stay."""
    left, shares = float(resident_parameters), []
    for unit in units:
        here = min(left, float(unit.parameters))
        shares.append(here / unit.parameters if unit.parameters else 1.0)
        left -= here
    return shares


def least_resident(units: Sequence[Unit], schedule: Schedule) -> float:
    """Return the fewest resident parameters with which no step stalls.

    It is the largest, over places and i, of the parameters that must leave units 1..i for their
    work to fit into RD_i; every place takes time in proportion to parameters.
    """
    most = 0.0
    for place in PLACES:
        count, work = 0.0, 0.0
        for unit, window in zip(units, reuse_distances(units, schedule, place), strict=True):
            count += unit.parameters
            work += time_at(unit, place)
            if work > window:
                most = max(most, count * (work - window) / work)
    return most


def lower_bound(units: Sequence[Unit], resident_parameters: float, schedule: Schedule) -> float:
    """Return P* in seconds for the best choice of `resident_parameters`.

    Exact for the host and for each direction of the link alone, so a bound for all together.
    """
    device = sum(unit.forward_s + unit.backward_s for unit in units)
    shares = prefix_shares(units, resident_parameters)
    return device + max(stall(units, shares, schedule, place) for place in PLACES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one side, by what they hold."""

    weights: float = 0.0
    gradients: float = 0.0
    state: float = 0.0
    shadows: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.state + self.shadows + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement, its step time, and its certificate.

    Attributes:
        schedule: When the host works.
        resident_parameters: Kept on the device: the first of the forward order.
        shares: Resident share of each unit.
        device_s: Forward and backward alone: no step is shorter.
        bound_s: P*: no schedule of this kind with so many residents has a shorter period.
        stalls: The least stall each place alone would cause, in seconds.
        no_stall_parameters: Residents with which nothing stalls.
        device: Memory there.
        host: Memory there.
    """

    schedule: Schedule
    resident_parameters: int
    shares: tuple[float, ...]
    device_s: float
    bound_s: float
    stalls: tuple[tuple[Place, float], ...]
    no_stall_parameters: int
    device: Memory
    host: Memory


def make_plan(
    units: Sequence[Unit],
    *,
    schedule: Schedule,
    device_memory_bytes: float,
    host_memory_bytes: float,
    activation_bytes: float,
    resident_parameters: float | None = None,
) -> Plan:
    """Return the best placement for a machine.

    Residents are as many as needed to stall nowhere, or as fit. If the host has no room for
    shadow state, the plan is for `defer`.

    Args:
        units: In forward order.
        schedule: When the host works.
        device_memory_bytes: Room for weights, gradients, activations and residents.
        host_memory_bytes: Room for state and shadows.
        activation_bytes: Of one micro-batch.
        resident_parameters: Keep so many instead.

    Raises:
        UsageError: It does not fit; the message says how much is missing.
    """
    if not units or sum(unit.parameters for unit in units) == 0:
        raise UsageError("the model has no parameters to place")
    total = sum(unit.parameters for unit in units)
    largest = max(unit.parameters for unit in units)
    base = Memory(
        weights=WEIGHT_BYTES * total,
        gradients=2.0 * 2.0 * largest,  # the block at work and the one on the link
        activations=activation_bytes,
    )
    room = device_memory_bytes - base.total
    if room < 0:
        raise UsageError(
            f"the device is too small even with everything offloaded: {format_size(-room)} more "
            "is needed",
            hint="use fewer tokens at once, or checkpointing",
        )
    needed = least_resident(units, schedule)
    fits = _fitting(needed if resident_parameters is None else resident_parameters, total, room)
    if resident_parameters is not None and fits < min(math.ceil(resident_parameters), total):
        missing = STATE_BYTES * (min(math.ceil(resident_parameters), total) - fits)
        raise UsageError(
            f"{resident_parameters:.0f} resident parameters do not fit on the device: "
            f"{format_size(missing)} is missing"
        )
    if schedule != "defer" and _host_memory(total - fits, schedule).total > host_memory_bytes:
        schedule, needed = "defer", least_resident(units, "defer")
        fits = _fitting(needed, total, room) if resident_parameters is None else fits
    short = _host_memory(total - fits, schedule).total - host_memory_bytes
    if short > 0:
        raise UsageError(f"the host is too small: {format_size(short)} more memory is needed")
    shares = prefix_shares(units, fits)
    offloaded = total - fits
    return Plan(
        schedule=schedule,
        resident_parameters=fits,
        shares=tuple(shares),
        device_s=sum(unit.forward_s + unit.backward_s for unit in units),
        bound_s=lower_bound(units, fits, schedule),
        stalls=tuple((place, stall(units, shares, schedule, place)) for place in PLACES),
        no_stall_parameters=min(total, math.ceil(needed)),
        device=Memory(
            weights=base.weights,
            gradients=base.gradients,
            state=STATE_BYTES * fits,
            activations=base.activations,
        ),
        host=_host_memory(offloaded, schedule),
    )


def _fitting(wanted: float, total: int, room_bytes: float) -> int:
    return min(math.ceil(wanted), total, int(room_bytes / STATE_BYTES))


def _host_memory(parameters: float, schedule: Schedule) -> Memory:
    """Return the host's bytes: fp32 p, m, v, bf16 weights out and gradients in, and shadows."""
    shadow = STATE_BYTES * parameters if schedule != "defer" else 0.0
    moved = WEIGHT_BYTES * parameters
    return Memory(weights=moved, gradients=moved, state=STATE_BYTES * parameters, shadows=shadow)
