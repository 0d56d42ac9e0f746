"""The update kernel against its memory bound and torch, the planner's schedules, real overlap.

1. Kernel: in place and into shadow memory, against loops with the same reads and writes and one
   addition each; the bf16 pass against torch's fused update plus the two casts it needs. Thread
   time on one core, alternatives in turn.
2. Schedules in virtual time: models x machines x tokens; the planned step against its bound, and
   other placements and orders against the planned step.
3. Overlap on this machine: what part of the update's time is still seen by the training thread.
   One core plays the device and one the host, so they share the memory; no throughput claim.

Run: python bench/offload.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor, nn

import harness
from tierwise.core.errors import UsageError
from tierwise.offload import OffloadAdamW, kernel
from tierwise.offload.plan import lower_bound, make_plan, prefix_shares
from tierwise.offload.simulate import Policy, simulate
from tierwise.offload.workload import (
    Batch,
    Unit,
    activation_bytes,
    count_units,
    decoder_named,
    machine_named,
    names_of,
)

ELEMENTS, RUNS = 1 << 24, 9
HYPER = kernel.numbers_of(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=9)
PAPER_SPEEDUP = 1.304  # CoTrain over ZeRO-Offload, its abstract
TOKENS = (8192, 32768)


@numba.njit(nogil=True)
def _add_in_place(p: Any, m: Any, v: Any, g: Any) -> None:
    for i in range(p.size):
        p[i] += g[i]
        m[i] += g[i]
        v[i] += g[i]


@numba.njit(nogil=True)
def _add_beside(  # noqa: PLR0917 - numba takes positions
    p: Any, m: Any, v: Any, g: Any, p2: Any, m2: Any, v2: Any
) -> None:
    for i in range(p.size):
        p2[i] = p[i] + g[i]
        m2[i] = m[i] + g[i]
        v2[i] = v[i] + g[i]


def thread_seconds(alternatives: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the thread time of each alternative, in turn, RUNS times after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for run in range(RUNS + 1):
        for name, function in alternatives.items():
            start = time.thread_time()
            function()
            if run:
                seconds[name].append(time.thread_time() - start)
    return seconds


def bench_kernel() -> list[harness.Row]:
    """Time the kernel and what it is compared with."""
    ins = [torch.rand(ELEMENTS) for _ in range(3)]
    outs = [torch.rand(ELEMENTS) for _ in range(3)]
    grad = torch.rand(ELEMENTS)
    grad16, weights16 = grad.bfloat16(), torch.zeros(ELEMENTS, dtype=torch.bfloat16)
    a, b, g = [t.numpy() for t in ins], [t.numpy() for t in outs], grad.numpy()

    def update(gradient: Tensor, targets: list[Tensor], *, stream: bool) -> Callable[[], object]:
        row = [t.data_ptr() for t in [*ins, gradient, *targets]]
        table = np.array([[*row, weights16.data_ptr(), ELEMENTS, int(stream)]], np.int64)
        bf16, width = gradient.dtype == torch.bfloat16, kernel.torch_width()
        return lambda: kernel.update(table, np.array([HYPER]), bf16=bf16, width=width)

    wide = grad.clone()
    add_in_place: Callable[..., None] = _add_in_place
    add_beside: Callable[..., None] = _add_beside

    def torch_pipeline() -> None:
        wide.copy_(grad16)
        step = torch.tensor(9.0)
        torch._fused_adamw_(
            [ins[0]], [wide], [ins[1]], [ins[2]], [], [step], lr=1e-3, beta1=0.9, beta2=0.95,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        weights16.copy_(ins[0])

    seconds = thread_seconds(
        {
            "in place": update(grad, ins, stream=False),
            "in place, additions": lambda: add_in_place(*a, g),
            "shadow": update(grad, outs, stream=True),
            "shadow, additions": lambda: add_beside(*a, g, *b),
            "bf16": update(grad16, ins, stream=False),
            "bf16 shadow": update(grad16, outs, stream=True),
            "torch": torch_pipeline,
        }
    )
    rates = {name: [ELEMENTS / t / 1e6 for t in times] for name, times in seconds.items()}
    ratio = harness.ratio_row
    return [
        harness.row_of("in place, fp32, 1 thread", rates["in place"], unit="Mparam/s"),
        harness.row_of("shadow, fp32, 1 thread", rates["shadow"], unit="Mparam/s"),
        harness.row_of("bf16 in and out, 1 thread", rates["bf16"], unit="Mparam/s"),
        ratio("in place over the same traffic", rates["in place"], rates["in place, additions"],
              "target 0.95"),
        ratio("shadow over the same traffic", rates["shadow"], rates["shadow, additions"],
              "target 0.95; stores bypass the cache"),
        ratio("bf16 over torch fused and casts", rates["bf16"], rates["torch"], "target 1.5"),
        ratio("bf16 shadow over torch fused and casts", rates["bf16 shadow"], rates["torch"]),
    ]  # fmt: skip


def bench_schedules() -> list[harness.Row]:
    """Return one row per model, machine and batch that fits, from virtual time."""
    rows = []
    for machine_name in names_of("machine"):
        for model_name in names_of("model"):
            for tokens in TOKENS:
                row = _one_schedule(model_name, machine_name, tokens)
                rows += [row] if row is not None else []
    return rows


def _one_schedule(model_name: str, machine_name: str, tokens: int) -> harness.Row | None:
    model, machine = decoder_named(model_name), machine_named(machine_name)
    batch = Batch(tokens=tokens, sequence_tokens=4096, micro_batch_tokens=4096, checkpointing=True)
    units = count_units(model, machine, batch)
    try:
        plan = make_plan(
            units, schedule="speculate", device_memory_bytes=machine.device_memory_bytes,
            host_memory_bytes=machine.host_memory_bytes,
            activation_bytes=activation_bytes(model, batch),
        )  # fmt: skip
    except UsageError:
        return None
    step = _period(units, list(plan.shares), plan.schedule)
    resident = plan.resident_parameters
    total = sum(unit.parameters for unit in units)
    others = {
        "fifo": _period(units, list(plan.shares), plan.schedule, order="fifo"),
        "last resident": _period(units, prefix_shares(units[::-1], resident)[::-1], plan.schedule),
        "uniform": _period(units, [resident / total] * len(units), plan.schedule),
        "barrier": _period(units, list(plan.shares), "barrier"),
        "sequential": _period(units, [0.0] * len(units), "sequential"),
    }
    gain, most = others["sequential"] / step, others["sequential"] / plan.bound_s
    verdict = f"gain {gain:.2f} x"
    if most < PAPER_SPEEDUP:
        verdict += f", at most {most:.2f} x: the bound forbids {PAPER_SPEEDUP}"
    elif gain < PAPER_SPEEDUP:
        verdict += f", below {PAPER_SPEEDUP}"
    assert lower_bound(units, resident, plan.schedule) <= step * (1 + 1e-9)
    note = ", ".join(f"{name} {value / step:.3f}" for name, value in others.items())
    return harness.row_of(
        f"{model_name}, {machine_name}, {tokens} tokens: step over bound",
        [step / plan.bound_s],
        unit="ratio",
        note=f"{plan.schedule}, {resident / total:.0%} resident, step {step:.3f} s; "
        f"over the step: {note}; {verdict}",
    )


def _period(units: list[Unit], shares: list[float], policy: Policy, **options: Any) -> float:
    chunk = max(2.0**22, sum(unit.parameters for unit in units) / 2000)
    return simulate(units, shares, policy, chunk_parameters=chunk, steps=4, **options).period_s


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return result


def bench_overlap() -> list[harness.Row]:
    """Time steps without an update, with torch's, and with the overlapped one, in turn."""
    width, layers, tokens = 384, 10, 64
    batch = torch.randn(tokens, width)
    torch.manual_seed(0)
    models = [nn.Sequential(*(_Layer(width) for _ in range(layers))) for _ in range(3)]
    theirs = torch.optim.AdamW(models[1].parameters(), 1e-3, fused=True)
    ours = OffloadAdamW(models[2], 1e-3, mode="speculate", max_grad_norm=1e9, overlap_forward=True)

    def passes(model: nn.Module) -> None:
        model(batch).square().mean().backward()

    def alone() -> None:
        passes(models[0])
        models[0].zero_grad()

    def sequential() -> None:
        passes(models[1])
        nn.utils.clip_grad_norm_(models[1].parameters(), 1e9)
        theirs.step()
        theirs.zero_grad()

    def overlapped() -> None:
        passes(models[2])
        ours.step()
        ours.zero_grad()

    seconds = harness.time_in_turn(
        {"alone": alone, "sequential": sequential, "overlapped": overlapped},
        num_runs=25, num_warmups=3,
    )  # fmt: skip
    work = thread_seconds({"alone": alone, "sequential": sequential, "overlapped": overlapped})
    ours.close()
    parameters = sum(p.numel() for p in models[0].parameters())
    note = f"{parameters / 1e6:.1f} M parameters, {tokens} tokens, 1 host thread"
    return [
        harness.row_of("step without update", [1e3 * t for t in seconds["alone"]], unit="ms"),
        harness.row_of("step, clip + AdamW(fused)", [1e3 * t for t in seconds["sequential"]],
                       unit="ms"),
        harness.row_of("step, overlapped", [1e3 * t for t in seconds["overlapped"]], unit="ms"),
        harness.row_of("exposed update over sequential update, wall", _exposed(seconds),
                       unit="ratio", note=note + "; quantile by quantile; see the load"),
        harness.row_of("the same, processor time of the training thread", _exposed(work),
                       unit="ratio", note=note + "; quantile by quantile"),
    ]  # fmt: skip


def _exposed(seconds: Mapping[str, list[float]]) -> list[float]:
    """Return (overlapped - alone) / (sequential - alone), quantile by quantile."""
    ordered = [sorted(seconds[name]) for name in ("alone", "sequential", "overlapped")]
    pairs = [(o - a, s - a) for a, s, o in zip(*ordered, strict=True) if s > a]
    return [exposed / sequential for exposed, sequential in pairs] or [float("nan")]


def main() -> None:
    """Run all three and write the result."""
    torch.set_num_threads(1)
    rows = bench_kernel() + bench_overlap() + bench_schedules()
    path = harness.write_results(
        "offload",
        rows,
        config={"elements": ELEMENTS, "runs": RUNS, "tokens": TOKENS, "torch_threads": 1},
        packages=("torch", "numba", "numpy"),
    )
    print(path)


if __name__ == "__main__":
    main()
