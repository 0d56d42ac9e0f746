"""Requests about names: look up, make, link, move, remove; and the kernel's forgetting.

Every handler takes the session, the operations to ask (see `dispatch` for why they are apart)
and the request, and returns the reply's body, or None where the protocol wants no reply.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable

from tierwise.archive.fuse import acl, wire
from tierwise.archive.fuse.session import Request, Session
from tierwise.archive.fuse.wire import Opcode
from tierwise.archive.operations import (
    MAX_NAME_BYTES,
    Attributes,
    Opened,
    Operations,
    RenameFlags,
    XattrFlags,
)

Handler = Callable[[Session, Operations, Request], "bytes | None"]


def lookup(session: Session, operations: Operations, request: Request) -> bytes:
    """LOOKUP: a name; its absence may be remembered like its presence."""
    name = _name(request, 0)
    try:
        return session.entry(operations.lookup(request.inode, name))
    except OSError as error:
        if error.errno != errno.ENOENT or not session.entry_valid_ns:
            raise
        return wire.absent_reply(session.entry_valid_ns)


def forget(session: Session, _: Operations, request: Request) -> None:
    """FORGET: the kernel returns references."""
    session.dereference(request.inode, wire.FORGET_IN.unpack_from(request.body)[0])


def batch_forget(session: Session, _: Operations, request: Request) -> None:
    """BATCH_FORGET: the same for many inodes."""
    (count,) = wire.BATCH_FORGET_IN.unpack_from(request.body)
    start = wire.BATCH_FORGET_IN.size
    body = request.body[start : start + count * wire.FORGET_ONE.size]
    for inode, references in wire.FORGET_ONE.iter_unpack(body):
        session.dereference(inode, references)


def create(session: Session, operations: Operations, request: Request) -> bytes:
    """CREATE: make a regular file and open it."""
    flags, mode, umask, _ = wire.CREATE_IN.unpack_from(request.body)
    mode, inherited = _initial_mode(session, request.inode, mode, umask)
    name = _name(request, wire.CREATE_IN.size)
    attributes, opened = operations.create(request.inode, name, mode, flags, request.caller())
    return _made_and_opened(session, request, flags, (attributes, opened), inherited)


def tmpfile(session: Session, operations: Operations, request: Request) -> bytes:
    """TMPFILE: make a file without a name and open it."""
    flags, mode, umask, _ = wire.CREATE_IN.unpack_from(request.body)
    mode, inherited = _initial_mode(session, request.inode, mode, umask)
    attributes, opened = operations.tmpfile(request.inode, mode, flags, request.caller())
    return _made_and_opened(session, request, flags, (attributes, opened), inherited)


def mknod(session: Session, operations: Operations, request: Request) -> bytes:
    """MKNOD: make a file, FIFO, socket or device node."""
    mode, rdev, umask, _ = wire.MKNOD_IN.unpack_from(request.body)
    mode, inherited = _initial_mode(session, request.inode, mode, umask)
    name = _name(request, wire.MKNOD_IN.size)
    attributes = operations.mknod(request.inode, name, mode, rdev, request.caller())
    _set_inherited(session, request, attributes, inherited)
    return session.entry(attributes)


def mkdir(session: Session, operations: Operations, request: Request) -> bytes:
    """MKDIR: make a directory; a default ACL is handed down to it."""
    mode, umask = wire.MKDIR_IN.unpack_from(request.body)
    mode, inherited = _initial_mode(session, request.inode, mode | stat.S_IFDIR, umask)
    name = _name(request, wire.MKDIR_IN.size)
    attributes = operations.mkdir(request.inode, name, stat.S_IMODE(mode), request.caller())
    _set_inherited(session, request, attributes, inherited)
    return session.entry(attributes)


def symlink(session: Session, operations: Operations, request: Request) -> bytes:
    """SYMLINK: name, then target."""
    name, target = _names(request, 0)
    return session.entry(operations.symlink(request.inode, name, target, request.caller()))


def link(session: Session, operations: Operations, request: Request) -> bytes:
    """LINK: another name of an inode."""
    (inode,) = wire.LINK_IN.unpack_from(request.body)
    name = _name(request, wire.LINK_IN.size)
    return session.entry(operations.link(inode, request.inode, name))


def unlink(_: Session, operations: Operations, request: Request) -> bytes:
    """UNLINK: remove a name."""
    operations.unlink(request.inode, _name(request, 0))
    return b""


def rmdir(_: Session, operations: Operations, request: Request) -> bytes:
    """RMDIR: remove an empty directory."""
    operations.rmdir(request.inode, _name(request, 0))
    return b""


def rename(_: Session, operations: Operations, request: Request) -> bytes:
    """RENAME and RENAME2: move a name."""
    if request.opcode == Opcode.RENAME2:
        new_parent, flags = wire.RENAME2_IN.unpack_from(request.body)
        name, new_name = _names(request, wire.RENAME2_IN.size)
    else:
        (new_parent,), flags = wire.RENAME_IN.unpack_from(request.body), 0
        name, new_name = _names(request, wire.RENAME_IN.size)
    operations.rename(request.inode, name, new_parent, new_name, RenameFlags(flags))
    return b""


def readlink(_: Session, operations: Operations, request: Request) -> bytes:
    """READLINK: the target, without a NUL."""
    return operations.readlink(request.inode)


HANDLERS: dict[int, Handler] = {
    Opcode.LOOKUP: lookup,
    Opcode.FORGET: forget,
    Opcode.BATCH_FORGET: batch_forget,
    Opcode.CREATE: create,
    Opcode.TMPFILE: tmpfile,
    Opcode.MKNOD: mknod,
    Opcode.MKDIR: mkdir,
    Opcode.SYMLINK: symlink,
    Opcode.LINK: link,
    Opcode.UNLINK: unlink,
    Opcode.RMDIR: rmdir,
    Opcode.RENAME: rename,
    Opcode.RENAME2: rename,
    Opcode.READLINK: readlink,
}


def _name(request: Request, start: int) -> bytes:
    name = bytes(request.body[start:-1])
    if len(name) > MAX_NAME_BYTES:
        raise OSError(errno.ENAMETOOLONG, "a name has at most 255 bytes")
    return name


def _names(request: Request, start: int) -> tuple[bytes, bytes]:
    first, second, _ = bytes(request.body[start:]).split(b"\0")
    if len(first) > MAX_NAME_BYTES or (request.opcode != Opcode.SYMLINK and len(second) > 255):
        raise OSError(errno.ENAMETOOLONG, "a name has at most 255 bytes")
    return first, second


def _initial_mode(
    session: Session, parent: int, mode: int, umask: int
) -> tuple[int, tuple[acl.Acl, acl.Acl] | None]:
    """Return the mode to make an object with, and the (access, default) ACLs it inherits."""
    if wire.Init.DONT_MASK not in session.capabilities:
        return mode, None
    default = _default_acl(session, parent)
    if default is None:
        return mode & ~umask, None
    mode, access = acl.inherit(default, mode)
    return mode, (access, default)


def _default_acl(session: Session, directory: int) -> acl.Acl | None:
    if directory in session.without_default_acl:
        return None
    try:
        return acl.parse(session.operations.getxattr(directory, acl.DEFAULT))
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    session.without_default_acl.add(directory)
    return None


def _set_inherited(
    session: Session,
    request: Request,
    attributes: Attributes,
    inherited: tuple[acl.Acl, acl.Acl] | None,
) -> None:
    if inherited is None:
        return
    access, default = inherited
    wanted = [] if acl.is_minimal(access) else [(acl.ACCESS, access)]
    if stat.S_ISDIR(attributes.mode):
        wanted.append((acl.DEFAULT, default))
    for name, value in wanted:
        session.operations.setxattr(
            attributes.inode, name, acl.encode(value), XattrFlags.NONE, request.caller()
        )


def _made_and_opened(
    session: Session,
    request: Request,
    flags: int,
    made: tuple[Attributes, Opened],
    inherited: tuple[acl.Acl, acl.Acl] | None,
) -> bytes:
    attributes, opened = made
    try:
        _set_inherited(session, request, attributes, inherited)
    except OSError:
        session.operations.release(attributes.inode, opened.handle)
        raise
    reply = session.opened(attributes.inode, opened, flags)
    return session.entry(attributes) + reply
