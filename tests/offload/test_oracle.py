"""An independent program agrees: CP-SAT chooses residents, order and times; nothing is better.

The constraint model is written from the definition of a step, with none of the planner's code:
which pieces stay resident, when every piece is copied, updated and sent back, and when the device
works or waits are all left to the solver. Times are whole numbers, so its optimum is exact.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from ortools.sat.python import cp_model

from tierwise.offload.plan import Schedule, least_resident, lower_bound, prefix_shares
from tierwise.offload.simulate import simulate
from tierwise.offload.workload import Unit

SCHEDULES: tuple[Schedule, ...] = ("speculate", "defer", "barrier")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Units as (forward, backward, pieces), and what a piece takes at (down, host, up)."""

    units: tuple[tuple[int, int, int], ...]
    piece: tuple[int, int, int] = (0, 1, 0)

    def planned(self) -> list[Unit]:
        down, host, up = self.piece
        return [
            Unit(name=f"u{number}", parameters=count, forward_s=forward, backward_s=backward,
                 update_s=host * count, down_s=down * count, up_s=up * count)
            for number, (forward, backward, count) in enumerate(self.units)
        ]  # fmt: skip

    @property
    def num_pieces(self) -> int:
        return sum(count for *_, count in self.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """Whether a piece leaves the device, and when each lane then begins with it."""

    moved: cp_model.LiteralT
    starts: list[cp_model.IntVar]


class Oracle:
    """One step in steady state, from the start of backward to the end of the next forward.

    All work of a step lies inside this stretch: gradients come from its backward, and its last
    forward needs the last weights. So the least makespan is the least period.
    """

    def __init__(self, instance: Instance, schedule: Schedule, *, whole: bool = False) -> None:
        self.model = cp_model.CpModel()
        device = sum(forward + backward for forward, backward, _ in instance.units)
        self._horizon = device + sum(instance.piece) * instance.num_pieces
        self._instance, self._schedule = instance, schedule
        self._lanes: list[list[cp_model.IntervalVar]] = [[], [], []]
        self.resident: list[list[cp_model.IntVar]] = []
        self._device(instance)
        for unit, (*_, count) in enumerate(instance.units):
            stays = [self.model.new_bool_var(f"stays {unit} {k}") for k in range(count)]
            for one, other in itertools.pairwise(stays):
                if whole:
                    self.model.add(one == other)
                else:
                    self.model.add(one >= other)  # pieces of a unit are alike
            self.resident.append(stays)
            before: _Moved | None = None
            for stay in stays:
                before = self._piece(unit, stay, before)
        for lane in self._lanes:
            self.model.add_no_overlap(lane)

    def _time(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self._horizon, name)

    def _device(self, instance: Instance) -> None:
        """Backwards from the last unit to the first, then forwards, with waits where it likes."""
        count = len(instance.units)
        self.backward_end = [self._time(f"backward {unit}") for unit in range(count)]
        self.forward_start = [self._time(f"forward {unit}") for unit in range(count)]
        now: cp_model.LinearExprT = 0
        for unit in reversed(range(count)):
            self.model.add(self.backward_end[unit] >= now + instance.units[unit][1])
            now = self.backward_end[unit]
        for unit in range(count):
            self.model.add(self.forward_start[unit] >= now)
            now = self.forward_start[unit] + instance.units[unit][0]
        self.period = self._time("period")
        self.model.add(self.period == now)

    def _piece(self, unit: int, stays: cp_model.IntVar, before: _Moved | None) -> _Moved:
        """Copy, update and send back one piece unless it stays; `before` is one like it."""
        moved, norm_known = ~stays, self.backward_end[0]
        ready: cp_model.LinearExprT = self.backward_end[unit]
        starts = []
        for place, length in enumerate(self._instance.piece):
            start = self._time(f"start {unit} {place}")
            self._lanes[place].append(
                self.model.new_optional_fixed_size_interval_var(start, length, moved, "")
            )
            self.model.add(start >= ready).only_enforce_if(moved)
            if place == 2 or (place == 1 and self._schedule == "defer"):
                self.model.add(start >= norm_known).only_enforce_if(moved)
            if before is not None:  # alike: done in this order
                both = [moved, before.moved]
                self.model.add(start >= before.starts[place] + length).only_enforce_if(both)
            ready = start + length
            starts.append(start)
        needed = self.forward_start[0 if self._schedule == "barrier" else unit]
        self.model.add(ready <= needed).only_enforce_if(moved)
        return _Moved(moved=moved, starts=starts)

    def solve(self, objective: cp_model.LinearExprT) -> int:
        """Return the proven least value of the objective."""
        self.model.minimize(objective)
        self.solver = cp_model.CpSolver()
        self.solver.parameters.num_workers = 1
        self.solver.parameters.random_seed = 1
        self.solver.parameters.max_deterministic_time = 60.0
        assert self.solver.solve(self.model) == cp_model.OPTIMAL
        return round(self.solver.objective_value)

    @property
    def num_resident(self) -> cp_model.LinearExprT:
        return sum(stay for stays in self.resident for stay in stays)

    def chosen(self) -> list[int]:
        return [sum(self.solver.value(stay) for stay in stays) for stays in self.resident]


def least_period(
    instance: Instance, schedule: Schedule, residents: int, *, whole: bool = False
) -> tuple[int, list[int]]:
    """Return the least period with at most so many resident pieces, and one choice of them."""
    oracle = Oracle(instance, schedule, whole=whole)
    oracle.model.add(oracle.num_resident <= residents)
    return oracle.solve(oracle.period), oracle.chosen()


def draw(seed: int, *, most: int = 5, piece: Sequence[int] = (0, 1, 0)) -> Instance:
    """Return units of any shape: empty ones, an early one without work, a late one with most."""
    chance = random.Random(seed)
    units = [
        (chance.randint(0, 4), chance.randint(0, 6), chance.choice([0, 1, 2, 3, 5]))
        for _ in range(chance.randint(1, most))
    ]
    if seed % 3 == 0:
        units[0] = (units[0][0], units[0][1], 0)
    if seed % 3 == 1:
        units[-1] = (units[-1][0], units[-1][1], 6)
    down, host, up = piece
    return Instance(units=tuple(units), piece=(down, host, up))


def simulated(instance: Instance, residents: int, schedule: Schedule) -> float:
    units = instance.planned()
    shares = prefix_shares(units, residents)
    return simulate(units, shares, schedule, chunk_parameters=1).period_s


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(12))
def test_no_residents_and_no_order_beat_the_closed_form(seed: int, schedule: Schedule) -> None:
    instance = draw(seed)
    for residents in {0, instance.num_pieces // 3, instance.num_pieces // 2}:
        best, _ = least_period(instance, schedule, residents)
        assert lower_bound(instance.planned(), residents, schedule) == best
        # a piece that has begun is not interrupted: at most one more at each boundary
        assert best <= simulated(instance, residents, schedule) <= best + 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(12))
