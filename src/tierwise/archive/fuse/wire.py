"""The kernel's FUSE protocol as bytes: opcodes, flags, structures.

Little-endian layouts of protocol 7.40 and later; what the kernel offers is settled in
`negotiate`. Only what this front end uses is here: no CUSE, DAX, io_uring, remote locks or
polling. docs/fuse.md names each structure.

Source: https://github.com/torvalds/linux/blob/master/include/uapi/linux/fuse.h
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from struct import Struct
from typing import Final

from tierwise.archive.operations import Attributes, FileSystemStatistics

HEADER_BYTES: Final = 40
MAX_WRITE_BYTES: Final = 1 << 20
BUFFER_BYTES: Final = MAX_WRITE_BYTES + 8192


class Opcode(IntEnum):
    """What a request asks."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SYNCFS = 50
    TMPFILE = 51
    COPY_FILE_RANGE_64 = 53


class Init(IntFlag):
    """Capabilities settled by INIT; the high word is sent apart."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    DONT_MASK = 1 << 6
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    POSIX_ACL = 1 << 20
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    HANDLE_KILLPRIV_V2 = 1 << 28
    SETXATTR_EXT = 1 << 29
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37


class OpenFlag(IntFlag):
    """How the kernel treats an opened file."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    NOFLUSH = 1 << 5
    PASSTHROUGH = 1 << 7


class SetattrField(IntFlag):
    """Which fields of a SETATTR are meant."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    HANDLE = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    CTIME = 1 << 10
    KILL_SET_ID = 1 << 11


class NotifyCode(IntEnum):
    """What an unasked message to the kernel says."""

    INVALIDATE_INODE = 2
    INVALIDATE_ENTRY = 3


FSYNC_DATA_ONLY: Final = 1
OPEN_KILL_SET_ID: Final = 1
WRITE_KILL_SET_ID: Final = 4
SETXATTR_ACL_KILL_SGID: Final = 1

IN_HEADER: Final = Struct("<IIQQIIIHH")
"""length, opcode, unique, inode, uid, gid, pid, extension length, padding"""
OUT_HEADER: Final = Struct("<IiQ")
"""length, -errno or a NotifyCode, unique"""

INIT_IN: Final = Struct("<IIIII")
"""major, minor, max_readahead, flags, high flags"""
INIT_IN_SHORT: Final = Struct("<IIII")
"""the same as older kernels send it"""
INIT_OUT: Final = Struct("<IIIIHHIIHHII24x")
"""major, minor, max_readahead, flags, max_background, congestion, max_write, time granularity,
max_pages, map_alignment, high flags, max_stack_depth"""

FORGET_IN: Final = Struct("<Q")
BATCH_FORGET_IN: Final = Struct("<I4x")
FORGET_ONE: Final = Struct("<QQ")
SETATTR_IN: Final = Struct("<I4xQQQqqqIIIIIIII")
"""valid, handle, size, lock owner, three times, three nanoseconds, mode, -, uid, gid, -"""
MKNOD_IN: Final = Struct("<IIII")
"""mode, rdev, umask, padding"""
MKDIR_IN: Final = Struct("<II")
"""mode, umask"""
CREATE_IN: Final = Struct("<IIII")
"""flags, mode, umask, open flags"""
RENAME_IN: Final = Struct("<Q")
RENAME2_IN: Final = Struct("<QI4x")
LINK_IN: Final = Struct("<Q")
OPEN_IN: Final = Struct("<II")
READ_IN: Final = Struct("<QQIIQII")
"""handle, offset, size, read flags, lock owner, open flags, padding"""
WRITE_IN: Final = Struct("<QQIIQII")
RELEASE_IN: Final = Struct("<QIIQ")
FLUSH_IN: Final = Struct("<Q16x")
FSYNC_IN: Final = Struct("<QI4x")
SETXATTR_IN: Final = Struct("<II")
SETXATTR_EXT_IN: Final = Struct("<IIII")
GETXATTR_IN: Final = Struct("<I4x")
FALLOCATE_IN: Final = Struct("<QQQI4x")
LSEEK_IN: Final = Struct("<QQI4x")
COPY_FILE_RANGE_IN: Final = Struct("<QQQQQQQ")
"""handle in, offset in, inode out, handle out, offset out, length, flags"""
INTERRUPT_IN: Final = Struct("<Q")

OPEN_OUT: Final = Struct("<QIi")
"""handle, OpenFlags, backing id"""
WRITE_OUT: Final = Struct("<I4x")
XATTR_SIZE_OUT: Final = Struct("<I4x")
LSEEK_OUT: Final = Struct("<Q")
COPY_FILE_RANGE_64_OUT: Final = Struct("<Q")
STATFS_OUT: Final = Struct("<QQQQQIII28x")
INVALIDATE_INODE_OUT: Final = Struct("<Qqq")
INVALIDATE_ENTRY_OUT: Final = Struct("<QII")

_ATTR = "QQQqqqIIIIIIIIII"
_ATTR_OUT = Struct("<QI4x" + _ATTR)
_ENTRY_OUT = Struct("<QQQQII" + _ATTR)
_DIRENT = Struct("<QQII")
_SECOND = 1_000_000_000

ENTRY_OUT_BYTES: Final = _ENTRY_OUT.size


def attributes_reply(attributes: Attributes, valid_ns: int) -> bytes:
    """Return a fuse_attr_out: attributes the kernel may keep for `valid_ns` nanoseconds."""
    seconds, nanoseconds = divmod(valid_ns, _SECOND)
    return _ATTR_OUT.pack(seconds, nanoseconds, *_attr(attributes))


def entry_reply(attributes: Attributes, entry_valid_ns: int, valid_ns: int) -> bytes:
    """Return a fuse_entry_out: a name's inode; generation is 0, as numbers are never reused."""
    entry_seconds, entry_nanoseconds = divmod(entry_valid_ns, _SECOND)
    seconds, nanoseconds = divmod(valid_ns, _SECOND)
    return _ENTRY_OUT.pack(
        attributes.inode,
        0,
        entry_seconds,
        seconds,
        entry_nanoseconds,
        nanoseconds,
        *_attr(attributes),
    )


