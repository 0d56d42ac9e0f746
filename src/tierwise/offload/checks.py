"""What OffloadAdamW refuses, each in one sentence.

Left out: closures; the optimizer says that itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tierwise.core.errors import UsageError
from tierwise.offload.kernel import ALIGNMENT
from tierwise.offload.memory import Slot


def check_arguments(
    *, max_grad_norm: float | None, mode: str, chunk_elements: int, num_threads: int
) -> None:
    """Return if the optimizer's arguments make sense.

    Raises:
        UsageError: One does not.
    """
    chunk = f"chunk_elements {chunk_elements} is not a multiple of {ALIGNMENT}"
    rules = (
        (mode in ("auto", "speculate", "defer", "barrier"), f"mode {mode!r} is not known"),
        (chunk_elements > 0 and chunk_elements % ALIGNMENT == 0, chunk),
        (num_threads >= 1, f"num_threads {num_threads} is not positive"),
    )
    check_norm(max_grad_norm)
    for holds, message in rules:
        if not holds:
            raise UsageError(message)


def check_norm(limit: float | None) -> None:
    """Return if gradients can be clipped to this norm (None: never).

    Raises:
        UsageError: They cannot.
    """
    if limit is not None and not limit > 0.0:
        raise UsageError(f"max_grad_norm {limit} is not > 0")


def check_group(group: Mapping[str, Any]) -> None:
    """Return if a parameter group, with the defaults filled in, asks for what there is.

    Raises:
        UsageError: A value makes no sense, or asks for another algorithm.
    """
    lr, betas, eps, decay = (group[key] for key in ("lr", "betas", "eps", "weight_decay"))
    rules = (
        (float(lr) >= 0.0, f"lr {lr} is negative"),
        (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0, f"betas {betas} are not in [0, 1)"),
        (eps >= 0.0, f"eps {eps} is negative"),
        (decay >= 0.0, f"weight_decay {decay} is negative"),
    )
    for holds, message in rules:
        if not holds:
            raise UsageError(message)
    for key in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(key):
            raise UsageError(f"a parameter group asks for {key}, which OffloadAdamW does not have")


def check_parameter(param: nn.Parameter, name: str) -> None:
    """Return if the parameter can be updated on the host.

    Raises:
        UsageError: Its type or layout is not supported.
    """
    kind = type(param.data)
    if kind is not Tensor or getattr(param, "_fsdp_flattened", False):
        shown = kind.__name__ if kind is not Tensor else "piece of FSDP's flat parameter"
        raise UsageError(
            f"{name} is a {shown}; OffloadAdamW updates whole plain tensors of one process",
            hint="use DistributedDataParallel, or torch.optim.AdamW with FSDP's CPU offload",
        )
    if param.is_complex():
        raise UsageError(f"{name} is complex; OffloadAdamW updates real parameters")
    if param.layout != torch.strided:
        raise UsageError(f"{name} is sparse; OffloadAdamW updates dense parameters")
    if param.dtype not in (torch.float32, torch.bfloat16):
        raise UsageError(
            f"{name} is {str(param.dtype).removeprefix('torch.')}; weights must be fp32 or bf16",
            hint="fp16 training keeps fp32 weights under autocast",
        )
    if not is_dense(param):
        raise UsageError(f"{name} is a view with gaps or overlaps", hint="make it contiguous")


def check_gradient(slot: Slot) -> None:
    """Return if a parameter that has a gradient can be updated with it.

    Raises:
        UsageError: The gradient is sparse or of another type than the weights, or the parameter
            is no longer what the optimizer was made for.
    """
    if slot.can_update():
        return
    grad = slot.param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise UsageError(
            "a gradient is sparse; OffloadAdamW updates dense ones",
            hint="make the embedding with sparse=False",
        )
    if not slot.fits():
        raise UsageError(
            f"the type, layout or device of parameter {tuple(slot.param.shape)} has changed since "
            "the optimizer was made",
            hint="convert the model first, then make the optimizer",
        )
    raise UsageError(f"a gradient is {grad.dtype}, its parameter {slot.param.dtype}")


def is_dense(tensor: Tensor) -> bool:
    """Say whether a tensor fills one stretch of memory, in whatever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
