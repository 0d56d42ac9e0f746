"""Hooks that tell the optimizer what the model is doing, without keeping it alive.

Gradients ready (autograd), a block's forward about to begin (its weights must have arrived), and
the weights about to be read or written as a state dict. Left out: `torch.compile` of a whole
model, whose hooks all fire after its compiled backward: right, but nothing overlaps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tierwise.offload.blocks import Block
from tierwise.offload.memory import Slot
from tierwise.offload.shadow import Shadow
from tierwise.offload.trace import Trace


class _Hook:
    """A hook that a copied or pickled model keeps only as a shell that does nothing."""

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing(_Hook):
    """What is left of a hook in a copy of the model."""

    def __call__(self, *_arguments: object) -> None:
        pass


class _Settle(_Hook):
    """Calls a bound method while its object lives."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *_arguments: object) -> None:
        if method := self._method():
            method()


class _Enter(_Hook):
    """Runs before one block's forward."""

    def __init__(self, block: Block, before: Callable[[Block], None], trace: Trace | None) -> None:
        self._block, self._trace = block, trace
        self._before = weakref.WeakMethod(before)
        self.starts: list[int] = []

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        if before := self._before():
            before(self._block)
        if self._trace:
            self.starts.append(self._trace.clock())


class _Leave(_Hook):
    """Runs after one block's forward, for the trace."""

    def __init__(
        self, block: Block, enter: _Enter, trace: Trace, mark: Callable[[int], None]
    ) -> None:
        self._block, self._enter, self._trace, self._mark = block, enter, trace, mark

    def __call__(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if self._enter.starts:
            self._trace.add("device", "forward", self._block.name, self._enter.starts.pop())
            self._mark(self._trace.clock())


def watch_model(
    model: nn.Module,
    blocks: Sequence[Block],
    *,
    before: Callable[[Block], None],
    settle: Callable[[], None] | None,
    trace: Trace | None,
    mark: Callable[[int], None],
) -> list[RemovableHandle]:
    """Return the handles of hooks on a model.

    Args:
        model: Its state dict hooks call `settle`.
        blocks: Their modules' forwards call `before`.
        before: A bound method; held weakly.
        settle: A bound method, held weakly, or None: weights are never late.
        trace: Notes the forwards.
        mark: Is told when a forward has ended, for the trace.
    """
    handles: list[RemovableHandle] = []
    for block in blocks:
        if block.module is not None:
            enter = _Enter(block, before, trace)
            handles.append(block.module.register_forward_pre_hook(enter))
            if trace:
                leave = _Leave(block, enter, trace, mark)
                handles.append(block.module.register_forward_hook(leave))
    if settle is not None:
        call = _Settle(settle)
        for module in {model, *(block.module for block in blocks if block.module is not None)}:
            for register in (
                module.register_state_dict_pre_hook,
                module.register_load_state_dict_pre_hook,
            ):
                handles.append(register(call))  # type: ignore[no-untyped-call]
    return handles


def watch_gradient(slot: Slot, shadow: Shadow) -> RemovableHandle:
    """Return the handle of a hook that tells `shadow` when the slot's gradient is accumulated."""

    def ready(_param: Tensor) -> None:
        shadow.gradient_ready(slot)

    handle: RemovableHandle = slot.param.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
    return handle
