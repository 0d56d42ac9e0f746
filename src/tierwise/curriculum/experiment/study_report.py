"""A study's findings as a report: one sentence an arm, a forest plot, tables, what it cost.

The sentences are made from the intervals alone, so that a report cannot say more than they do.
Left out: the raw scores, which are in the cells' folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierwise.core.report import Block, Figure, Report, Section, Table, Text, csv_of
from tierwise.curriculum.experiment.study import BASE, CellResult, StudyConfig, cells_of
from tierwise.curriculum.experiment.study_analysis import (
    ArmAccuracy,
    Comparison,
    GroupAccuracy,
    StudyResult,
    accuracy_by_group,
    analyse,
    spent_by_arm,
)
from tierwise.curriculum.experiment.tuning import ArmRate
from tierwise.curriculum.training.budget import Budget
from tierwise.curriculum.training.evaluate import NO_DIFFERENCE, Decoding
from tierwise.curriculum.training.training_figures import COLOURS, drawing


def study_report(
    config: StudyConfig, cells: Sequence[CellResult], rates: Sequence[ArmRate] = ()
) -> Report:
    """Return the report of the cells that are done.

    Args:
        config: The study.
        cells: From `run_study` or `read_cells`.
        rates: From `read_rates`, where the learning rate was tuned.
    """
    found = analyse(cells, config.control)
    planned = len(cells_of(config))
    blocks: list[Block] = [Text(text=line) for line in conclusions(found, config.control)]
    for decoding in (Decoding.SAMPLED, Decoding.GREEDY):
        shown = [one for one in found.comparisons if one.decoding is decoding]
        if shown:
            blocks.append(forest_figure(shown, name=f"forest-{decoding.value}"))
    blocks += [
        accuracy_table(found.accuracies),
        comparison_table(found.comparisons),
        spent_table(cells, config.grpo.budget),
    ]
    blocks += [
        group_table(groups, name)
        for name, groups in (
            ("stratum", accuracy_by_group(cells, lambda row: row.stratum)),
            ("task", accuracy_by_group(cells, lambda row: row.task)),
        )
        if groups
    ]
    if rates:
        blocks.append(rate_table(rates))
    summary = (
        ("training runs done", f"{len(cells)} of {planned}"),
        ("seeds an arm", str(config.num_seeds)),
        ("held-out samples", str(len(cells[0].scores) if cells else 0)),
        ("comparisons", str(len(found.comparisons))),
    )
    return Report(
        title="Does the choice of samples matter",
        summary=summary,
        sections=(
            Section(title="What the numbers bear", blocks=tuple(blocks)),
            Section(title="How to read this", blocks=(Text(text=_READING),)),
        ),
    )


_MAX_IN_FULL = 6
_READING = (
    "Every arm was trained from the same model on an equal budget (which one, stands above the "
    "table of what each took); only the samples differ, what a supervised stage learns, and the "
    "learning rate where it was tuned. Intervals hold 95 % and take both the held-out samples and "
    "the training seeds at random; with few seeds they are somewhat too narrow. A comparison reads "
    "higher or lower only if its interval, widened for all comparisons of this study together "
    "(Bonferroni), leaves out zero. 'No difference seen' is not 'no difference': it says that this "
    "many seeds and samples cannot tell."
)


def conclusions(found: StudyResult, control: str) -> list[str]:
    """Return a sentence on training at all, and one on choosing samples."""
    lines = []
    for decoding in (Decoding.SAMPLED, Decoding.GREEDY):
        trained = [c for c in found.comparisons if c.decoding is decoding and c.control == BASE]
        chosen = [c for c in found.comparisons if c.decoding is decoding and c.control == control]
        if trained:
            lines.append(f"{decoding.value} accuracy against the untrained base: {_list(trained)}.")
        if chosen:
            lines.append(f"{decoding.value} accuracy against {control}: {_list(chosen)}.")
    return [line[:1].upper() + line[1:] for line in lines]


def _list(comparisons: Sequence[Comparison]) -> str:
    if len(comparisons) > _MAX_IN_FULL:  # figure and table below have them all
        by_verdict: dict[str, list[Comparison]] = {}
        for one in comparisons:
            by_verdict.setdefault(one.verdict, []).append(one)
        return "; ".join(
            f"{verdict} for {len(ones)} of {len(comparisons)} arms ({_in_short(ones)} points)"
            for verdict, ones in sorted(by_verdict.items())
        )
    return "; ".join(
        f"{one.arm} {100 * one.difference:+.1f} points "
        f"[{100 * one.wide_low:+.1f}, {100 * one.wide_high:+.1f}] ({one.verdict})"
        for one in comparisons
    )


def _in_short(comparisons: Sequence[Comparison]) -> str:
    """Return the differences that were seen by arm, of others only from where to where they lie."""
    points = [100 * one.difference for one in comparisons]
    if comparisons[0].verdict == NO_DIFFERENCE:
        return f"{min(points):+.1f} to {max(points):+.1f}"
    return ", ".join(
        f"{one.arm} {value:+.1f}" for one, value in zip(comparisons, points, strict=True)
    )


def forest_figure(comparisons: Sequence[Comparison], *, name: str) -> Figure:
    """Return the differences with their intervals; thin lines are the widened ones."""
    labels = [f"{one.arm} - {one.control}" for one in comparisons]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.axvline(0, color="#888", linewidth=1)
        for place, one in enumerate(reversed(comparisons)):
            colour = COLOURS[one.verdict]
            wide = [100 * one.wide_low, 100 * one.wide_high]
            axes.plot(wide, [place, place], color=colour, linewidth=0.8)
            axes.plot([100 * one.low, 100 * one.high], [place, place], color=colour, linewidth=2.5)
            axes.plot([100 * one.difference], [place], "o", color=colour)
        axes.set_yticks(range(len(labels)), labels[::-1], fontsize=8)
        axes.set_xlabel("percentage points")

    rows = [
        (one.arm, one.control, one.decoding.value, one.difference, one.low, one.high, one.wide_low,
         one.wide_high, one.verdict)
        for one in comparisons
    ]  # fmt: skip
    header = ("arm", "control", "decoding", "difference", "low", "high", "wide_low", "wide_high")
    return Figure(
        name=name,
        caption=f"Differences of {comparisons[0].decoding.value} held-out accuracy. Thick: 95 % "
        f"interval; thin: widened for all comparisons together. Grey: {NO_DIFFERENCE}.",
        svg=drawing(draw, height=0.9 + 0.24 * len(labels)),
        csv=csv_of((*header, "verdict"), rows),
    )


def accuracy_table(found: Sequence[ArmAccuracy]) -> Table:
    """Return each arm's accuracy with its interval."""
    return Table(
        caption="Held-out accuracy in %, mean over seeds, with 95 % intervals.",
        header=("arm", "decoding", "seeds", "samples", "accuracy", "interval"),
        rows=tuple(
            (
                one.arm, one.decoding.value, str(one.num_seeds), str(one.num_samples),
                f"{100 * one.value:.1f}", f"{100 * one.low:.1f} - {100 * one.high:.1f}",
            )
            for one in found
        ),
    )  # fmt: skip


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Return every comparison with both intervals."""
    return Table(
        caption="Differences in percentage points: 95 % interval, and the one widened for all "
        "comparisons together, which decides how it reads.",
        header=("arm", "control", "decoding", "difference", "95 %", "all together", "reads"),
        rows=tuple(
            (
                one.arm, one.control, one.decoding.value, f"{100 * one.difference:+.1f}",
                f"{100 * one.low:+.1f} to {100 * one.high:+.1f}",
                f"{100 * one.wide_low:+.1f} to {100 * one.wide_high:+.1f}",
                one.verdict,
            )
            for one in comparisons
        ),
    )  # fmt: skip


def group_table(found: Sequence[GroupAccuracy], name: str) -> Table:
    """Return the sampled accuracy of every arm, a column for each stratum or task."""
    sizes = {one.group: one.num_samples for one in found}
    cell = {
        (one.arm, one.group): f"{100 * one.value:.0f} [{100 * one.low:.0f}, {100 * one.high:.0f}]"
        for one in found
    }
    arms = dict.fromkeys(one.arm for one in found)
    return Table(
        caption=f"Sampled held-out accuracy in % by {name}, with 95 % intervals that are not "
        "widened for their number: for looking, not for deciding. In brackets: samples.",
        header=("arm", *(f"{group} ({size})" for group, size in sizes.items())),
        rows=tuple((arm, *(cell.get((arm, group), "-") for group in sizes)) for arm in arms),
    )


def rate_table(rates: Sequence[ArmRate]) -> Table:
    """Return which learning rate each arm got, and from what."""
    tried = [rate for rate, _ in rates[0].tried]
    return Table(
        caption="Learning rate of each arm: the one of the best sampled accuracy (in %) on "
        f"{rates[0].num_samples} validation samples, which are neither trained on nor held out, "
        f"over {rates[0].num_runs} training run(s) at each rate under seeds of their own. At an "
        "end of the rates tried, a better one may lie beyond.",
        header=("arm", "rate", *(f"at {rate:g}" for rate in tried), "at an end"),
        rows=tuple(
            (
                one.arm, f"{one.rate:g}", *(f"{100 * value:.1f}" for _, value in one.tried),
                "yes" if one.at_the_edge else "no",
            )
            for one in rates
        ),
    )  # fmt: skip


def spent_table(cells: Sequence[CellResult], budget: Budget | None) -> Table:
    """Return what each arm spent, and what of it is equal."""
    equal = (
        "The number of steps of each stage is equal by design; an arm with two stages takes both."
        if budget is None
        else f"Equal by design, to within a step: {budget.amount:,.0f} {budget.unit}, both stages "
        "together. A run that took all its steps first did not reach the budget."
    )
    return Table(
        caption="What one training run of each arm took, mean over seeds. "
        f"{equal} Seconds are wall time of a shared machine.",
        header=(
            "arm", "pool", "samples drawn", "completions", "tokens sampled", "tokens learned",
            "seconds", "budget reached",
        ),
        rows=tuple(
            (
                arm, f"{spent['num_samples']:.0f}", f"{spent['num_drawn']:.0f}",
                f"{spent['completions']:.0f}", f"{spent['completion_tokens']:.0f}",
                f"{spent['target_tokens']:.0f}", f"{spent['seconds']:.1f}",
                f"{100 * spent['budget_reached']:.0f} %" if budget is not None else "-",
            )
            for arm, spent in spent_by_arm(cells).items()
        ),
    )  # fmt: skip
