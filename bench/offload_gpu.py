"""What only a GPU can settle, in at most 12 minutes: bits, step time, memory, prediction.

1. Bits: torch's fused AdamW on the device against the host's, one update of 4 M elements; norms in
   a list and alone; casts to bf16; and whole trainings, OffloadAdamW against the same with the
   update made on the host after clipping on the device.
2. Step time and peak device memory, two models x two sequence lengths x clip on and off: AdamW on
   the device, OffloadAdamW (three ways), and, where they are installed, torchao's
   CPUOffloadOptimizer and DeepSpeed's ZeRO-Offload.
3. The planner's bound from measured rates against the measured step.

Run: python bench/offload_gpu.py            on a machine with a CUDA device
     python bench/offload_gpu.py --toy      anywhere, toy size, on the CPU lane; writes nothing
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import harness
from tierwise.offload import OffloadAdamW, fingerprint
from tierwise.offload.plan import lower_bound
from tierwise.offload.workload import Machine, price_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One model and its batches."""

    width: int
    layers: int
    vocabulary: int
    sequences: tuple[int, ...]
    batch: int


TOY = (Size(width=32, layers=2, vocabulary=64, sequences=(8,), batch=2),)
REAL = (
    Size(width=2048, layers=16, vocabulary=32000, sequences=(1024, 4096), batch=4),
    Size(width=4096, layers=16, vocabulary=32000, sequences=(1024, 4096), batch=2),
)


class Layer(nn.Module):
    """A pre-norm transformer layer with fused attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x after the layer, [batch, time, width]."""
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return result


class Model(nn.Module):
    """A decoder; layers are recomputed in backward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size.width) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each next token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        logits = self.head(x)[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make(size: Size, device: str) -> Model:
    """Return the model in bf16, the same each time."""
    torch.manual_seed(0)
    return Model(size).to(device=device, dtype=torch.bfloat16)


def batches(size: Size, sequence: int, device: str) -> Iterator[Tensor]:
    """Yield batches of tokens for ever, the same each time."""
    generator = torch.Generator().manual_seed(1)
    while True:
        shape = (size.batch, sequence)
        yield torch.randint(0, size.vocabulary, shape, generator=generator).to(device)


def wait(device: str) -> None:
    """Return when the device has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()


