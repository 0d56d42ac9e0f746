"""Draw docs/images/offload-theorem.svg: four schedules of one model, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tierwise.core.report import svg_of
from tierwise.offload.plan import least_resident, prefix_shares
from tierwise.offload.simulate import Policy, simulate
from tierwise.offload.workload import Machine, Unit, price_unit

COLORS = {
    "forward": "#4878a8", "backward": "#8fb3d3", "copy": "#b7950b",
    "update": "#3f8f5f", "upload": "#e3c75f",
}  # fmt: skip
ROWS = {"device": 2, "link": 1, "host": 0}


def draw(axes: Any, title: str, units: list[Unit], shares: list[float], policy: Policy) -> None:
    """Draw one schedule's third step and what follows."""
    done = simulate(units, shares, policy, chunk_parameters=2e5, steps=4, record=True)
    starts = [s.start_ns for s in done.spans if s.kind == "forward" and s.name == units[0].name]
    origin = sorted(starts)[2]
    for span in done.spans:
        if span.end_ns <= origin:
            continue
        start, end = (max(span.start_ns, origin) - origin) / 1e9, (span.end_ns - origin) / 1e9
        row, height = ROWS[span.lane] - 0.4, 0.8
        if span.lane == "link":  # copies above, uploads below
            row, height = row + (0.4 if span.track == 0 else 0.0), 0.4
        axes.broken_barh([(start, end - start)], (row, height), facecolors=COLORS[span.kind],
                         edgecolor="white", linewidth=0.4)  # fmt: skip
        if span.lane == "device" and end - start > 0.15:
            axes.text((start + end) / 2, 2, span.name, ha="center", va="center", fontsize=7,
                      color="white")  # fmt: skip
    for step in (0, 1):
        axes.axvline(step * done.period_s, color="#d9534f", linewidth=1)
    axes.set_yticks(list(ROWS.values()), list(ROWS), fontsize=8)
    axes.set_xlim(-0.1, 22)
    axes.set_title(f"{title}: {done.period_s:.1f} s a step", fontsize=9, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Write the picture."""
    machine = Machine(device_flop_s=1e12, device_memory_bytes=1e12, link_bytes_s=4e6,
                      host_parameters_s=1e6, host_memory_bytes=1e12)  # fmt: skip
    shapes = [("1", 1_600_000, (0.25, 0.5))]
    shapes += [(str(number), 1_000_000, (0.4, 0.8)) for number in range(2, 7)]
    units = [price_unit(name, parameters, times, machine) for name, parameters, times in shapes]
    resident = least_resident(units, "speculate")
    nothing = [0.0] * len(units)
    last = prefix_shares(units[::-1], resident)[::-1]
    cases: list[tuple[str, list[float], Policy]] = [
        ("everything after backward", nothing, "sequential"),
        ("overlapped, nothing resident", nothing, "speculate"),
        ("overlapped, last units resident", last, "speculate"),
        ("overlapped, first units resident", prefix_shares(units, resident), "speculate"),
    ]
    figure = Figure(figsize=(9, 5.6))
    for axes, (title, shares, policy) in zip(
        figure.subplots(len(cases), 1, sharex=True), cases, strict=True
    ):
        draw(axes, title, units, shares, policy)
        axes.set_xlabel("seconds" if title == cases[-1][0] else "")
    figure.subplots_adjust(hspace=0.55)
    path = Path(__file__).parents[1] / "docs" / "images" / "offload-theorem.svg"
    path.write_text(svg_of(figure))
    print(path)


if __name__ == "__main__":
    main()
