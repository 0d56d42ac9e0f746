"""Progress of long work: a bar on a terminal, JSON lines with `--json`, silence in a library call.

A long-running function takes `progress: Progress = SILENT` and never prints. Left out: time
estimates in JSON (the reader has the clock).
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Task(Protocol):
    """One piece of counted work."""

    def advance(self, amount: float = 1.0) -> None:
        """Count `amount` more units as done."""


class Progress(Protocol):
    """Where a long-running function says how far it is."""

    def task(self, name: str, total: float | None) -> contextlib.AbstractContextManager[Task]:
        """Return a context for work named `name` of `total` units (None: not known)."""

    def note(self, message: str) -> None:
        """Say one sentence about what is happening."""


class _SilentTask:
    def advance(self, amount: float = 1.0) -> None:
        """Say nothing."""


class SilentProgress:
    """Says nothing: the default of every library call."""

    @contextlib.contextmanager
    def task(self, name: str, total: float | None) -> Iterator[Task]:
        """Return a task that counts nothing."""
        yield _SilentTask()

    def note(self, message: str) -> None:
        """Say nothing."""


SILENT = SilentProgress()


class _LineTask:
    def __init__(self, emit: Callable[[float], None], interval_s: float) -> None:
        self._emit, self._interval_s = emit, interval_s
        self._done, self._last = 0.0, time.monotonic()

    def advance(self, amount: float = 1.0) -> None:
        self._done += amount
        if time.monotonic() - self._last >= self._interval_s:
            self._last = time.monotonic()
            self._emit(self._done)

    def finish(self) -> None:
        self._emit(self._done)


class JsonProgress:
    """`{"progress": name, "done": x, "total": y}` lines, at most two a second."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextlib.contextmanager
    def task(self, name: str, total: float | None) -> Iterator[Task]:
        """Return a task that writes a line now and then, and one at its end."""

        def emit(done: float) -> None:
            self._write({"progress": name, "done": done, "total": total})

        task = _LineTask(emit, 0.5)
        yield task
        task.finish()

    def note(self, message: str) -> None:
        """Write the sentence as `{"note": message}`."""
        self._write({"note": message})

    def _write(self, row: dict[str, object]) -> None:
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()


class PlainProgress:
    """A line at the start and every ten seconds of each task, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextlib.contextmanager
    def task(self, name: str, total: float | None) -> Iterator[Task]:
        """Return a task that prints how far it is every ten seconds."""
        of = "" if total is None else f" of {total:g}"
        self.note(f"{name}{of}")
        yield _LineTask(lambda done: self.note(f"{name}: {done:g}{of}"), 10.0)

    def note(self, message: str) -> None:
        """Print the sentence."""
        self._stream.write(message + "\n")
        self._stream.flush()


class BarProgress:
    """A bar per task on a terminal, gone when the task is done."""

    def __init__(self) -> None:
        self._bars: RichProgress | None = None
        self._depth = 0

    @contextlib.contextmanager
    def task(self, name: str, total: float | None) -> Iterator[Task]:
        """Return a task drawn as a bar with the time left."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bars = RichProgress(
                *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
            )
            self._bars.start()
        bars, self._depth = self._bars, self._depth + 1
        handle = bars.add_task(name, total=total)

        class _BarTask:
            def advance(self, amount: float = 1.0) -> None:
                bars.advance(handle, amount)

        try:
            yield _BarTask()
        finally:
            bars.remove_task(handle)
            self._depth -= 1
            if self._depth == 0:
                bars.stop()
                self._bars = None

    def note(self, message: str) -> None:
        """Print the sentence above the bars."""
        if self._bars is None:
            sys.stderr.write(message + "\n")
        else:
            self._bars.console.print(message, markup=False, highlight=False)


def choose_progress(*, as_json: bool, stream: TextIO | None = None) -> Progress:
    """Return what fits where standard error goes: JSON lines, a bar, or plain lines."""
    target = sys.stderr if stream is None else stream
    if as_json:
        return JsonProgress(target)
    return BarProgress() if target.isatty() else PlainProgress(target)
