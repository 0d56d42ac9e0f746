"""A device with memory of its own, played by threads: the paths a GPU takes, without one.

Copies begin when they are asked for and end later, on threads of their own, as on CUDA streams;
the device sees uploaded weights only after it has waited for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.offload.small_models import Gpt, gpt_loss
from tests.offload.twins import ALWAYS, NEVER, SOMETIMES, Scenario, assert_same_bits
from tierwise.offload import OffloadAdamW, fingerprint
from tierwise.offload.lane import Lane, Pair, Wait
from tierwise.offload.memory import host_bytes
from tierwise.offload.queue import Task


class FarLane:
    """Copies take time and happen elsewhere; parameters cannot be touched by the host."""

    shares_memory = False

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.moved: list[int] = []
        self._link = ThreadPoolExecutor(1)  # copies end in order, as on one stream
        self._lock = threading.Lock()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        slab = torch.zeros(num_elements, dtype=dtype)
        self.allocated_bytes += slab.numel() * slab.element_size()
        return slab

    def norms(self, grads: Sequence[Tensor]) -> list[Tensor]:
        wide = [grad.float() for grad in grads]
        return list(torch._foreach_norm(wide)) if wide else []

    def to_host(self, grads: Sequence[Tensor], targets: Sequence[Tensor | None]) -> Wait:
        assert all(target is not None for target in targets)
        kept = [grad.detach().clone() for grad in grads]  # what a stream's order guarantees

        def copy() -> None:
            time.sleep(0.0003)
            for grad, target in zip(kept, targets, strict=True):
                assert target is not None
                target.copy_(grad)
            with self._lock:
                self.moved.append(len(kept))

        done = self._link.submit(copy)
        return lambda: done.result(30)

    def to_device(self, pairs: Sequence[Pair]) -> Wait:
        # the data leaves now (the host may write the source again) and arrives when waited for
        sent = [(param, source.clone()) for param, source in pairs]

        def arrive() -> None:
            with torch.no_grad():
                for param, source in sent:
                    param.copy_(source)

        return arrive

    def settle(self) -> None:
        pass


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[FarLane]:
    made: list[FarLane] = []

    def choose(parameters: Sequence[Any]) -> Lane:
        made.append(FarLane())
        return made[-1]

    monkeypatch.setattr("tierwise.offload.optimizer.choose_lane", choose)
    return made


@pytest.mark.parametrize("clip", [NEVER, SOMETIMES, ALWAYS])
@pytest.mark.parametrize("mode", ["speculate", "defer", "barrier", "auto"])
def test_clipping(lanes: list[FarLane], clip: str, mode: str) -> None:
    assert_same_bits(Scenario(clip=clip), mode=mode)
    assert sum(lanes[-1].moved) > 0


EVENTS: dict[str, dict[str, Any]] = {
    "tied, accumulated": {"case": "gpt-tied", "accumulation": 2},
    "experts": {"case": "experts", "skipped": True},
    "channels last": {"case": "vit"},
    "groups, late lr, resumed": {"two_groups": True, "late_lr": True, "resumed": 6},
    "nan": {"poisoned": float("nan")},
    "bf16": {"bf16": True, "accumulation": 2},
    "bf16, no clip": {"bf16": True, "clip": "off"},
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("mode", ["speculate", "defer"])
def test_events(lanes: list[FarLane], event: str, mode: str) -> None:
    options = {"mode": mode, "overlap_forward": True, "num_threads": 2, "chunk_elements": 256}
    assert_same_bits(Scenario(**EVENTS[event]), **options)


def test_residents_and_freed_gradients(lanes: list[FarLane]) -> None:
    assert_same_bits(Scenario(), mode="speculate", resident_elements=5000)
    assert_same_bits(Scenario(), mode="speculate", release_grads=True, overlap_forward=True)
    assert_same_bits(Scenario(), mode="defer", release_grads=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["speculate", "defer"])
def test_each_gradient_crosses_the_link_once_and_memory_is_as_planned(
    lanes: list[FarLane], mode: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Gpt().to(dtype)
    optimizer = OffloadAdamW(model, 1e-2, mode=mode, max_grad_norm=1e-3)  # every step is clipped
    for step in range(3):
        gpt_loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    parameters = list(model.parameters())
    assert sum(lanes[0].moved) == 3 * len(parameters)
    state = host_bytes(parameters, shadow=mode == "speculate", direct=False)
    grads = sum(-(-p.numel() // 64) * 64 * p.element_size() for p in parameters)
    assert lanes[0].allocated_bytes == state + grads


def test_a_stale_proposal_does_not_write_where_the_update_does(lanes: list[FarLane]) -> None:
    def run(late: bool) -> str:
        torch.manual_seed(0)
        model = Gpt().bfloat16()
        options: dict[str, Any] = {"mode": "speculate", "max_grad_norm": 1e-3, "chunk_elements": 64}
        ours = OffloadAdamW(model, 1e-2, **options)
        release = threading.Event()
        held: list[int] = []
        redone: list[Task] = []

        def before(task: Task) -> None:
            if task.speculative:
                if not held:
                    held.append(task.rank)
                    release.wait(0.5)
            elif held and task.rank == held[0]:
                redone.append(task)
                if len(redone) == 2:  # the first piece is in place: now the proposal's would be
                    release.set()
                    deadline = time.monotonic() + 5
                    while ours._queue._running and time.monotonic() < deadline:
                        time.sleep(0.001)

        for step in range(4):
            if late and step == 3:
                ours._queue.before = before
            gpt_loss(model, step).backward()  # type: ignore[no-untyped-call]
            ours.step()
            ours.zero_grad()
        ours.close()
        assert bool(held) == late
        return fingerprint(model)

    assert run(late=True) == run(late=False)
