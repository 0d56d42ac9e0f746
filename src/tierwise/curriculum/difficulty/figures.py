"""What a scored data set looks like: blocks for a report.

Everything drawn is also there as numbers (the CSV beside each figure). Left out: the training
curves, which belong to the training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tierwise.core.report import Block, Figure, Section, Table, Text, csv_of, svg_of
from tierwise.curriculum.difficulty.agreement import agreement_table, between_probes
from tierwise.curriculum.difficulty.evidence import gallery
from tierwise.curriculum.difficulty.pism import Stratum, strata_counts
from tierwise.curriculum.difficulty.probes import Masking
from tierwise.curriculum.difficulty.scores import Score, Scores
from tierwise.curriculum.difficulty.select import By, stratum
from tierwise.curriculum.duplicates import Duplicates, find_duplicates
from tierwise.curriculum.samples import Sample

_COLOURS = {
    Stratum.EASY: "#4c9f70",
    Stratum.MEDIUM: "#e0a526",
    Stratum.HARD: "#c8553d",
    Stratum.UNSOLVED: "#5b5f73",
    Stratum.ERROR: "#b9b9c3",
}


def report_section(
    scores: Scores,
    samples: Sequence[Sample],
    *,
    masking: Masking,
    seed: int,
    duplicates: Duplicates | None = None,
    title: str = "Curriculum: how hard is each sample for this model",
) -> Section:
    """Return the section that shows strata, curves, example pictures and what it all cost.

    Args:
        scores: From `score` or `read_scores`.
        samples: The data set that was scored.
        masking: As in the scores' configuration; for the example pictures.
        seed: The run's seed; the example pictures are masked as they were asked.
        duplicates: Of the samples; found here when None.
        title: Heading of the section.
    """
    blocks: list[Block] = [
        strata_figure(scores.rows),
        strata_table(scores.rows),
        curve_figure(scores.rows),
        gallery(scores.rows, samples, masking=masking, seed=seed),
        blind_note(scores.rows),
        *((rscore_table(scores.rows),) if _has_trees(scores.rows) else ()),
        agreement_table(between_probes(scores.rows)),
        duplicates_note(duplicates or find_duplicates(samples)),
    ]
    if scores.spent:
        blocks.append(cost_table(scores.spent))
    return Section(title=title, blocks=tuple(blocks))


def strata_figure(rows: Sequence[Score]) -> Figure:
    """Return how many samples each stratum has, by masking and by attention."""
    kinds: tuple[tuple[str, By], ...] = (
        ("PISM", "pism"),
        ("CMAB, paper's limits", "cmab"),
        ("CMAB, quantiles", "cmab_quantile"),
        *((("r-score, thirds", "rscore"),) if _has_trees(rows) else ()),
    )
    counts = {label: strata_counts([stratum(row, by) for row in rows]) for label, by in kinds}

    def draw(axes: Any) -> None:
        labels = list(counts)[::-1]
        left = [0] * len(labels)
        for one in Stratum:
            widths = [counts[label][one] for label in labels]
            if not any(widths):
                continue
            axes.barh(labels, widths, left=left, color=_COLOURS[one], label=one.value, height=0.6)
            for place, (start, width) in enumerate(zip(left, widths, strict=True)):
                if width >= 0.04 * len(rows):
                    axes.text(
                        start + width / 2, place, str(width), ha="center", va="center", color="w"
                    )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_xlabel("samples")
        axes.legend(ncol=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)

    table = [(label, one.value, counts[label][one]) for label in counts for one in Stratum]
    return Figure(
        name="strata",
        caption=f"How {len(rows)} samples fall into strata under {len(kinds)} readings of "
        "difficulty.",
        svg=_drawing(draw, height=2.4),
        csv=csv_of(("difficulty", "stratum", "samples"), table),
    )


def curve_figure(rows: Sequence[Score]) -> Figure:
    """Return the pass rate against the masked share, by stratum."""
    groups: dict[Stratum, list[Score]] = {}
    for row in rows:
        if row.curve_permilles and row.pism_stratum is not Stratum.ERROR:
            groups.setdefault(row.pism_stratum, []).append(row)
    table: list[tuple[str, float, float, int]] = []
    for one in Stratum:
        for permille in sorted(
            {share for row in groups.get(one, []) for share in row.curve_permilles}
        ):
            rates = [rate for row in groups[one] if (rate := _rate_at(row, permille)) is not None]
            table.append((one.value, permille / 1000, fmean(rates), len(rates)))

    def draw(axes: Any) -> None:
        for one in Stratum:
            points = [(share, rate) for name, share, rate, _ in table if name == one.value]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=_COLOURS[one], label=one.value)
        axes.set_xlabel("share of the pixels masked")
        axes.set_ylabel("pass rate")
        axes.set_ylim(0, 1.02)
        axes.legend(frameon=False)

    return Figure(
        name="pass_rate_against_mask",
        caption="Mean pass rate against the masked share of the picture, by PISM stratum.",
        svg=_drawing(draw, height=3.2),
        csv=csv_of(("stratum", "masked_share", "mean_pass_rate", "samples"), table),
    )


def _rate_at(row: Score, permille: int) -> float | None:
    for share, rate in zip(row.curve_permilles, row.curve_rates, strict=True):
        if share == permille:
            return rate
    return None


def strata_table(rows: Sequence[Score]) -> Table:
    """Return each PISM stratum with its size, pass rate, and how sure its members are."""
    lines = []
    for one in Stratum:
        members = [row for row in rows if row.pism_stratum is one]
        if not members:
            continue
        rates = [row.pass_rate for row in members if row.pass_rate is not None]
        blind = sum(row.blind_answerable for row in members)
        lines.append(
            (
                one.value,
                str(len(members)),
                f"{len(members) / len(rows):.0%}",
                f"{fmean(rates):.2f}" if rates else "-",
                f"{fmean(row.stratum_confidence for row in members):.2f}",
                str(blind),
            )
        )
    return Table(
        caption="PISM strata; 'same again' is the mean probability that a repetition of the "
        "experiment puts a sample into the same stratum",
        header=("stratum", "samples", "share", "pass rate", "same again", "blind-answerable"),
        rows=tuple(lines),
    )


def _has_trees(rows: Sequence[Score]) -> bool:
    return any(row.r_score is not None for row in rows)


def rscore_table(rows: Sequence[Score]) -> Table:
    """Return each r-score stratum with its size, score and share of right leaves."""
    lines = []
    for one in Stratum:
        members = [row for row in rows if row.rscore_stratum is one]
        scores = [row.r_score for row in members if row.r_score is not None]
        rates = [row.tree_rate for row in members if row.tree_rate is not None]
        if members:
            mean_score = f"{fmean(scores):.3f}" if scores else "-"
            mean_rate = f"{fmean(rates):.2f}" if rates else "-"
            lines.append((one.value, str(len(members)), mean_score, mean_rate))
    return Table(
        caption="Reasoning trees: strata are thirds by r-score, the accuracy that few edits of the "
        "model's choices can gain",
        header=("stratum", "samples", "mean r-score", "right leaves"),
        rows=tuple(lines),
    )


def blind_note(rows: Sequence[Score]) -> Text:
    """Return a sentence on what can be answered without looking."""
    asked = [row for row in rows if row.blind_rate is not None or row.grey_rate is not None]
    if not asked:
        return Text(text="The blind pass rate was not measured.")
    blind = sum(row.blind_answerable for row in asked)
    grey = [row.grey_rate for row in asked if row.grey_rate is not None]
    rates = [row.pass_rate for row in asked if row.pass_rate is not None]
    return Text(
        text=f"{blind} of {len(asked)} samples can be answered without the picture. With a grey "
        f"picture the pass rate is {fmean(grey) if grey else 0:.2f}, with the picture "
        f"{fmean(rates) if rates else 0:.2f}."
    )


def duplicates_note(found: Duplicates) -> Text:
    """Return a sentence on samples that are in the data set more than once."""
    if not found.exact and not found.near:
        return Text(text="No sample is a duplicate of another, nor nearly one.")
    examples = ", ".join(" = ".join(group) for group in (*found.exact, *found.near)[:3])
    return Text(
        text=f"{len(found.exact)} groups of samples are exact duplicates and {len(found.near)} "
        f"show nearly the same picture under the same question, such as {examples}."
    )


def cost_table(spent: Mapping[str, float]) -> Table:
    """Return what the attempts cost."""
    return Table(
        caption="Cost of scoring, all runs into this folder together",
        header=("attempts", "errors", "generated tokens", "seconds"),
        rows=(
            (
                f"{spent['attempts']:,.0f}",
                f"{spent['errors']:,.0f}",
                f"{spent['tokens']:,.0f}",
                f"{spent['seconds']:,.1f}",
            ),
        ),
    )


def _drawing(draw: Callable[[Any], None], *, height: float) -> str:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7.0, height))
    axes = canvas.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    return svg_of(canvas)
