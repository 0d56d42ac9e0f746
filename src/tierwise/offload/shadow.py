"""Gradients as they become ready -> proposals in shadow memory, while backward goes on.

```
 gradient ready --> pending, one block --flush--> norm, copy, tasks --worker--> new p, m, v beside
                                                                                the committed ones
```

A proposal assumes that nothing will be clipped and no hyper-parameter changes; `step()` keeps it
if that came true and its gradient and parameter are still what they were, and otherwise works from
the committed state, which no proposal ever touches. So nothing here can change a bit, whatever
the timing.

The last micro-batch of an accumulation is where proposals are worth making. Which backward is the
last is learned from the step before (or said through `accumulate`); a wrong guess costs time
only. A running sum of squares that is already over the norm proves that the step will be clipped:
the rest of the backward makes no more proposals.

Departure: the paper (CoTrain, https://dl.acm.org/doi/10.1145/3605573.3605647) updates in place as
gradients arrive, which clipping by the global norm rules out; shadow memory makes it exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tierwise.offload import kernel
from tierwise.offload.blocks import Block
from tierwise.offload.consumed import ConsumedGradient
from tierwise.offload.lane import Lane, Wait
from tierwise.offload.memory import BYTES_UPDATED, Row, Slot, laid_out_like
from tierwise.offload.queue import Task, Ticket, UpdateQueue
from tierwise.offload.trace import Trace


@dataclass(slots=True, kw_only=True)
class Updater:
    """Cuts the update of some parameters into tasks for the host.

    Attributes:
        lane: Where the gradients come from.
        width: Of torch's vector loop (`kernel.torch_width`).
        chunk: Elements a task updates, about; a multiple of `ALIGNMENT`.
        trace: Notes each task, if given.
    """

    lane: Lane
    width: int | None
    chunk: int
    trace: Trace | None

    def tasks(
        self,
        block: Block,
        work: Sequence[tuple[Slot, Tensor]],
        ticket: Ticket,
        *,
        shadow: bool,
        clip: float = 1.0,
        wait: Wait | None = None,
        then: Callable[[], None] | None = None,
    ) -> list[Task]:
        """Return tasks that update (slot, host gradient) pairs of one block.

        Args:
            block: Gives the rank.
            work: What to update; each slot's `numbers` say with which hyper-parameters.
            ticket: Counts the tasks.
            shadow: Write proposals, else update the committed state in place.
            clip: Coefficient the gradients are multiplied by.
            wait: Blocks until the gradients are in host memory.
            then: Runs after the last task, on its thread.
        """
        pieces: list[tuple[bool, list[Row], list[tuple[float, ...]]]] = []
        # the memory behind the addresses lives as long as the tasks, even if p.data is replaced
        keep = [(grad, slot.param.untyped_storage()) for slot, grad in work]
        for bf16 in (False, True):
            chosen = [(slot, grad) for slot, grad in work if slot.is_bf16 == bf16]
            pieces += [(bf16, *piece) for piece in self._pieces(chosen, shadow=shadow, clip=clip)]
        finish = _Countdown(len(pieces), then)
        kind = "update" if shadow or clip == 1.0 else "redo"
        return [
            Task(
                block.rank,
                self._work(block.name, kind, piece, keep=keep, wait=wait, finish=finish),
                ticket,
                speculative=shadow,
            )
            for piece in pieces
        ]

    def _pieces(
        self, work: Sequence[tuple[Slot, Tensor]], *, shadow: bool, clip: float
    ) -> Iterator[tuple[list[Row], list[tuple[float, ...]]]]:
        rows: list[Row] = []
        numbers: list[tuple[float, ...]] = []
        size, direct = 0, self.lane.shares_memory
        for slot, grad in work:
            assert slot.numbers is not None
            mine = (clip, *slot.numbers[1:])
            for row in slot.rows(grad, shadow=shadow, direct=direct, chunk=self.chunk):
                rows.append(row)
                numbers.append(mine)
                size += row[kernel.COUNT]
                if size >= self.chunk:
                    yield rows, numbers
                    rows, numbers, size = [], [], 0
        if rows:
            yield rows, numbers

    def _work(
        self,
        name: str,
        kind: str,
        piece: tuple[bool, list[Row], list[tuple[float, ...]]],
        *,
        keep: object,
        wait: Wait | None,
        finish: _Countdown,
    ) -> Callable[[], None]:
        bf16, rows, numbers = piece
        addresses, table = np.array(rows, dtype=np.int64), np.array(numbers)
        trace, width = self.trace, self.width

        def work() -> None:
            _ = keep
            if wait is not None:
                wait()
            start = trace.clock() if trace else 0
            kernel.update(addresses, table, bf16=bf16, width=width)
            if trace:
                num_bytes = BYTES_UPDATED * int(addresses[:, kernel.COUNT].sum())
                trace.add("host", kind, name, start, track=_track(), num_bytes=num_bytes)
            finish()

        return work


class _Countdown:
    """Calls `then` when it has been called `count` times, from any threads."""

    def __init__(self, count: int, then: Callable[[], None] | None) -> None:
        self._count, self._then, self._lock = count, then, threading.Lock()

    def __call__(self) -> None:
        if self._then is not None:
            with self._lock:
                self._count -= 1
                last = self._count == 0
            if last:
                self._then()


def _track() -> int:
    """Return 0 for the thread that trains, else the number of the worker from 1."""
    name = threading.current_thread().name
    prefix, _, number = name.rpartition("-")
    return int(number) + 1 if prefix == "tierwise-offload" else 0


def numbers_for(slot: Slot) -> tuple[float, ...]:
    """Return what the kernel needs to make the slot's next step, unclipped."""
    group = slot.group
    return kernel.numbers_of(
        lr=float(group["lr"]),
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=slot.step + 1,
    )


