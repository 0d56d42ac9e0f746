"""Drawings of a comparison: SVG with the CSV behind each.

Colours are Okabe and Ito's, told apart by most colour-blind readers, and every line is also
named at its end. Left out: interaction; `tierwise tco serve` has it.

Legend: T years, S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tierwise.core.report import Figure, csv_of, svg_of
from tierwise.tco.compare import Comparison, StrategyCost
from tierwise.tco.ledger import Category
from tierwise.tco.solve import Sweep, Waterfall, WinnerMap
from tierwise.tco.spread import TornadoBar

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")


def _axes(width: float = 8.0, height: float = 4.2) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, height), layout="constrained")
    axes = canvas.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="y", color="#d8dee6", linewidth=0.6)
    axes.set_axisbelow(True)
    return canvas, axes


def money_scale(largest_usd: float) -> tuple[float, str]:
    """Return (divisor, unit) that keeps the largest amount below a thousand.

    >>> money_scale(2.5e7)
    (1000000.0, 'million USD')
    """
    for divisor, unit in ((1e9, "billion USD"), (1e6, "million USD"), (1e3, "thousand USD")):
        if abs(largest_usd) >= divisor:
            return divisor, unit
    return 1.0, "USD"


def cost_curves(comparison: Comparison, *, name: str = "cost-curves") -> Figure:
    """Return cumulative present value by year, one line a strategy, with its 5-95 % band."""
    canvas, axes = _axes()
    scenario, spread = comparison.scenario, comparison.spread
    years = np.arange(scenario.horizon_years) + scenario.start_year
    largest = max(float(item.cumulative_usd.max()) for item in comparison.strategies)
    divisor, unit = money_scale(largest)
    header = ["year"]
    series: list[Any] = []
    for place, item in enumerate(comparison.strategies):
        colour = COLOURS[place % len(COLOURS)]
        header.append(f"{item.name}_usd")
        series.append(item.cumulative_usd)
        axes.plot(years, item.cumulative_usd / divisor, color=colour, linewidth=1.8)
        if spread is not None:
            band_T3 = spread.bands_usd[item.name]
            axes.fill_between(
                years, band_T3[:, 0] / divisor, band_T3[:, 2] / divisor, color=colour, alpha=0.12,
                linewidth=0,
            )  # fmt: skip
            header += [f"{item.name}_{p}_usd" for p in ("p5", "p50", "p95")]
            series += list(band_T3.T)
    if largest > 0:
        _label_ends(axes, years, comparison.strategies, divisor)
        axes.set_yscale("log")
    axes.set_ylabel(f"cumulative present value, {unit}")
    axes.set_xlabel("year")
    axes.yaxis.set_major_formatter("{x:g}")
    band = "; shaded: 5-95 % of the draws" if spread is not None else ""
    rows = [[int(year), *(float(s[t]) for s in series)] for t, year in enumerate(years)]
    caption = (
        f"What {scenario.name} costs up to each year, in present value of {scenario.currency_year} "
        f"dollars (logarithmic axis){band}."
    )
    return Figure(name=name, caption=caption, svg=svg_of(canvas), csv=csv_of(header, rows))


def _label_ends(axes: Any, years: Any, strategies: Sequence[StrategyCost], divisor: float) -> None:
    """Name each line at its end, pushed apart where ends are close (the axis is logarithmic)."""
    order = sorted(range(len(strategies)), key=lambda i: strategies[i].cumulative_usd[-1])
    floor = 0.0
    for place in order:
        end = float(strategies[place].cumulative_usd[-1]) / divisor
        if end <= 0:  # nothing to see on a logarithmic axis
            continue
        at = max(end, floor * 1.22)
        floor = at
        axes.annotate(
            strategies[place].name, (years[-1], at), xytext=(5, 0),
            textcoords="offset points", color=COLOURS[place % len(COLOURS)], va="center",
            fontsize=9, annotation_clip=False,
        )  # fmt: skip


def category_bars(comparison: Comparison, *, name: str = "cost-categories") -> Figure:
    """Return undiscounted cost by category, one bar a strategy."""
    canvas, axes = _axes(height=3.6)
    strategies = comparison.strategies
    found = [c for c in Category if any(c in item.ledger.by_category() for item in strategies)]
    table = {item.name: item.ledger.by_category() for item in strategies}
    divisor, unit = money_scale(max(item.ledger.total() for item in strategies))
    left = np.zeros(len(strategies))
    names = [item.name for item in strategies]
    for place, category in enumerate(found):
        amounts = np.array([table[item].get(category, 0.0) for item in names]) / divisor
        hatch = "//" if place >= len(COLOURS) else None
        axes.barh(
            names, amounts, left=left, color=COLOURS[place % len(COLOURS)], hatch=hatch,
            edgecolor="white", linewidth=0.4, label=str(category).replace("_", " "),
        )  # fmt: skip
        left = left + amounts
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} over {comparison.scenario.horizon_years} years, undiscounted")
    if found:
        axes.legend(fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    rows = [[c, *(table[item].get(c, 0.0) for item in names)] for c in found]
    return Figure(
        name=name,
        caption="What the money buys, over the whole horizon and before discounting.",
        svg=svg_of(canvas),
        csv=csv_of(["category", *(f"{n}_usd" for n in names)], rows),
    )


def tornado_bars(
    bars: Sequence[TornadoBar], *, title: str, ratio: bool, name: str = "tornado"
) -> Figure:
    """Return the ten inputs that move a result most, each from its low to its high."""
    shown = list(bars[:10])
    canvas, axes = _axes(height=0.8 + 0.34 * max(len(shown), 1))
    divisor, unit = (1.0, "cost ratio")
    convert: Callable[[float], float] = np.exp if ratio else float
    if not ratio:
        divisor, unit = money_scale(
            max((max(bar.at_low, bar.at_high) for bar in shown), default=0.0)
        )
    for place, bar in enumerate(shown):
        low, high = convert(bar.at_low) / divisor, convert(bar.at_high) / divisor
        axes.barh(place, high - low, left=low, color=COLOURS[0 if high >= low else 1], height=0.7)
    axes.set_yticks(
        range(len(shown)), [f"{bar.key}  {bar.low:g} - {bar.high:g}" for bar in shown], fontsize=8
    )
    axes.invert_yaxis()
    axes.use_sticky_edges = False
    axes.set_xlabel(unit)
    if ratio:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:.2g}")
        axes.tick_params(axis="x", which="both", labelsize=8)
        axes.axvline(1.0, color="#5a6675", linewidth=0.8)
    rows = [[b.key, b.low, b.high, convert(b.at_low), convert(b.at_high)] for b in bars]
    return Figure(
        name=name,
        caption=f"{title}: one input at a time from its low to its high (orange: falls as the "
        "input rises).",
        svg=svg_of(canvas),
        csv=csv_of(["key", "low", "high", "result_at_low", "result_at_high"], rows),
    )


def sweep_curves(sweep: Sweep, *, name: str = "sweep") -> Figure:
    """Return present value of every strategy over one input."""
    canvas, axes = _axes()
    divisor, unit = money_scale(max(float(v.max()) for v in sweep.total_usd.values()))
    for place, (strategy, totals) in enumerate(sweep.total_usd.items()):
        axes.plot(
            sweep.values, totals / divisor, color=COLOURS[place % len(COLOURS)], label=strategy
        )
    axes.set_xlabel(sweep.key)
    axes.set_ylabel(f"present value, {unit}")
    axes.legend(fontsize=8, frameon=False)
    names = list(sweep.total_usd)
    rows = [
        [float(value), *(float(sweep.total_usd[n][i]) for n in names)]
        for i, value in enumerate(sweep.values)
    ]
    return Figure(
        name=name,
        caption=f"Present value of each strategy as {sweep.key} changes, all else at its value.",
        svg=svg_of(canvas),
        csv=csv_of([sweep.key, *(f"{n}_usd" for n in names)], rows),
    )


def winner_map(result: WinnerMap, *, name: str = "winner-map") -> Figure:
    """Return which strategy is cheapest over two inputs."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    canvas, axes = _axes(height=4.6)
    names = list(result.names)
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
    axes.pcolormesh(
        result.x_values, result.y_values, result.winner_YX, cmap=ListedColormap(colours), vmin=-0.5,
        vmax=len(names) - 0.5, shading="nearest", edgecolors="face", linewidth=0.3,
    )  # fmt: skip
    axes.set_xlabel(result.x_key)
    axes.set_ylabel(result.y_key)
    present = sorted({int(i) for i in np.unique(result.winner_YX)})
    axes.legend(
        handles=[Patch(color=colours[i], label=names[i]) for i in present], fontsize=8,
        loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False,
    )  # fmt: skip
    rows = [
        [float(x), float(y), names[int(result.winner_YX[j, i])], float(result.lead_YX[j, i])]
        for j, y in enumerate(result.y_values)
        for i, x in enumerate(result.x_values)
    ]
    return Figure(
        name=name,
        caption=f"The cheapest strategy over {result.x_key} and {result.y_key}, all else at its "
        "value. The CSV has by how much it leads.",
        svg=svg_of(canvas),
        csv=csv_of([result.x_key, result.y_key, "winner", "runner_up_over_winner"], rows),
    )


def waterfall_bars(result: Waterfall, *, name: str = "waterfall") -> Figure:
    """Return the steps from one scenario's cost to another's."""
    canvas, axes = _axes()
    divisor, unit = money_scale(max(abs(result.start_usd), abs(result.end_usd)))
    labels = [result.start_name, *(step.label for step in result.steps), result.end_name]
    level = result.start_usd
    axes.bar(0, level / divisor, color="#5a6675")
    for place, step in enumerate(result.steps, start=1):
        colour = COLOURS[5] if step.change_usd > 0 else COLOURS[2]
        axes.bar(place, step.change_usd / divisor, bottom=level / divisor, color=colour)
        level += step.change_usd
    axes.bar(len(labels) - 1, result.end_usd / divisor, color="#5a6675")
    axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    axes.set_ylabel(f"present value, {unit}")
    rows = [[step.label, step.change_usd] for step in result.steps]
    return Figure(
        name=name,
        caption=f"{result.strategy}: from {result.start_name} to {result.end_name}.",
        svg=svg_of(canvas),
        csv=csv_of(
            ["step", "change_usd"],
            [[result.start_name, result.start_usd], *rows, [result.end_name, result.end_usd]],
        ),
    )
