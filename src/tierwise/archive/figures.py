"""The map of files on discs as a figure, with the extents behind it as CSV.

Left out: more than a screenful of discs; the figure shows the first forty and says so.
"""

from __future__ import annotations

from collections.abc import Collection

from tierwise.archive.catalogue import Catalogue
from tierwise.core.report import Figure, csv_of, svg_of

_MAX_DISCS = 40
_COLOURS = ("#3b6ea5", "#e08e2b", "#5a9e4b", "#8d62a8", "#b0504f", "#4aa3a2", "#9a8248")
_PARITY, _LOST = "#b9bec6", "#c0392b"
_HEADER = ("label", "kind", "array", "position", "state", "folder", "path", "offset", "length")

_SQL = """
SELECT m.image, e.image_offset, e.length, e.path
FROM extents e JOIN images m USING (image)
WHERE e.image_offset IS NOT NULL AND e.length > 0 ORDER BY m.image, e.image_offset
"""


def disc_map(catalogue: Catalogue, *, lost: Collection[str] = ()) -> Figure:
    """Return the map of files on discs: one bar a disc, one colour a top-level folder.

    Args:
        catalogue: The open catalogue.
        lost: Labels of discs to mark as lost, besides those the catalogue knows of.
    """
    discs = catalogue.all(
        "SELECT m.image, label, kind, array, position, m.size,"
        " COALESCE((SELECT d.state FROM discs d WHERE d.image = m.image"
        " ORDER BY d.burned_ns DESC, d.slot DESC LIMIT 1), m.state)"
        " FROM images m WHERE m.size IS NOT NULL ORDER BY array, position"
    )
    discs = [(*row[:6], "lost" if row[1] in lost else row[6]) for row in discs]
    files: dict[int, list[tuple[int, int, str]]] = {row[0]: [] for row in discs}
    for image, offset, length, path in catalogue.all(_SQL):
        files[image].append((offset, length, path))
    rows = []
    for image, label, kind, array, position, size, state in discs:
        if kind == "parity":
            rows.append((label, kind, array, position, state, "", "", 0, size))
        rows += [
            (label, kind, array, position, state, _folder(path), path, offset, length)
            for offset, length, path in files[image]
        ]
    caption = _caption(discs, sum(len(found) for found in files.values()))
    return Figure(
        name="archive-map", caption=caption, svg=_draw(discs, files), csv=csv_of(_HEADER, rows)
    )


def _folder(path: str) -> str:
    """Return the top-level folder of a path on a disc, whose first part is `data`."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else "(top)"


def _caption(discs: list[tuple[object, ...]], num_files: int) -> str:
    parity = sum(1 for row in discs if row[2] == "parity")
    lost = [str(row[1]) for row in discs if row[6] == "lost"]
    text = (
        f"{num_files} files and parts of split files on {len(discs) - parity} data discs, "
        f"with {parity} discs of parity"
    )
    if lost:
        text += f"; lost: {', '.join(lost)}"
    if len(discs) > _MAX_DISCS:
        text += f"; the first {_MAX_DISCS} discs are drawn"
    return text + "."


def _draw(discs: list[tuple[object, ...]], files: dict[int, list[tuple[int, int, str]]]) -> str:
    from matplotlib.figure import Figure as Drawing
    from matplotlib.patches import Patch

    shown = discs[:_MAX_DISCS]
    folders = sorted({_folder(path) for found in files.values() for _, _, path in found})
    colour = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(folders)}
    drawing = Drawing(figsize=(9, 1.2 + 0.32 * max(len(shown), 1)))
    axes = drawing.add_subplot()
    for row, (image, _, kind, _, _, size, state) in enumerate(shown):
        assert isinstance(image, int)
        assert isinstance(size, int)
        axes.barh(row, size / 1e6, height=0.8, color="#eceff3", edgecolor="#8a919c", linewidth=0.6)
        if kind == "parity":
            axes.barh(row, size / 1e6, height=0.8, color=_PARITY, hatch="////", edgecolor="#ffffff")
        found = files[image]
        axes.barh(
            [row] * len(found),
            [length / 1e6 for _, length, _ in found],
            left=[offset / 1e6 for offset, _, _ in found],
            height=0.8,
            color=[colour[_folder(path)] for _, _, path in found],
        )
        if state == "lost":
            axes.barh(row, size / 1e6, height=0.8, fill=False, edgecolor=_LOST, linewidth=2)
            axes.plot([0, size / 1e6], [row - 0.4, row + 0.4], color=_LOST, linewidth=2)
    axes.set_yticks(range(len(shown)), [str(row[1]) for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("position on the disc, MB")
    handles = [Patch(color=colour[name], label=name) for name in folders[: len(_COLOURS)]]
    handles.append(Patch(facecolor=_PARITY, hatch="////", edgecolor="#ffffff", label="parity"))
    if any(row[6] == "lost" for row in shown):
        handles.append(Patch(fill=False, edgecolor=_LOST, label="lost disc"))
    axes.legend(handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return svg_of(drawing)