class Shadow:
    """Collects gradients by block while backward runs, and makes proposals of them.

    Args:
        updater: Cuts the work.
        queue: Takes it.
        want_norms: Note every gradient's norm when it becomes ready.
        norm_limit: Squares of norms summing to more than its square end the proposals, if given.
        release: Free gradients that have been copied to the host.
    """

    def __init__(
        self,
        updater: Updater,
        queue: UpdateQueue,
        *,
        want_norms: bool,
        norm_limit: float | None,
        release: bool,
    ) -> None:
        self.wanted = False  # make proposals in this step's final backward
        self.accumulating = False
        self.ask_last: Callable[[], bool] | None = None  # somebody who knows
        self.final_when_ready = True  # else somebody scales gradients afterwards
        self.want_norms, self.norm_limit = want_norms, norm_limit
        self.rounds = 0  # backwards since the last step
        self.stopped = False  # this backward is over the norm
        self._expected_rounds, self._told = 1, False
        self._updater, self._queue = updater, queue
        self._release = release
        self._pending: list[Slot] = []
        self._square_sum = 0.0
        self._callback_set = False
        self._mark_ns = 0

    def gradient_ready(self, slot: Slot) -> None:
        """Note that a gradient has been accumulated; called by autograd."""
        slot.hits += 1
        if slot.hits > self.rounds:
            self._begin_round()
        if self._pending and self._pending[0].block is not slot.block:
            self.flush()
        self._pending.append(slot)
        if not self._callback_set:
            self._callback_set = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def mark(self, time_ns: int) -> None:
        """Say that the device begins something new, for the trace."""
        self._mark_ns = time_ns

    def _begin_round(self) -> None:
        self._queue.check()
        if self.rounds:
            self.discard()
        self.rounds += 1
        self._square_sum, self.stopped, self._callback_set = 0.0, False, False

    def _end_backward(self) -> None:
        self._callback_set = False
        self.flush()

    def told(self) -> None:
        """Remember that the caller says which backwards are not final."""
        self._told = True

    def _is_final(self) -> bool:
        if self.ask_last is not None:
            last = self.ask_last()
        else:
            last = self._told or self.rounds >= self._expected_rounds
        return self.final_when_ready and not self.accumulating and last and not _is_distributed()

    def flush(self) -> None:
        """Hand over the gradients collected so far."""
        slots, self._pending = self._pending, []
        slots = [slot for slot in dict.fromkeys(slots) if slot.can_update()]
        if not slots:
            return
        self._trace_backward(slots[0].block)
        if not self._is_final():
            return
        if any(s.ticket is not None and s.ticket.remaining for s in slots):
            self._queue.cancel(wait=True)  # an earlier backward's proposal, in the same memory
        with torch.no_grad():
            self._note(slots)
            if self.want_norms and self._over_limit(slots):
                self.stopped = True
                self._queue.cancel(wait=False)
            moved = [slot for slot in slots if not slot.resident]
            self._fetch([slot for slot in moved if slot.host_grad is not None])
            if self.wanted and not self.stopped:
                self._propose([slot for slot in moved if slot.has_shadow])

    def _note(self, slots: Sequence[Slot]) -> None:
        grads = [slot.param.grad for slot in slots]
        norms: Sequence[Tensor | None] = [None] * len(slots)
        if self.want_norms:
            norms = self._updater.lane.norms([grad for grad in grads if grad is not None])
        for slot, grad, norm in zip(slots, grads, norms, strict=True):
            assert grad is not None
            slot.forget()
            slot.grad, slot.grad_version, slot.norm = grad, grad._version, norm

    def _over_limit(self, slots: Sequence[Slot]) -> bool:
        if self.norm_limit is None or not self._updater.lane.shares_memory:
            return False  # reading a norm would make the device wait
        self._square_sum += sum(float(s.norm) ** 2 for s in slots if s.norm is not None)
        return not self._square_sum <= 1.001 * self.norm_limit**2

    def _fetch(self, slots: Sequence[Slot]) -> None:
        """Begin to move gradients that have a place in host memory, and free them if asked to."""
        pairs = [(s, s.grad, s.host_grad) for s in slots if s.grad is not None]
        if not pairs:
            return
        laid = [laid_out_like(grad, slot.param) for slot, grad, _ in pairs]
        wait = self._updater.lane.to_host(laid, [target for *_, target in pairs])
        for slot, _, _ in pairs:
            slot.arrived = wait
            if self._release:
                slot.param.grad = slot.grad = ConsumedGradient(slot.param)
                slot.grad_version = slot.grad._version

    def _propose(self, slots: Sequence[Slot]) -> None:
        if not slots:
            return
        block, ticket = slots[0].block, Ticket()
        for slot in slots:
            slot.refresh_master()
            slot.param_seen = slot.stamp()
            slot.numbers, slot.ticket = numbers_for(slot), ticket
        moved, wait = bring_to_host(self._updater.lane, slots)
        self._queue.submit(self._updater.tasks(block, moved, ticket, shadow=True, wait=wait))

    def _trace_backward(self, block: Block) -> None:
        if trace := self._updater.trace:
            trace.add("device", "backward", block.name, self._mark_ns or trace.clock())
            self._mark_ns = trace.clock()

    def discard(self) -> None:
        """Drop every proposal under way; committed state is as it was."""
        self._pending.clear()
        self._queue.cancel(wait=True)

    def stepped(self) -> None:
        """Begin a new step; the number of backwards it took is expected again."""
        self._expected_rounds = max(1, self.rounds)
        self.rounds = 0


def _is_distributed() -> bool:
    """Say whether gradients will be averaged over processes after they are ready."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def bring_to_host(lane: Lane, slots: Sequence[Slot]) -> tuple[list[tuple[Slot, Tensor]], Wait]:
    """Return (slot, gradient in host memory) pairs, and what waits for those under way.

    Gradients that have arrived, or are on their way since backward, are not moved again.
    """
    waits: list[Wait] = []
    pairs: list[tuple[Slot, Tensor]] = []
    for slot in slots:
        grad = slot.param.grad
        assert grad is not None
        if slot.arrived is None or not slot.grad_is_current():
            grad = laid_out_like(grad, slot.param)
            slot.arrived = lane.to_host([grad], [slot.host_grad])
        if slot.host_grad is None:  # read where it lies
            pairs.append((slot, laid_out_like(grad, slot.param)))
        else:
            pairs.append((slot, slot.host_grad))
        if slot.arrived not in waits:
            waits.append(slot.arrived)

    def wait() -> None:
        for each in waits:
            each()

    return pairs, wait
