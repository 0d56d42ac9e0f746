"""A long verb that is cut off at its n-th step; run by test_cut_off.py in a process of its own.

Usage: cut_child.py VERB SIGNAL STEP ROOT OTHER. Steps are what a progress bar counts, and the
named points between them; the process sends itself SIGNAL at step STEP (0: never). OTHER is the
folder that import reads or export makes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tierwise.archive.vault import Archive


class CutOff:
    """A progress display, and crash points, that end the process at a step."""

    def __init__(self, number: int, left: int) -> None:
        self._number, self._left = number, left

    def step(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)

    @contextlib.contextmanager
    def task(self, label: str, total: float | None) -> Iterator[Any]:
        yield SimpleNamespace(advance=self.step)


def main(verb: str, number: int, step: int, root: Path, other: Path) -> None:
    cut: Any = CutOff(number, step)
    if verb == "rebuild":
        Archive.rebuild(root, clock=lambda: 10**18, progress=cut, crash_point=cut.step)
        return
    with Archive.open(root, write=verb == "import") as archive:
        if verb == "import":
            archive.files.import_tree(other, progress=cut)
        else:
            archive.export(["/"], other, bagit=verb == "bag", progress=cut)


if __name__ == "__main__":
    try:
        main(
            sys.argv[1], signal.Signals[sys.argv[2]], int(sys.argv[3]),
            Path(sys.argv[4]), Path(sys.argv[5]),
        )  # fmt: skip
    except KeyboardInterrupt:
        sys.exit(130)
