"""The catalogue's state as JSON records: what each image carries so that discs alone rebuild it.

One record says everything about one inode at one sequence number; of several, the highest wins.
That makes a rebuild from any subset of discs a merge, and lets a rename or a chmod of a burned
file reach the next disc as one line. Byte strings are escaped as in docs/formats/image.md,
attribute values are base64. The fields are listed in docs/formats/catalogue.md.

Left out: the file bytes' places; those are read off the image itself.
"""

from __future__ import annotations

import base64
import binascii
import json
import stat
from collections.abc import Mapping
from typing import Any

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.disc_names import escape_name, escape_path, unescape_name, unescape_path
from tierwise.archive.operations import MAX_NAME_BYTES, ROOT_INODE
from tierwise.core.errors import DataError

Record = dict[str, Any]
_KINDS = (
    stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR,
    stat.S_IFBLK,
)  # fmt: skip
_INODE_FIELDS = ("mode", "uid", "gid", "rdev", "size", "atime_ns", "mtime_ns", "ctime_ns")


def line_bytes(record: Mapping[str, object]) -> int:
    """Return an upper bound of what a record takes up on an image."""
    return len(json.dumps(record)) + 16


def inode_record(catalogue: Catalogue, ino: int, *, unsealed: bool = False) -> Record:
    """Return an inode's state, with those of its versions that are on images or going there.

    Args:
        catalogue: The open catalogue.
        ino: The inode.
        unsealed: Also the version that is only in the buffer, which no image carries.
    """
    columns = ", ".join(_INODE_FIELDS)
    row = catalogue.one(f"SELECT seq, target, {columns} FROM inodes WHERE ino = ?", ino)
    assert row is not None
    record: Record = {"record": "inode", "inode": ino, "seq": row[0]}
    record |= dict(zip(_INODE_FIELDS, row[2:], strict=True))
    if row[1] is not None:
        record["target"] = escape_path(row[1])
    path = path_of(catalogue, ino)
    if path is not None:
        record["path"] = escape_path(path)
    names = catalogue.all("SELECT parent, name FROM names WHERE ino = ? ORDER BY cookie", ino)
    record["names"] = [[parent, escape_name(name)] for parent, name in names]
    xattrs = catalogue.all("SELECT name, value FROM xattrs WHERE ino = ? ORDER BY name", ino)
    if xattrs:
        record["xattrs"] = {
            escape_name(name): base64.b64encode(value).decode() for name, value in xattrs
        }
    versions = catalogue.all(
        "SELECT version, number, size, mtime_ns, created_ns,"
        " CASE state WHEN 'bucket' THEN NULL ELSE sha256 END FROM versions"
        " WHERE ino = ? AND (state <> 'bucket' OR ?) ORDER BY number", ino, int(unsealed),
    )  # fmt: skip
    if versions:
        record["versions"] = [list(version) for version in versions]
    return record


def path_of(catalogue: Catalogue, ino: int) -> bytes | None:
    """Return a path of an inode without the leading slash (its first name), or None."""
    parts: list[bytes] = []
    while ino != ROOT_INODE:
        row = catalogue.one(
            "SELECT parent, name FROM names WHERE ino = ? ORDER BY cookie LIMIT 1", ino
        )
        if row is None:
            return None
        ino = row[0]
        parts.append(row[1])
    return b"/".join(reversed(parts))


def tombstone_record(ino: int, path: bytes, deleted_ns: int, seq: int) -> Record:
    """Return the record that keeps a deleted inode from coming back."""
    return {
        "record": "tombstone", "inode": ino, "path": escape_path(path), "time_ns": deleted_ns,
        "seq": seq,
    }  # fmt: skip


def archive_record(catalogue: Catalogue, settings: Mapping[str, object]) -> Record:
    """Return the archive's settings and counters, so that numbers are never used twice."""
    counters: dict[str, int] = dict(
        catalogue.all("SELECT name, seq FROM sqlite_sequence WHERE name IN ('inodes', 'versions')")
    )
    return {
        "record": "archive",
        "seq": catalogue.value("SELECT value FROM meta WHERE key = 'seq'"),
        "last_inode": counters.get("inodes", 0),
        "last_version": counters.get("versions", 0),
        "settings": dict(settings),
    }


def check_record(record: Mapping[str, Any]) -> None:
    """Refuse a record no archive writes, so that damage or malice on one disc spoils no rebuild.

    Raises:
        DataError: A field is missing or impossible: a name that leads elsewhere, say.
    """
    try:
        _check_numbers(record, "inode", "seq")
        if int(record["inode"]) < ROOT_INODE:
            raise DataError(f"{record['inode']} is no inode")
        if record["record"] == "inode":
            _check_inode(dict(record))
        elif record["record"] == "tombstone":
            _check_numbers(record, "time_ns")
            unescape_path(record["path"])
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise DataError(f"malformed: {type(error).__name__} {error}") from error


def _check_inode(record: Record) -> None:
    _check_numbers(record, *_INODE_FIELDS)
    if stat.S_IFMT(record["mode"]) not in _KINDS or record["size"] < 0:
        raise DataError("its mode or its size is none a file can have")
    for parent, name in decode_names(record):
        if parent < ROOT_INODE or parent == record["inode"] or not _is_name(name):
            raise DataError(f"{name!r} in folder {parent} is no name")
    if record["names"]:
        unescape_path(record["path"])
    decode_target(record)
    decode_xattrs(record)
    versions = record.get("versions", [])
    if any(len({row[i] for row in versions}) < len(versions) for i in (0, 1)):
        raise DataError("two of its contents have one number")
    for row in versions:
        _, _, _, _, _, sha256 = row
        for number in row[:5]:
            _check_number(number)
        if sha256 is not None and len(bytes.fromhex(sha256)) != 32:
            raise DataError(f"{sha256!r} is no SHA-256")


def _check_numbers(record: Mapping[str, Any], *names: str) -> None:
    for name in names:
        _check_number(record[name])


def _check_number(value: object) -> None:
    if not (isinstance(value, int) and -(1 << 63) <= value < 1 << 63):
        raise DataError(f"{value!r} is no number of 64 bits")


def _is_name(name: bytes) -> bool:
    """Return whether a name may stand in a folder.

    >>> [_is_name(name) for name in (b"a", b"", b"..", b"a/b", b"x" * 256)]
    [True, False, False, False, False]
    """
    return (
        0 < len(name) <= MAX_NAME_BYTES
        and name not in (b".", b"..")
        and not set(name) & set(b"/\0")
    )


def decode_names(record: Record) -> list[tuple[int, bytes]]:
    """Return an inode record's names as (parent inode, name)."""
    return [(int(parent), unescape_name(name)) for parent, name in record["names"]]


def decode_xattrs(record: Record) -> dict[bytes, bytes]:
    """Return an inode record's extended attributes."""
    found: dict[str, str] = record.get("xattrs", {})
    return {
        unescape_name(name): base64.b64decode(value, validate=True) for name, value in found.items()
    }


def decode_target(record: Record) -> bytes | None:
    """Return an inode record's symbolic link target, or None."""
    return unescape_path(record["target"]) if "target" in record else None


def inode_values(record: Record) -> tuple[int, ...]:
    """Return (mode, uid, gid, rdev, size, atime, mtime, ctime) of an inode record."""
    return tuple(int(record[name]) for name in _INODE_FIELDS)
