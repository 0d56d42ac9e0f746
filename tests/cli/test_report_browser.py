"""A report opens in a real browser with no network, no console message and no sideways scroll."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tierwise.core import report as rep

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
)  # fmt: skip
FRAME = """<!DOCTYPE html><html><body><iframe id="f" style="border:0;height:900px;width:{width}px">
</iframe><script>const f=document.getElementById('f');f.srcdoc={page};f.onload=()=>{{
const d=f.contentDocument,broken=[...d.images].filter(i=>!i.naturalWidth).length;
const w=f.contentWindow.innerWidth;
document.title=`probe ${{d.documentElement.scrollWidth}} ${{w}} ${{broken}}`
}}</script></body></html>"""
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.xdist_group("browser"),
]


def open_page(path: Path, width: int, folder: Path) -> tuple[str, list[str]]:
    """Return the page as the browser sees it, and its console messages."""
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900",
         "--virtual-time-budget=3000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3))
    figure.subplots().plot([0, 1, 2], [2, 0, 1])
    row = ("a rather long cell of text that does not break",) * 6
    report = rep.Report(
        title="A report",
        summary=tuple((f"label {i}", "0.512 [0.498, 0.526]") for i in range(7)),
        sections=(
            rep.Section(
                title="All kinds of block",
                blocks=(
                    rep.Text(text="words " * 80 + "x" * 30),
                    rep.Table(caption="wide", header=("column",) * 6, rows=(row,) * 3),
                    rep.Figure(name="f", caption="lines", svg=rep.svg_of(figure), csv="x\n1\n"),
                ),
            ),
        ),
    )
    return rep.write_report(report, tmp_path / "run")


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_is_quiet_and_fits(page: Path, width: int, tmp_path: Path) -> None:
    probed = tmp_path / "probed.html"
    literal = json.dumps(page.read_text()).replace("</", "<\\/")
    probed.write_text(FRAME.format(width=width, page=literal))
    dom, console = open_page(probed, max(width, 500), tmp_path)
    assert console == []
    found = re.search(r"<title>probe (\d+) (\d+) (\d+)</title>", dom)
    assert found is not None
    scroll_width, inner_width, broken_pictures = map(int, found.groups())
    assert scroll_width <= inner_width == width
    assert broken_pictures == 0


def test_the_console_is_really_heard(tmp_path: Path) -> None:
    noisy = tmp_path / "noisy.html"
    noisy.write_text("<html><body><script>console.error('heard')</script></body></html>")
    _, console = open_page(noisy, 800, tmp_path)
    assert len(console) == 1
    assert "heard" in console[0]
