"""A run of named steps in one folder that can be interrupted anywhere and run again.

Each finished step is noted in `state.json` together with the number of events it left in
`record.jsonl`. Running again with the same configuration skips finished steps and starts the
first unfinished one: from the work it left if the step says so, otherwise in an empty folder.
Another configuration, or a run that had finished, starts clean, and says what it deletes. Two
runs in one folder at once are refused. Left out: parallel steps.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierwise.core.errors import AccessError, StateError, UsageError
from tierwise.core.progress import Progress
from tierwise.core.records import RECORD_NAME, RunRecord, write_whole

STATE_NAME = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What a step gets: its own folder, the run's folder, the record, and where to say progress."""

    folder: Path
    run_folder: Path
    record: RunRecord
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        name: Also the name of its folder in the run.
        title: What it does, for people.
        work: Does it.
        resumable: An interrupted `work` goes on from what it left in its folder.
        clean: Called before the folder is emptied, to let go of what lies outside it (a mount).
    """

    name: str
    title: str
    work: Callable[[StepContext], None]
    resumable: bool = False
    clean: Callable[[Path], None] | None = None


def run_steps(
    steps: Sequence[Step], folder: Path, *, config_text: str, progress: Progress
) -> RunRecord:
    """Run the unfinished steps of a run; return its record.

    Args:
        steps: In order; names are unique.
        folder: The run's folder; made if absent.
        config_text: The resolved configuration; it is written to config.toml, and a folder that
            holds a run of another configuration is started clean.
        progress: Where to say what is going on.

    Raises:
        UsageError: The folder holds something that is not a run.
        StateError: Another process is running in the folder.
    """
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for path in filter(_is_torn, list(folder.iterdir())):
            path.unlink()
        identity = hashlib.sha256(config_text.encode()).hexdigest()
        done = _finished_steps(folder, identity)
        if done is None or len(done) == len(steps):
            _start_clean(folder, steps, progress)
            done = {}
            _write_state(folder, identity, done)
            write_whole(folder / "config.toml", config_text)
        record = RunRecord(folder, clock=time.time)
        record.truncate(max(done.values(), default=0))
        for number, step in enumerate(steps, start=1):
            label = f"[{number}/{len(steps)}] {step.title}"
            if step.name in done:
                progress.note(f"{label}: done before")
                continue
            progress.note(label)
            _run_step(step, folder, record, progress)
            done[step.name] = len(record.events())
            _write_state(folder, identity, done)
    return record


def _write_state(folder: Path, identity: str, done: dict[str, int]) -> None:
    state = {"config_sha256": identity, "num_events_after": done}
    write_whole(folder / STATE_NAME, json.dumps(state, indent=2) + "\n")


def _run_step(step: Step, folder: Path, record: RunRecord, progress: Progress) -> None:
    own = folder / step.name
    if not step.resumable:
        _empty(step, own)
    own.mkdir(exist_ok=True)
    start = time.monotonic()
    context = StepContext(folder=own, run_folder=folder, record=record, progress=progress)
    step.work(context)
    seconds = round(time.monotonic() - start, 3)
    record.event("step.done", step=step.name, timing={"seconds": seconds})


def _empty(step: Step, own: Path) -> None:
    if own.exists():
        if step.clean is not None:
            step.clean(own)
        shutil.rmtree(own)


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="name another with --out")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise AccessError(f"not permitted to write in {folder}", hint="name another with --out")
    if any(not _is_torn(path) for path in folder.iterdir()) and _read_state(folder) is None:
        raise UsageError(
            f"{folder} is not empty and holds no run", hint="name an empty folder with --out"
        )


def _is_torn(path: Path) -> bool:
    """Return whether a file is what a killed whole-file write left behind."""
    return path.name.startswith(".") and path.name.endswith(".part")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the run's lock; the kernel lets it go however the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(
                f"another process is running in {folder}", hint="wait for it, or use another --out"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _finished_steps(folder: Path, identity: str) -> dict[str, int] | None:
    """Return step -> events after it, or None when the folder holds no run of this identity."""
    state = _read_state(folder)
    if state is None or state["config_sha256"] != identity:
        return None
    return dict(state["num_events_after"])


def _read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state a run left in the folder, or None when there is none."""
    try:
        state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    known = isinstance(state, dict) and set(state) == {"config_sha256", "num_events_after"}
    return state if known else None


def _start_clean(folder: Path, steps: Sequence[Step], progress: Progress) -> None:
    """Delete an earlier run: its known files and step folders, nothing else."""
    if _read_state(folder) is not None:
        progress.note(f"deleting the earlier run in {folder}")
    for step in steps:
        _empty(step, folder / step.name)
    for name in (RECORD_NAME, "config.toml", "manifest.json", "report.html", "report.md"):
        (folder / name).unlink(missing_ok=True)
    if (folder / "figures").is_dir():
        shutil.rmtree(folder / "figures")
