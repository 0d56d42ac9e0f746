"""What OffloadAdamW refuses, each in one sentence.

Left out: what only a step can show (sparse gradients, closures); the optimizer says that itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tierwise.core.errors import UsageError
from tierwise.offload.kernel import ALIGNMENT


def check_arguments(
    *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    max_grad_norm: float | None, mode: str, chunk_elements: int, num_threads: int,
) -> None:  # fmt: skip
    """Return if the optimizer's arguments make sense.

    Raises:
        UsageError: One does not.
    """
    chunk = f"chunk_elements {chunk_elements} is not a multiple of {ALIGNMENT}"
    rules = (
        (float(lr) >= 0.0, f"lr {lr} is negative"),
        (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0, f"betas {betas} are not in [0, 1)"),
        (eps >= 0.0, f"eps {eps} is negative"),
        (weight_decay >= 0.0, f"weight_decay {weight_decay} is negative"),
        (max_grad_norm is None or max_grad_norm > 0.0, f"max_grad_norm {max_grad_norm} is not > 0"),
        (mode in ("auto", "speculate", "defer", "barrier"), f"mode {mode!r} is not known"),
        (chunk_elements > 0 and chunk_elements % ALIGNMENT == 0, chunk),
        (num_threads >= 1, f"num_threads {num_threads} is not positive"),
    )
    for holds, message in rules:
        if not holds:
            raise UsageError(message)


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


def is_dense(tensor: Tensor) -> bool:
    """Say whether a tensor fills one stretch of memory, in whatever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
