"""The proof a user can run: train twice, apart, and compare every bit.

`verify_bits` trains a model with `clip_grad_norm_` + `torch.optim.AdamW(fused=True)` and again,
from the same seed, with `OffloadAdamW`, and compares weights, moments and norms. `fingerprint`
is the hash to print where the two runs are different programs.

Left out: tolerance. NaN equals NaN; anything else that differs, differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tierwise.offload.optimizer import OffloadAdamW


def fingerprint(what: nn.Module | Mapping[str, Any]) -> str:
    """Return the SHA-256 of all tensors of a model or a (nested) state dict, as hex digits.

    Names, types, shapes and bytes count; nothing else does.
    """
    tree = what.state_dict() if isinstance(what, nn.Module) else what
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors("", tree)):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(path: str, tree: Any) -> list[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        return [(path, tree)]
    if isinstance(tree, Mapping):
        found = [_tensors(f"{path}/{key}", value) for key, value in tree.items()]
        return [pair for pairs in found for pair in pairs]
    return []


def differing_bits(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, int]:
    """Return, for each tensor that is not the same in both, the number of differing elements.

    A tensor present on one side only counts with all its elements.
    """
    a, b = dict(_tensors("", ours)), dict(_tensors("", theirs))
    counts = {name: int((a.get(name, b.get(name)) == 0).numel()) for name in a.keys() ^ b.keys()}  # type: ignore[union-attr]
    for name in a.keys() & b.keys():
        same = (a[name] == b[name]) & (a[name].signbit() == b[name].signbit())
        same |= a[name].isnan() & b[name].isnan()
        if not bool(same.all()):
            counts[name] = int((~same).sum())
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class BitReport:
    """What two trainings of the same model had in common.

    Attributes:
        equal: Every weight, moment, step counter and norm is the same.
        num_elements: Numbers compared.
        differing: Tensor name -> differing elements, weights under `/weights`, moments under
            `/state/INDEX`, norms under `/norms`.
        ours_sha256: Hash of the weights after OffloadAdamW.
        theirs_sha256: Hash of the weights after torch.optim.AdamW.
        steps: Steps taken by each.
        clipped: Steps in which gradients were scaled down.
        kept: Parameter updates computed during backward and kept.
        redone: Parameter updates computed after the norm was known.
    """

    equal: bool
    num_elements: int
    differing: dict[str, int]
    ours_sha256: str
    theirs_sha256: str
    steps: int
    clipped: int
    kept: int
    redone: int


def verify_bits(
    make_model: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Tensor],
    *,
    steps: int,
    seed: int,
    lr: float = 1e-3,
    weight_decay: float = 1e-2,
    max_grad_norm: float | None = 1.0,
    accumulation: int = 1,
    **options: Any,
) -> BitReport:
    """Train twice from the same seed and return what differs.

    Args:
        make_model: Makes the model; called once a run, after seeding torch.
        loss_of: (model, number of the micro-batch from 0) -> loss; same number, same batch.
        steps: Optimizer steps.
        seed: Seeds torch before each run.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Clips the global norm; None: never.
        accumulation: Backwards a step.
        options: More arguments of OffloadAdamW (`mode`, `num_threads`, ...).
    """
    runs: list[dict[str, Any]] = []
    counts = None
    for offloaded in (False, True):
        torch.manual_seed(seed)
        model = make_model()
        optimizer: torch.optim.Optimizer
        if offloaded:
            optimizer = OffloadAdamW(
                model, lr, weight_decay=weight_decay, max_grad_norm=max_grad_norm, **options
            )
        else:
            optimizer = torch.optim.AdamW(
                model.parameters(), lr, weight_decay=weight_decay, fused=True
            )
        norms = []
        for step in range(steps):
            for part in range(accumulation):
                loss_of(model, step * accumulation + part).backward()  # type: ignore[no-untyped-call]
            if isinstance(optimizer, OffloadAdamW):
                optimizer.step()
                norms.append(optimizer.grad_norm or 0.0)
            else:
                norms.append(
                    0.0
                    if max_grad_norm is None
                    else float(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
                )
                optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        runs.append(
            {"weights": _copy(model), "state": state, "norms": {"all": torch.tensor(norms)}}
        )
        if isinstance(optimizer, OffloadAdamW):
            counts = optimizer.counts
            optimizer.close()
    assert counts is not None
    differing = differing_bits(runs[1], runs[0])
    return BitReport(
        equal=not differing,
        num_elements=sum(tensor.numel() for _, tensor in _tensors("", runs[0])),
        differing=differing,
        ours_sha256=fingerprint(runs[1]["weights"]),
        theirs_sha256=fingerprint(runs[0]["weights"]),
        steps=steps,
        clipped=counts.clipped,
        kept=counts.kept,
        redone=counts.redone,
    )


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
