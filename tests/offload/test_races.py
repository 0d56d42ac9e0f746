"""Timing changes nothing, and a dead worker is an error, never a hang."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.offload.small_models import Gpt, gpt_loss
from tests.offload.twins import SOMETIMES, Ours, Scenario, play, reference
from tierwise.core.errors import StateError
from tierwise.offload import OffloadAdamW, fingerprint, verify_bits
from tierwise.offload.queue import LowestFirst, Task, Ticket, UpdateQueue
from tierwise.offload.verify import differing_bits


def delays(seed: int) -> Callable[[Task], None]:
    draw = random.Random(seed)
    lock = threading.Lock()

    def before(task: Task) -> None:
        with lock:
            pause = draw.choice([0.0, 0.0, 0.0005, 0.004])
        time.sleep(pause)

    return before


@pytest.mark.parametrize("mode", ["speculate", "defer", "auto"])
@pytest.mark.parametrize("seed", [0, 1])
def test_delays_at_every_hand_over(mode: str, seed: int) -> None:
    scenario = Scenario(clip=SOMETIMES, accumulation=2, two_groups=True, skipped=True, steps=12)

    def build(model: nn.Module) -> Ours:
        options = {"mode": mode, "num_threads": 2, "chunk_elements": 1024, "overlap_forward": True}
        side = Ours(model, scenario, options)
        side.optimizer._queue.before = delays(seed)
        return side

    assert differing_bits(play(scenario, build), reference(scenario)) == {}


class Heavy(nn.Module):
    """Much state and no arithmetic: the host can never keep up with this backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding(4000, 40) for _ in range(6))

    def forward(self, index: Tensor) -> Tensor:
        x = torch.zeros(len(index), 40)
        for layer in self.layers:
            x = functional.silu(x + layer(index))
        return x


@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("limit", [0.05, 1e9])
def test_layers_with_terrible_arithmetic_density(overlap_forward: bool, limit: float) -> None:
    def loss(model: nn.Module, number: int) -> Tensor:
        index = torch.arange(5) + 7 * number
        result: Tensor = model(index).square().mean()
        return result

    report = verify_bits(
        Heavy, loss, steps=8, seed=0, max_grad_norm=limit, mode="speculate", lr=1e-2,
        overlap_forward=overlap_forward,
    )  # fmt: skip
    assert report.equal, report.differing


class Tangle(nn.Module):
    """Layers of drawn shapes, some used twice, some idle, in a drawn order."""

    def __init__(self, widths: list[int], order: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in zip(widths, [*widths[1:], widths[0]], strict=True)
        )
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for index in self.order:
            layer = self.layers[index % len(self.layers)]
            assert isinstance(layer, nn.Linear)
            wide = functional.pad(x, (0, 32))[:, : layer.in_features]
            total = total + functional.gelu(layer(wide)).square().mean()
        return total


@given(
    widths=st.lists(st.integers(1, 21), min_size=1, max_size=5),
    order=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    mode=st.sampled_from(["speculate", "defer", "barrier", "auto"]),
    limit=st.sampled_from([None, 1e-2, 0.5, 1e9]),
    accumulation=st.integers(1, 3),
    late=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_graph_of_shapes(
    *, widths: list[int], order: list[int], mode: str, limit: float | None, accumulation: int,
    late: bool,
) -> None:  # fmt: skip
    def loss(model: nn.Module, number: int) -> Tensor:
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(number))
        result: Tensor = model(x)
        return result

    report = verify_bits(
        lambda: Tangle(widths, order), loss, steps=4, seed=0, max_grad_norm=limit, mode=mode,
        accumulation=accumulation, overlap_forward=late, num_threads=2, chunk_elements=64,
    )  # fmt: skip
    assert report.equal, report.differing


def _trained(mode: Any, **options: Any) -> tuple[nn.Module, OffloadAdamW]:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = OffloadAdamW(model, 1e-2, mode=mode, **options)
    for step in range(2):
        gpt_loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("error", [ValueError("disk on fire"), SystemExit(3)])
def test_a_worker_that_dies_while_proposing_is_an_error_at_the_next_call(
    error: BaseException,
) -> None:
    model, ours = _trained("speculate")
    weights, state = fingerprint(model), fingerprint(ours.state_dict()["state"])

    def die(task: Task) -> None:
        raise error

    ours._queue.before = die

    def backward_and_step() -> None:
        gpt_loss(model, 2).backward()  # type: ignore[no-untyped-call]
        ours.step()

    with pytest.raises(StateError, match=r"update thread failed .*the last step is intact"):
        backward_and_step()
    with pytest.raises(StateError, match="update thread failed"):
        ours.step()
    assert fingerprint(model) == weights
    assert fingerprint(ours.state_dict()["state"]) == state
    ours.close()


def test_a_worker_that_dies_while_updating_in_place_says_the_state_is_torn() -> None:
    model, ours = _trained("barrier")
    ours._queue.before = vanish
    gpt_loss(model, 2).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(StateError, match="torn") as caught:
        ours.step()
    assert caught.value.hint == "load the last checkpoint"
    ours.close()


def test_a_deferred_update_that_fails_is_met_by_the_next_forward() -> None:
    model, ours = _trained("defer")
    gpt_loss(model, 2).backward()  # type: ignore[no-untyped-call]
    ours._queue.before = vanish
    ours.step()
    with pytest.raises(StateError, match="gone"):
        gpt_loss(model, 3)
    ours.close()


