"""The global norm of the gradients and what it makes of them, bit for bit as `clip_grad_norm_`.

Norms are of single tensors, in fp32, noted while backward ran where they still hold; the norm of
those norms, in the order of the model's parameters, is the global one. Left out: other norms than
the 2-norm.

Source: Pascanu, Mikolov & Bengio, On the difficulty of training recurrent neural networks,
https://arxiv.org/abs/1211.5063, algorithm 1; PyTorch 2.13, torch/nn/utils/clip_grad.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tierwise.offload.lane import Lane
from tierwise.offload.memory import Slot


def clip_order(model: nn.Module | None, groups: Sequence[Mapping[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters whose gradients count: the model's, in its order, then the others."""
    params = list(model.parameters()) if model is not None else []
    inside = set(params)
    return params + [p for group in groups for p in group["params"] if p not in inside]


def gradient_norms(
    params: Sequence[nn.Parameter], slots: Mapping[nn.Parameter, Slot], lane: Lane
) -> list[Tensor]:
    """Return the norm of every gradient there is, in the order of `params`."""
    found: dict[nn.Parameter, Tensor] = {}
    missing: list[tuple[nn.Parameter, Tensor]] = []
    for param in params:
        if param.grad is None:
            continue
        slot = slots.get(param)
        if slot is not None and slot.norm is not None and slot.grad_is_current():
            found[param] = slot.norm
        else:
            missing.append((param, param.grad))
    fresh = lane.norms([grad for _, grad in missing])
    found.update(zip((param for param, _ in missing), fresh, strict=True))
    return [found[param] for param in params if param in found]


def clip_coefficient(norm: Tensor, limit: float) -> float:
    """Return what gradients of this global norm are multiplied by: at most 1."""
    return float(torch.clamp(limit / (norm + 1e-6), max=1.0))


def unscale(params: Sequence[nn.Parameter], scale: Tensor) -> None:
    """Undo a GradScaler's scale as its own `unscale_` does."""
    inverse = scale.double().reciprocal().float()
    for param in params:
        if param.grad is not None:
            param.grad.mul_(inverse.to(param.grad.device))
