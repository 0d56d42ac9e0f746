"""Mounts to test on: one server process a module and a subject, one empty folder a test.

Subjects are the ways a file's bytes can go: the mirror giving backing files (kernel passthrough as
root), the mirror answering reads and writes itself, with and without the page cache; and the
archive.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tierwise.archive.fuse import can_mount, mounted_process
from tierwise.archive.fuse.device import is_privileged
from tierwise.archive.fuse.mirror import InputOutput, Mirror
from tierwise.archive.operations import Operations
from tierwise.archive.vault import Archive, mountable

_counter = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = can_mount()
    for item in items:
        if here in item.path.parents and "unit" not in item.path.stem:
            item.add_marker(pytest.mark.fuse)
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{_subject(item)}"))
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _subject(item: pytest.Item) -> object:
    """Return what a test mounts, so that tests of one mount run in one process."""
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else callspec.params.get("mountpoint", "")


@pytest.fixture(scope="module", params=[*InputOutput, "vault"], ids=str)
def mountpoint(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a mount in a place that other users can reach (pytest's own is private)."""
    base = Path(tempfile.mkdtemp(prefix="tierwise-fuse-"))
    base.chmod(0o755)
    (base / "mount").mkdir()
    with mounted_process(_factory(base / "source", request.param), base / "mount") as mount:
        yield mount.path
    shutil.rmtree(base)


def _factory(source: Path, subject: str) -> Callable[[], Operations]:
    if subject != "vault":
        source.mkdir()
        return partial(Mirror, source, InputOutput(subject))
    with Archive.init(source, archive_id="f" * 32, disc_size_bytes=1 << 30, library_slots=20):
        return partial(mountable, source)


@pytest.fixture
def folder(mountpoint: Path) -> Path:
    """Return an empty folder on the mount."""
    made = mountpoint / f"test-{next(_counter)}"
    made.mkdir()
    return made


@pytest.fixture
def needs_root() -> None:
    if not is_privileged():
        pytest.skip("needs root: other users' rights are tested")
