"""What the catalogue answers without touching media: listings, versions, events, trees.

Left out: which discs a restore needs, which belongs to the queue (`requests`).
"""

from __future__ import annotations

import datetime
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.files import as_bytes
from tierwise.archive.fs import state_word
from tierwise.archive.namespace import Namespace
from tierwise.archive.operations import Attributes
from tierwise.core.errors import MissingFileError

AnyPath = str | bytes | Path


def resolve(catalogue: Catalogue, path: AnyPath) -> tuple[bytes, Attributes]:
    """Return a path as bytes and what it leads to.

    Raises:
        MissingFileError: Nothing has that name.
    """
    base = as_bytes(path)
    try:
        return base, Namespace(catalogue).resolve(base)
    except OSError as error:
        raise MissingFileError(
            f"nothing named {os.fsdecode(path)} in the archive",
            hint="paths count from the archive's root, not from where it is mounted",
        ) from error


def walk(names: Namespace, base: bytes, top: Attributes) -> Iterator[tuple[bytes, Attributes]]:
    """Yield (path, attributes) of an inode and everything below it, names in order."""
    yield base, top
    if stat.S_ISDIR(top.mode):
        for entry in sorted(names.entries(top.inode, 0), key=lambda found: found.name):
            below = base + b"/" + entry.name if base else entry.name
            assert entry.attributes is not None
            yield from walk(names, below, entry.attributes)


def files_below(catalogue: Catalogue, paths: Iterable[AnyPath]) -> list[tuple[bytes, int]]:
    """Return (path, current version) of files, and of all files below folders."""
    names = Namespace(catalogue)
    found: dict[bytes, int] = {}
    for path in paths:
        for below, entry in walk(names, *resolve(catalogue, path)):
            version = catalogue.value("SELECT version FROM inodes WHERE ino = ?", entry.inode)
            if version is not None:
                found[below] = version
    return list(found.items())


def versions_below(catalogue: Catalogue, paths: Iterable[AnyPath]) -> list[int]:
    """Return the current versions of files, and of all files below folders, each once."""
    return list(dict.fromkeys(version for _, version in files_below(catalogue, paths)))


def others_below(
    catalogue: Catalogue, paths: Iterable[AnyPath]
) -> list[tuple[bytes, bytes | None]]:
    """Return the folders (path, None) and symbolic links (path, target) below some paths."""
    names = Namespace(catalogue)
    found: list[tuple[bytes, bytes | None]] = []
    for path in paths:
        for below, entry in walk(names, *resolve(catalogue, path)):
            if stat.S_ISDIR(entry.mode):
                found.append((below, None))
            elif stat.S_ISLNK(entry.mode):
                found.append((below, names.readlink(entry.inode)))
    return found


def list_folder(catalogue: Catalogue, path: AnyPath) -> list[dict[str, Any]]:
    """Return a folder's entries, or the file itself: name, mode, size, time, state, discs."""
    base, top = resolve(catalogue, path)
    if not stat.S_ISDIR(top.mode):
        return [_list_row(catalogue, os.fsdecode(base), top)]
    entries = sorted(Namespace(catalogue).entries(top.inode, 0), key=lambda entry: entry.name)
    return [
        _list_row(catalogue, os.fsdecode(entry.name), entry.attributes)
        for entry in entries
        if entry.attributes is not None
    ]


def _list_row(catalogue: Catalogue, name: str, found: Attributes) -> dict[str, Any]:
    row = catalogue.one(
        "SELECT v.version, v.number, v.state, v.resident FROM inodes i JOIN versions v"
        " ON v.version = i.version WHERE i.ino = ?", found.inode,
    )  # fmt: skip
    kind = "folder" if stat.S_ISDIR(found.mode) else "other"
    return {
        "name": name,
        "mode": stat.filemode(found.mode),
        "size": found.size,
        "mtime_ns": found.mtime_ns,
        "state": kind if row is None else state_word(row[2], row[3]),
        "version": None if row is None else row[1],
        "discs": [] if row is None else _labels_of(catalogue, row[0]),
    }


def _labels_of(catalogue: Catalogue, version: int) -> list[str]:
    rows = catalogue.all(
        "SELECT label FROM extents JOIN images USING (image) WHERE version = ? ORDER BY piece",
        version,
    )
    return [row[0] for row in rows]


def list_versions(catalogue: Catalogue, path: AnyPath) -> list[dict[str, Any]]:
    """Return the contents a file has had, oldest first."""
    rows = catalogue.all(
        "SELECT version, number, size, mtime_ns, sha256, state, resident FROM versions"
        " WHERE ino = ? ORDER BY number", resolve(catalogue, path)[1].inode,
    )  # fmt: skip
    return [
        {
            "number": number, "size": size, "mtime_ns": mtime_ns, "sha256": sha256,
            "state": state_word(state, resident), "discs": _labels_of(catalogue, version),
        }
        for version, number, size, mtime_ns, sha256, state, resident in rows
    ]  # fmt: skip


def list_events(catalogue: Catalogue, last: int) -> list[dict[str, Any]]:
    """Return the last events, oldest first, in PREMIS terms."""
    rows = catalogue.all(
        "SELECT time_ns, type, object, outcome, detail FROM events ORDER BY event DESC LIMIT ?",
        last,
    )
    return [
        {
            "time": datetime.datetime.fromtimestamp(time_ns / 1e9, tz=datetime.UTC).isoformat(
                timespec="seconds"
            ),
            "type": kind, "object": about, "outcome": outcome, "detail": detail,
        }
        for time_ns, kind, about, outcome, detail in reversed(rows)
    ]  # fmt: skip
