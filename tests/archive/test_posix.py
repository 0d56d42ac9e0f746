"""A state machine: the archive's file system against a plain directory, operation by operation.

The archive is also sealed, burned, evicted and reopened at any moment, which nobody may notice.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierwise.archive.files import Files
from tierwise.archive.operations import RenameFlags, SetAttributes, XattrFlags
from tierwise.archive.vault import Archive

NAMES = st.sampled_from(["a", "b", "c", "dir", "né\n", "-x", "A"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
BYTES = st.binary(max_size=5000)
MIB = 1 << 20
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # thousands of fsyncs


def outcome(call: Callable[[], object]) -> int:
    """Return 0 or the errno a call failed with."""
    try:
        call()
    except OSError as error:
        return error.errno or -1
    return 0


class AgainstDirectory(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="tierwise-", dir=FAST))
        self.plain = self.base / "plain"
        self.plain.mkdir()
        self.now = 1_700_000_000_000_000_000
        self.archive = Archive.init(
            self.base / "vault",
            archive_id="0123456789abcdef" * 2,
            disc_size_bytes=2 * MIB,
            data_discs=2,
            parity_discs=1,
            forepart_bytes=100,
            library_slots=400,
            clock=self.clock,
        )

    def clock(self) -> int:
        self.now += 1_000_000
        return self.now

    def teardown(self) -> None:
        if hasattr(self, "archive"):
            self.compare()
            self.archive.close()
            shutil.rmtree(self.base)

    @property
    def files(self) -> Files:
        return self.archive.files

    def through_link(self, *paths: str) -> bool:
        """Return whether a path leads through a symbolic link: the kernel follows those for us."""
        return any(
            parent.is_symlink()
            for path in paths
            for parent in (self.plain / path).parents
            if parent != self.plain and self.plain in parent.parents
        )

    def both(self, plain: Callable[[], object], ours: Callable[[], object]) -> None:
        expected, got = outcome(plain), outcome(ours)
        assert errno.errorcode.get(got, got) == errno.errorcode.get(expected, expected)

    def where(self, path: str) -> tuple[int, bytes]:
        folder, _, name = path.encode().rpartition(b"/")
        found = self.archive.fs.names.resolve(folder)
        if not stat.S_ISDIR(found.mode):
            raise NotADirectoryError(errno.ENOTDIR, path)
        return found.inode, name

    # Rules

    @rule(path=PATHS, data=BYTES)
    def write(self, path: str, data: bytes) -> None:
        if self.through_link(path):
            return
        target = self.plain / path
        if not target.parent.is_dir() or target.is_dir() or target.is_symlink():
            return
        target.write_bytes(data)
        self.files.write_file(path, data)

    @rule(path=PATHS, data=BYTES, offset=st.integers(0, 9000))
    def write_at(self, path: str, data: bytes, offset: int) -> None:
        if self.through_link(path):
            return
        target = self.plain / path
        if not target.is_file() or target.is_symlink() or not data:
            return
        with target.open("r+b") as stream:
            stream.seek(offset)
            stream.write(data)
        self.files.write_at(path, data, offset)

    @rule(path=PATHS, size=st.integers(0, 9000))
    def truncate(self, path: str, size: int) -> None:
        if self.through_link(path):
            return
        target = self.plain / path
        if not target.is_file() or target.is_symlink():
            return
        os.truncate(target, size)
        fs, caller = self.archive.fs, self.files.caller
        ino = fs.names.resolve(path.encode()).inode
        self.files.wait(lambda: fs.setattr(ino, SetAttributes(size=size), caller))

    @rule(path=PATHS)
    def mkdir(self, path: str) -> None:
        if self.through_link(path):
            return

        def ours() -> None:
            self.archive.fs.mkdir(*self.where(path), 0o755, self.files.caller)

        self.both((self.plain / path).mkdir, ours)

    @rule(path=PATHS)
    def unlink(self, path: str) -> None:
        if self.through_link(path):
            return
        self.both((self.plain / path).unlink, lambda: self.archive.fs.unlink(*self.where(path)))

    @rule(path=PATHS)
    def rmdir(self, path: str) -> None:
        if self.through_link(path):
            return
        self.both((self.plain / path).rmdir, lambda: self.archive.fs.rmdir(*self.where(path)))

    @rule(old=PATHS, new=PATHS)
    def rename(self, old: str, new: str) -> None:
        if self.through_link(old, new):
            return
        self.both(
            lambda: os.rename(self.plain / old, self.plain / new),  # noqa: PTH104
            lambda: self.archive.fs.rename(*self.where(old), *self.where(new), RenameFlags.NONE),
        )

    @rule(old=PATHS, new=PATHS)
    def link(self, old: str, new: str) -> None:
        if self.through_link(old, new):
            return

        def ours() -> None:
            ino = self.archive.fs.names.resolve(old.encode()).inode
            self.archive.fs.link(ino, *self.where(new))

        self.both(lambda: os.link(self.plain / old, self.plain / new, follow_symlinks=False), ours)

    @rule(path=PATHS, text=PATHS)
    def symlink(self, path: str, text: str) -> None:
        if self.through_link(path):
            return

        def ours() -> None:
            parent, name = self.where(path)
            self.archive.fs.symlink(parent, name, text.encode(), self.files.caller)

        self.both(lambda: os.symlink(text, self.plain / path), ours)  # noqa: PTH211

    @rule(path=PATHS, mode=st.integers(0, 0o7777))
    def chmod(self, path: str, mode: int) -> None:
        if self.through_link(path):
            return
        target = self.plain / path
        if target.is_symlink() or not target.exists():
            return
        target.chmod(mode)
        ino = self.archive.fs.names.resolve(path.encode()).inode
        self.archive.fs.setattr(ino, SetAttributes(mode=mode), self.files.caller)

    @rule(path=PATHS, value=st.binary(max_size=20))
    def setxattr(self, path: str, value: bytes) -> None:
        if self.through_link(path):
            return
        target = self.plain / path
        if target.is_symlink() or not target.exists():
            return
        ino = self.archive.fs.names.resolve(path.encode()).inode
        self.archive.fs.setxattr(ino, b"user.note", value, XattrFlags.NONE, self.files.caller)
        assert self.archive.fs.getxattr(ino, b"user.note") == value

    @rule()
    def seal_all(self) -> None:
        self.archive.seal(partial=True)

    @rule()
    def burn_all(self) -> None:
        self.archive.burn(partial=True)

    @rule()
    def evict_all(self) -> None:
        self.archive.evict()

    @rule()
    def reopen(self) -> None:
        self.archive.close()
        self.archive = Archive.open(self.base / "vault", clock=self.clock)

    # What must hold

    @invariant()
    def same_names(self) -> None:
        if not hasattr(self, "archive"):
            return
        ours = {path: found.mode for path, found in self.files.walk()}
        assert set(ours) == set(self.plain_names())

    def plain_names(self) -> list[bytes]:
        base = os.fsencode(self.plain)
        return [
            os.path.join(folder, name)[len(base) + 1 :]  # noqa: PTH118 - bytes
            for folder, folders, names in os.walk(base)
            for name in folders + names
        ]

    def compare(self) -> None:
        """Compare everything: types, modes, link counts, sizes and bytes."""
        for path, found in self.files.walk():
            plain = os.fsencode(self.plain) + b"/" + path
            expected = os.lstat(plain)
            assert found.mode == expected.st_mode, path
            if stat.S_ISDIR(found.mode):
                assert found.links == 2 + sum(
                    1 for e in os.scandir(plain) if e.is_dir(follow_symlinks=False)
                )
                continue
            assert found.links == expected.st_nlink, path
            assert found.size == expected.st_size, path
            if stat.S_ISLNK(found.mode):
                assert self.archive.fs.readlink(found.inode) == os.readlink(plain)  # noqa: PTH115
            else:
                assert self.files.read_file(path) == Path(os.fsdecode(plain)).read_bytes(), path


AgainstDirectory.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes: do it by hand
    suppress_health_check=list(HealthCheck),
)
TestAgainstDirectory = AgainstDirectory.TestCase


@pytest.mark.slow
class TestAgainstDirectoryLong(AgainstDirectory.TestCase):  # type: ignore[valid-type,misc]
    settings = settings(
        max_examples=300,
        stateful_step_count=80,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


del AgainstDirectory  # the test cases above are what pytest should collect
