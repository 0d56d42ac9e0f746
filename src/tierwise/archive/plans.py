"""Planned images as JSON rows in the catalogue, and the names images and arrays get.

Left out: choosing what goes into an image (`bucket`) and making it (`seal`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from tierwise.archive.disc_names import escape_name, escape_path, unescape_name, unescape_path
from tierwise.archive.image import NodeKind, SealEntry
from tierwise.archive.slices import Record
from tierwise.archive.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a version: bytes `offset` to `offset + length`, number `index` of `count`."""

    version: int
    ino: int
    size: int
    number: int
    index: int
    count: int
    offset: int
    length: int


def with_piece(plain: SealEntry, piece: Piece, store: Store) -> SealEntry:
    """Return a file's entry with the bytes of a piece."""
    return replace(
        plain,
        size=piece.size,
        source=store.path(piece.version),
        source_offset=piece.offset,
        length=piece.length,
        version=piece.number,
        piece_index=piece.index,
        piece_count=piece.count,
        piece_offset=piece.offset,
        extra={"version": piece.version},
    )


def image_label(archive_id: str, array: int, kind: str, position: int) -> str:
    """Return the volume label of an image: archive, array, kind and position.

    >>> image_label("0123456789abcdef" * 2, 3, "parity", 11)
    'TW_01234567_A00003_P011'
    """
    return f"TW_{archive_id[:8].upper()}_A{array:05d}_{kind[0].upper()}{position:03d}"


def image_id(archive_id: str, label: str) -> str:
    """Return the 32 hex digits that name an image on its disc."""
    return digest_id(archive_id, label)


def digest_id(archive_id: str, text: str) -> str:
    """Return 32 hex digits for a thing of an archive, the same whenever they are asked for."""
    return hashlib.sha256(f"{archive_id}/{text}".encode()).hexdigest()[:32]


def entry_json(entry: SealEntry, note: Record) -> dict[str, Any]:
    """Return a planned entry as JSON, without the bytes' place in the buffer."""
    return {
        "paths": [escape_path(path) for path in entry.paths],
        "kind": str(entry.kind),
        "numbers": [
            entry.inode, entry.mode, entry.uid, entry.gid, entry.rdev, entry.mtime_ns,
            entry.atime_ns, entry.ctime_ns, entry.size, entry.source_offset, entry.length,
            entry.version, entry.piece_index, entry.piece_count, entry.piece_offset,
        ],
        "target": escape_path(entry.target),
        "xattrs": {escape_name(name): value.hex() for name, value in entry.xattrs.items()},
        "extra": note,
    }  # fmt: skip


def entry_from_json(body: dict[str, Any], store: Store) -> SealEntry:
    """Return a planned entry as the image writer takes it."""
    numbers: list[Any] = body["numbers"]
    version = body["extra"].get("version")
    return SealEntry(
        paths=tuple(unescape_path(path) for path in body["paths"]),
        kind=NodeKind(body["kind"]),
        inode=numbers[0],
        mode=numbers[1],
        uid=numbers[2],
        gid=numbers[3],
        rdev=numbers[4],
        mtime_ns=numbers[5],
        atime_ns=numbers[6],
        ctime_ns=numbers[7],
        size=numbers[8],
        source=None if version is None else store.path(version),
        source_offset=numbers[9],
        length=numbers[10],
        version=numbers[11],
        piece_index=numbers[12],
        piece_count=numbers[13],
        piece_offset=numbers[14],
        target=unescape_path(body["target"]),
        xattrs={unescape_name(name): bytes.fromhex(v) for name, v in body["xattrs"].items()},
        extra=body["extra"],
    )
