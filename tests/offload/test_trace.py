"""Spans add up, the JSON is what viewers read, and a real step's trace has all its parts."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch

from tests.offload.small_models import Gpt, gpt_loss
from tierwise.offload import OffloadAdamW, Trace
from tierwise.offload.profile import profile_model
from tierwise.offload.trace import (
    Lane,
    Span,
    draw_timeline,
    measure_overlap,
    update_window,
    write_chrome_trace,
)


def span(  # noqa: PLR0917 - a row of a table
    lane: Lane, kind: str, start: int, end: int, step: int = 0, name: str = "x"
) -> Span:
    return Span(lane=lane, kind=kind, name=name, start_ns=start, end_ns=end, step=step)


def test_overlap_by_hand() -> None:
    ms = 1_000_000
    found = measure_overlap(
        [
            span("device", "forward", 0, 10 * ms),
            span("device", "backward", 10 * ms, 30 * ms),
            span("host", "update", 25 * ms, 40 * ms),
            span("device", "wait", 30 * ms, 40 * ms),
        ]
    )
    assert (found.update_s, found.hidden_s, found.exposed_s) == (0.015, 0.005, 0.01)
    assert (found.device_s, found.wall_s) == (0.03, 0.04)
    assert found.hidden_share == pytest.approx(1 / 3)
    assert measure_overlap([]).hidden_share == 0.0


def test_the_window_leaves_earlier_forwards_out() -> None:
    spans = [
        span("device", "forward", 0, 1, name="a"),
        span("device", "forward", 1, 2, name="b"),
        span("device", "forward", 10, 11, name="a"),
        span("device", "forward", 11, 12, name="b"),
        span("device", "backward", 12, 13, name="b"),
        span("device", "backward", 13, 14, name="a"),
        span("host", "update", 13, 15, name="b"),
        span("device", "forward", 20, 21, step=1, name="a"),
    ]
    assert update_window(spans, 0) == spans[2:7]
    assert update_window(spans, 1) == spans[7:]


def traced(mode: str, steps: int = 4) -> list[Span]:
    torch.manual_seed(0)
    model, trace = Gpt(), Trace()
    optimizer = OffloadAdamW(model, 1e-2, mode=mode, trace=trace)  # type: ignore[arg-type]
    for step in range(steps):
        gpt_loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return trace.spans


def test_a_real_trace_has_every_block_in_every_lane() -> None:
    spans = [s for s in traced("speculate") if s.step == 2]
    names = {s.name for s in spans if s.kind == "forward"}
    assert names == {s.name for s in spans if s.kind == "backward"}
    assert names == {s.name for s in spans if s.kind == "update"}
    assert names == {s.name for s in spans if s.kind == "upload"}
    moved = sum(s.bytes for s in spans if s.kind == "update")
    assert moved == 28 * sum(p.numel() for p in Gpt().parameters())
    assert all(s.end_ns >= s.start_ns for s in spans)


def test_chrome_trace_and_picture(tmp_path: Path) -> None:
    spans = traced("defer", steps=2)
    write_chrome_trace(spans, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(spans)
    assert min(event["ts"] for event in complete) == 0
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "device",
        "link",
        "host",
    }
    figure = draw_timeline(spans, name="timeline", caption="Two steps.")
    assert figure.svg.lstrip().startswith("<?xml")
    rows = list(csv.DictReader(io.StringIO(figure.csv)))
    assert len(rows) == len(spans)
    assert float(rows[0]["start_ms"]) == 0.0


def test_an_empty_trace_can_be_written_and_drawn(tmp_path: Path) -> None:
    write_chrome_trace([], tmp_path / "trace.json")
    assert draw_timeline([], name="nothing", caption="Nothing.").csv.startswith("lane,")


def test_profiling_a_model_leaves_it_unchanged() -> None:
    torch.manual_seed(0)
    model = Gpt()
    before = [p.clone() for p in model.parameters()]
    rows = profile_model(model, gpt_loss, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert sum(parameters for _, parameters, _, _ in rows) == sum(p.numel() for p in before)
    names = [name for name, *_ in rows]
    assert (names[0], names[-1]) == ("embedding", "head")
    assert all(forward > 0 and backward > 0 for _, _, forward, backward in rows)
