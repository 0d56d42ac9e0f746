"""Under torch.compile: block by block it overlaps, whole it is right; never another bit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.offload.small_models import Gpt, gpt_loss
from tierwise.offload import OffloadAdamW, Trace, fingerprint
from tierwise.offload.queue import Task

# Dynamo looks at .grad of what goes into a graph, also without OffloadAdamW
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

BACKEND = "aot_eager"  # the same graphs, without a C++ compiler
STEPS = 5


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend=BACKEND, fullgraph=True)  # type: ignore[return-value]


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=BACKEND, fullgraph=True)
    return model


def by_block(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend=BACKEND)
    return model


def slow_down(optimizer: OffloadAdamW) -> None:
    """Make every task end late, so that weights read too early are old ones."""

    def wait(task: Task) -> None:
        time.sleep(0.002)

    optimizer._queue.before = wait


def weights(model: nn.Module) -> str:
    return fingerprint({k.replace("_orig_mod.", ""): v for k, v in model.state_dict().items()})


def reference(compiled: Callable[[nn.Module], nn.Module], *, eager_steps: int = 0) -> str:
    torch.manual_seed(0)
    model: nn.Module = Gpt(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    for step in range(STEPS):
        if step == eager_steps:
            model = compiled(model)
        gpt_loss(model, step).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 4.0)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def train(model: nn.Module, optimizer: OffloadAdamW, steps: range) -> None:
    for step in steps:
        gpt_loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("compiled", "first", "mode"),
    [
        (wrapped, "model", "speculate"),
        (in_place, "optimizer", "defer"),
        pytest.param(wrapped, "optimizer", "defer", marks=pytest.mark.slow),
        pytest.param(in_place, "model", "speculate", marks=pytest.mark.slow),
    ],
)
def test_a_whole_model_is_one_graph_with_the_same_bits_and_is_told_so_once(
    compiled: Callable[[nn.Module], nn.Module],
    first: str,
    mode: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = reference(compiled)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model: nn.Module = Gpt(layers=2)
    if first == "model":
        model = compiled(model)
    ours = OffloadAdamW(model, 1e-2, mode=mode, max_grad_norm=4.0, overlap_forward=True)
    if first == "optimizer":
        model = compiled(model)
    slow_down(ours)
    with caplog.at_level(logging.WARNING, logger="tierwise.offload"):
        train(model, ours, range(STEPS))
    assert not ours._delivery.pending
    assert weights(model) == expected
    assert counters["stats"]["unique_graphs"] == 1
    assert sum("no block's forward was seen" in r.message for r in caplog.records) == 1
    ours.close()


def test_weights_late_from_an_uncompiled_step_are_waited_for() -> None:
    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend=BACKEND)  # type: ignore[return-value]

    expected = reference(compiled, eager_steps=2)
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Gpt(layers=2)
    ours = OffloadAdamW(plain, 1e-2, mode="defer", max_grad_norm=4.0)
    slow_down(ours)
    train(plain, ours, range(2))
    late = [ours._delivery.pending]
    model = compiled(plain)
    loss = gpt_loss(model, 2)
    late.append(ours._delivery.pending)
    assert late == [True, False]  # they were waited for, and not only by the compiler's delay
    loss.backward()  # type: ignore[no-untyped-call]
    ours.step()
    ours.zero_grad()
    train(model, ours, range(3, STEPS))
    assert weights(model) == expected
    ours.close()


@pytest.mark.parametrize("traced", [False, True])
def test_compiled_block_by_block_weights_may_be_late_and_gradients_early(
    traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = reference(by_block)
    torch._dynamo.reset()
    torch.manual_seed(0)
    trace = Trace() if traced else None
    model = by_block(Gpt(layers=2))
    ours = OffloadAdamW(
        model, 1e-2, mode="speculate", max_grad_norm=4.0, overlap_forward=True, trace=trace
    )
    slow_down(ours)
    train(model, ours, range(STEPS))
    assert ours._delivery.pending  # the last step has returned before its weights
    assert ours.counts.kept > 0
    assert weights(model) == expected
    assert not [r for r in caplog.records if r.name == "tierwise.offload"]
    if trace is not None:
        forwards = {span.name for span in trace.spans if span.kind == "forward"}
        assert any("layers.1" in name for name in forwards)
    ours.close()
