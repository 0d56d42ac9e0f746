"""A model -> its blocks in forward order: the units in which work is handed to the host.

A block is one layer of a stack (a child of a ModuleList or Sequential), a module compiled on its
own, or whatever stands beside the stacks (embedding, final norm, head). The registration order
stands for the forward order until the first forward shows the true one. A tied parameter belongs
to the first block that has it; the modules of the others, any of which may run first, share it.

Left out: tracing the graph, and models whose order changes from step to step (the order is a
matter of speed, never of bits).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

_STACKS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(slots=True, eq=False)
class Block:
    """Parameters that are needed, and become ready, together.

    Attributes:
        name: Path of its module in the model.
        module: The module whose forward needs the parameters; None without a model.
        parameters: Its parameters, without those of an earlier block.
        rank: Place in the forward order; lower is needed sooner after a step.
        sharers: Modules of other blocks that use one of the parameters too (tied weights).
    """

    name: str
    module: nn.Module | None
    parameters: list[nn.Parameter] = field(default_factory=list)
    rank: int = 0
    sharers: list[nn.Module] = field(default_factory=list)


def blocks_of(model: nn.Module | None, parameters: Sequence[nn.Parameter]) -> list[Block]:
    """Return the model's blocks, then blocks for those of `parameters` that it does not have."""
    blocks = split_blocks(model) if model is not None else []
    inside = {p for block in blocks for p in block.parameters}
    outside = single_blocks([p for p in parameters if p not in inside])
    for block in outside:
        block.rank += len(blocks)
    return blocks + outside


def split_blocks(model: nn.Module) -> list[Block]:
    """Return the blocks of a model that own at least one parameter, in registration order."""
    owners: dict[nn.Parameter, Block] = {}
    blocks: list[Block] = []
    total = sum(p.numel() for p in model.parameters())
    for name, module, recurse in _walk(model, "", total):
        parameters = list(module.parameters(recurse=recurse))
        for owner in {owners[p]: None for p in parameters if p in owners}:
            owner.sharers.append(module)
        own = [p for p in parameters if p not in owners]
        if own:
            blocks.append(Block(name or "(root)", module, own, rank=len(blocks)))
            owners.update(dict.fromkeys(own, blocks[-1]))
    return blocks


def _walk(module: nn.Module, name: str, total: int) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (path, module, whether its children belong to it)."""
    if not isinstance(module, _STACKS):
        yield name, module, False
    children = dict(module.named_children())
    for key, child in children.items():
        path = f"{name}.{key}" if name else key
        whole = _is_compiled(child) or _is_layer(module, child, total)
        if _has_stack(child) and not whole:
            yield from _walk(child, path, total)
        else:
            yield path, child, True


def _is_layer(parent: nn.Module, child: nn.Module, total: int) -> bool:
    """Say whether a child of a stack is one block, though it has stacks of its own (experts)."""
    return isinstance(parent, _STACKS) and 4 * sum(p.numel() for p in child.parameters()) <= total


def _is_compiled(module: nn.Module) -> bool:
    """Say whether calls of a module go through torch.compile, without importing the compiler."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _has_stack(module: nn.Module) -> bool:
    return any(isinstance(part, _STACKS) and len(part) for part in module.modules())


def single_blocks(parameters: list[nn.Parameter], *, num_elements: int = 1 << 20) -> list[Block]:
    """Return blocks of about `num_elements` in the order given, for parameters without a model."""
    blocks: list[Block] = []
    size = num_elements
    for parameter in parameters:
        if size >= num_elements:
            blocks.append(Block(f"part {len(blocks)}", None, [], rank=len(blocks)))
            size = 0
        blocks[-1].parameters.append(parameter)
        size += parameter.numel()
    return blocks
