"""Requests about attributes: stat, chmod, chown, truncate, times, extended attributes, ACLs."""

from __future__ import annotations

import errno
import stat
from dataclasses import replace

from tierwise.archive.fuse import acl, wire
from tierwise.archive.fuse.names import Handler
from tierwise.archive.fuse.session import Request, Session
from tierwise.archive.fuse.wire import Opcode, SetattrField
from tierwise.archive.operations import Caller, Operations, SetAttributes, XattrFlags

_NS = 1_000_000_000
_ABSENT = (errno.ENODATA, errno.ENOSYS, errno.EOPNOTSUPP)
_CAPABILITY = b"security.capability"


def getattr_(session: Session, operations: Operations, request: Request) -> bytes:
    """GETATTR: stat."""
    return session.attributes(operations.getattr(request.inode))


def setattr_(session: Session, operations: Operations, request: Request) -> bytes:
    """SETATTR: what the request marks as meant; a changed mode is carried into the ACL."""
    changes = _changes(request, session.clock_ns())
    if _kills_set_id(request):
        _drop_capability(session, request.inode)
        mode = changes.mode
        if mode is None:
            mode = stat.S_IMODE(session.operations.getattr(request.inode).mode)
        if without_set_id(mode) != mode:
            changes = replace(changes, mode=without_set_id(mode))
    attributes = operations.setattr(request.inode, changes, request.caller())
    if changes.mode is not None and wire.Init.POSIX_ACL in session.capabilities:
        _carry_mode(session, request, changes.mode)
    return session.attributes(attributes)


def statfs(_: Session, operations: Operations, request: Request) -> bytes:
    """STATFS: the room there is."""
    del request
    return wire.statistics_reply(operations.statfs())


def getxattr(_: Session, operations: Operations, request: Request) -> bytes:
    """GETXATTR: a value, or its length."""
    (size,) = wire.GETXATTR_IN.unpack_from(request.body)
    name = bytes(request.body[wire.GETXATTR_IN.size : -1])
    return _sized(operations.getxattr(request.inode, name), size)


def listxattr(_: Session, operations: Operations, request: Request) -> bytes:
    """LISTXATTR: NUL-terminated names, or their length."""
    (size,) = wire.GETXATTR_IN.unpack_from(request.body)
    return _sized(b"".join(name + b"\0" for name in operations.listxattr(request.inode)), size)


def setxattr(session: Session, operations: Operations, request: Request) -> bytes:
    """SETXATTR: a value; an access ACL also sets the permission bits."""
    if wire.Init.SETXATTR_EXT in session.capabilities:
        size, flags, extra, _ = wire.SETXATTR_EXT_IN.unpack_from(request.body)
        start = wire.SETXATTR_EXT_IN.size
    else:
        (size, flags), extra = wire.SETXATTR_IN.unpack_from(request.body), 0
        start = wire.SETXATTR_IN.size
    rest = bytes(request.body[start:])
    end = rest.index(b"\0")
    name, value = rest[:end], rest[end + 1 : end + 1 + size]
    session.without_default_acl.discard(request.inode)
    if name == acl.ACCESS and wire.Init.POSIX_ACL in session.capabilities:
        kill_group = bool(extra & wire.SETXATTR_ACL_KILL_SGID)
        _set_access_acl(session, operations, request, value, kill_set_gid=kill_group)
    else:
        operations.setxattr(request.inode, name, value, XattrFlags(flags), request.caller())
    return b""


def removexattr(session: Session, operations: Operations, request: Request) -> bytes:
    """REMOVEXATTR: remove a name; removing an ACL that is not there is no error."""
    name = bytes(request.body[:-1])
    session.without_default_acl.discard(request.inode)
    if name in (acl.ACCESS, acl.DEFAULT):
        _remove_if_there(operations, request.inode, name)
    else:
        operations.removexattr(request.inode, name)
    return b""


def without_set_id(mode: int) -> int:
    """Return permission bits without set-user-ID, and set-group-ID where it is one.

    Set-group-ID without group execution once meant mandatory locking, and stays.

    >>> oct(without_set_id(0o106755)), oct(without_set_id(0o102745))
    ('0o755', '0o2745')
    """
    gone = stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0)
    return stat.S_IMODE(mode) & ~gone


