"""Mounts to test on: one server process a module and a subject, one empty folder a test.

Subjects are the ways a file's bytes can go: the mirror giving backing files (kernel passthrough as
root), the mirror answering reads and writes itself, with and without the page cache.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tierwise.archive.fuse import can_mount, mounted_process
from tierwise.archive.fuse.device import is_privileged
from tierwise.archive.fuse.mirror import InputOutput, Mirror

_counter = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = can_mount()
    for item in items:
        if here in item.path.parents and "unit" not in item.path.stem:
            item.add_marker(pytest.mark.fuse)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", params=list(InputOutput), ids=str)
def mountpoint(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a mount in a place that other users can reach (pytest's own is private)."""
    base = Path(tempfile.mkdtemp(prefix="tierwise-fuse-"))
    base.chmod(0o755)
    (base / "source").mkdir()
    (base / "mount").mkdir()
    factory = partial(Mirror, base / "source", request.param)
    with mounted_process(factory, base / "mount") as mount:
        yield mount.path
    shutil.rmtree(base)


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
