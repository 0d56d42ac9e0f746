"""What a training stage looks like: learning curves and changes with intervals, for a report.

Everything drawn is also there as numbers (the CSV beside each figure). Left out: the strata of the
data, which belong to `figures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tierwise.core.report import Block, Figure, Section, Table, Text, csv_of, svg_of
from tierwise.curriculum.training.evaluate import NO_DIFFERENCE, Accuracy, Decoding, Difference

COLOURS = {"higher": "#4c9f70", "lower": "#c8553d", NO_DIFFERENCE: "#5b5f73"}
_WINDOW = 5


def training_section(
    metrics: Sequence[Mapping[str, Any]],
    changes: Sequence[Difference],
    *,
    title: str = "Training: did it help",
) -> Section:
    """Return the section that shows what a stage did and what changed on held-out samples.

    Args:
        metrics: `TrainResult.metrics`.
        changes: From `differences`, after less before.
        title: Heading of the section.
    """
    blocks: list[Block] = [Text(text=sentence(changes))]
    if changes:
        blocks.append(difference_figure(changes))
    if metrics:
        blocks.append(learning_figure(metrics))
    if changes:
        blocks.append(difference_table(changes))
    return Section(title=title, blocks=tuple(blocks))


def sentence(changes: Sequence[Difference]) -> str:
    """Return what the held-out samples say, in words that claim no more than the intervals."""
    parts = []
    for change in changes:
        if change.group == "all":
            interval = f"95 % interval {100 * change.low:+.1f} to {100 * change.high:+.1f} points"
            parts.append(
                f"{change.decoding.value} accuracy went from {100 * change.before:.1f} to "
                f"{100 * change.after:.1f} % ({interval}: {change.verdict})"
            )
    if not parts:
        return "Nothing was evaluated."
    num_samples = next(change.num_samples for change in changes if change.group == "all")
    return (
        f"On {num_samples} held-out samples, the same before and after: {'; '.join(parts)}. "
        "The interval is over samples; one training seed says nothing about the spread over seeds."
    )


def learning_figure(metrics: Sequence[Mapping[str, Any]], *, name: str = "learning") -> Figure:
    """Return reward, share of groups without advantage and gradient norm against the step."""
    steps = [int(row["step"]) for row in metrics]
    columns = ("reward", "zero_advantage_share", "grad_norm", "completion_tokens")
    labels = ("reward", "groups that agree", "gradient norm", "tokens an answer")

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, len(columns))
        for panel, column, label in zip(panels, columns, labels, strict=True):
            values = [float(row[column]) for row in metrics]
            smooth = [fmean(values[max(0, i - _WINDOW + 1) : i + 1]) for i in range(len(values))]
            panel.plot(steps, values, ".", color="#b9b9c3")
            panel.plot(steps, smooth, "-", color="#3a5a8c")
            panel.set_title(label, fontsize=9)
            panel.set_xlabel("step", fontsize=8)
            panel.tick_params(labelsize=8)
            bounded = column.endswith(("reward", "share"))
            panel.set_ylim(0, 1 if bounded else 1.1 * max(*values, 1e-9))

    rows = [(step, *(row[c] for c in columns)) for step, row in zip(steps, metrics, strict=True)]
    return Figure(
        name=name,
        caption=f"Each dot is a training step, the line the mean of {_WINDOW}. Groups that agree "
        "(all their answers right, or all wrong) teach nothing.",
        svg=drawing(draw, height=2.1),
        csv=csv_of(("step", *columns), rows),
    )


def difference_figure(
    changes: Sequence[Difference],
    *,
    name: str = "accuracy-change",
    caption: str = "Change of accuracy on held-out samples, with 95 % intervals over samples.",
) -> Figure:
    """Return a forest plot of differences with their intervals, in percentage points."""
    shown = [change for change in changes if change.num_samples >= 2]
    labels = [f"{change.group} ({change.decoding.value})" for change in shown]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.axvline(0, color="#888", linewidth=1)
        for place, change in enumerate(reversed(shown)):
            colour = COLOURS[change.verdict]
            axes.plot([100 * change.low, 100 * change.high], [place, place], color=colour)
            marker = "o" if change.decoding is Decoding.GREEDY else "s"
            axes.plot([100 * change.difference], [place], marker, color=colour)
        axes.set_yticks(range(len(shown)), labels[::-1], fontsize=8)
        axes.set_xlabel("percentage points")

    table = [
        (c.group, c.decoding.value, c.num_samples, c.before, c.after, c.difference, c.low, c.high,
         c.verdict)
        for c in changes
    ]  # fmt: skip
    header = ("group", "decoding", "samples", "before", "after", "difference", "low", "high")
    return Figure(
        name=name,
        caption=caption,
        svg=drawing(draw, height=0.9 + 0.22 * max(1, len(shown))),
        csv=csv_of((*header, "verdict"), table),
    )


def difference_table(changes: Sequence[Difference]) -> Table:
    """Return before, after and the difference of every group."""
    return Table(
        caption="Accuracy before and after, in %, and the paired difference in points. Of rows "
        "where nothing changed, one in twenty reads as a change by chance.",
        header=("group", "decoding", "samples", "before", "after", "difference", "reads"),
        rows=tuple(
            (
                change.group,
                change.decoding.value,
                str(change.num_samples),
                f"{100 * change.before:.1f}",
                f"{100 * change.after:.1f}",
                f"{100 * change.difference:+.1f} "
                f"[{100 * change.low:+.1f}, {100 * change.high:+.1f}]",
                change.verdict,
            )
            for change in changes
        ),
    )


def accuracy_table(found: Sequence[Accuracy]) -> Table:
    """Return the accuracy of every group with its interval."""
    return Table(
        caption="Accuracy in % with 95 % intervals; answers without a verdict are left out.",
        header=("group", "decoding", "samples", "unscored", "accuracy", "interval"),
        rows=tuple(
            (
                one.group,
                one.decoding.value,
                str(one.num_samples),
                str(one.num_unscored),
                f"{100 * one.value:.1f}",
                f"{100 * one.low:.1f} - {100 * one.high:.1f} ({one.interval})",
            )
            for one in found
        ),
    )


def drawing(draw: Callable[[Any], None], *, height: float) -> str:
    """Return what a function draws on a figure as SVG; the height is in inches."""
    from matplotlib.figure import Figure as Drawing

    figure = Drawing(figsize=(7.6, height), layout="constrained")
    draw(figure)
    return svg_of(figure)
