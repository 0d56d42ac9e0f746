"""The contents of open inodes: which file holds the bytes, when a new version begins.

A version in the bucket is edited in place. Once it is being sealed it never changes again: the
first opening for writing copies it (sharing blocks where the disk can) into a new version, which
becomes current when the copy is durable, and vanishes again if nothing was written. Content that
is only on disc is read from its forepart, or recalled whole through `Later`.

Left out: parts of a file; a recall brings back the whole of it.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.namespace import fail
from tierwise.archive.operations import RETRY, Later
from tierwise.archive.store import Store

Recall = Callable[[int, Event], None]
"""Makes a version resident, or raises `OSError`; polls the event and raises EINTR when set."""


@dataclass(slots=True)
class Content:
    """One inode's content while it is open.

    Attributes:
        version: What it is; 0 for the empty content of a file never written.
        fd: The resident file, or None while it is only on disc.
        writable: The file may be written in place.
        backing: Handles were given the descriptor (kernel passthrough); stays so until closed.
        base: The version it was copied from, or None.
        size, mtime_ns: As of the last time the catalogue knew.
        handles: How many openings there are.
    """

    ino: int
    version: int
    size: int
    mtime_ns: int
    fd: int | None = None
    writable: bool = False
    backing: bool = False
    base: int | None = None
    handles: int = 0


class Contents:
    """All open contents of one mount (or one library session)."""

    def __init__(
        self,
        catalogue: Catalogue,
        store: Store,
        recall: Recall,
        crash_point: Callable[[str], None],
        *,
        passthrough: bool,
    ) -> None:
        self._catalogue, self._store, self._recall = catalogue, store, recall
        self._crash_point, self._passthrough = crash_point, passthrough
        self._open: dict[int, Content] = {}

    def get(self, ino: int) -> Content | None:
        """Return the content of an open inode, or None."""
        return self._open.get(ino)

    def inodes(self) -> list[int]:
        """Return the inodes that are open."""
        return list(self._open)

    def unsettled_bytes(self) -> int:
        """Return by how much open files have outgrown what the catalogue knows of them."""
        return sum(
            os.fstat(content.fd).st_size - content.size
            for content in self._open.values()
            if content.writable and content.fd is not None
        )

    def acquire(self, ino: int, *, write: bool, truncate: bool = False) -> Content:
        """Open an inode's content once more; `Later` when bytes must come from disc first."""
        content = self._open.get(ino)
        if content is None:
            content = self._load(ino, write=write or truncate, keep_bytes=not truncate)
            self._open[ino] = content
        elif (write or truncate) and not content.writable:
            self._make_writable(content, keep_bytes=not truncate)
        content.handles += 1
        if truncate and content.fd is not None:
            os.ftruncate(content.fd, 0)
        return content

    def release(self, ino: int) -> None:
        """Close one opening; with the last, the catalogue learns what became of the content."""
        content = self._open[ino]
        content.handles -= 1
        if content.handles == 0:
            del self._open[ino]
            try:
                self.settle(content, closing=True)
            finally:
                if content.fd is not None:
                    os.close(content.fd)

    def release_all(self) -> None:
        """Close everything, at unmount."""
        for ino in list(self._open):
            self._open[ino].handles = 1
            self.release(ino)

    # Opening

    def _load(self, ino: int, *, write: bool, keep_bytes: bool) -> Content:
        with self._catalogue.transaction():
            row = self._catalogue.one(
                "SELECT i.size, i.mtime_ns, v.version, v.state, v.resident FROM inodes i"
                " LEFT JOIN versions v ON v.version = i.version WHERE i.ino = ?", ino,
            )  # fmt: skip
            if row is None:
                fail(errno.ENOENT)
            size, mtime_ns, version, state, resident = row
            if state == "bucket":
                fd = self._store.open(version, write=True)
                self._catalogue.run(
                    "UPDATE versions SET open = 1, writes = writes + ? WHERE version = ?",
                    int(write), version,
                )  # fmt: skip
                os.utime(fd, ns=(mtime_ns, mtime_ns))
                return Content(
                    ino, version, size, mtime_ns, fd, writable=True, backing=self._passthrough
                )
        if version is None and not write:
            return Content(ino, 0, 0, mtime_ns)
        content = Content(ino, version or 0, size, mtime_ns)
        if resident and keep_bytes:
            self._open_resident(content)
        if write:
            content.backing = self._passthrough
            try:
                self._make_writable(content, keep_bytes=keep_bytes)
            except BaseException:
                if content.fd is not None:
                    os.close(content.fd)
                raise
        return content

    def _open_resident(self, content: Content) -> None:
        """Open a sealed version's file; if it is gone after all, remember that it is on disc."""
        try:
            content.fd = self._store.open(content.version, write=False)
        except FileNotFoundError:
            self._catalogue.run(
                "UPDATE versions SET resident = 0 WHERE version = ?", content.version
            )
            return
        self._catalogue.run(
            "UPDATE versions SET used_ns = ? WHERE version = ?",
            self._catalogue.clock(), content.version,
        )  # fmt: skip

    def need_bytes(self, content: Content) -> int:
        """Return the descriptor of the content, or raise `Later` that brings it back from disc."""
        if content.fd is None and content.version:
            self._open_resident(content)
        if content.fd is not None:
            return content.fd
        version = content.version

        def bring_back(interrupted: Event) -> object:
            self._recall(version, interrupted)
            return RETRY

        raise Later(bring_back)

    def _make_writable(self, content: Content, *, keep_bytes: bool) -> None:
        """Begin a new version of a content that may not be changed."""
        old_fd = content.fd
        keep_bytes = keep_bytes and content.size > 0
        if keep_bytes:
            old_fd = self.need_bytes(content)
        version = self._catalogue.insert(
            "INSERT INTO versions (ino, number, size, mtime_ns, created_ns, state, resident, open,"
            " used_ns) SELECT ?1, COALESCE(MAX(number), 0) + 1, ?2, ?3, ?4, 'bucket', 1, 1, ?4"
            " FROM versions WHERE ino = ?1",
            content.ino, content.size, content.mtime_ns, self._catalogue.clock(),
        )  # fmt: skip
        try:
            fd = self._store.create(version)
            self._crash_point("write: file made")
            if keep_bytes and old_fd is not None:
                self._store.copy(old_fd, fd)
                os.fsync(fd)  # what was durable before must not hang on bytes that are not
                self._store.sync_folder(version)
                self._crash_point("write: content copied")
            os.utime(fd, ns=(content.mtime_ns, content.mtime_ns))
        except BaseException:
            self._store.remove(version)
            self._catalogue.run("DELETE FROM versions WHERE version = ?", version)
            raise
        self._catalogue.run("UPDATE inodes SET version = ? WHERE ino = ?", version, content.ino)
        self._catalogue.touched.add(content.ino)
        self._crash_point("write: version current")
        content.base = content.version or None
        content.version, content.fd, content.writable = version, fd, True
        if old_fd is not None:
            os.close(old_fd)

    # Closing

    def settle(self, content: Content, *, closing: bool = False) -> None:
        """Tell the catalogue the size and time of a content that may have been written."""
        if not content.writable or content.fd is None:
            return
        found = os.fstat(content.fd)
        changed = (found.st_size, found.st_mtime_ns) != (content.size, content.mtime_ns)
        if not (changed or closing):
            return
        unwritten = closing and not changed and self._is_copy(content)
        with self._catalogue.transaction():
            if unwritten:
                self._forget_copy(content)
                return
            if changed:
                content.base = None
                content.size, content.mtime_ns = found.st_size, found.st_mtime_ns
                self._catalogue.run(
                    "UPDATE inodes SET size = ?1, mtime_ns = ?2, ctime_ns = MAX(ctime_ns, ?2),"
                    " seq = ?3, dirty = 1 WHERE ino = ?4",
                    content.size, content.mtime_ns, self._catalogue.next_seq(content.ino),
                    content.ino,
                )  # fmt: skip
            self._crash_point("write: before the catalogue knows the size")
            self._catalogue.run(
                "UPDATE versions SET size = ?, mtime_ns = ?, open = ?, sha256 = NULL"
                " WHERE version = ?",
                content.size, content.mtime_ns, int(not closing), content.version,
            )  # fmt: skip

    def _is_copy(self, content: Content) -> bool:
        """Return whether the bytes are still those of the version it was copied from.

        Size and times are not enough: a shared mapping may write without touching either.
        """
        if content.base is None or content.fd is None:
            return False
        expected = self._catalogue.value(
            "SELECT sha256 FROM versions WHERE version = ?", content.base
        )
        with os.fdopen(os.dup(content.fd), "rb") as stream:
            stream.seek(0)
            return bool(hashlib.file_digest(stream, "sha256").hexdigest() == expected)

    def _forget_copy(self, content: Content) -> None:
        self._catalogue.run(
            "UPDATE inodes SET version = ? WHERE ino = ?", content.base, content.ino
        )
        self._catalogue.run("DELETE FROM versions WHERE version = ?", content.version)
        self._store.remove(content.version)
