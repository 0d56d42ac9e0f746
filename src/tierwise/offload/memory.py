"""A parameter's place in host memory: committed state, shadow state, and the rows over them.

```
             committed          shadow
 master p    bank b             bank 1-b       (bf16 weights, or a device with its own memory)
 m, v        bank b             bank 1-b       commit = b becomes 1-b, nothing is copied
 weights     the parameter      staging        what goes to the device after a commit
```

Memory is one slab per kind, cut into slices that start at multiples of `ALIGNMENT` elements.
fp32 parameters whose memory the host shares are their own master. Left out: fp16 and fp64.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tierwise.core.errors import UsageError
from tierwise.offload.blocks import Block
from tierwise.offload.kernel import ALIGNMENT
from tierwise.offload.lane import Lane, Wait
from tierwise.offload.queue import Ticket

logger = logging.getLogger("tierwise.offload")

Row = tuple[int, ...]
BYTES_UPDATED = 28  # read g, p, m, v and write p, m, v in fp32; the bf16 pass moves as much


class Slot:
    """One parameter, its state in host memory, and its proposal while there is one.

    Attributes:
        param: The parameter.
        group: Its entry of `param_groups`.
        block: The block it is handed over with.
        step: Updates so far.
        bank: Which of the two banks is committed.
        kind: What the state was allocated for: (type, size, strides, device).
        hits: Times its gradient became ready since the last step.
        grad: The gradient noted when it became ready, and what else is noted with it: its
            `grad_version`, its `norm`; `arrived` waits for its copy in `host_grad`, and `ticket`
            counts the tasks of the proposal made from it with `numbers`.
    """

    __slots__ = (
        "arrived", "bank", "block", "elements", "grad", "grad_version", "group", "has_shadow",
        "hits", "host_grad", "is_bf16", "kind", "m", "master", "norm", "numbers", "param",
        "param_seen", "resident", "staging", "step", "step_tensor", "ticket", "v",
    )  # fmt: skip

    def __init__(self, param: nn.Parameter, group: dict[str, Any], block: Block) -> None:
        self.param, self.group, self.block = param, group, block
        self.kind = _kind_of(param)
        self.is_bf16 = param.dtype == torch.bfloat16
        self.elements = param.numel()
        self.step, self.bank, self.hits = 0, 0, 0
        self.step_tensor = torch.zeros((), dtype=torch.float32)
        self.m: list[Tensor] = []
        self.v: list[Tensor] = []
        self.master: list[Tensor] = []
        self.staging: Tensor | None = None
        self.host_grad: Tensor | None = None
        self.has_shadow = False
        self.resident = False
        self.param_seen: tuple[int, int] | None = None  # (address, version) the master is of
        self.forget()

    def forget(self) -> None:
        """Drop the proposal; committed state is as it was."""
        self.grad: Tensor | None = None
        self.grad_version = -1
        self.norm: Tensor | None = None
        self.numbers: Row | tuple[float, ...] | None = None
        self.ticket: Ticket | None = None
        self.arrived: Wait | None = None

    def stamp(self) -> tuple[int, int]:
        """Return what changes when somebody writes to the parameter: (address, version)."""
        return self.param.data_ptr(), self.param._version

    def grad_is_current(self) -> bool:
        """Say whether p.grad is still the gradient that was noted, unchanged."""
        grad = self.param.grad
        return grad is not None and grad is self.grad and grad._version == self.grad_version

    def fits(self) -> bool:
        """Say whether the parameter is still of the type and layout the state was made for."""
        return _kind_of(self.param) == self.kind

    def can_update(self) -> bool:
        """Say whether there is a gradient that the host can read as it is."""
        grad = self.param.grad
        return (
            grad is not None
            and grad.layout == torch.strided
            and grad.dtype == self.param.dtype
            and self.fits()
        )

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Take the master from the parameter if somebody else has written to it (or never yet).

        A write that left the rounded master as it is (the weights loaded again after the
        optimizer's state, or a neighbour's in the same storage, which counts versions for both)
        leaves the master its finer digits.
        """
        if not self.master or self.param_seen == self.stamp():
            return
        master = self.master[self.bank]
        known = self.is_bf16 and self.param_seen is not None
        if not (known and torch.equal(master.bfloat16(), self.param.to(master.device))):
            master.copy_(self.param)
        self.param_seen = self.stamp()

    def rows(self, grad: Tensor, *, shadow: bool, direct: bool, chunk: int) -> Iterator[Row]:
        """Yield rows of the address table: pieces of at most `chunk` elements.

        Args:
            grad: The gradient in host memory, laid out like the parameter.
            shadow: Write the proposal beside the committed state, else over it.
            direct: The host may write the parameter itself (only without `shadow`).
            chunk: Elements, a multiple of `ALIGNMENT`.
        """
        here, there = self.bank, 1 - self.bank if shadow else self.bank
        address = self.param.data_ptr()
        p_in = self.master[here].data_ptr() if self.master else address
        if self.master:
            p_out = self.master[there].data_ptr()
        else:
            p_out = self._staging_address() if shadow else address
        weights = 0
        if self.is_bf16:
            weights = address if direct and not shadow else self._staging_address()
        m_in, v_in = self.m[here].data_ptr(), self.v[here].data_ptr()
        m_out, v_out = self.m[there].data_ptr(), self.v[there].data_ptr()
        gradient, size = grad.data_ptr(), grad.element_size()
        for start in range(0, self.elements, chunk):
            at, count = 4 * start, min(chunk, self.elements - start)
            yield (
                p_in + at, m_in + at, v_in + at, gradient + size * start,
                p_out + at, m_out + at, v_out + at, weights + 2 * start, count, int(shadow),
            )  # fmt: skip

    def _staging_address(self) -> int:
        assert self.staging is not None
        return self.staging.data_ptr()

    def upload_pair(self) -> tuple[Tensor, Tensor]:
        """Return (parameter, where its new value lies in host memory)."""
        source = self.staging if self.is_bf16 or not self.master else self.master[self.bank]
        assert source is not None
        return self.param, source


