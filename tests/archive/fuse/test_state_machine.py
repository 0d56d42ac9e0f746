"""A state machine: whatever is done to a mounted folder and to a plain one has the same outcome.

The twin lies on the file system that the mirror serves, so that every difference is the front
end's. After each run both trees are compared whole: names, types, modes, links, contents,
targets, attributes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tierwise.archive.fuse import system

_runs = itertools.count()
NAMES = st.sampled_from(["a", "b", "é\n"])
PATHS = st.lists(NAMES, min_size=1, max_size=2).map(lambda parts: Path(*parts))
MODES = st.sampled_from([0o600, 0o644, 0o755, 0o4755, 0o2755, 0o1777, 0])
DATA = st.binary(max_size=9000)


def outcome(call: Callable[[], object]) -> object:
    """Return what a call returned, or the errno it failed with."""
    try:
        result = call()
    except OSError as error:
        return f"errno {error.errno}"
    return result if isinstance(result, int | bytes | str | list) else None


def describe(root: Path) -> dict[str, object]:
    """Return everything a user can see of a tree, inode numbers and times apart."""
    described: dict[str, object] = {}
    inodes: dict[int, str] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        found = path.lstat()
        name = str(path.relative_to(root))
        row: list[object] = [oct(found.st_mode), found.st_nlink, found.st_uid, found.st_gid]
        row.append(inodes.setdefault(found.st_ino, name))
        if stat.S_ISREG(found.st_mode):
            row += [found.st_size, path.read_bytes()]
            row += [(key, os.getxattr(path, key)) for key in sorted(os.listxattr(path))]
        elif stat.S_ISLNK(found.st_mode):
            row.append(str(path.readlink()))
        described[name] = row
    return described


class Twins(RuleBasedStateMachine):
    """Two folders, one of them on a mount; descriptors open on both."""

    mounted_root: Path
    plain_root: Path

    def __init__(self) -> None:
        super().__init__()
        name = f"run-{next(_runs)}"
        self.roots = (self.mounted_root / name, self.plain_root / name)
        for root in self.roots:
            root.mkdir()
        self.open: list[tuple[int, int]] = []

    def both(self, call: Callable[[Path], object]) -> object:
        mounted_outcome, plain_outcome = (outcome(lambda r=r: call(r)) for r in self.roots)  # type: ignore[misc]
        assert mounted_outcome == plain_outcome
        return plain_outcome

    def through(self, index: int, call: Callable[[int], object]) -> None:
        if self.open:
            pair = self.open[index % len(self.open)]
            first, second = (outcome(lambda d=d: call(d)) for d in pair)  # type: ignore[misc]
            assert first == second

    @rule(path=PATHS, mode=MODES)
    def mkdir(self, path: Path, mode: int) -> None:
        self.both(lambda root: (root / path).mkdir(mode))

    @rule(path=PATHS, data=DATA)
    def write(self, path: Path, data: bytes) -> None:
        self.both(lambda root: (root / path).write_bytes(data))

    @rule(path=PATHS)
    def read(self, path: Path) -> None:
        self.both(lambda root: (root / path).read_bytes())

    @rule(path=PATHS, size=st.integers(0, 20_000))
    def truncate(self, path: Path, size: int) -> None:
        self.both(lambda root: os.truncate(root / path, size))

    @rule(path=PATHS)
    def unlink(self, path: Path) -> None:
        self.both(lambda root: (root / path).unlink())

    @rule(path=PATHS)
    def rmdir(self, path: Path) -> None:
        self.both(lambda root: (root / path).rmdir())

    @rule(old=PATHS, new=PATHS)
    def rename(self, old: Path, new: Path) -> None:
        self.both(lambda root: (root / old).rename(root / new))

    @rule(old=NAMES, new=NAMES, flags=st.sampled_from([1, 2]))
    def rename_with_flags(self, old: str, new: str, flags: int) -> None:
        def call(root: Path) -> None:
            descriptor = os.open(root, os.O_RDONLY)
            try:
                system.rename(descriptor, old.encode(), descriptor, new.encode(), flags)
            finally:
                os.close(descriptor)

        self.both(call)

    @rule(old=PATHS, new=PATHS)
    def link(self, old: Path, new: Path) -> None:
        self.both(lambda root: (root / new).hardlink_to(root / old))

    @rule(path=PATHS, leads_to=PATHS)
    def symlink(self, path: Path, leads_to: Path) -> None:
        self.both(lambda root: (root / path).symlink_to(leads_to))

    @rule(path=PATHS, mode=MODES)
    def chmod(self, path: Path, mode: int) -> None:
        self.both(lambda root: (root / path).chmod(mode))

    @rule(path=PATHS, uid=st.integers(0, 2), follow=st.booleans())
    def chown(self, path: Path, uid: int, follow: bool) -> None:
        if os.geteuid() == 0:
            self.both(lambda root: os.chown(root / path, uid, -1, follow_symlinks=follow))

    @rule(path=PATHS, key=st.sampled_from(["user.k", "user.l"]), value=st.binary(max_size=50))
    def setxattr(self, path: Path, key: str, value: bytes) -> None:
        self.both(lambda root: os.setxattr(root / path, key, value))

    @rule(path=PATHS, key=st.sampled_from(["user.k", "user.l"]))
    def removexattr(self, path: Path, key: str) -> None:
        self.both(lambda root: os.removexattr(root / path, key))

    @rule(path=PATHS)
    def list_names(self, path: Path) -> None:
        self.both(lambda root: sorted(found.name for found in (root / path).iterdir()))

    @rule(path=PATHS, flags=st.sampled_from([0, os.O_TRUNC, os.O_APPEND, os.O_EXCL]))
    def open_file(self, path: Path, flags: int) -> None:
        descriptors = []
        for root in self.roots:
            with contextlib.suppress(OSError):
                how = os.O_RDWR | os.O_CREAT | flags
                descriptors.append(os.open(root / path, how, 0o640))
        assert len(descriptors) != 1
        if descriptors:
            self.open.append((descriptors[0], descriptors[1]))

    @rule(index=st.integers(0, 9), data=DATA, offset=st.integers(0, 12_000))
    def write_through(self, index: int, data: bytes, offset: int) -> None:
        self.through(index, lambda descriptor: os.pwrite(descriptor, data, offset))

    @rule(index=st.integers(0, 9), size=st.integers(0, 9000), offset=st.integers(0, 12_000))
    def read_through(self, index: int, size: int, offset: int) -> None:
        self.through(index, lambda descriptor: os.pread(descriptor, size, offset))

    @rule(index=st.integers(0, 9), size=st.integers(0, 9000))
    def truncate_through(self, index: int, size: int) -> None:
        self.through(index, lambda descriptor: os.ftruncate(descriptor, size))

    @rule(index=st.integers(0, 9))
    def stat_through(self, index: int) -> None:
        self.through(index, lambda descriptor: os.fstat(descriptor).st_size)
        self.through(index, lambda descriptor: os.fstat(descriptor).st_nlink)

    @rule(index=st.integers(0, 9))
    def close(self, index: int) -> None:
        if self.open:
            for descriptor in self.open.pop(index % len(self.open)):
                os.close(descriptor)

    @invariant()
    def same_names(self) -> None:
        self.both(lambda root: sorted(found.name for found in root.iterdir()))

    def teardown(self) -> None:
        try:
            assert describe(self.roots[0]) == describe(self.roots[1])
        finally:
            for descriptor in itertools.chain.from_iterable(self.open):
                os.close(descriptor)
            for root in self.roots:
                for directory, _, _ in os.walk(root):
                    Path(directory).chmod(0o700)
                shutil.rmtree(root)


@pytest.fixture(scope="module")
def twin_root() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="tierwise-twin-"))
    yield base
    shutil.rmtree(base)


def run_twins(mountpoint: Path, twin_root: Path, num_examples: int, num_steps: int) -> None:
    class Here(Twins):
        mounted_root, plain_root = mountpoint, twin_root

    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_mount_behaves_as_the_plain_folder(mountpoint: Path, twin_root: Path) -> None:
    run_twins(mountpoint, twin_root, num_examples=25, num_steps=40)


@pytest.mark.slow
def test_a_mount_behaves_as_the_plain_folder_at_length(mountpoint: Path, twin_root: Path) -> None:
    run_twins(mountpoint, twin_root, num_examples=300, num_steps=80)