def test_the_least_resident_work_without_a_stall(seed: int, schedule: Schedule) -> None:
    instance = draw(seed)
    oracle = Oracle(instance, schedule)
    oracle.model.add(oracle.period == sum(f + b for f, b, _ in instance.units))
    assert oracle.solve(oracle.num_resident) == least_resident(instance.planned(), schedule)


@pytest.mark.parametrize("piece", [(1, 1, 1), (1, 3, 1), (3, 2, 3), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_with_both_directions_of_the_link(seed: int, piece: tuple[int, int, int]) -> None:
    instance = draw(seed, most=4, piece=piece)
    for schedule in SCHEDULES:
        for residents in {0, instance.num_pieces // 3}:
            best, _ = least_period(instance, schedule, residents)
            ours = simulated(instance, residents, schedule)
            assert lower_bound(instance.planned(), residents, schedule) <= best <= ours
            assert ours <= best + sum(piece)  # one piece's way through the three lanes


def test_a_best_set_of_whole_units_need_not_be_a_prefix_and_the_split_prefix_is_as_good() -> None:
    # two pieces may stay; the first unit is too large for that, the second is not
    instance = Instance(units=((1, 1, 3), (1, 1, 2), (1, 1, 0)))
    whole, chosen = least_period(instance, "speculate", 2, whole=True)
    assert chosen == [0, 2, 0]
    split, _ = least_period(instance, "speculate", 2)
    assert split == lower_bound(instance.planned(), 2, "speculate") < whole


@pytest.mark.parametrize("seed", range(8))
def test_no_set_of_whole_units_beats_the_split_prefix(seed: int) -> None:
    instance = draw(seed)
    residents = instance.num_pieces // 2
    for schedule in SCHEDULES:
        whole, _ = least_period(instance, schedule, residents, whole=True)
        assert whole >= lower_bound(instance.planned(), residents, schedule)