def _kind_of(param: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device]:
    return param.dtype, param.size(), param.stride(), param.device


def host_bytes(params: Sequence[nn.Parameter], *, shadow: bool, direct: bool) -> int:
    """Return the host memory the state of `params` takes, in bytes (gradients apart)."""
    total = 0
    for param in params:
        elements = _padded(param.numel())
        bf16 = param.dtype == torch.bfloat16
        banks = 2 if shadow else 1
        per_element = 8 * banks + (4 * banks if bf16 or not direct else 0)
        if bf16:
            per_element += 2 if shadow or not direct else 0
        elif direct and shadow:
            per_element += 4
        total += elements * per_element
    return total


def _padded(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def allocate_state(slots: Sequence[Slot], lane: Lane, *, shadow: bool, keep_grads: bool) -> None:
    """Give every slot its slices of new slabs.

    Args:
        slots: Parameters without state so far.
        lane: Allocates the slabs.
        shadow: Make room for proposals.
        keep_grads: Make room for gradients in host memory.
    """
    direct = lane.shares_memory
    with_master = [s for s in slots if s.is_bf16 or not direct]
    narrow = [s for s in slots if s.is_bf16]
    own = [s for s in slots if not s.is_bf16]
    for _ in range(2 if shadow else 1):
        for slot, piece in _cut(slots, lane, torch.float32):
            slot.m.append(piece)
        for slot, piece in _cut(slots, lane, torch.float32):
            slot.v.append(piece)
        for slot, piece in _cut(with_master, lane, torch.float32):
            slot.master.append(piece)
    if shadow or not direct:
        for slot, piece in _cut(narrow, lane, torch.bfloat16):
            slot.staging = piece
    if shadow and direct:
        for slot, piece in _cut(own, lane, torch.float32):
            slot.staging = piece
    if keep_grads:
        for dtype, chosen in ((torch.float32, own), (torch.bfloat16, narrow)):
            for slot, piece in _cut(chosen, lane, dtype):
                slot.host_grad = piece
    for slot in slots:
        slot.has_shadow = shadow


def _cut(slots: Sequence[Slot], lane: Lane, dtype: torch.dtype) -> Iterator[tuple[Slot, Tensor]]:
    """Yield a slice of one new slab for every slot, shaped and laid out like the parameter."""
    if not slots:
        return
    slab = lane.allocate(sum(_padded(slot.elements) for slot in slots), dtype)
    offset = 0
    for slot in slots:
        piece = slab[offset : offset + slot.elements]
        yield slot, piece.as_strided(slot.param.size(), slot.param.stride(), offset)
        offset += _padded(slot.elements)


def laid_out_like(grad: Tensor, param: Tensor) -> Tensor:
    """Return the gradient with the parameter's memory order, itself if it has it already."""
    if grad.stride() == param.stride():
        return grad
    return torch.empty_like(param, dtype=grad.dtype, device=grad.device).copy_(grad)


def room_for_shadows(params: Sequence[nn.Parameter], *, direct: bool, budget: int | None) -> bool:
    """Say whether shadow state fits into host memory; log a warning if it does not.

    Args:
        params: What state is for.
        direct: The host may write the parameters themselves.
        budget: Bytes; None: what is free.

    Raises:
        UsageError: There is not even room for the state itself.
    """
    needed = host_bytes(params, shadow=True, direct=direct)
    least = host_bytes(params, shadow=False, direct=direct)
    room = free_bytes() if budget is None else budget
    if room is None or needed <= room:
        return True
    if least > room:
        raise UsageError(
            f"the optimizer state takes {least} bytes of host memory, {least - room} more "
            "than there is"
        )
    logger.warning(
        "host memory is short of %d bytes for shadow state: updates wait for the norm",
        needed - room,
    )
    return False


def free_bytes() -> int | None:
    """Return the memory that can be had without swapping, or None where Linux does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:  # noqa: PTH123 - not a file
            rows = dict(line.split(":", 1) for line in stream)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
