"""What stands in `p.grad` once a gradient has been moved to the host and freed.

It has the shape, type and device of the gradient and no memory. Whoever computes with it, to
clip it by hand or to add another micro-batch, gets one sentence instead of a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tierwise.core.errors import StateError


class ConsumedGradient(Tensor):
    """A gradient without numbers; every operation on it raises StateError."""

    @staticmethod
    def __new__(cls, param: nn.Parameter) -> ConsumedGradient:
        """Make the stand-in for one parameter's gradient."""
        made: ConsumedGradient = Tensor._make_wrapper_subclass(
            cls, param.size(), strides=param.stride(), dtype=param.dtype, device=param.device
        )
        return made

    def __init__(self, param: nn.Parameter) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it is; the numbers are gone."""
        return f"ConsumedGradient({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let autograd handle it, and refuse to compute with it."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise StateError(
            "the gradient is already consumed: OffloadAdamW has moved it to the host",
            hint="clip with max_grad_norm=, put all but the last backward of a step inside "
            "opt.accumulate(), or make the optimizer with release_grads=False",
        )