def drop_set_id(session: Session, inode: int, caller: Caller) -> None:
    """Take set-ID bits and file capabilities away, because somebody changes the file's bytes."""
    _drop_capability(session, inode)
    mode = session.operations.getattr(inode).mode
    kept = without_set_id(mode)
    if kept != stat.S_IMODE(mode):
        session.operations.setattr(inode, SetAttributes(mode=kept), caller)
        session.attributes_changed(inode)


HANDLERS: dict[int, Handler] = {
    Opcode.GETATTR: getattr_,
    Opcode.SETATTR: setattr_,
    Opcode.STATFS: statfs,
    Opcode.GETXATTR: getxattr,
    Opcode.LISTXATTR: listxattr,
    Opcode.SETXATTR: setxattr,
    Opcode.REMOVEXATTR: removexattr,
}


def _kills_set_id(request: Request) -> bool:
    return bool(wire.SETATTR_IN.unpack_from(request.body)[0] & SetattrField.KILL_SET_ID)


def _drop_capability(session: Session, inode: int) -> None:
    """Remove a file capability, if there is one: asking needs no privilege, removing does."""
    try:
        session.operations.getxattr(inode, _CAPABILITY)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
    else:
        session.operations.removexattr(inode, _CAPABILITY)


def _changes(request: Request, now_ns: int) -> SetAttributes:
    fields = wire.SETATTR_IN.unpack_from(request.body)
    valid = SetattrField(fields[0])
    _, size, _, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns, mode, _, uid, gid, _ = fields[1:]
    return SetAttributes(
        mode=stat.S_IMODE(mode) if SetattrField.MODE in valid else None,
        uid=uid if SetattrField.UID in valid else None,
        gid=gid if SetattrField.GID in valid else None,
        size=size if SetattrField.SIZE in valid else None,
        atime_ns=_time(
            valid, SetattrField.ATIME, SetattrField.ATIME_NOW, atime * _NS + atime_ns, now_ns
        ),
        mtime_ns=_time(
            valid, SetattrField.MTIME, SetattrField.MTIME_NOW, mtime * _NS + mtime_ns, now_ns
        ),
        ctime_ns=ctime * _NS + ctime_ns if SetattrField.CTIME in valid else None,
    )


def _time(
    valid: SetattrField, given: SetattrField, now: SetattrField, time_ns: int, now_ns: int
) -> int | None:
    if now in valid:
        return now_ns
    return time_ns if given in valid else None


def _sized(value: bytes, size: int) -> bytes:
    if not size:
        return wire.XATTR_SIZE_OUT.pack(len(value))
    if len(value) > size:
        raise OSError(errno.ERANGE, "the value does not fit")
    return value


def _remove_if_there(operations: Operations, inode: int, name: bytes) -> None:
    try:
        operations.removexattr(inode, name)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise


def _set_access_acl(
    session: Session,
    operations: Operations,
    request: Request,
    value: bytes,
    *,
    kill_set_gid: bool,
) -> None:
    """Set permission bits, and the ACL itself if they do not say it all."""
    entries = acl.parse(value)
    inode, caller = request.inode, request.caller()
    mode = acl.apply_to_mode(entries, stat.S_IMODE(session.operations.getattr(inode).mode))
    if kill_set_gid:
        mode &= ~stat.S_ISGID
    if acl.is_minimal(entries):
        _remove_if_there(session.operations, inode, acl.ACCESS)
    else:
        operations.setxattr(inode, acl.ACCESS, value, XattrFlags.NONE, caller)
    session.operations.setattr(inode, SetAttributes(mode=mode), caller)


def _carry_mode(session: Session, request: Request, mode: int) -> None:
    try:
        entries = acl.parse(session.operations.getxattr(request.inode, acl.ACCESS))
    except OSError as error:
        if error.errno in _ABSENT:
            return
        raise
    value = acl.encode(acl.change_mode(entries, mode))
    caller = request.caller()
    session.operations.setxattr(request.inode, acl.ACCESS, value, XattrFlags.NONE, caller)
