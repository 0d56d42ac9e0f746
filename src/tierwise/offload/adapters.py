"""Accelerate, the HF Trainer and TRL's trainers, which clip by hand between backward and step.

Their clipping scales gradients in place even when it changes nothing, so every proposal would be
stale. Connected, their call to clip becomes a wish for the coming step, and the norm they log is
the one the optimizer has noted. Which backward is the last of a step is asked of Accelerate.

Left out: engines that keep their own gradients (DeepSpeed, FSDP), and fp16 with a GradScaler,
which goes the trainers' own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tierwise.core.errors import UsageError
from tierwise.offload.optimizer import OffloadAdamW


def connect_accelerator(accelerator: Any, optimizer: OffloadAdamW) -> None:
    """Let an `accelerate.Accelerator` clip through the optimizer.

    `accelerator.clip_grad_norm_(model.parameters(), c)` then scales nothing: it returns the norm,
    and the coming `step()` clips to c. Call it before or after `prepare`.

    Args:
        accelerator: Of one process; another kind of training is left as it is.
        optimizer: Updates all parameters whose gradients are clipped.

    Raises:
        UsageError: The accelerator drives several processes or an engine of its own.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind != "NO":
        raise UsageError(f"OffloadAdamW trains in one process, not under {kind}")
    by_hand: Callable[..., Any] = accelerator.clip_grad_norm_

    def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        if norm_type != 2 or accelerator.scaler is not None:
            result: Tensor | None = by_hand(parameters, max_norm, norm_type)
            return result
        return optimizer.clip_on_step(max_norm)

    accelerator.clip_grad_norm_ = clip
    optimizer.ask_whether_last(lambda: bool(accelerator.sync_gradients))


def use_with_trainer(trainer: Any, **options: Any) -> OffloadAdamW:
    """Give a transformers Trainer (or a TRL trainer) an OffloadAdamW made from its arguments.

    Learning rate, betas, eps, weight decay (with the Trainer's rule for what decays) and
    max_grad_norm are the Trainer's; call it before `trainer.train()`.

    Args:
        trainer: Its model is on one device.
        options: More arguments of OffloadAdamW (`mode`, `overlap_forward`, ...).

    Raises:
        UsageError: The trainer already has an optimizer, or uses an engine of its own.
    """
    if trainer.optimizer is not None:
        raise UsageError("the trainer already has an optimizer")
    args, model = trainer.args, trainer.model
    decayed = set(trainer.get_decay_parameter_names(model))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    optimizer = OffloadAdamW(
        [group for group in groups if group["params"]],
        args.learning_rate,
        (args.adam_beta1, args.adam_beta2),
        args.adam_epsilon,
        model=model,
        max_grad_norm=args.max_grad_norm or None,
        **options,
    )
    connect_accelerator(trainer.accelerator, optimizer)
    trainer.optimizer = optimizer
    return optimizer
