"""The fused pass against torch's own, element by element."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tierwise.offload import kernel

HYPER = [
    {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
    {"lr": 3e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.0},
    {"lr": 1e-4, "beta1": 0.0, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.3},
    {"lr": 1e-3, "beta1": 0.5, "beta2": 0.98, "eps": 0.0, "weight_decay": 0.1},
    {"lr": 1e-3, "beta1": 0.3, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1},
]


def aligned(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)  # torch aligns to 64 bytes


def state_of(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = [aligned(count) for _ in range(3)]
    state[0].copy_(torch.randn(count, generator=generator))
    return state


def gradient(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (2 * torch.randn(count, generator=generator))
    return torch.randn(count, generator=generator) * scale


def run(
    state: list[Tensor],
    grad: Tensor,
    hyper: dict[str, float],
    step: int,
    *,
    out: list[Tensor] | None = None,
    clip: float = 1.0,
    cuts: list[int] | None = None,
    weights: Tensor | None = None,
    width: int | None = -1,
) -> None:
    out = out or state
    count = grad.numel()
    edges = [0, *(cuts or []), count]
    rows = []
    for start, stop in itertools.pairwise(edges):
        if start < stop:
            ins = [t.data_ptr() + 4 * start for t in state]
            outs = [t.data_ptr() + 4 * start for t in out]
            place = 0 if weights is None else weights.data_ptr() + 2 * start
            g = grad.data_ptr() + grad.element_size() * start
            rows.append([*ins, g, *outs, place, stop - start, int(out is not state)])
    numbers = (clip, *kernel.numbers_of(step=step, **hyper)[1:])
    kernel.update(
        np.array(rows, dtype=np.int64).reshape(-1, kernel.NUM_ADDRESSES),
        np.array([numbers] * len(rows)).reshape(-1, kernel.NUM_NUMBERS),
        bf16=weights is not None,
        width=kernel.torch_width() if width == -1 else width,
    )


def torch_steps(state: list[Tensor], grads: list[Tensor], hyper: dict[str, float]) -> list[Tensor]:
    param = torch.nn.Parameter(state[0].clone())
    optimizer = torch.optim.AdamW(
        [param], lr=hyper["lr"], betas=(hyper["beta1"], hyper["beta2"]), eps=hyper["eps"],
        weight_decay=hyper["weight_decay"], fused=True,
    )  # fmt: skip
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    entry = optimizer.state[param]
    return [param.detach(), entry["exp_avg"], entry["exp_avg_sq"]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("hyper", HYPER, ids=lambda hyper: f"beta1={hyper['beta1']}")
@pytest.mark.parametrize("count", [*range(1, 34), 63, 64, 65, 1007, 4096, 100_003])
def test_bits_of_torch_fused(count: int, hyper: dict[str, float]) -> None:
    state = state_of(count, 1)
    grads = [gradient(count, seed) for seed in range(2, 6)]
    expected = torch_steps(state, grads, hyper)
    for step, grad in enumerate(grads, start=1):
        run(state, grad, hyper, step)
    assert same(state, expected)


def test_clip_is_a_rounded_product_before_anything_else() -> None:
    state, grad = state_of(10_007, 1), gradient(10_007, 2)
    coefficient = float(torch.tensor(0.3))
    expected = torch_steps(state, [grad * torch.tensor(coefficient)], HYPER[0])
    run(state, grad, HYPER[0], 1, clip=coefficient)
    assert same(state, expected)


def test_shadow_leaves_the_committed_state_alone() -> None:
    state, grad = state_of(10_007, 1), gradient(10_007, 2)
    before, shadow = [t.clone() for t in state], [aligned(10_007) for _ in range(3)]
    run(state, grad, HYPER[0], 1, out=shadow)
    assert same(state, before)
    run(state, grad, HYPER[0], 1)
    assert same(shadow, state)


@given(
    count=st.integers(1, 3000),
    cuts=st.sets(st.integers(1, 46), max_size=6),
    seed=st.integers(0, 99),
    in_place=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_splits_do_not_change_bits(count: int, cuts: set[int], seed: int, in_place: bool) -> None:
    whole, pieces, grad = state_of(count, seed), state_of(count, seed), gradient(count, seed + 1)
    out = None if in_place else [aligned(count) for _ in range(3)]
    run(whole, grad, HYPER[0], 3)
    edges = sorted(64 * cut for cut in cuts if 64 * cut < count)
    run(pieces, grad, HYPER[0], 3, out=out, cuts=edges)
    assert same(out or pieces, whole)


@pytest.mark.parametrize("count", [7, 64, 1007, 50_001])
def test_bf16_gradients_in_and_weights_out(count: int) -> None:
    state, shadow = state_of(count, 1), [aligned(count) for _ in range(3)]
    grad = gradient(count, 2).bfloat16()
    weights = aligned(count, torch.bfloat16)
    expected = torch_steps(state, [grad.float()], HYPER[0])
    run(state, grad, HYPER[0], 1, out=shadow, weights=weights)
    assert same(shadow, expected)
    assert torch.equal(weights, expected[0].bfloat16())
    again = aligned(count, torch.bfloat16)
    run(state, grad, HYPER[0], 1, weights=again)
    assert same(state, expected)
    assert torch.equal(again, weights)


def test_bf16_rounding_of_every_kind_of_number() -> None:
    bits = np.arange(0, 1 << 32, 65_521, dtype=np.uint32)  # a prime stride through all patterns
    values = torch.from_numpy(bits.view(np.float32).copy())
    values[:4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.3895e38])
    state = [values.clone(), aligned(len(values)), aligned(len(values))]
    weights = aligned(len(values), torch.bfloat16)
    still = {"lr": 0.0, "beta1": 0.9, "beta2": 0.9, "eps": 1.0, "weight_decay": 0.0}
    run(state, aligned(len(values), torch.bfloat16), still, 1, weights=weights)
    expected = values.bfloat16()
    assert torch.equal(weights.isnan(), expected.isnan())
    assert torch.equal(weights.nan_to_num(), expected.nan_to_num())


def test_special_numbers() -> None:
    special = [0.0, -0.0, 1e-45, 1e-38, 1e38, float("inf"), -float("inf"), float("nan")]
    grad = torch.tensor(special * 8)
    state = state_of(64, 1)
    expected = torch_steps(state, [grad, grad], HYPER[0])
    for step in (1, 2):
        run(state, grad, HYPER[0], step)
    for ours, theirs in zip(state, expected, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_a_spike_never_makes_v_negative() -> None:
    state = state_of(4096, 1)
    for step in range(1, 8):
        grad = gradient(4096, step)
        grad[::100] *= 1e4
        run(state, grad, HYPER[0], step)
    assert bool((state[2] >= 0).all())
    assert all(bool(t.isfinite().all()) for t in state)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_fallback_has_the_same_bits(bf16: bool) -> None:
    count = 1007
    grad = gradient(count, 2).bfloat16() if bf16 else gradient(count, 2)
    results = []
    for width in (-1, None):
        state, out = state_of(count, 1), [aligned(count) for _ in range(3)]
        weights = aligned(count, torch.bfloat16) if bf16 else None
        run(state, grad, HYPER[0], 2, out=out, clip=0.5, weights=weights, width=width)
        results.append([*out, *([weights] if weights is not None else [])])
    assert same(*results)


def _child(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env={**os.environ, **environment},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.slow
def test_a_processor_whose_bits_differ_takes_the_fallback() -> None:
    code = """
import torch
from tierwise.offload import kernel, verify_bits
model = lambda: torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 3))
loss = lambda m, n: m(torch.ones(4, 7) * n).square().mean()
report = verify_bits(model, loss, steps=5, seed=0)
print(kernel.torch_width(), report.equal)
"""
    assert _child(code, ATEN_CPU_CAPABILITY="default") == "None True"


@pytest.mark.slow
def test_works_where_nothing_can_be_cached() -> None:
    code = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
from tierwise.offload import kernel
print(kernel.torch_width() is not None)
"""
    assert _child(code) == "True"
