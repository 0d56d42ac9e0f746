"""Hooks that tell the optimizer what the model is doing, without keeping it alive.

Gradients ready (autograd), a block's forward about to begin (its weights must have arrived), and
the weights about to be read or written as a state dict.

Where a block is compiled on its own, its hooks run before its graph. Inside the graph of a whole
compiled model they would cut it to pieces (and other pieces are fused to other bits), so there
they do nothing: the optimizer sees no forward of the block, and waits for its weights in `step()`.
The graph is guarded against weights that are late all the same, after a forward that was not
compiled. Left out: overlapping such a model's update with it; its gradients arrive all at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tierwise.offload.blocks import Block
from tierwise.offload.delivery import Gate
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

    def __init__(
        self, block: Block, before: Callable[[Block], None], settle: Callable[[], None],
        gate: Gate, trace: Trace | None,
    ) -> None:  # fmt: skip
        self._block, self._gate, self._trace = block, gate, trace
        self._before, self._settle = weakref.WeakMethod(before), weakref.WeakMethod(settle)
        self.starts: list[int] = []

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        if not _inside_a_graph(module):
            self._enter()
        elif self._gate.late:  # the graph is compiled again with this, and only for this
            self._catch_up()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self) -> None:
        if before := self._before():
            before(self._block)
        if self._trace:
            self.starts.append(self._trace.clock())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _catch_up(self) -> None:
        if settle := self._settle():
            settle()


class _Leave(_Hook):
    """Runs after one block's forward, for the trace."""

    def __init__(
        self, block: Block, enter: _Enter, trace: Trace, mark: Callable[[int], None]
    ) -> None:
        self._block, self._enter, self._trace, self._mark = block, enter, trace, mark

    def __call__(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if not _inside_a_graph(module):
            self._leave()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self) -> None:
        if self._enter.starts:
            self._trace.add("device", "forward", self._block.name, self._enter.starts.pop())
            self._mark(self._trace.clock())


def _inside_a_graph(module: nn.Module) -> bool:
    """Say whether a larger module than this one is compiled and calls it."""
    return torch.compiler.is_compiling() and module._compiled_call_impl is None


def watch_model(
    model: nn.Module,
    blocks: Sequence[Block],
    *,
    before: Callable[[Block], None],
    settle: Callable[[], None],
    overlap_forward: bool,
    gate: Gate,
    trace: Trace | None,
    mark: Callable[[int], None],
) -> list[RemovableHandle]:
    """Return the handles of hooks on a model.

    Args:
        model: The model.
        blocks: The forwards of their modules, and of those that share a parameter, call `before`.
        before: A bound method; held weakly.
        settle: A bound method that waits for all weights; held weakly.
        overlap_forward: Weights may be late: state dict hooks call `settle`.
        gate: Says whether weights are late now.
        trace: Notes the forwards.
        mark: Is told when a forward has ended, for the trace.
    """
    handles: list[RemovableHandle] = []
    for block in blocks:
        if block.module is not None:
            enter = _Enter(block, before, settle, gate, trace)
            handles.append(block.module.register_forward_pre_hook(enter))
            for module in block.sharers:
                early = _Enter(block, before, settle, gate, None)
                handles.append(module.register_forward_pre_hook(early))
            if trace:
                leave = _Leave(block, enter, trace, mark)
                handles.append(block.module.register_forward_hook(leave))
    if overlap_forward:
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

    trained = slot.param.requires_grad
    slot.param.requires_grad_(True)  # a frozen one takes no hooks, and may be trained later
    handle: RemovableHandle = slot.param.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
    slot.param.requires_grad_(trained)
    return handle
