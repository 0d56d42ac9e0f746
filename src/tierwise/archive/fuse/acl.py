"""POSIX access control lists: the part a file system does, the kernel doing the checking.

An ACL and the permission bits say some things twice; they are kept equal here: setting an ACL
sets the bits, chmod rewrites the ACL, and what is made in a directory with a default ACL
inherits it in place of the umask. All functions are pure.

Source: POSIX.1e draft 17, 23.1-23.3; acl(5); the byte layout is that of the kernel's
`struct posix_acl_xattr_entry`, https://github.com/torvalds/linux/blob/master/include/uapi/linux/posix_acl_xattr.h
"""

from __future__ import annotations

import errno
import stat
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

ACCESS: Final = b"system.posix_acl_access"
DEFAULT: Final = b"system.posix_acl_default"

_VERSION: Final = 2
_HEADER = struct.Struct("<I")
_ENTRY = struct.Struct("<HHI")


class Tag(IntEnum):
    """Whom an entry is about."""

    USER_OBJ = 0x01
    USER = 0x02
    GROUP_OBJ = 0x04
    GROUP = 0x08
    MASK = 0x10
    OTHER = 0x20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of an ACL: `user:identifier:permissions`."""

    tag: Tag
    permissions: int
    identifier: int = 0xFFFFFFFF


Acl = tuple[Entry, ...]


def parse(value: bytes) -> Acl:
    """Return the ACL in an extended attribute's value.

    Raises:
        OSError: EINVAL if it is malformed.
    """
    body = memoryview(value)[_HEADER.size :]
    if len(value) < _HEADER.size or len(body) % _ENTRY.size:
        raise OSError(errno.EINVAL, "malformed ACL")
    if _HEADER.unpack_from(value)[0] != _VERSION:
        raise OSError(errno.EOPNOTSUPP, "unknown version of ACL")
    try:
        return tuple(
            Entry(tag=Tag(tag), permissions=permissions, identifier=identifier)
            for tag, permissions, identifier in _ENTRY.iter_unpack(body)
        )
    except ValueError as error:
        raise OSError(errno.EINVAL, "malformed ACL") from error


def encode(acl: Acl) -> bytes:
    """Return an ACL as an extended attribute's value."""
    return _HEADER.pack(_VERSION) + b"".join(
        _ENTRY.pack(entry.tag, entry.permissions, entry.identifier) for entry in acl
    )


def is_minimal(acl: Acl) -> bool:
    """Return whether permission bits say all that the ACL says."""
    return all(entry.tag in (Tag.USER_OBJ, Tag.GROUP_OBJ, Tag.OTHER) for entry in acl)


def apply_to_mode(acl: Acl, mode: int) -> int:
    """Return the mode with the permission bits an access ACL implies; the mask is the group's.

    >>> acl = mode_to_acl(0o640)
    >>> oct(apply_to_mode(acl, 0o100777))
    '0o100640'
    """
    permissions = {entry.tag: entry.permissions for entry in acl}
    group = permissions.get(Tag.MASK, permissions.get(Tag.GROUP_OBJ, 0))
    bits = permissions.get(Tag.USER_OBJ, 0) << 6 | group << 3 | permissions.get(Tag.OTHER, 0)
    return mode & ~0o777 | bits


def mode_to_acl(mode: int) -> Acl:
    """Return the minimal ACL that says what permission bits say."""
    return (
        Entry(tag=Tag.USER_OBJ, permissions=mode >> 6 & 7),
        Entry(tag=Tag.GROUP_OBJ, permissions=mode >> 3 & 7),
        Entry(tag=Tag.OTHER, permissions=mode & 7),
    )


def change_mode(acl: Acl, mode: int) -> Acl:
    """Return an access ACL after chmod: owner, other, and the mask (or the group without one)."""
    group_tag = Tag.MASK if any(entry.tag is Tag.MASK for entry in acl) else Tag.GROUP_OBJ
    bits = {Tag.USER_OBJ: mode >> 6 & 7, group_tag: mode >> 3 & 7, Tag.OTHER: mode & 7}
    return tuple(
        replace(entry, permissions=bits[entry.tag]) if entry.tag in bits else entry for entry in acl
    )


def inherit(default: Acl, mode: int) -> tuple[int, Acl]:
    """Return the mode and the access ACL of an object made under a default ACL.

    Args:
        default: The directory's default ACL.
        mode: Type and bits asked for, the umask not applied.
    """
    permissions = {entry.tag: entry.permissions for entry in default}
    group_tag = Tag.MASK if Tag.MASK in permissions else Tag.GROUP_OBJ
    asked = {Tag.USER_OBJ: mode >> 6 & 7, group_tag: mode >> 3 & 7, Tag.OTHER: mode & 7}
    access = tuple(
        replace(entry, permissions=entry.permissions & asked.get(entry.tag, 7)) for entry in default
    )
    return apply_to_mode(access, mode & ~0o777 | stat.S_IMODE(mode) & 0o7000), access
