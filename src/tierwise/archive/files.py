"""Paths for library callers: write, read, walk and import files without a mount.

The same operations the kernel would ask for, one after the other, with waits for discs done in
the caller's thread. Left out: open file objects; a mount gives those.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

from tierwise.archive.fs import ArchiveFileSystem
from tierwise.archive.operations import (
    RETRY,
    ROOT_INODE,
    Attributes,
    Caller,
    Later,
    RenameFlags,
    SetAttributes,
    XattrFlags,
)
from tierwise.core.errors import MissingFileError
from tierwise.core.progress import SILENT, Progress

T = TypeVar("T")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What `Files.import_tree` brought in."""

    files: int
    folders: int
    links: int
    others: int
    bytes: int


def as_bytes(path: str | bytes | Path) -> bytes:
    """Return a path as bytes without leading or trailing slashes.

    >>> as_bytes("/a/b/")
    b'a/b'
    """
    return os.fsencode(path).strip(b"/")


class Files:
    """Path-based access to an archive's file system.

    Args:
        fs: The file system.
        clock: Nanoseconds; times of what is written here.
    """

    def __init__(self, fs: ArchiveFileSystem, clock: Callable[[], int]) -> None:
        self._fs, self._clock = fs, clock
        self.caller = Caller(uid=os.getuid(), gid=os.getgid(), pid=os.getpid())

    def wait(self, call: Callable[[], T]) -> T:
        """Return what an operation answers, waiting for discs where it has to."""
        while True:
            try:
                return call()
            except Later as later:
                answer = later.work(Event())
                if answer is not RETRY:
                    return answer  # type: ignore[no-any-return]

    def stat(self, path: str | bytes | Path) -> Attributes:
        """Return a path's attributes, not following symbolic links."""
        return self._fs.getattr(self._resolve(path))

    def exists(self, path: str | bytes | Path) -> bool:
        """Return whether there is something of that name."""
        try:
            self._fs.names.resolve(as_bytes(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _resolve(self, path: str | bytes | Path) -> int:
        try:
            return self._fs.names.resolve(as_bytes(path)).inode
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingFileError(f"nothing named {os.fsdecode(path)} in the archive") from error

    def _split(self, path: str | bytes | Path) -> tuple[int, bytes]:
        folder, _, name = as_bytes(path).rpartition(b"/")
        return self._resolve(folder), name

    def make_folders(self, path: str | bytes | Path) -> int:
        """Make a folder and those above it where missing; return its inode."""
        ino = ROOT_INODE
        for name in filter(None, as_bytes(path).split(b"/")):
            try:
                ino = self._fs.lookup(ino, name).inode
            except FileNotFoundError:
                ino = self._fs.mkdir(ino, name, 0o755, self.caller).inode
        return ino

    def write_file(
        self, path: str | bytes | Path, data: bytes, *, mode: int = 0o644,
        mtime_ns: int | None = None,
    ) -> None:  # fmt: skip
        """Write a file whole, making folders above it; an existing one is replaced."""
        self._write(path, iter((data,)), mode=mode, mtime_ns=mtime_ns)

    def _write(
        self, path: str | bytes | Path, chunks: Iterator[bytes], *, mode: int, mtime_ns: int | None
    ) -> int:
        folder, _, name = as_bytes(path).rpartition(b"/")
        parent = self.make_folders(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            ino = self._fs.lookup(parent, name).inode
            handle = self.wait(lambda: self._fs.open(ino, flags, self.caller)).handle
        except FileNotFoundError:
            found, opened = self._fs.create(parent, name, mode, flags, self.caller)
            ino, handle = found.inode, opened.handle
        try:
            offset = 0
            for chunk in chunks:
                view = memoryview(chunk)
                while view:
                    done = self.wait(
                        partial(self._fs.write, ino, handle, offset, view, self.caller)
                    )
                    offset, view = offset + done, view[done:]
            stamp = self._clock() if mtime_ns is None else mtime_ns
            self._fs.setattr(ino, SetAttributes(mtime_ns=stamp, atime_ns=stamp), self.caller)
        finally:
            self._fs.release(ino, handle)
        return ino

    def write_at(self, path: str | bytes | Path, data: bytes, offset: int) -> None:
        """Write bytes into an existing file; a sealed one gets a new version."""
        ino = self._resolve(path)
        handle = self.wait(lambda: self._fs.open(ino, os.O_RDWR, self.caller)).handle
        try:
            view = memoryview(data)
            self.wait(lambda: self._fs.write(ino, handle, offset, view, self.caller))
        finally:
            self._fs.release(ino, handle)

    def read_file(self, path: str | bytes | Path) -> bytes:
        """Return a file's bytes, recalling them from disc if need be."""
        return b"".join(self.read_chunks(path))

    def read_chunks(self, path: str | bytes | Path) -> Iterator[bytes]:
        """Yield a file's bytes in pieces of up to 1 MiB."""
        ino = self._resolve(path)
        handle = self.wait(lambda: self._fs.open(ino, os.O_RDONLY, self.caller)).handle
        try:
            offset = 0
            while chunk := self.wait(
                lambda at=offset: self._fs.read(ino, handle, at, _CHUNK_BYTES, self.caller)  # type: ignore[misc]
            ):
                yield chunk
                offset += len(chunk)
        finally:
            self._fs.release(ino, handle)

    def remove(self, path: str | bytes | Path) -> None:
        """Remove a file or an empty folder."""
        parent, name = self._split(path)
        if stat.S_ISDIR(self._fs.lookup(parent, name).mode):
            self._fs.rmdir(parent, name)
        else:
            self._fs.unlink(parent, name)

    def rename(self, old: str | bytes | Path, new: str | bytes | Path) -> None:
        """Move a name, replacing what is there."""
        (parent, name), (new_parent, new_name) = self._split(old), self._split(new)
        self._fs.rename(parent, name, new_parent, new_name, RenameFlags.NONE)

    def link(self, old: str | bytes | Path, new: str | bytes | Path) -> None:
        """Give a file a second name."""
        self._fs.link(self._resolve(old), *self._split(new))

    def symlink(self, target: str | bytes, path: str | bytes | Path) -> None:
        """Make a symbolic link."""
        self._fs.symlink(*self._split(path), os.fsencode(target), self.caller)

    def walk(self, path: str | bytes | Path = b"") -> Iterator[tuple[bytes, Attributes]]:
        """Yield (path, attributes) of everything below a folder, names in order."""
        base = as_bytes(path)
        entries = sorted(self._fs.names.entries(self._resolve(base), 0), key=lambda e: e.name)
        for entry in entries:
            below = base + b"/" + entry.name if base else entry.name
            yield below, self._fs.getattr(entry.inode)
            if stat.S_ISDIR(entry.mode):
                yield from self.walk(below)

    def import_tree(
        self, source: Path, destination: str | bytes | Path = b"", *, progress: Progress = SILENT
    ) -> Imported:
        """Copy a folder's content in: modes, owners, times, links and xattrs, names in order.

        What is there already with the same type, size, time and mode is left as it is, so that an
        import that was cut off goes on when it is run again; a file's time is set last.
        """
        counts = {"files": 0, "folders": 0, "links": 0, "others": 0, "bytes": 0}
        top = as_bytes(destination)
        self.make_folders(top)
        seen: dict[tuple[int, int], bytes] = {}
        if not source.is_dir():
            raise MissingFileError(f"no folder {source}")
        with progress.task("import", None) as task:
            self._import_folder(os.fsencode(source), top, counts, seen, task.advance)
        return Imported(**counts)

    def _import_folder(
        self, source: bytes, target: bytes, counts: dict[str, int],
        seen: dict[tuple[int, int], bytes], advance: Callable[[], None],
    ) -> None:  # fmt: skip
        for name in sorted(os.listdir(source)):  # noqa: PTH208 - names must stay bytes
            path, below = source + b"/" + name, target + b"/" + name if target else name
            found = os.lstat(path)
            first = seen.get((found.st_dev, found.st_ino))
            there = self._there(below)
            if first is not None:
                if there is None or there.inode != self.stat(first).inode:
                    self._make_way(below, there)
                    self.link(first, below)
                counts["links"] += 1
                continue
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                seen[found.st_dev, found.st_ino] = below
            self._import_one(path, below, found, there)
            _count(found, counts)
            if stat.S_ISDIR(found.st_mode):
                self._import_folder(path, below, counts, seen, advance)
                self._copy_metadata(path, below, found)
            advance()

    def _there(self, path: bytes) -> Attributes | None:
        parent, name = self._split(path)
        try:
            return self._fs.lookup(parent, name)
        except FileNotFoundError:
            return None

    def _make_way(self, below: bytes, there: Attributes | None) -> None:
        if there is not None:
            self.remove(below)

    def _import_one(
        self, path: bytes, below: bytes, found: os.stat_result, there: Attributes | None
    ) -> None:
        if stat.S_ISDIR(found.st_mode):
            if there is not None and not stat.S_ISDIR(there.mode):
                self.remove(below)
            self.make_folders(below)
            return
        if there is not None and _is_same(found, there):
            return
        if stat.S_ISREG(found.st_mode):
            if there is not None and not stat.S_ISREG(there.mode):
                self.remove(below)
            self._write(below, _chunks(path), mode=0o600, mtime_ns=None)
        elif stat.S_ISLNK(found.st_mode):
            self._make_way(below, there)
            self.symlink(os.readlink(path), below)  # noqa: PTH115 - bytes
        else:
            self._make_way(below, there)
            self._fs.mknod(*self._split(below), found.st_mode, found.st_rdev, self.caller)
        self._copy_metadata(path, below, found)

    def _copy_metadata(self, path: bytes, below: bytes, found: os.stat_result) -> None:
        ino = self._resolve(below)
        for text in os.listxattr(path, follow_symlinks=False):
            value = os.getxattr(path, text, follow_symlinks=False)
            self._fs.setxattr(ino, os.fsencode(text), value, XattrFlags.NONE, self.caller)
        changes = SetAttributes(
            mode=None if stat.S_ISLNK(found.st_mode) else stat.S_IMODE(found.st_mode),
            uid=found.st_uid,
            gid=found.st_gid,
            atime_ns=found.st_atime_ns,
            mtime_ns=found.st_mtime_ns,
        )
        self._fs.setattr(ino, changes, self.caller)


def _chunks(path: bytes) -> Iterator[bytes]:
    with open(path, "rb") as stream:  # noqa: PTH123 - the path is bytes
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


def _is_same(found: os.stat_result, there: Attributes) -> bool:
    """Return whether what is to be imported is there already, by the rule of rsync."""
    return (found.st_mode, found.st_size, found.st_mtime_ns, found.st_rdev) == (
        there.mode,
        there.size,
        there.mtime_ns,
        there.rdev,
    )


def _count(found: os.stat_result, counts: dict[str, int]) -> None:
    if stat.S_ISREG(found.st_mode):
        counts["files"] += 1
        counts["bytes"] += found.st_size
    elif stat.S_ISDIR(found.st_mode):
        counts["folders"] += 1
    else:
        counts["links" if stat.S_ISLNK(found.st_mode) else "others"] += 1
