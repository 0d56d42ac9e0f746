"""Optimizer state on its way in and out, in the format of torch.optim.AdamW.

Left out: sharded checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tierwise.core.errors import DataError
from tierwise.offload.memory import Slot


def state_of(slot: Slot) -> dict[str, Tensor]:
    """Return torch's entry for one parameter, over committed memory; bf16 adds `master`."""
    state = {
        "step": slot.step_tensor, "exp_avg": slot.m[slot.bank], "exp_avg_sq": slot.v[slot.bank],
    }  # fmt: skip
    if slot.is_bf16:
        state["master"] = slot.master[slot.bank]
    return state


def check_state(
    state: dict[int, dict[str, Any]],
    groups: Sequence[dict[str, Any]],
    sizes: Sequence[int],
    params: Sequence[nn.Parameter],
) -> None:
    """Return if a state dict fits the parameters.

    Raises:
        DataError: It belongs to another model or another algorithm.
    """
    if [len(group["params"]) for group in groups] != list(sizes):
        found = [len(group["params"]) for group in groups]
        raise DataError(f"the state is of another model: groups of {found}, here {list(sizes)}")
    if any(group.get("amsgrad") or group.get("maximize") for group in groups):
        raise DataError("the state uses amsgrad or maximize, which OffloadAdamW does not have")
    indices = [index for group in groups for index in group["params"]]
    for index, entry in state.items():
        if missing := [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in entry]:
            names = ", ".join(missing)
            raise DataError(f"the state is not AdamW's: parameter {index} has no {names}")
    for index, param in zip(indices, params, strict=True):
        if index in state and state[index]["exp_avg"].shape != param.shape:
            shape = tuple(state[index]["exp_avg"].shape)
            raise DataError(
                f"the state is of another model: parameter {index} is {shape}, "
                f"here {tuple(param.shape)}"
            )


def clear_slot(slot: Slot) -> None:
    """Take a slot back to the state before its first step; its weights stay."""
    slot.forget()
    slot.hits, slot.step, slot.param_seen = 0, 0, None
    slot.step_tensor.zero_()
    slot.m[slot.bank].zero_()
    slot.v[slot.bank].zero_()


@torch.no_grad()
def fill_slot(slot: Slot, entry: dict[str, Any]) -> None:
    """Take over torch's entry for one parameter; without `master`, it is taken from the weights."""
    slot.step = int(entry["step"])
    slot.step_tensor.fill_(slot.step)
    slot.m[slot.bank].copy_(entry["exp_avg"])
    slot.v[slot.bank].copy_(entry["exp_avg_sq"])
    if slot.master and "master" in entry:
        slot.master[slot.bank].copy_(entry["master"])
        slot.param_seen = slot.stamp()
