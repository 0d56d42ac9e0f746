"""A run of steps survives being killed at any moment, and never deletes what is not its own."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from tierwise.cli.steps import Step, StepContext, run_steps
from tierwise.core.errors import StateError, UsageError
from tierwise.core.progress import SILENT
from tierwise.core.records import RunRecord


class Killed(BaseException):
    """Stands for the end of the process."""


class Script:
    """Three steps that write files and events; one of them can be killed half-way."""

    def __init__(self, *, resumable: bool) -> None:
        self.kill_in: str | None = None
        self.ran: list[str] = []
        self.cleaned: list[str] = []
        self.steps = [
            Step(
                name=name,
                title=f"step {name}",
                work=lambda context, name=name: self.work(name, context),  # type: ignore[misc]
                resumable=resumable,
                clean=lambda folder: self.cleaned.append(folder.name),
            )
            for name in ("a", "b", "c")
        ]

    def work(self, name: str, context: StepContext) -> None:
        self.ran.append(name)
        rows = sorted(path.name for path in context.folder.iterdir())
        (context.folder / f"part{len(rows)}").write_text(name)
        context.record.event("half", step=name, seen=rows)
        if self.kill_in == name:
            self.kill_in = None
            raise Killed
        (context.folder / "whole").write_text(name)


def run(script: Script, folder: Path, config: str = "seed = 1\n") -> list[dict[str, object]]:
    record = run_steps(script.steps, folder, config_text=config, progress=SILENT)
    return [{k: v for k, v in e.items() if k != "timing"} for e in record.events()]


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("killed", ["a", "b", "c"])
def test_killed_in_any_step_it_goes_on_there(tmp_path: Path, killed: str, resumable: bool) -> None:
    script = Script(resumable=resumable)
    script.kill_in = killed
    with pytest.raises(Killed):
        run(script, tmp_path / "run")
    events = run(script, tmp_path / "run")
    assert script.ran == sorted([*"abc", killed])
    assert [event["step"] for event in events if event["event"] == "step.done"] == ["a", "b", "c"]
    if resumable:
        assert {"event": "half", "step": killed, "seen": ["part0"]} in events
    else:
        assert script.cleaned == [killed]
        assert events == run(Script(resumable=False), tmp_path / "uninterrupted")


def test_events_of_an_unfinished_step_are_not_kept_twice(tmp_path: Path) -> None:
    script = Script(resumable=False)
    script.kill_in = "b"
    with pytest.raises(Killed):
        run(script, tmp_path)
    steps = [event["step"] for event in run(script, tmp_path)]
    assert steps == ["a", "a", "b", "b", "c", "c"]


def test_a_finished_run_starts_clean(tmp_path: Path) -> None:
    script = Script(resumable=True)
    first = run(script, tmp_path)
    assert run(script, tmp_path) == first
    assert script.ran == [*"abcabc"]


def test_another_configuration_starts_clean(tmp_path: Path) -> None:
    script = Script(resumable=True)
    script.kill_in = "c"
    with pytest.raises(Killed):
        run(script, tmp_path)
    run(script, tmp_path, config="seed = 2\n")
    assert script.ran == [*"abcabc"]
    assert (tmp_path / "config.toml").read_text() == "seed = 2\n"


@pytest.mark.parametrize("state", ['{"config_sha', "{}", "[]", '{"theirs": 1}'])
def test_a_folder_with_a_foreign_or_torn_state_is_refused(tmp_path: Path, state: str) -> None:
    (tmp_path / "config.toml").write_text("theirs = true\n")
    (tmp_path / "figures").mkdir()
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UsageError, match="holds no run"):
        run(Script(resumable=False), tmp_path)
    assert (tmp_path / "figures").exists()


def test_a_folder_with_other_things_in_it_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(UsageError, match="is not empty and holds no run"):
        run(Script(resumable=False), tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is not a folder"):
        run(Script(resumable=False), tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "thesis.tex"]


def test_starting_clean_keeps_what_is_not_the_runs(tmp_path: Path) -> None:
    script = Script(resumable=False)
    run(script, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    run(script, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    run(Script(resumable=False), tmp_path)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(StateError, match="another process"):
            run(Script(resumable=False), tmp_path)
    finally:
        os.close(descriptor)


def test_the_state_says_how_many_events_each_step_left(tmp_path: Path) -> None:
    run(Script(resumable=False), tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["num_events_after"] == {"a": 2, "b": 4, "c": 6}
    assert len(RunRecord(tmp_path, clock=float).events()) == 6


def test_what_a_killed_write_left_behind_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / ".state.json.0a1b2c3d.part").write_text("{")
    run(Script(resumable=False), tmp_path)
    assert not list(tmp_path.glob(".*.part"))
