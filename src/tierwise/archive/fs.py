"""The archive as a POSIX file system: `operations.Operations` over catalogue and buffer.

Knows nothing of the kernel's protocol; the front end in `fuse` and the library calls in `files`
both drive it. Resident unsealed files have a backing file, so the kernel moves their bytes itself;
everything else is read and written here.

Departs from POSIX, on purpose: reading does not change atime; the attributes
`user.tierwise.state`, `.version` and `.discs` are there for every file though no list names them,
and cannot be set.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from threading import Event

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.contents import Content, Contents, Recall
from tierwise.archive.journal import Journal
from tierwise.archive.namespace import Namespace, fail
from tierwise.archive.operations import (
    RETRY,
    Attributes,
    Caller,
    DirectoryEntry,
    FileSystemStatistics,
    Later,
    Notifier,
    Opened,
    OpenedDirectory,
    Operations,
    RenameFlags,
    SetAttributes,
    XattrFlags,
)
from tierwise.archive.room import Room
from tierwise.archive.store import Store

Pause = Callable[[Event, float], None]
"""Waits so many seconds, or until the event is set."""

_OWN_XATTRS = b"user.tierwise."
_PUNCH_HOLE, _KEEP_SIZE = 2, 1


class ArchiveFileSystem(Operations):
    """One archive's namespace and contents.

    Args:
        catalogue: The open catalogue.
        store: The buffer.
        recall: Brings a version back from disc; see `contents.Recall`.
        may_recall: Whether a caller's read may wait for a disc; otherwise it gets EACCES beyond
            the forepart.
        room: Asked before content grows; raises `OSError(ENOSPC)`.
        usage: Returns (bytes used, bytes free) for statfs.
        pause: Waits some seconds before a write when the buffer is nearly full.
        crash_point: Called between steps with their names; tests die there.
        journal: Keeps names beside the bytes whenever they are made durable.
        passthrough: Let the kernel move the bytes of unsealed files; then `room` is asked only
            when they are opened.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        store: Store,
        *,
        recall: Recall,
        may_recall: Callable[[Caller], bool],
        room: Room,
        usage: Callable[[], tuple[int, int]],
        pause: Pause,
        journal: Journal,
        crash_point: Callable[[str], None] = lambda name: None,
        passthrough: bool = True,
    ) -> None:
        self.names = Namespace(catalogue)
        self.contents = Contents(catalogue, store, recall, crash_point, passthrough=passthrough)
        self._crash_point = crash_point
        self._catalogue, self._store = catalogue, store
        self._may_recall, self._room, self._usage = may_recall, room, usage
        self._pause, self._journal = pause, journal
        self._waited: set[int] = set()  # handles whose next write has done its waiting
        self.on_destroy: Callable[[], None] = lambda: None
        self.refuse_offline = False  # callers that may not recall may not even open
        self._mounted = False
        self._next_handle = 1

    def mounted(self, notifier: Notifier) -> None:
        """Note that a kernel counts references from now on."""
        self._mounted = True

    def destroy(self) -> None:
        """Close all contents and make everything durable."""
        self._mounted = False
        self.contents.release_all()
        self.free_unnamed()
        self.syncfs()
        self._journal.close()
        self._store.keep_recalled()
        self.on_destroy()

    # Names

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return the attributes of the inode a name leads to."""
        return self._live(self.names.lookup(parent, name))

    def getattr(self, inode: int) -> Attributes:
        """Return the attributes of an inode; of one being written, as its file has them."""
        return self._live(self.names.attributes(inode))

    def _live(self, found: Attributes) -> Attributes:
        content = self.contents.get(found.inode)
        if content is None or not content.writable or content.fd is None:
            return found
        now = os.fstat(content.fd)
        if (now.st_size, now.st_mtime_ns) == (content.size, content.mtime_ns):
            return found
        return replace(
            found,
            size=now.st_size,
            blocks=-(-now.st_size // 512),
            mtime_ns=now.st_mtime_ns,
            ctime_ns=max(found.ctime_ns, now.st_mtime_ns),
        )

    def forget(self, inode: int) -> None:
        """Free an inode that has no name either."""
        if self.contents.get(inode) is None:
            self._free_if_unnamed(inode)

    def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Attributes, Opened]:
        """Make a regular file and open it."""
        self._room.take(0)
        with self._catalogue.transaction():
            made = self.names.add(parent, name, stat.S_IFREG | mode, caller)
            opened = self._opened(self.contents.acquire(made.inode, write=True))
        return self._live(made), opened

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attributes:
        """Make a file, FIFO, socket or device node."""
        return self.names.add(parent, name, mode, caller, rdev=rdev)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attributes:
        """Make a directory."""
        return self.names.add(parent, name, stat.S_IFDIR | (mode & 0o7777), caller)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attributes:
        """Make a symbolic link."""
        return self.names.add(parent, name, stat.S_IFLNK | 0o777, caller, target=target)

    def link(self, inode: int, parent: int, name: bytes) -> Attributes:
        """Give an inode another name."""
        return self._live(self.names.link(inode, parent, name))

    def tmpfile(
        self, parent: int, mode: int, flags: int, caller: Caller
    ) -> tuple[Attributes, Opened]:
        """Make a file without a name."""
        with self._catalogue.transaction():
            made = self.names.add_nameless(parent, stat.S_IFREG | mode, caller)
            opened = self._opened(self.contents.acquire(made.inode, write=True))
        return made, opened

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name; the file goes with its last name and last user."""
        self._removed(self.names.unlink(parent, name))

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory."""
        self._removed(self.names.rmdir(parent, name))

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: RenameFlags
    ) -> None:
        """Move a name; only the catalogue changes."""
        self._removed(self.names.rename(parent, name, new_parent, new_name, flags))

    def _removed(self, left: Attributes | None) -> None:
        if left is None or left.links > 0 or self._mounted:
            return
        if self.contents.get(left.inode) is None:
            self._free_if_unnamed(left.inode)

    def _free_if_unnamed(self, ino: int) -> None:
        with self._catalogue.transaction():
            if self._catalogue.value("SELECT nlink FROM inodes WHERE ino = ?", ino) != 0:
                return
            self._catalogue.run("DELETE FROM xattrs WHERE ino = ?", ino)
            self._catalogue.run("DELETE FROM inodes WHERE ino = ?", ino)
            self._catalogue.touched.add(ino)
            gone = self._store.forget_versions("ino = ? AND state <> 'sealing'", ino)
        for version in gone:
            self._store.remove(version)

    def free_unnamed(self) -> None:
        """Free every inode without a name: nobody can have one open at this moment."""
        for (ino,) in self._catalogue.all("SELECT ino FROM inodes WHERE nlink = 0"):
            self._free_if_unnamed(ino)

    def readlink(self, inode: int) -> bytes:
        """Return a symbolic link's target."""
        return self.names.readlink(inode)

    # Attributes

    def setattr(self, inode: int, changes: SetAttributes, caller: Caller) -> Attributes:
        """Change attributes; a new size may begin a new version."""
        if changes.size is not None:
            self._resize(inode, changes.size)
        content = self.contents.get(inode)
        if content is not None:
            self.contents.settle(content)
            if changes.mtime_ns is not None and content.writable and content.fd is not None:
                os.utime(content.fd, ns=(changes.mtime_ns, changes.mtime_ns))
                content.mtime_ns = changes.mtime_ns
        if changes != SetAttributes(size=changes.size):
            self.names.setattr(inode, changes)
        return self.getattr(inode)

    def _resize(self, ino: int, size: int) -> None:
        found = self.getattr(ino)
        if stat.S_ISDIR(found.mode):
            fail(errno.EISDIR)
        if not stat.S_ISREG(found.mode):
            fail(errno.EINVAL)
        self._room.take(max(0, size - found.size))
        content = self.contents.acquire(ino, write=True, truncate=size == 0)
        try:
            if content.fd is not None:
                os.ftruncate(content.fd, size)
                now = self._catalogue.clock()
                os.utime(content.fd, ns=(now, now))
        finally:
            self.contents.release(ino)

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return an extended attribute, or one of the archive's own."""
        if name.startswith(_OWN_XATTRS):
            return self._own_xattr(inode, name[len(_OWN_XATTRS) :])
        return self.names.getxattr(inode, name)

    def _own_xattr(self, ino: int, name: bytes) -> bytes:
        row = self._catalogue.one(
            "SELECT v.version, number, state, resident FROM inodes i"
            " JOIN versions v ON v.version = i.version WHERE i.ino = ?", ino,
        )  # fmt: skip
        if row is None:
            fail(errno.ENODATA)
        if name == b"state":
            return state_word(row[2], row[3]).encode()
        if name == b"version":
            return str(row[1]).encode()
        if name == b"discs":
            rows = self._catalogue.all(
                "SELECT DISTINCT label FROM extents JOIN images USING (image) WHERE version = ?"
                " ORDER BY label", row[0],
            )  # fmt: skip
            return b" ".join(label.encode() for (label,) in rows)
        return fail(errno.ENODATA)

    def setxattr(
        self, inode: int, name: bytes, value: bytes, flags: XattrFlags, caller: Caller
    ) -> None:
        """Set an extended attribute."""
        if name.startswith(_OWN_XATTRS):
            fail(errno.EPERM)
        self.names.setxattr(inode, name, value, flags)

    def listxattr(self, inode: int) -> Sequence[bytes]:
        """Return the names of the extended attributes that were set."""
        return self.names.listxattr(inode)

    def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an extended attribute."""
        self.names.removexattr(inode, name)

    def statfs(self) -> FileSystemStatistics:
        """Return what is used and what may still be written."""
        used, free = self._usage()
        files = int(self._catalogue.value("SELECT COUNT(*) FROM inodes"))
        return FileSystemStatistics(
            blocks=(used + free) // 4096,
            blocks_free=free // 4096,
            blocks_available=free // 4096,
            files=files + free // 4096,
            files_free=free // 4096,
        )

    # Files

    def open(self, inode: int, flags: int, caller: Caller) -> Opened:
        """Open a file, beginning a new version when a sealed one is to be written."""
        truncate = bool(flags & os.O_TRUNC)
        write = flags & os.O_ACCMODE != os.O_RDONLY
        if not truncate:
            self._check_recall(inode, caller, write=write)
        if write or truncate:
            self._room.take(0)
        return self._opened(self.contents.acquire(inode, write=write, truncate=truncate))

    def _check_recall(self, ino: int, caller: Caller, *, write: bool) -> None:
        """Refuse an opening that would need a disc, where policy says so: EACCES."""
        if self._may_recall(caller) or not (write or self.refuse_offline):
            return
        content = self.contents.get(ino)
        if content is not None and content.fd is not None:
            return
        resident = self._catalogue.value(
            "SELECT v.resident OR v.size = 0 FROM inodes i JOIN versions v"
            " ON v.version = i.version WHERE i.ino = ?", ino,
        )  # fmt: skip
        if resident == 0:
            fail(errno.EACCES)

    def _opened(self, content: Content) -> Opened:
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        if content.backing:
            return Opened(handle=handle, backing=content.fd)
        return Opened(handle=handle, direct=content.fd is None)

    def read(self, inode: int, handle: int, offset: int, size: int, caller: Caller) -> bytes:
        """Return bytes from the buffer, the forepart, or (later) from disc."""
        content = self._content(inode)
        if content.fd is None:
            end = min(offset + size, content.size)
            if offset >= end:
                return b""
            head = self._store.forepart(content.version)
            if end <= len(head):
                return head[offset:end]
            if not self._may_recall(caller):
                # not EAGAIN: programs take that for the end of the file
                return head[offset:] or fail(errno.EACCES)
        return os.pread(self.contents.need_bytes(content), size, offset)

    def write(self, inode: int, handle: int, offset: int, data: memoryview, caller: Caller) -> int:
        """Write bytes to the current version."""
        self._slow_down(handle, len(data))
        self._room.take(len(data))
        content = self._content(inode)
        if content.fd is None or not content.writable:
            fail(errno.EBADF)
        done = os.pwrite(content.fd, data, offset)
        now = self._catalogue.clock()
        os.utime(content.fd, ns=(now, now))
        return done

    def _slow_down(self, handle: int, num_bytes: int) -> None:
        """Have a write into a buffer that is nearly full wait, once, and then be asked again."""
        if handle in self._waited:
            self._waited.discard(handle)
            return
        seconds = self._room.wait_s(num_bytes)
        if seconds <= 0:
            return

        def wait(interrupted: Event) -> object:
            self._pause(interrupted, seconds)
            self._waited.add(handle)
            return RETRY

        raise Later(wait)

    def _content(self, ino: int) -> Content:
        content = self.contents.get(ino)
        return fail(errno.EBADF) if content is None else content

    def flush(self, inode: int, handle: int) -> None:
        """Nothing is held back here, so a close has nothing to report."""

    def release(self, inode: int, handle: int) -> None:
        """Close a handle."""
        self._waited.discard(handle)
        self.contents.release(inode)
        if not self._mounted and self.contents.get(inode) is None:
            self._free_if_unnamed(inode)

    def fsync(self, inode: int, handle: int, *, data_only: bool) -> None:
        """Make bytes, size and names durable: the file, then the catalogue's log."""
        content = self._content(inode)
        if content.fd is not None and content.writable:
            os.fsync(content.fd)
            self._store.sync_folder(content.version)
            self._crash_point("fsync: bytes durable")
            self.contents.settle(content)
        self._sync_names()
        self._crash_point("fsync: catalogue durable")

    def fallocate(self, inode: int, handle: int, mode: int, offset: int, length: int) -> None:
        """Allocate space in a file that is being written."""
        content = self._content(inode)
        if content.fd is None or not content.writable:
            fail(errno.EBADF)
        if mode != 0:
            fail(errno.EOPNOTSUPP)
        self._room.take(length)
        os.posix_fallocate(content.fd, offset, length)

    def lseek(self, inode: int, handle: int, offset: int, whence: int) -> int:
        """Answer SEEK_DATA and SEEK_HOLE; what is on disc is all data."""
        content = self._content(inode)
        if content.fd is None:
            return super().lseek(inode, handle, offset, whence)
        return os.lseek(content.fd, offset, whence)

    # Directories

    def opendir(self, inode: int) -> OpenedDirectory:
        """Open a directory."""
        if not stat.S_ISDIR(self.names.attributes(inode).mode):
            fail(errno.ENOTDIR)
        return OpenedDirectory(handle=0, parent=self.names.parent_of(inode))

    def readdir(
        self, inode: int, handle: int, cookie: int, *, plus: bool
    ) -> Iterable[DirectoryEntry]:
        """Yield the entries after a cookie."""
        for entry in self.names.entries(inode, cookie):
            assert entry.attributes is not None
            yield replace(entry, attributes=self._live(entry.attributes)) if plus else entry

    def fsyncdir(self, inode: int, handle: int, *, data_only: bool) -> None:
        """Make names durable."""
        self._sync_names()

    def syncfs(self) -> None:
        """Make everything durable."""
        self._store.sync_all()
        for ino in self.contents.inodes():
            content = self.contents.get(ino)
            if content is not None:
                self.contents.settle(content)
        self._sync_names()

    def _sync_names(self) -> None:
        """Make the catalogue durable, and what it would lose with its volume beside the bytes."""
        self._journal.write()
        self._crash_point("fsync: names journalled")
        self._catalogue.sync()


def wait_for_room(interrupted: Event, seconds: float) -> None:
    """Let time pass; a signal to the writer ends the wait, and its write goes ahead."""
    interrupted.wait(seconds)


def state_word(state: str, resident: int) -> str:
    """Return what `user.tierwise.state` says of a version.

    >>> state_word("bucket", 1), state_word("burned", 1), state_word("burned", 0)
    ('resident', 'burned', 'offline')
    """
    if state in ("bucket", "sealing"):
        return "resident"
    if not resident:
        return "offline"
    return state
