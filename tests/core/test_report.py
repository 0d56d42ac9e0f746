"""A report is one file that loads nothing, escapes what it is given, and keeps the numbers."""

from __future__ import annotations

import csv
import re
from html.parser import HTMLParser
from pathlib import Path

from tierwise.core import report as rep

EVIL = "<script>alert(1)</script> & | pipe"
REPORT = rep.Report(
    title="A & B",
    summary=(("accuracy", "0.5 [0.4, 0.6]"), ("evil", EVIL)),
    sections=(
        rep.Section(
            title="One <b>",
            blocks=(
                rep.Text(text=EVIL),
                rep.Table(caption="cap", header=("x", "y"), rows=(("1", EVIL),)),
                rep.Figure(name="fig", caption='say "hi"', svg="<svg/>", csv="x,y\n1,2\n"),
                rep.Gallery(caption="pictures", pictures=((b"\x89PNG", "a digit"),)),
            ),
        ),
    ),
)


class Collector(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = Collector()
    text = rep.render_html(REPORT)
    page.feed(text)
    assert "script" not in {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name in ("src", "href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#"))
    assert "url(" not in text


def test_every_link_of_the_page_has_its_target() -> None:
    page = Collector()
    page.feed(rep.render_html(REPORT))
    anchors = {attributes.get("id") for _, attributes in page.tags}
    for _, attributes in page.tags:
        href = attributes.get("href") or ""
        assert not href.startswith("#") or href[1:] in anchors


def test_markdown_tables_keep_their_columns() -> None:
    rows = [line for line in rep.render_markdown(REPORT).splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}


def test_figures_are_written_with_their_numbers(tmp_path: Path) -> None:
    path = rep.write_report(REPORT, tmp_path)
    assert path == tmp_path / "report.html"
    with (tmp_path / "figures" / "fig.csv").open(newline="") as stream:
        assert list(csv.DictReader(stream)) == [{"x": "1", "y": "2"}]
    assert (tmp_path / "figures" / "fig.svg").read_text() == "<svg/>"


def test_the_same_drawing_is_the_same_svg() -> None:
    from matplotlib.figure import Figure

    def draw() -> str:
        figure = Figure(figsize=(2, 1))
        figure.subplots().plot([0, 1], [1, 0])
        return rep.svg_of(figure)

    assert draw() == draw()
    assert draw().startswith("<?xml")


def test_csv_keeps_all_digits() -> None:
    assert rep.csv_of(["x"], [[0.1 + 0.2]]) == "x\n0.30000000000000004\n"
