"""Parameters that stay where they are trained: their update runs on the device, inside step().

The planner keeps the first blocks of the forward order there, whose update the host would finish
too late. Left out: proposals for them; a device updates fast enough after the norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierwise.offload.memory import Slot


def allocate_resident(slots: Sequence[Slot]) -> None:
    """Give slots fp32 state on the device of their parameters."""
    for slot in slots:
        for banks in (slot.m, slot.v, *((slot.master,) if slot.is_bf16 else ())):
            banks.append(torch.zeros_like(slot.param.detach(), dtype=torch.float32))


def update_resident(slots: Sequence[Slot], coefficient: float) -> None:
    """Make the next step of the slots with torch's fused kernel; `slot.step` is the caller's."""
    for slot in slots:
        grad = slot.param.grad
        assert grad is not None
        group, weights = slot.group, slot.master[0] if slot.master else slot.param
        torch._fused_adamw_(
            [weights],
            [grad.float() * torch.tensor(coefficient, device=grad.device)],
            [slot.m[0]],
            [slot.v[0]],
            [],
            [torch.tensor(slot.step + 1.0, device=grad.device)],
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            amsgrad=False,
            maximize=False,
        )
        if slot.master:
            slot.param.copy_(weights)
        slot.param_seen = slot.stamp()