def absent_reply(entry_valid_ns: int) -> bytes:
    """Return a fuse_entry_out that says: no such name, and you may remember that."""
    seconds, nanoseconds = divmod(entry_valid_ns, _SECOND)
    return _ENTRY_OUT.pack(0, 0, seconds, 0, nanoseconds, 0, *(0,) * 16)


def _attr(attributes: Attributes) -> tuple[int, ...]:
    atime, atime_ns = divmod(attributes.atime_ns, _SECOND)
    mtime, mtime_ns = divmod(attributes.mtime_ns, _SECOND)
    ctime, ctime_ns = divmod(attributes.ctime_ns, _SECOND)
    return (
        attributes.inode,
        attributes.size,
        attributes.blocks,
        atime,
        mtime,
        ctime,
        atime_ns,
        mtime_ns,
        ctime_ns,
        attributes.mode,
        attributes.links,
        attributes.uid,
        attributes.gid,
        attributes.rdev,
        attributes.block_size,
        0,
    )


def directory_entry(inode: int, cookie: int, mode: int, name: bytes) -> bytes:
    r"""Return a fuse_dirent, padded to 8 bytes.

    >>> directory_entry(7, 3, 0o100644, b"name")[24:]
    b'name\x00\x00\x00\x00'
    """
    return _DIRENT.pack(inode, cookie, len(name), mode >> 12) + name + bytes(-len(name) % 8)


def directory_entry_bytes(name: bytes, *, plus: bool) -> int:
    """Return how long a fuse_dirent, or fuse_direntplus, of a name is."""
    return (ENTRY_OUT_BYTES if plus else 0) + _DIRENT.size + len(name) + (-len(name) % 8)


def statistics_reply(statistics: FileSystemStatistics) -> bytes:
    """Return a fuse_statfs_out."""
    return STATFS_OUT.pack(
        statistics.blocks,
        statistics.blocks_free,
        statistics.blocks_available,
        statistics.files,
        statistics.files_free,
        statistics.block_size,
        statistics.max_name_bytes,
        statistics.block_size,
    )
