"""One source, four faces: silence, JSON lines, plain lines, bars."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest

from tierwise.core.progress import (
    SILENT,
    BarProgress,
    JsonProgress,
    PlainProgress,
    Progress,
    choose_progress,
)


def work(face: Progress) -> None:
    face.note("begin")
    with face.task("outer", 2) as outer, face.task("inner", None) as inner:
        inner.advance(5)
        outer.advance()
        face.note("half")
        outer.advance()


def test_a_library_call_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    work(SILENT)
    assert capsys.readouterr() == ("", "")


def test_json_lines_end_with_the_whole_count() -> None:
    stream = io.StringIO()
    work(JsonProgress(stream))
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {"progress": "outer", "done": 2.0, "total": 2} in rows
    assert {"progress": "inner", "done": 5.0, "total": None} in rows
    assert {"note": "half"} in rows


def test_plain_lines_name_the_task() -> None:
    stream = io.StringIO()
    work(PlainProgress(stream))
    assert stream.getvalue().splitlines() == ["begin", "outer of 2", "inner", "half"]


def test_bars_nest_and_go_away(capsys: pytest.CaptureFixture[str]) -> None:
    face = BarProgress()
    work(face)
    work(face)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("half") == 2


@pytest.mark.parametrize(
    ("as_json", "terminal", "kind"),
    [(True, True, JsonProgress), (False, True, BarProgress), (False, False, PlainProgress)],
)
def test_the_face_fits_where_standard_error_goes(
    as_json: bool, terminal: bool, kind: Callable[..., Progress]
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    assert type(choose_progress(as_json=as_json, stream=stream)) is kind


def test_lines_are_spaced_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with JsonProgress(stream).task("many", 100) as task:
        for _ in range(100):
            now[0] += 0.01
            task.advance()
    assert len(stream.getvalue().splitlines()) == 3
