"""The seam between a file system and the front end that mounts it.

`Operations` is what a file system answers: inode numbers and byte names in, `Attributes` and
`OSError(errno)` out. It knows nothing of the kernel's protocol; `tierwise.archive.fuse` knows
nothing of archives. A file system subclasses `Operations` and overrides what it can do; what it
leaves alone answers as a file system without that feature does.

Rules, both ways:

- The front end makes one call at a time, though not always from the same thread. Nothing here
  needs a lock against another call; background threads of the file system are its own matter.
- Only `OSError` with an `errno` may leave a method (and `Later`, below). Anything else reaches the
  user as EIO and the front end's `on_fault`; the mount goes on.
- Permission bits, sticky directories, the caller's umask and ACLs are checked by the kernel
  (`default_permissions`); a method may assume that the caller was allowed to ask. Two rules stay
  here: an object made in a set-group-ID directory takes the directory's group, and a new
  directory there takes the bit too (`inherited_group`).
- Inode numbers are never reused; 1 is the root. The front end counts the kernel's references:
  `forget` comes when the last one goes, and an inode without a name must work until then.

Left out, because the kernel does it better for a single machine: locks (POSIX and flock stay
local to the mount) and `access`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from threading import Event
from typing import Any, Final, NoReturn, Protocol

ROOT_INODE: Final = 1
MAX_NAME_BYTES: Final = 255


class RenameFlags(IntFlag):
    """What renameat2(2) asks beyond a plain rename."""

    NONE = 0
    NO_REPLACE = 1
    EXCHANGE = 2
    WHITEOUT = 4


class XattrFlags(IntFlag):
    """What setxattr(2) asks beyond a plain set."""

    NONE = 0
    CREATE = 1
    REPLACE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """What stat(2) says of an inode.

    Args:
        inode: Number, stable over remounts, never reused.
        mode: File type and permission bits, as `st_mode`.
        size: Bytes; of a symbolic link, the length of its target.
        blocks: Units of 512 bytes. Report what the logical size takes up, never 0 for a file
            whose bytes are elsewhere: `tar --sparse` believes it and archives zeros.
        links: Names; of a directory, 2 plus its subdirectories.
        uid, gid: Owner.
        rdev: Device number of a device node.
        atime_ns, mtime_ns, ctime_ns: Nanoseconds since 1970; may be negative.
        block_size: Preferred size of I/O, bytes.
    """

    inode: int
    mode: int
    size: int = 0
    blocks: int = 0
    links: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    block_size: int = 4096

    @classmethod
    def from_stat(cls, result: os.stat_result, *, inode: int | None = None) -> Attributes:
        """Return the attributes of a stat result, under another inode number if one is given."""
        return cls(
            inode=result.st_ino if inode is None else inode,
            mode=result.st_mode,
            size=result.st_size,
            blocks=result.st_blocks,
            links=result.st_nlink,
            uid=result.st_uid,
            gid=result.st_gid,
            rdev=result.st_rdev,
            atime_ns=result.st_atime_ns,
            mtime_ns=result.st_mtime_ns,
            ctime_ns=result.st_ctime_ns,
            block_size=result.st_blksize,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAttributes:
    """What to change of an inode: None leaves a field as it is ("now" is already a time).

    `mode` holds permission bits only. A change of owner or size also carries the mode without its
    set-ID bits where POSIX wants them gone: the kernel adds it.
    """

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: file-system uid and gid, and the thread's id (0 for the kernel's own requests)."""

    uid: int
    gid: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A file handle, and where its bytes go.

    Args:
        handle: Any number >= 0, given back with every call on this opening.
        backing: Descriptor of the regular file that holds exactly this inode's bytes, or None.
            With one, `read` and `write` are never called: the kernel moves data to and from the
            backing file (passthrough), or the front end does where the kernel will not; size and
            times are then what `fstat` of the backing says, whenever they are asked. Open it
            O_RDWR if the inode may be written. The file system keeps it open until the `release`
            of the inode's last handle, and closes it then.
            While an inode is open with a backing, every further `open` must give the same file
            (another descriptor of it will do): its content may not move meanwhile.
        direct: Without a backing: no page cache and no read-ahead, so that a read asks for
            exactly the bytes the caller wanted. For files whose bytes are far away.
        keep_cache: Without a backing: pages cached by an earlier opening are still right.
    """

    handle: int
    backing: int | None = None
    direct: bool = False
    keep_cache: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDirectory:
    """A directory handle, and the inode that `..` names (the directory itself for the root)."""

    handle: int
    parent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryEntry:
    """One name in a directory; `.` and `..` are added by the front end.

    Args:
        name: 1 to 255 bytes, any but NUL and slash.
        inode: Its number.
        mode: Its `st_mode`; only the type matters.
        cookie: Position *after* this entry, > 0: `readdir(cookie)` goes on from there, also when
            entries came and went meanwhile. A row number that is never reused serves well.
        attributes: The same inode's attributes; must be there when `readdir` was asked with
            `plus`, unless the inode has vanished since.
    """

    name: bytes
    inode: int
    mode: int
    cookie: int
    attributes: Attributes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystemStatistics:
    """What statfs(2) says; blocks are of `block_size` bytes."""

    blocks: int
    blocks_free: int
    blocks_available: int
    files: int
    files_free: int
    block_size: int = 4096
    max_name_bytes: int = MAX_NAME_BYTES


class _Retry:
    """The type of `RETRY`."""

    __slots__ = ()


RETRY: Final = _Retry()
"""What a `Later`'s work returns to have the same operation called again."""


