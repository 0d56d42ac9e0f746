"""Requests about open files: open, read, write, make durable, close.

A handle with a backing descriptor is served from it here when the kernel does not do it
(passthrough); the file system is asked for the rest.
"""

from __future__ import annotations

import errno
import os

from tierwise.archive.fuse import system, wire
from tierwise.archive.fuse.attributes import drop_set_id
from tierwise.archive.fuse.names import Handler
from tierwise.archive.fuse.session import Request, Session
from tierwise.archive.fuse.wire import Opcode
from tierwise.archive.operations import RETRY, Later, Operations

_COPY_LIMIT_BYTES = 1 << 27


def open_(session: Session, operations: Operations, request: Request) -> bytes:
    """OPEN: with O_TRUNC, emptied first."""
    flags, extra = wire.OPEN_IN.unpack_from(request.body)
    opened = operations.open(request.inode, flags, request.caller())
    if extra & wire.OPEN_KILL_SET_ID:
        drop_set_id(session, request.inode, request.caller())
    return session.opened(request.inode, opened, flags)


def read(session: Session, operations: Operations, request: Request) -> bytes:
    """READ: up to `size` bytes."""
    handle, offset, size, *_ = wire.READ_IN.unpack_from(request.body)
    descriptor = session.files.descriptor(request.inode, handle)
    if descriptor is not None:
        return os.pread(descriptor, size, offset)
    return operations.read(request.inode, handle, offset, size, request.caller())[:size]


def write(session: Session, operations: Operations, request: Request) -> bytes:
    """WRITE: all the bytes, or an error; set-ID bits go first where the kernel says so."""
    handle, offset, size, flags, *_ = wire.WRITE_IN.unpack_from(request.body)
    if flags & wire.WRITE_KILL_SET_ID:
        drop_set_id(session, request.inode, request.caller())
    data = request.body[wire.WRITE_IN.size : wire.WRITE_IN.size + size]
    descriptor = session.files.descriptor(request.inode, handle)
    if descriptor is None:
        written = operations.write(request.inode, handle, offset, data, request.caller())
    else:
        written = os.pwrite(descriptor, data, offset)
    return wire.WRITE_OUT.pack(written)


def flush(_: Session, operations: Operations, request: Request) -> bytes:
    """FLUSH: one descriptor was closed."""
    operations.flush(request.inode, wire.FLUSH_IN.unpack_from(request.body)[0])
    return b""


def release(session: Session, operations: Operations, request: Request) -> bytes:
    """RELEASE: the handle is closed; the kernel lets go of the backing file first."""
    handle = wire.RELEASE_IN.unpack_from(request.body)[0]
    try:
        session.files.remove(request.inode, handle)
    finally:
        operations.release(request.inode, handle)
    return b""


def fsync(session: Session, operations: Operations, request: Request) -> bytes:
    """FSYNC: make bytes and attributes durable.

    A backing file may hold much that is not yet on its disc: it is synchronised beside the loop
    first, and the file system finds little left to do.
    """
    handle, flags = wire.FSYNC_IN.unpack_from(request.body)
    data_only = bool(flags & wire.FSYNC_DATA_ONLY)
    descriptor = session.files.descriptor(request.inode, handle)
    if descriptor is not None and not request.prepared:
        request.prepared = True
        raise Later(lambda _: _synchronise(descriptor, data_only=data_only))
    operations.fsync(request.inode, handle, data_only=data_only)
    return b""


def _synchronise(descriptor: int, *, data_only: bool) -> object:
    if data_only:
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)
    return RETRY


def fallocate(session: Session, operations: Operations, request: Request) -> bytes:
    """FALLOCATE: allocate, punch, zero."""
    handle, offset, length, mode = wire.FALLOCATE_IN.unpack_from(request.body)
    if request.uid:
        drop_set_id(session, request.inode, request.caller())
    descriptor = session.files.descriptor(request.inode, handle)
    if descriptor is None:
        operations.fallocate(request.inode, handle, mode, offset, length)
    else:
        system.fallocate(descriptor, mode, offset, length)
    return b""


def lseek(session: Session, operations: Operations, request: Request) -> bytes:
    """LSEEK: where data or a hole begins."""
    handle, offset, whence = wire.LSEEK_IN.unpack_from(request.body)
    descriptor = session.files.descriptor(request.inode, handle)
    if descriptor is None:
        return wire.LSEEK_OUT.pack(operations.lseek(request.inode, handle, offset, whence))
    return wire.LSEEK_OUT.pack(os.lseek(descriptor, offset, whence))


def copy_file_range(session: Session, _operations: Operations, request: Request) -> bytes:
    """COPY_FILE_RANGE: between two backing files; the kernel copies by itself otherwise."""
    handle, offset, inode_out, handle_out, offset_out, length, *_ = (
        wire.COPY_FILE_RANGE_IN.unpack_from(request.body)
    )
    source = session.files.descriptor(request.inode, handle)
    target = session.files.descriptor(inode_out, handle_out)
    if source is None or target is None:
        raise OSError(errno.EOPNOTSUPP, "not both files have a backing")
    if request.uid:
        drop_set_id(session, inode_out, request.caller())
    copied = os.copy_file_range(source, target, min(length, _COPY_LIMIT_BYTES), offset, offset_out)
    session.files.content_changed(inode_out)
    if request.opcode == Opcode.COPY_FILE_RANGE_64:
        return wire.COPY_FILE_RANGE_64_OUT.pack(copied)
    return wire.WRITE_OUT.pack(copied)


HANDLERS: dict[int, Handler] = {
    Opcode.OPEN: open_,
    Opcode.READ: read,
    Opcode.WRITE: write,
    Opcode.FLUSH: flush,
    Opcode.RELEASE: release,
    Opcode.FSYNC: fsync,
    Opcode.FALLOCATE: fallocate,
    Opcode.LSEEK: lseek,
    Opcode.COPY_FILE_RANGE: copy_file_range,
    Opcode.COPY_FILE_RANGE_64: copy_file_range,
}
