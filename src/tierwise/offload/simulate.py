"""Steps in virtual time: the device, both directions of the link, and the host, piece by piece.

```
 device   F1 F2 ... Fn Bn ... B2 B1 | F1 ...        unit i's forward waits for its weights
 down           gradient pieces, as backwards end
 host               updates, lowest unit first (the optimizer's own queue)
 up                     new weights, once the norm is known
```

What it is for: claims about schedules that a machine without a GPU cannot time, and the check that
the closed form of `plan` is what the queue achieves. Pieces are not preempted. Left out: noise,
contention for the host's memory, launch overheads.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tierwise.offload.plan import PLACES, Place, Schedule, time_at
from tierwise.offload.queue import LowestFirst
from tierwise.offload.trace import Lane, Span
from tierwise.offload.workload import Unit

Order = Literal["lowest", "fifo"]
Policy = Schedule | Literal["sequential"]
_LANES: dict[Place, tuple[Lane, str, int]] = {
    "host": ("host", "update", 0), "down": ("link", "copy", 0), "up": ("link", "upload", 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule did.

    Attributes:
        period_s: Time of a step once it repeats.
        spans: Of all simulated steps, in nanoseconds of virtual time; empty if not recorded.
    """

    period_s: float
    spans: tuple[Span, ...]


@dataclass(slots=True, eq=False)
class _Piece:
    unit: int
    step: int
    times: dict[Place, float]


class _Server:
    """One machine that works on one piece at a time, in the order of its queue."""

    def __init__(self, place: Place, order: Order, run: _Run) -> None:
        self._place, self._order, self._run = place, order, run
        self._lowest: LowestFirst[_Piece] = LowestFirst()
        self._first: deque[_Piece] = deque()
        self._busy = False

    def add(self, piece: _Piece) -> None:
        if self._order == "lowest":
            self._lowest.push(piece.unit, piece)
        else:
            self._first.append(piece)
        self._run.at(self._run.now, self._begin)  # after whatever else arrives now

    def _begin(self) -> None:
        if self._busy or not (self._lowest or self._first):
            return
        piece = self._lowest.pop() if self._order == "lowest" else self._first.popleft()
        self._busy = True
        start, length = self._run.now, piece.times[self._place]

        def end() -> None:
            self._busy = False
            lane, kind, track = _LANES[self._place]
            self._run.note(lane, kind, piece.unit, start, step=piece.step, track=track)
            self._run.left(piece, self._place)
            self._begin()

        self._run.at(start + length, end)


class _Run:
    """The event loop and the device's program."""

    def __init__(
        self, units: Sequence[Unit], shares: Sequence[float], policy: Policy, *,
        order: Order, chunk: float, steps: int, record: bool,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.spans: list[Span] = []
        self.starts: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._units, self._policy, self._steps, self._record = units, policy, steps, record
        self._work = [self._cut(u, s, chunk) for u, s in zip(units, shares, strict=True)]
        self._servers = {place: _Server(place, order, self) for place in PLACES}
        self._held: dict[Place, list[_Piece]] = {"host": [], "up": []}
        self._known = True  # the norm of the step in flight
        self._missing = [0] * len(units)
        self._position, self._step = 0, 0
        self._waiting = False

    @staticmethod
    def _cut(unit: Unit, share: float, chunk: float) -> list[dict[Place, float]]:
        part = (1.0 - share) * unit.parameters
        count = math.ceil(part / chunk - 1e-9) if part > 0 else 0
        times: dict[Place, float] = {
            place: time_at(unit, place) * (1.0 - share) / count if count else 0.0
            for place in PLACES
        }
        return [times] * count

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._number), action))

    def note(
        self, lane: Lane, kind: str, unit: int, start: float, *, step: int, track: int = 0
    ) -> None:
        if not self._record:
            return
        self.spans.append(
            Span(
                lane=lane, kind=kind, name=self._units[unit].name, start_ns=round(start * 1e9),
                end_ns=round(self.now * 1e9), step=step, track=track,
            )
        )  # fmt: skip

    def play(self) -> None:
        self.at(0.0, self._advance)
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _advance(self) -> None:
        """Begin the device's next piece of work, or wait for weights."""
        num = len(self._units)
        if self._position == 2 * num:
            self._position, self._step = 0, self._step + 1
        if self._step == self._steps:
            return
        forward = self._position < num
        unit = self._position if forward else 2 * num - 1 - self._position
        together = self._policy in ("barrier", "sequential")
        late = sum(self._missing) if together and self._position == 0 else self._missing[unit]
        if forward and late:
            self._waiting = True
            return
        if self._position == 0:
            self.starts.append(self.now)
        start = self.now
        kind = "forward" if forward else "backward"
        length = self._units[unit].forward_s if forward else self._units[unit].backward_s
        step = self._step

        def end() -> None:
            self.note("device", kind, unit, start, step=step)
            if not forward:
                self._gradient(unit, step)
            self._position += 1
            self._advance()

        self.at(start + length, end)

    def _gradient(self, unit: int, step: int) -> None:
        if unit == len(self._units) - 1:
            self._known = False
        pieces = [_Piece(unit, step, times) for times in self._work[unit]]
        self._missing[unit] = len(pieces)
        for piece in pieces:
            self._servers["down"].add(piece)
        if unit == 0:  # the norm is known: what waited for it may go on
            self._known = True
            for place, held in self._held.items():
                for piece in held:
                    self._servers[place].add(piece)
                held.clear()

    def left(self, piece: _Piece, place: Place) -> None:
        """Send a piece on from the place that has finished with it."""
        following: dict[Place, Place] = {"down": "host", "host": "up"}
        if place == "up":
            self._missing[piece.unit] -= 1
            if self._waiting:
                self._waiting = False
                self._advance()
            return
        goal = following[place]
        waits = goal == "up" or self._policy in ("defer", "sequential")
        if waits and not self._known:
            self._held[goal].append(piece)
        else:
            self._servers[goal].add(piece)


def simulate(
    units: Sequence[Unit],
    shares: Sequence[float],
    policy: Policy,
    *,
    order: Order = "lowest",
    chunk_parameters: float = 2**22,
    steps: int = 5,
    record: bool = False,
) -> Simulation:
    """Return the steady period of a schedule, and everything that happened.

    Args:
        units: In forward order.
        shares: Resident share of each.
        policy: A schedule of the plan, or `sequential`: all updates after backward, all weights
            back before the next forward (ZeRO-Offload's, its copies overlapped).
        order: Lowest unit first, or first come first served (at the host and on the link).
        chunk_parameters: Size of a piece, at most.
        steps: Steps to simulate; the period is that of the last.
        record: Return spans too.
    """
    run = _Run(
        units, shares, policy, order=order, chunk=chunk_parameters, steps=steps, record=record
    )
    run.play()
    return Simulation(period_s=run.starts[-1] - run.starts[-2], spans=tuple(run.spans))