class Later(Exception):
    """Raised by an operation that would have to wait, so that the mount need not.

    Args:
        work: Called once in a thread of its own, *outside* the one-call-at-a-time rule, with an
            event that is set when the caller was interrupted or the mount goes away (poll it, and
            raise `OSError(EINTR)`). What it returns is the operation's answer; `RETRY` has the
            operation called again, under the rule; an `OSError` is the caller's error.

    Any method but `forget`, `release` and `destroy` may raise it: reads that wait for a recall,
    an `fsync` of much data.
    """

    def __init__(self, work: Callable[[Event], Any]) -> None:
        super().__init__("the answer comes later")
        self.work = work


class Notifier(Protocol):
    """How a file system tells the kernel that something changed without being asked.

    Every call returns at once and may come from any thread, also from inside an operation: the
    message is sent by a thread of the front end. Inodes the kernel does not know are ignored.
    """

    def inode_changed(self, inode: int, *, data: bool = True) -> None:
        """Drop cached attributes and, with `data`, cached pages of an inode."""

    def entry_changed(self, parent: int, name: bytes) -> None:
        """Drop what the kernel remembers of a name, or of its absence."""


class Operations:
    """A file system; see the module's rules. Methods not overridden say "not supported".

    A base class rather than a `Protocol`, against the house's habit: most of these methods have
    one right answer for a file system without the feature, and it is given here once.
    """

    def mounted(self, notifier: Notifier) -> None:
        """Take the kernel's line of notification; called once, before any other call."""

    def destroy(self) -> None:
        """Let go of everything: the mount is gone, every handle closed, every inode forgotten."""

    # Names

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return the attributes of the inode a name leads to; ENOENT if there is none."""
        _refuse(errno.ENOSYS)

    def forget(self, inode: int) -> None:
        """Note that the kernel knows this inode no more: free it if it has no name either."""

    def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Attributes, Opened]:
        """Make a regular file and open it; EEXIST if the name is taken.

        The kernel looked the name up before; `flags` are open(2)'s.
        """
        _refuse(errno.ENOSYS)

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attributes:
        """Make a file, FIFO, socket or device node, as the type in `mode` says."""
        _refuse(errno.EPERM)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attributes:
        """Make a directory; `mode` holds permission bits."""
        _refuse(errno.EPERM)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attributes:
        """Make a symbolic link."""
        _refuse(errno.EPERM)

    def link(self, inode: int, parent: int, name: bytes) -> Attributes:
        """Give an inode another name, and return its attributes; EEXIST if the name is taken."""
        _refuse(errno.EPERM)

    def tmpfile(
        self, parent: int, mode: int, flags: int, caller: Caller
    ) -> tuple[Attributes, Opened]:
        """Make a file without a name (O_TMPFILE), links 0, that `link` may name later."""
        _refuse(errno.EOPNOTSUPP)

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name that is not a directory's."""
        _refuse(errno.EPERM)

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory; ENOTEMPTY otherwise."""
        _refuse(errno.EPERM)

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: RenameFlags
    ) -> None:
        """Move a name, replacing what is there unless `flags` say otherwise.

        EEXIST under NO_REPLACE, ENOENT when EXCHANGE finds nothing, EINVAL for a flag that is not
        supported, ENOTEMPTY for a directory in use. The kernel refused a directory moved into
        itself and a file over a directory already.
        """
        _refuse(errno.EPERM)

    def readlink(self, inode: int) -> bytes:
        """Return a symbolic link's target."""
        _refuse(errno.EINVAL)

    # Attributes

    def getattr(self, inode: int) -> Attributes:
        """Return the attributes of an inode."""
        _refuse(errno.ENOSYS)

    def setattr(self, inode: int, changes: SetAttributes, caller: Caller) -> Attributes:
        """Change attributes, all or none, and return the new ones; `size` truncates or extends."""
        _refuse(errno.EPERM)

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return the value of an extended attribute; ENODATA if there is none."""
        _refuse(errno.ENOSYS)

    def setxattr(
        self, inode: int, name: bytes, value: bytes, flags: XattrFlags, caller: Caller
    ) -> None:
        """Set an extended attribute; EEXIST under CREATE, ENODATA under REPLACE."""
        _refuse(errno.ENOSYS)

    def listxattr(self, inode: int) -> Sequence[bytes]:
        """Return the names of all extended attributes."""
        _refuse(errno.ENOSYS)

    def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an extended attribute; ENODATA if there is none."""
        _refuse(errno.ENOSYS)

    def statfs(self) -> FileSystemStatistics:
        """Return the room there is."""
        _refuse(errno.ENOSYS)

    # Files

    def open(self, inode: int, flags: int, caller: Caller) -> Opened:
        """Open a file; with O_TRUNC in `flags`, empty it first."""
        _refuse(errno.ENOSYS)

    def read(self, inode: int, handle: int, offset: int, size: int, caller: Caller) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        _refuse(errno.EIO)

    def write(self, inode: int, handle: int, offset: int, data: memoryview, caller: Caller) -> int:
        """Write bytes and return how many; `data` is not valid after the call."""
        _refuse(errno.EROFS)

    def flush(self, inode: int, handle: int) -> None:
        """Answer one close(2): the last chance to report an error. Handles stay open."""
        _refuse(errno.ENOSYS)

    def release(self, inode: int, handle: int) -> None:
        """Close a handle; nobody hears of an error."""

    def fsync(self, inode: int, handle: int, *, data_only: bool) -> None:
        """Return when the file's bytes, and unless `data_only` its attributes, are durable.

        Not optional: a default would acknowledge what nobody did.
        """
        _refuse(errno.EIO)

    def fallocate(self, inode: int, handle: int, mode: int, offset: int, length: int) -> None:
        """Give or take room in a file without a backing (fallocate modes); EOPNOTSUPP if unable."""
        _refuse(errno.EOPNOTSUPP)

    def lseek(self, inode: int, handle: int, offset: int, whence: int) -> int:
        """Answer SEEK_DATA and SEEK_HOLE of a file without a backing: by default, all is data."""
        size = self.getattr(inode).size
        if offset >= size:
            _refuse(errno.ENXIO)
        return offset if whence == os.SEEK_DATA else size

    # Directories

    def opendir(self, inode: int) -> OpenedDirectory:
        """Open a directory."""
        _refuse(errno.ENOSYS)

    def readdir(
        self, inode: int, handle: int, cookie: int, *, plus: bool
    ) -> Iterable[DirectoryEntry]:
        """Yield the entries after `cookie` (0: all); the front end stops when its reply is full."""
        _refuse(errno.ENOSYS)

    def releasedir(self, inode: int, handle: int) -> None:
        """Close a directory handle."""

    def fsyncdir(self, inode: int, handle: int, *, data_only: bool) -> None:
        """Return when the directory's entries are durable."""
        _refuse(errno.EIO)

    def syncfs(self) -> None:
        """Return when everything is durable (syncfs(2), sync(1))."""
        _refuse(errno.EIO)


def inherited_group(parent: Attributes, mode: int, caller: Caller) -> tuple[int, int]:
    """Return the mode and group of an object made in a directory, by the set-group-ID rule.

    Args:
        parent: The directory's attributes.
        mode: Type and permission bits asked for.
        caller: Who makes it.

    >>> shared = Attributes(inode=1, mode=stat.S_IFDIR | 0o2775, gid=50)
    >>> mode, group = inherited_group(shared, stat.S_IFDIR | 0o755, Caller(uid=1, gid=1, pid=1))
    >>> oct(mode), group
    ('0o42755', 50)
    """
    if not parent.mode & stat.S_ISGID:
        return mode, caller.gid
    return (mode | stat.S_ISGID if stat.S_ISDIR(mode) else mode), parent.gid


def _refuse(code: int) -> NoReturn:
    raise OSError(code, os.strerror(code))
