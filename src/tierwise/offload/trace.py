"""What ran where and when: spans in three lanes -> exposed time, Chrome-trace JSON, a picture.

Lanes: `device` (forward, backward, and the waits in which it could have computed), `link`
(copies), `host` (updates). The JSON opens in Perfetto and chrome://tracing; its fields are in
docs/formats/trace.md. On the CPU lane the device is the thread that trains.

Left out: kernels inside a span (a profiler shows those); the end of a block's backward is the
arrival of its last gradient, which is what the schedule reacts to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tierwise.core.records import write_whole
from tierwise.core.report import Figure, csv_of, svg_of

Lane = Literal["device", "link", "host"]
LANES: tuple[Lane, ...] = ("device", "link", "host")
_COLORS = {
    "forward": "#4878a8", "backward": "#8fb3d3", "wait": "#d9534f",
    "copy": "#b7950b", "upload": "#e3c75f", "update": "#3f8f5f", "redo": "#a06cb0",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stretch of work in one lane.

    Attributes:
        lane: Where it ran.
        kind: forward, backward, wait, copy, upload, update or redo.
        name: Of the block, or what was waited for.
        start_ns: Clock reading at its start.
        end_ns: Clock reading at its end.
        step: Optimizer step it belongs to, from 0.
        track: Number of the thread within the lane.
        bytes: Moved or touched; 0 where not known.
    """

    lane: Lane
    kind: str
    name: str
    start_ns: int
    end_ns: int
    step: int
    track: int = 0
    bytes: int = 0


class Trace:
    """A list of spans that every thread may add to.

    Args:
        clock: Returns nanoseconds; only differences matter.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self.spans: list[Span] = []
        self.step = 0

    def add(
        self, lane: Lane, kind: str, name: str, start_ns: int, *, track: int = 0, num_bytes: int = 0
    ) -> None:
        """Add a span that ends now."""
        self.spans.append(
            Span(
                lane=lane,
                kind=kind,
                name=name,
                start_ns=start_ns,
                end_ns=self.clock(),
                step=self.step,
                track=track,
                bytes=num_bytes,
            )
        )


def update_window(spans: Iterable[Span], step: int) -> list[Span]:
    """Return the spans of one step from the forward that its backward belongs to.

    Forwards before it (generation, evaluation) are left out; so are earlier micro-batches.
    """
    mine = [span for span in spans if span.step == step]
    backward = [span.start_ns for span in mine if span.kind == "backward"]
    if not backward:
        return mine
    last = max(backward)
    starts: dict[str, int] = {}
    first_backward: dict[str, int] = {}
    for span in mine:
        if span.kind == "backward":
            first_backward[span.name] = max(first_backward.get(span.name, 0), span.start_ns)
    begin = min([*first_backward.values(), last])
    for span in mine:
        if span.kind == "forward" and span.start_ns < begin:
            starts[span.name] = max(starts.get(span.name, 0), span.start_ns)
    origin = min([begin, *starts.values()])
    return [span for span in mine if span.start_ns >= origin]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How much of the host's work was hidden, over some steps.

    Attributes:
        update_s: Time the host spent on updates (threads added up).
        hidden_s: Part of it while the device was in forward or backward.
        exposed_s: Time the device waited for the host or the link.
        device_s: Time in forward and backward.
        wall_s: First start to last end.
    """

    update_s: float
    hidden_s: float
    exposed_s: float
    device_s: float
    wall_s: float

    @property
    def hidden_share(self) -> float:
        """Part of the host's update time that cost no device time, 0 to 1."""
        return self.hidden_s / self.update_s if self.update_s else 0.0


def measure_overlap(spans: Iterable[Span]) -> Overlap:
    """Return how much of the updates' time was covered by the device's own work."""
    spans = list(spans)
    busy = _merge((s.start_ns, s.end_ns) for s in spans if s.kind in ("forward", "backward"))
    updates = [s for s in spans if s.kind in ("update", "redo")]
    hidden = sum(
        max(0, min(s.end_ns, stop) - max(s.start_ns, start))
        for s in updates
        for start, stop in busy
    )
    starts, ends = [s.start_ns for s in spans], [s.end_ns for s in spans]
    return Overlap(
        update_s=sum(s.end_ns - s.start_ns for s in updates) / 1e9,
        hidden_s=hidden / 1e9,
        exposed_s=sum(s.end_ns - s.start_ns for s in spans if s.kind == "wait") / 1e9,
        device_s=sum(stop - start for start, stop in busy) / 1e9,
        wall_s=(max(ends) - min(starts)) / 1e9 if spans else 0.0,
    )


def _merge(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(pieces):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def write_chrome_trace(spans: Iterable[Span], path: Path) -> None:
    """Write the spans as Chrome-trace JSON (docs/formats/trace.md), times from the first start."""
    spans = sorted(spans, key=lambda span: (span.start_ns, span.lane, span.name))
    origin = spans[0].start_ns if spans else 0
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": lane}}
        for pid, lane in enumerate(LANES)
    ]
    for span in spans:
        rest = {key: asdict(span)[key] for key in ("step", "bytes")}
        events.append(
            {
                "ph": "X",
                "pid": LANES.index(span.lane),
                "tid": span.track,
                "name": f"{span.kind} {span.name}",
                "cat": span.kind,
                "ts": (span.start_ns - origin) / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": rest,
            }
        )
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def draw_timeline(spans: Iterable[Span], *, name: str, caption: str) -> Figure:
    """Return the lanes over time as a figure, with one CSV row a span."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Patch

    spans = sorted(spans, key=lambda span: (span.start_ns, span.lane, span.name))
    origin = spans[0].start_ns if spans else 0
    canvas = Canvas(figsize=(9.5, 2.6))
    axes = canvas.subplots()
    for row, lane in enumerate(reversed(LANES)):
        for kind, color in _COLORS.items():
            chosen = [s for s in spans if s.lane == lane and s.kind == kind]
            bars = [((s.start_ns - origin) / 1e6, (s.end_ns - s.start_ns) / 1e6) for s in chosen]
            axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=color, linewidth=0)
    axes.set_yticks(range(len(LANES)), list(reversed(LANES)))
    axes.set_xlabel("milliseconds")
    axes.margins(x=0.01)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    shown = [kind for kind in _COLORS if any(s.kind == kind for s in spans)]
    handles = [Patch(color=_COLORS[kind], label=kind) for kind in shown]
    axes.legend(handles=handles, ncols=7, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    header = ("lane", "kind", "name", "start_ms", "end_ms", "step", "track", "bytes")
    rows = [
        (
            s.lane,
            s.kind,
            s.name,
            (s.start_ns - origin) / 1e6,
            (s.end_ns - origin) / 1e6,
            s.step,
            s.track,
            s.bytes,
        )
        for s in spans
    ]
    return Figure(name=name, caption=caption, svg=svg_of(canvas), csv=csv_of(header, rows))
