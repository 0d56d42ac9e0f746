"""Report data -> one self-contained HTML file, Markdown, and figures as SVG with their CSV.

A capability builds a `Report` from text, tables, figures and pictures; this module renders it.
The HTML loads nothing: figures and pictures are embedded. Left out: interactive charts, since a
static SVG still opens in thirty years.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tierwise.core.records import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One paragraph of plain text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of ready-made cells; numbers are formatted by whoever knows their unit."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing, and the numbers behind it.

    Attributes:
        name: File stem, unique in the report.
        caption: What is to be seen, in words; also the text for those who cannot see it.
        svg: The drawing.
        csv: The data drawn, as CSV text with a header.
    """

    name: str
    caption: str
    svg: str
    csv: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    """Small PNG pictures side by side, each as (PNG bytes, caption)."""

    caption: str
    pictures: tuple[tuple[bytes, str], ...]


Block = Text | Table | Figure | Gallery


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A title, the result in a few (label, value) pairs, and sections."""

    title: str
    summary: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]


def svg_of(figure: Any) -> str:
    """Return a matplotlib figure as SVG text, the same for the same drawing."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "tierwise", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return buffer.getvalue()


def csv_of(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return CSV text; floats keep all their digits."""
    import csv

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()


def write_report(report: Report, folder: Path) -> Path:
    """Write report.html, report.md and figures/NAME.svg + NAME.csv; return the HTML's path."""
    for figure in _figures(report):
        write_whole(folder / "figures" / f"{figure.name}.svg", figure.svg)
        write_whole(folder / "figures" / f"{figure.name}.csv", figure.csv)
    write_whole(folder / "report.md", render_markdown(report))
    write_whole(folder / "report.html", render_html(report))
    return folder / "report.html"


def _figures(report: Report) -> Iterator[Figure]:
    for section in report.sections:
        yield from (block for block in section.blocks if isinstance(block, Figure))


def render_html(report: Report) -> str:
    """Return the report as one HTML document that loads nothing from anywhere."""
    links = "".join(
        f'<a href="#{_anchor(section.title)}">{html.escape(section.title)}</a>'
        for section in report.sections
    )
    tiles = "".join(
        f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>"
        for label, value in report.summary
    )
    body = "".join(_html_section(section) for section in report.sections)
    title = html.escape(report.title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><link rel="icon" href="data:,"><style>{_css()}</style></head><body>'
        f"<header><h1>{title}</h1><nav>{links}</nav></header>"
        f"<main><dl>{tiles}</dl>{body}</main></body></html>\n"
    )


def _css() -> str:
    return resources.files("tierwise.core").joinpath("report.css").read_text(encoding="utf-8")


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _html_section(section: Section) -> str:
    blocks = "".join(_html_block(block) for block in section.blocks)
    heading = html.escape(section.title)
    return f'<section id="{_anchor(section.title)}"><h2>{heading}</h2>{blocks}</section>'


def _html_block(block: Block) -> str:
    match block:
        case Text(text=text):
            return f"<p>{html.escape(text)}</p>"
        case Table():
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.header)
            rows = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
                for row in block.rows
            )
            caption = html.escape(block.caption)
            wide = ' class="many"' if len(block.header) > 2 else ""
            return (
                f'<p class="caption">{caption}</p><div class="wide"><table{wide}>'
                f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
            )
        case Figure():
            data = base64.b64encode(block.svg.encode()).decode()
            caption = html.escape(block.caption)
            return (
                f'<figure><div class="wide" tabindex="0"><img class="drawing" alt="{caption}" '
                f'src="data:image/svg+xml;base64,{data}"></div>'
                f"<figcaption>{caption} <small>figures/{block.name}.csv</small></figcaption>"
                "</figure>"
            )
        case Gallery():
            cells = "".join(
                f'<figure><img alt="{html.escape(note)}" src="data:image/png;base64,'
                f'{base64.b64encode(png).decode()}"><figcaption>{html.escape(note)}</figcaption></figure>'
                for png, note in block.pictures
            )
            return f'<p>{html.escape(block.caption)}</p><div class="gallery">{cells}</div>'


def render_markdown(report: Report) -> str:
    """Return the report as Markdown; figures are links to the SVG files beside it."""
    lines = [f"# {report.title}", ""]
    lines += [f"- **{label}**: {value}" for label, value in report.summary]
    for section in report.sections:
        lines += ["", f"## {section.title}", ""]
        for block in section.blocks:
            lines += [*_markdown_block(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_block(block: Block) -> list[str]:
    match block:
        case Text(text=text):
            return [text]
        case Table():
            cells = [block.header, tuple("---" for _ in block.header), *block.rows]
            rows = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells]
            return [f"*{block.caption}*", "", *rows]
        case Figure():
            return [f"![{block.caption}](figures/{block.name}.svg)"]
        case Gallery():
            return [block.caption, "", *(f"- {note}" for _, note in block.pictures)]
