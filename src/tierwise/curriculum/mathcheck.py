"""Mathematical equality by math-verify, in a process of its own, so that a time limit holds.

math-verify limits its time by a signal, which only works in the main thread of a program, and
whose failure elsewhere was taken for "not equal" (https://github.com/verl-project/verl/pull/5635).
Here the limit is kept from outside: a worker that does not answer in time is stopped and replaced,
and the outcome is `timeout`, which is an error and not a wrong answer.

`python -m tierwise.curriculum.mathcheck` is that worker: JSON lines in, JSON lines out.
"""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import threading
from enum import StrEnum
from functools import lru_cache

DEFAULT_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 60.0


class MathOutcome(StrEnum):
    """What the checker found."""

    EQUAL = "equal"
    DIFFERENT = "different"
    GOLD_UNREADABLE = "gold_unreadable"
    TIMEOUT = "judge_timeout"
    FAILED = "judge_failed"


class MathChecker:
    """Compares two mathematical texts; safe to call from many threads.

    Args:
        timeout_s: Longest time for one comparison, in seconds.
    """

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    @staticmethod
    @lru_cache(maxsize=1)
    def shared() -> MathChecker:
        """Return the checker that this process shares."""
        return MathChecker()

    def check(self, gold: str, answer: str) -> MathOutcome:
        """Return whether two texts mean the same number, expression, set or interval."""
        with self._lock:
            worker = self._running()
            if worker is None or worker.stdin is None:
                return MathOutcome.FAILED
            try:
                worker.stdin.write(json.dumps([gold, answer]) + "\n")
                worker.stdin.flush()
                line = self._read_line(worker, self._timeout_s)
            except OSError:
                self._stop()
                return MathOutcome.FAILED
            if line is None:
                self._stop()
                return MathOutcome.TIMEOUT
            if not line:
                self._stop()
                return MathOutcome.FAILED
            return MathOutcome(json.loads(line))

    def close(self) -> None:
        """Stop the worker; the next check starts a new one."""
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[str] | None:
        if self._worker is None or self._worker.poll() is not None:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "tierwise.curriculum.mathcheck"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            if self._read_line(self._worker, _START_TIMEOUT_S) is None:
                self._stop()
        return self._worker

    @staticmethod
    def _read_line(worker: subprocess.Popen[str], timeout_s: float) -> str | None:
        """Return the next line, "" at the end of the stream, or None when time is up."""
        assert worker.stdout is not None
        ready, _, _ = select.select([worker.stdout], [], [], timeout_s)
        return worker.stdout.readline() if ready else None

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.kill()
        worker.wait()
        for stream in (worker.stdin, worker.stdout):
            if stream is not None:
                stream.close()


def compare(gold: str, answer: str) -> MathOutcome:
    """Return whether two texts are equal, without any time limit (the worker's own call)."""
    from math_verify import parse, verify

    target = parse(f"${gold}$", parsing_timeout=None) or parse(gold, parsing_timeout=None)
    if not target:
        return MathOutcome.GOLD_UNREADABLE
    found = parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None)
    equal = verify(target, found, timeout_seconds=None)
    return MathOutcome.EQUAL if equal else MathOutcome.DIFFERENT


def _serve() -> None:
    import logging

    logging.disable(logging.CRITICAL)
    import math_verify  # noqa: F401 - the slow import, before the first question

    sys.stdout.write('"ready"\n')
    sys.stdout.flush()
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            outcome = compare(gold, answer)
        except Exception:  # whatever the parser raises, the caller is told and goes on
            outcome = MathOutcome.FAILED
        sys.stdout.write(json.dumps(outcome.value) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
