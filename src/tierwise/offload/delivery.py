"""After the norm is known: what is left to compute, and new weights on their way to the device.

Every block of a step becomes tasks on the queue, lowest rank first, and stays `late` until its
weights have arrived. Who needs them waits for that block alone: its forward (with
`overlap_forward`), a state dict, or the end of `step()`.

Left out: several steps under way at once; a block's last step arrives before its next begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tierwise.core.errors import TrainingError
from tierwise.offload.blocks import Block
from tierwise.offload.lane import Lane, Wait
from tierwise.offload.memory import Slot
from tierwise.offload.queue import Task, Ticket, UpdateQueue
from tierwise.offload.shadow import Updater, bring_to_host
from tierwise.offload.trace import Trace


@dataclass(slots=True, kw_only=True)
class _Late:
    """What a block still waits for after a step."""

    ticket: Ticket
    arrivals: list[Wait]
    slots: list[Slot]
    read: list[tuple[Tensor, int]]  # gradients being read, and their versions


class Gate:
    """Whether any block's weights are on their way: plain enough for torch.compile to guard on."""

    def __init__(self) -> None:
        self.late = False


class Delivery:
    """Brings the weights of a step to the device, block by block.

    Args:
        lane: The device.
        queue: Runs the work.
        updater: Cuts it.
        trace: Notes uploads and waits, if given.
    """

    def __init__(
        self, lane: Lane, queue: UpdateQueue, updater: Updater, trace: Trace | None
    ) -> None:
        self._lane, self._queue, self._updater, self._trace = lane, queue, updater, trace
        self._late: dict[Block, _Late] = {}
        self.gate = Gate()

    @property
    def pending(self) -> bool:
        """Whether any block is late."""
        return self.gate.late

    def start(self, work: Sequence[tuple[Slot, bool]], coefficient: float) -> list[Block]:
        """Hand over the rest of a step; return its blocks, lowest first.

        Args:
            work: (slot, whether its proposal has just been committed).
            coefficient: Clips the gradients of the others, which are updated in place.
        """
        self._lane.settle()
        by_block: dict[Block, list[tuple[Slot, bool]]] = {}
        for slot, kept in work:
            by_block.setdefault(slot.block, []).append((slot, kept))
        blocks = sorted(by_block, key=lambda block: block.rank)
        tasks = [task for b in blocks for task in self._tasks(b, by_block[b], coefficient)]
        self._queue.submit(tasks)
        self.gate.late = bool(self._late)
        return blocks

    def _tasks(
        self, block: Block, work: Sequence[tuple[Slot, bool]], coefficient: float
    ) -> list[Task]:
        direct = self._lane.shares_memory
        redo = [slot for slot, kept in work if not kept]
        grads = [slot.param.grad for slot in redo]
        upload = [slot.upload_pair() for slot, kept in work if kept or not direct]
        late = _Late(
            ticket=Ticket(),
            arrivals=[],
            slots=[slot for slot, _ in work],
            read=[(grad, grad._version) for grad in grads if grad is not None],
        )
        self._late[block] = late

        def send() -> None:
            if upload:
                start = self._trace.clock() if self._trace else 0
                late.arrivals.append(self._lane.to_device(upload))
                if self._trace:
                    num_bytes = sum(p.numel() * p.element_size() for p, _ in upload)
                    self._trace.add("link", "upload", block.name, start, num_bytes=num_bytes)

        if not redo:
            return [Task(block.rank, send, late.ticket)]
        host, wait = bring_to_host(self._lane, redo)
        if direct:  # the host writes these parameters behind torch's back
            for slot in redo:
                torch.autograd.graph.increment_version(slot.param)
        return self._updater.tasks(
            block, host, late.ticket, shadow=False, clip=coefficient, wait=wait, then=send
        )

    def arrive(self, block: Block) -> None:
        """Return when the block's weights are what the last step made them.

        Raises:
            StateError: The host's thread has failed.
            TrainingError: A gradient was written to while the host still read it.
        """
        late = self._late.get(block)
        if late is None:
            return
        start = self._trace.clock() if self._trace else 0
        waited = late.ticket.remaining > 0
        self._queue.finish([late.ticket])
        for arrival in late.arrivals:
            arrival()
        for slot in late.slots:
            slot.param_seen = slot.stamp()
        del self._late[block]  # not before: an interrupted wait is waited for again
        self.gate.late = bool(self._late)
        if self._trace and waited:
            self._trace.add("device", "wait", block.name, start)
        if any(grad._version != version for grad, version in late.read):
            error = TrainingError(
                f"a gradient of {block.name} was changed after step() while the host still read it",
                hint="call zero_grad() with set_to_none=True, or synchronize() first",
            )
            self._queue.fail(error)
            raise error

    def arrive_all(self) -> None:
        """Return when no block is late."""
        for block in sorted(self._late, key=lambda block: block.rank):
            self.arrive(block)
