"""A real model on the machine at hand -> its profile: how long each block's passes take.

Runs a few steps with the trace on and takes medians; the file is docs/formats/profile.md. Left
out: warm-up beyond the first step, and devices whose kernels run after their launch returns (the
spans would time launches).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from torch import Tensor, nn

from tierwise.core.errors import UsageError
from tierwise.offload.blocks import split_blocks
from tierwise.offload.optimizer import OffloadAdamW
from tierwise.offload.trace import Span, Trace


def profile_model(
    model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], *, steps: int = 5
) -> list[tuple[str, int, float, float]]:
    """Return (name, parameters, forward_s, backward_s) of each block, in forward order.

    The weights are not changed: the learning rate is zero.

    Args:
        model: On the CPU.
        loss_of: (model, step) -> loss of one step's batch.
        steps: Steps to time, after one that is not timed.
    """
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise UsageError("profile_model times the host's own passes", hint="move the model to cpu")
    trace = Trace()
    optimizer = OffloadAdamW(model, 0.0, weight_decay=0.0, mode="barrier", trace=trace)
    for step in range(steps + 1):
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    timed = [span for span in trace.spans if span.step > 0]
    order = list(dict.fromkeys(span.name for span in timed if span.kind == "forward"))
    blocks = {block.name: block for block in split_blocks(model)}
    names = [name for name in order if name in blocks]
    names += [name for name in blocks if name not in order]
    return [
        (
            name,
            sum(p.numel() for p in blocks[name].parameters if p.requires_grad),
            _median_s(timed, "forward", name, steps),
            _median_s(timed, "backward", name, steps),
        )
        for name in names
    ]


def _median_s(spans: list[Span], kind: str, name: str, steps: int) -> float:
    """Return the median over steps of the time in one block (which may run more than once)."""
    sums = dict.fromkeys(range(1, steps + 1), 0.0)
    for span in spans:
        if span.kind == kind and span.name == name and span.step in sums:
            sums[span.step] += (span.end_ns - span.start_ns) / 1e9
    return statistics.median(sums.values())