def bench_bits(device: str, elements: int) -> list[harness.Row]:
    """Count differing elements between device and host arithmetic."""
    generator = torch.Generator().manual_seed(0)
    state = [torch.randn(elements, generator=generator), *(torch.zeros(elements),) * 2]
    grad = torch.randn(elements, generator=generator)
    sides = []
    for side in ("cpu", device):
        p, m, v, g = (tensor.clone().to(side) for tensor in (*state, grad))
        torch._fused_adamw_(
            [p], [g], [m], [v], [], [torch.tensor(3.0, device=side)], lr=1e-3, beta1=0.9,
            beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        sides.append([p.cpu(), m.cpu(), v.cpu()])
    rows = [
        _count(f"fused AdamW, device against host: {name}", int((a != b).sum()), elements)
        for name, a, b in zip("pmv", *sides, strict=True)
    ]
    pieces = list(torch.split(grad.to(device), elements // 7 + 1))
    listed = torch._foreach_norm(pieces)
    alone = [torch.linalg.vector_norm(piece) for piece in pieces]
    rows.append(
        _count("norm in a list against alone", sum(map(_differ, listed, alone)), len(pieces))
    )
    cast = grad.to(device).bfloat16().cpu() != grad.bfloat16()
    rows.append(_count("cast to bf16, device against host", int(cast.sum()), elements))
    return rows


def _differ(a: Tensor, b: Tensor) -> int:
    return int(not torch.equal(a, b))


def _count(name: str, count: int, of: int) -> harness.Row:
    return harness.row_of(name, [float(count)], unit="differ", note=f"of {of}")


def bench_training_bits(device: str, size: Size) -> harness.Row:
    """Train by OffloadAdamW, and by clipping on the device and AdamW on fp32 host copies."""
    hashes = []
    for offloaded in (True, False):
        model, source = make(size, device), batches(size, size.sequences[0], device)
        optimizer: Any
        if offloaded:
            optimizer = OffloadAdamW(model, 1e-3, max_grad_norm=1.0, mode="speculate")
        else:
            masters = [nn.Parameter(p.detach().float().cpu()) for p in model.parameters()]
            optimizer = torch.optim.AdamW(masters, 1e-3, fused=True)
        for _ in range(6):
            model(next(source)).backward()
            if not offloaded:
                _host_step(model, masters, optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
        hashes.append(fingerprint(model))
        if offloaded:
            optimizer.close()
    return _count("trained weights, OffloadAdamW against host AdamW", hashes[0] != hashes[1], 1)


def _host_step(model: nn.Module, masters: list[nn.Parameter], optimizer: Any) -> None:
    """Norm on the device in fp32, coefficient and update on the host."""
    grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    coefficient = torch.clamp(1.0 / (norm + 1e-6), max=1.0).cpu()
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad.cpu() * coefficient
    optimizer.step()
    with torch.no_grad():
        for master, param in zip(masters, model.parameters(), strict=True):
            param.copy_(master)


Method = Callable[[nn.Module, float | None], tuple[Any, bool]]  # optimizer, whether it clips


def methods() -> dict[str, Method]:
    """Return what is compared and installed here."""

    def ours(**options: Any) -> Method:
        return lambda model, clip: (
            OffloadAdamW(model, 1e-4, max_grad_norm=clip, **options),
            True,
        )

    found: dict[str, Method] = {
        "AdamW on the device, bf16 state": lambda model, clip: (
            torch.optim.AdamW(model.parameters(), 1e-4, fused=True),
            False,
        ),
        "OffloadAdamW, speculate": ours(mode="speculate", overlap_forward=True),
        "OffloadAdamW, speculate, grads freed": ours(
            mode="speculate", overlap_forward=True, release_grads=True
        ),
        "OffloadAdamW, defer": ours(mode="defer"),
    }
    if importlib.util.find_spec("torchao") and torch.cuda.is_available():
        from torchao.optim import CPUOffloadOptimizer

        found["torchao CPUOffloadOptimizer"] = lambda model, clip: (
            CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, lr=1e-4),
            False,
        )
    return found


def bench_steps(device: str, size: Size, sequence: int, *, steps: int) -> list[harness.Row]:
    """Return step time and peak memory of every method, clip on and off."""
    rows = []
    label = f"{size.width} x {size.layers}, {size.batch} x {sequence} tokens"
    for clip in (None, 1.0):
        for name, method in methods().items():
            model = make(size, device)
            optimizer, clips = method(model, clip)
            times, peak = _time_steps(model, optimizer, None if clips else clip,
                                      batches(size, sequence, device), device, steps)  # fmt: skip
            if isinstance(optimizer, OffloadAdamW):
                optimizer.close()
            title = f"{label}, {'clip' if clip else 'no clip'}: {name}"
            rows.append(harness.row_of(title, times, unit="s", note=f"peak {peak / 1e9:.2f} GB"))
            del model, optimizer
    if importlib.util.find_spec("deepspeed") and device == "cuda":
        rows.append(_deepspeed(size, sequence, label, steps))
    return rows


def _time_steps(  # noqa: PLR0917
    model: nn.Module, optimizer: Any, clip: float | None, source: Iterator[Tensor],
    device: str, steps: int,
) -> tuple[list[float], float]:  # fmt: skip
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(steps + 2):
        wait(device)
        start = time.perf_counter()
        model(next(source)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:  # a late step is paid for by the next forward, inside the next interval
            times.append(time.perf_counter() - start)
    wait(device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return times, float(peak)


def _deepspeed(size: Size, sequence: int, label: str, steps: int) -> harness.Row:
    import deepspeed

    model = make(size, "cuda")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": size.batch,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    )
    source, times = batches(size, sequence, "cuda"), []
    for step in range(steps + 2):
        wait("cuda")
        start = time.perf_counter()
        engine.backward(engine(next(source)))
        engine.step()
        wait("cuda")
        if step >= 2:
            times.append(time.perf_counter() - start)
    return harness.row_of(f"{label}, clip: DeepSpeed ZeRO-Offload", times, unit="s")


def bench_prediction(device: str, size: Size, sequence: int, *, steps: int) -> list[harness.Row]:
    """Return the measured step over the planner's bound from rates measured here."""
    model, source = make(size, device), batches(size, sequence, device)
    forward, backward = _passes(model, source, device, steps)
    machine = _machine(device)
    total = sum(p.numel() for p in model.parameters())
    names = {"embedding": model.embedding, **dict(model.layers.named_children())}
    units = []
    for name, module in names.items():
        count = sum(p.numel() for p in module.parameters())
        share = 0.0 if name == "embedding" else 1.0 / size.layers
        units.append(price_unit(name, count, (forward * share, backward * share), machine))
    rest = total - sum(unit.parameters for unit in units)
    units.append(price_unit("head", rest, (0.0, 0.0), machine))
    optimizer = OffloadAdamW(model, 1e-4, mode="speculate", overlap_forward=True)
    times, _ = _time_steps(model, optimizer, None, source, device, steps)
    optimizer.close()
    bound = lower_bound(units, 0, "speculate")
    note = f"forward and backward {forward + backward:.4f} s, bound {bound:.4f} s"
    return [
        harness.row_of("host update rate", [machine.host_parameters_s / 1e9], unit="Gparam/s"),
        harness.row_of("link rate, one way", [machine.link_bytes_s / 1e9], unit="GB/s"),
        harness.row_of("measured step over predicted bound", [t / bound for t in times],
                       unit="ratio", note=note),
    ]  # fmt: skip


def _passes(
    model: nn.Module, source: Iterator[Tensor], device: str, steps: int
) -> tuple[float, float]:
    forwards, backwards = [], []
    for _ in range(steps + 1):
        wait(device)
        start = time.perf_counter()
        loss = model(next(source))
        wait(device)
        middle = time.perf_counter()
        loss.backward()
        wait(device)
        backwards.append(time.perf_counter() - middle)
        forwards.append(middle - start)
        model.zero_grad()
    return statistics.median(forwards[1:]), statistics.median(backwards[1:])


def _machine(device: str) -> Machine:
    """Return this machine's rates: an update of the host's, a copy over the link."""
    count = 1 << (26 if device == "cuda" else 16)
    param = nn.Parameter(torch.zeros(count))
    optimizer = OffloadAdamW([param], 1e-4, mode="barrier")
    update = []
    for _ in range(4):
        param.grad = torch.ones(count)
        start = time.perf_counter()
        optimizer.step()
        update.append(time.perf_counter() - start)
    optimizer.close()
    host = torch.zeros(count, pin_memory=device == "cuda")
    there = torch.zeros(count, device=device)
    copy = []
    for _ in range(4):
        wait(device)
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        wait(device)
        copy.append(time.perf_counter() - start)
    return Machine(
        device_flop_s=1.0, device_memory_bytes=1.0, host_memory_bytes=1.0,
        link_bytes_s=4.0 * count / min(copy[1:]), host_parameters_s=count / min(update[1:]),
    )  # fmt: skip


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="toy size on the CPU lane")
    parser.add_argument("--minutes", type=float, default=12.0, help="begin no new part after")
    arguments = parser.parse_args()
    device = "cpu" if arguments.toy or not torch.cuda.is_available() else "cuda"
    sizes, steps = (TOY, 2) if device == "cpu" else (REAL, 8)
    stop = time.monotonic() + 60 * arguments.minutes
    rows = bench_bits(device, 1 << (12 if device == "cpu" else 22))
    rows.append(bench_training_bits(device, sizes[0] if device == "cpu" else TOY[0]))
    rows += bench_prediction(device, sizes[0], sizes[0].sequences[0], steps=steps)
    for size in sizes:
        for sequence in size.sequences:
            if time.monotonic() < stop:
                rows += bench_steps(device, size, sequence, steps=steps)
    if device == "cuda":
        harness.write_results("offload_gpu", rows, config={"device": torch.cuda.get_device_name()},
                              packages=("torch", "numba"))  # fmt: skip
    else:
        for row in rows:
            print(f"{row.name:<70} {row.median:>10.4g} {row.unit:<8} {row.note}")


if __name__ == "__main__":
    main()
