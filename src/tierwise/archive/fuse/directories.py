"""Requests about directories: open, list (with and without attributes), make durable, close.

`.` and `..` are made here, at positions 1 and 2; a file system's cookie `c` is position `c + 2`.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from tierwise.archive.fuse import wire
from tierwise.archive.fuse.names import Handler
from tierwise.archive.fuse.session import Request, Session
from tierwise.archive.fuse.wire import Opcode
from tierwise.archive.operations import DirectoryEntry, Operations

_DOTS = 2
_NOTHING = bytes(wire.ENTRY_OUT_BYTES)


def opendir(session: Session, operations: Operations, request: Request) -> bytes:
    """OPENDIR: a handle."""
    opened = operations.opendir(request.inode)
    session.directories[request.inode, opened.handle] = opened.parent
    return wire.OPEN_OUT.pack(opened.handle, 0, 0)


def readdir(session: Session, operations: Operations, request: Request) -> bytes:
    """READDIR and READDIRPLUS: as many entries as fit.

    With attributes, every entry but the dots counts as looked up. An error after the first entry
    waits for the next request: the kernel holds what it was sent.
    """
    parts: list[bytes] = []
    try:
        for part in _parts(session, operations, request):
            parts.append(part)
    except Exception:
        if not parts:
            raise
    return b"".join(parts)


def _parts(session: Session, operations: Operations, request: Request) -> Iterator[bytes]:
    """Yield entries as the kernel wants them until its buffer is full."""
    handle, position, room, *_ = wire.READ_IN.unpack_from(request.body)
    plus = request.opcode == Opcode.READDIRPLUS
    parent = session.directories.get((request.inode, handle), request.inode)
    for offset, entry in _entries(operations, request.inode, handle, parent, position, plus=plus):
        room -= wire.directory_entry_bytes(entry.name, plus=plus)
        known = entry.attributes
        if room < 0:
            if known is not None and not session.is_referenced(known.inode):
                operations.forget(known.inode)
            return
        dirent = wire.directory_entry(entry.inode, offset, entry.mode, entry.name)
        if plus:
            dirent = (_NOTHING if known is None else session.entry(known)) + dirent
        yield dirent


def _entries(
    operations: Operations, inode: int, handle: int, parent: int, position: int, *, plus: bool
) -> Iterator[tuple[int, DirectoryEntry]]:
    dots = ((1, b".", inode), (2, b"..", parent))
    for offset, name, number in dots[position:]:
        yield offset, DirectoryEntry(name=name, inode=number, mode=stat.S_IFDIR, cookie=offset)
    for entry in operations.readdir(inode, handle, max(0, position - _DOTS), plus=plus):
        yield entry.cookie + _DOTS, entry


def releasedir(session: Session, operations: Operations, request: Request) -> bytes:
    """RELEASEDIR: the handle is closed."""
    handle = wire.RELEASE_IN.unpack_from(request.body)[0]
    session.directories.pop((request.inode, handle), None)
    operations.releasedir(request.inode, handle)
    return b""


def fsyncdir(_: Session, operations: Operations, request: Request) -> bytes:
    """FSYNCDIR: make names durable."""
    handle, flags = wire.FSYNC_IN.unpack_from(request.body)
    data_only = bool(flags & wire.FSYNC_DATA_ONLY)
    operations.fsyncdir(request.inode, handle, data_only=data_only)
    return b""


def syncfs(_: Session, operations: Operations, request: Request) -> bytes:
    """SYNCFS: make everything durable."""
    del request
    operations.syncfs()
    return b""


HANDLERS: dict[int, Handler] = {
    Opcode.OPENDIR: opendir,
    Opcode.READDIR: readdir,
    Opcode.READDIRPLUS: readdir,
    Opcode.RELEASEDIR: releasedir,
    Opcode.FSYNCDIR: fsyncdir,
    Opcode.SYNCFS: syncfs,
}
