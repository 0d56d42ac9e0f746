"""The catalogue's state as JSON records: what each image carries so that discs alone rebuild it.

One record says everything about one inode at one sequence number; of several, the highest wins.
That makes a rebuild from any subset of discs a merge, and lets a rename or a chmod of a burned
file reach the next disc as one line. Byte strings are escaped as in docs/formats/image.md,
attribute values are base64. The fields are listed in docs/formats/catalogue.md.

Left out: the file bytes' places; those are read off the image itself.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.disc_names import escape_name, escape_path, unescape_name, unescape_path
from tierwise.archive.operations import ROOT_INODE

Record = dict[str, Any]
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
        "SELECT version, number, size, mtime_ns, created_ns, sha256 FROM versions"
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


def decode_names(record: Record) -> list[tuple[int, bytes]]:
    """Return an inode record's names as (parent inode, name)."""
    return [(int(parent), unescape_name(name)) for parent, name in record["names"]]


def decode_xattrs(record: Record) -> dict[bytes, bytes]:
    """Return an inode record's extended attributes."""
    found: dict[str, str] = record.get("xattrs", {})
    return {unescape_name(name): base64.b64decode(value) for name, value in found.items()}


def decode_target(record: Record) -> bytes | None:
    """Return an inode record's symbolic link target, or None."""
    return unescape_path(record["target"]) if "target" in record else None


def inode_values(record: Record) -> tuple[int, ...]:
    """Return (mode, uid, gid, rdev, size, atime, mtime, ctime) of an inode record."""
    return tuple(int(record[name]) for name in _INODE_FIELDS)
