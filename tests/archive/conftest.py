"""An archive of tiny discs for tests, with a clock that ticks a millisecond at every look."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
ARCHIVE_ID = "0123456789abcdef" * 2


class Ticking:
    """Nanoseconds since 1970: one millisecond later at every look."""

    def __init__(self, start_ns: int = 1_700_000_000_000_000_000) -> None:
        self.now_ns = start_ns

    def __call__(self) -> int:
        self.now_ns += 1_000_000
        return self.now_ns


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A folder in memory where there is one: the archive syncs a lot."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="tierwise-test-", dir=memory))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make_archive(fast_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that makes an archive `name` in the test's folder; all are closed."""
    from tierwise.archive.vault import Archive

    made = []

    def make(name: str = "vault", **changes: Any) -> Archive:
        settings: dict[str, Any] = {
            "archive_id": ARCHIVE_ID,
            "disc_size_bytes": 2 * MIB,
            "data_discs": 2,
            "parity_discs": 1,
            "forepart_bytes": 512,
            "library_slots": 60,
            "clock": Ticking(),
        }
        archive = Archive.init(fast_path / name, **(settings | changes))
        made.append(archive)
        return archive

    yield make
    for archive in made:
        archive.close()