def test_in_defer_mode_forward_overlaps_updates_and_waits_for_its_own_weights() -> None:
    model, ours = _trained("defer")
    gpt_loss(model, 2).backward()  # type: ignore[no-untyped-call]
    begun: list[tuple[int, str]] = []
    order = threading.Event()

    def before(task: Task) -> None:
        begun.append((task.rank, threading.current_thread().name))
        if len(begun) == 1:
            order.wait(10)  # the first update is held until step() has returned

    ours._queue.before = before
    ours.step()
    ours.zero_grad()
    pending = [ours._delivery.pending]
    order.set()
    gpt_loss(model, 3)
    assert [*pending, ours._delivery.pending] == [True, False]
    assert [rank for rank, _ in begun] == sorted(rank for rank, _ in begun)
    ours.close()


def test_state_dicts_wait_for_late_weights() -> None:
    model, ours = _trained("defer")
    twin, reference_ = _trained("barrier")
    for each, optimizer in ((model, ours), (twin, reference_)):
        gpt_loss(each, 2).backward()  # type: ignore[no-untyped-call]
        optimizer._queue.before = lambda task: time.sleep(0.01)
        optimizer.step()
    assert fingerprint(model) == fingerprint(twin)
    model.load_state_dict(twin.state_dict())
    ours.close()
    reference_.close()


def vanish(task: Task) -> None:
    raise OSError("gone")


def wait_for(event: threading.Event) -> None:
    event.wait(10)


def test_lowest_rank_leaves_first_and_equals_in_order_of_arrival() -> None:
    queue: LowestFirst[str] = LowestFirst()
    for rank, name in ((3, "d"), (1, "a"), (2, "c"), (1, "b")):
        queue.push(rank, name)
    assert queue.remove(lambda name: name == "c") == ["c"]
    assert [queue.pop() for _ in range(len(queue))] == ["a", "b", "d"]


def test_the_queue_cancels_only_what_is_speculative_and_not_begun() -> None:
    gate, ran = threading.Event(), []
    queue, held = UpdateQueue(1), Ticket()
    queue.submit([Task(0, lambda: wait_for(gate), held, speculative=True)])
    while queue._running == 0:
        time.sleep(0.001)
    dropped, kept = Ticket(), Ticket()
    queue.submit([Task(1, lambda: ran.append("dropped"), dropped, speculative=True)])
    queue.submit([Task(2, lambda: ran.append("kept"), kept)])
    queue.cancel(wait=False)
    assert (dropped.remaining, dropped.dropped, kept.remaining) == (0, 1, 1)
    gate.set()
    queue.finish([held, kept])
    assert ran == ["kept"]
    queue.close()


def test_finish_runs_tasks_itself_while_workers_are_busy() -> None:
    gate = threading.Event()
    queue, held, mine = UpdateQueue(1), Ticket(), Ticket()
    queue.submit([Task(0, lambda: wait_for(gate), held, speculative=True)])
    while queue._running == 0:
        time.sleep(0.001)
    names: list[str] = []
    queue.submit([Task(1, lambda: names.append(threading.current_thread().name), mine)])
    queue.finish([mine])
    assert names == [threading.current_thread().name]
    gate.set()
    queue.finish([held])
    queue.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_uses_nor_closes_it() -> None:
    _, ours = _trained("speculate")
    child = os.fork()
    if child == 0:
        try:
            ours.step()
        except StateError as error:
            ours._queue.close()
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    ours.step()
    ours.close()


class TwoHeads(nn.Module):
    """One head of one layer, one of two: micro-batches may use either, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 24)
        self.low, self.high = nn.Linear(24, 24), nn.Linear(24, 8)
        self.other = nn.Linear(24, 8)

    def forward(self, x: Tensor, *, deep: bool, other: bool, seen: Callable[..., None]) -> Tensor:
        hidden = self.body(x)
        hidden.register_hook(seen)
        total = torch.zeros(())
        if deep:
            total = total + self.high(functional.gelu(self.low(hidden))).square().mean()
        if other:
            total = total + self.other(hidden).square().mean()
        return total


def test_a_head_that_misses_a_micro_batch_is_not_proposed_twice_at_once() -> None:
    def run(mode: Any) -> str:
        torch.manual_seed(0)
        model = TwoHeads()
        ours = OffloadAdamW(model, 1e-2, mode=mode, num_threads=2)
        high = next(slot for p, slot in ours._slots.items() if p is model.high.weight)
        release, begun = threading.Event(), []

        def before(task: Task) -> None:
            if task.speculative and task.rank == high.block.rank:
                begun.append(task)
                if len(begun) == 1:
                    release.wait(0.5)

        def third(_grad: Tensor) -> None:  # high's second proposal ends before its first
            deadline = time.monotonic() + 5
            while len(begun) < 2 or (high.ticket is not None and high.ticket.remaining):
                if mode == "barrier" or time.monotonic() > deadline:
                    break
                time.sleep(0.001)
            release.set()

        ours._queue.before = before
        uses = [(False, True), (True, True), (True, False)]
        for number, (deep, other) in enumerate(uses):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(number))
            seen = third if number == 2 else lambda _grad: None
            model(x, deep=deep, other=other, seen=seen).backward()
            for param in model.parameters():  # somebody puts others in their place
                if param.grad is not None and number < 2:
                    param.grad = param.grad.clone()
        ours.step()
        ours.close()
        return fingerprint(model)

    assert run("speculate") == run("barrier")
