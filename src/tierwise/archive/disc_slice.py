"""What a disc says about itself: entries, identity, array position; as JSON lines and back.

Each image carries `CATALOGUE.jsonl`, the slice of the catalogue that its files need: true names,
every time to the nanosecond, versions, pieces, links, extended attributes, and whatever records
the catalogue adds (tombstones, renames). This module holds the values and their encoding, pure
and strict; docs/formats/image.md is its specification. Left out: where bytes lie in the image,
which the file systems on the disc say better.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tierwise.archive.disc_names import escape_name, escape_path, unescape_name, unescape_path
from tierwise.core.errors import DataError, UsageError

FORMAT_VERSION = 1
APPLICATION = "TIERWISE"  # in the ISO 9660 descriptor: what makes a damaged disc ours
CHECKSUM_PREFIX = "TIERWISE CRC32 "  # there too, before eight hex digits (ImageChecksum)
CHECKSUM_OFFSET = 16 * 2048 + 883 + len(CHECKSUM_PREFIX)
CATALOGUE_NAME = "CATALOGUE.jsonl"
MANIFEST_NAME = "MANIFEST.sha256"
ARRAY_NAME = "ARRAY.json"
FORMAT_NAME = "FORMAT.txt"
PARITY_NAME = "PARITY.bin"
CHECKSUMS_NAME = "CHECKSUMS.bin"
DATA_NAME = "data"


class NodeKind(StrEnum):
    """What a path of the archive is; the last four exist in the slice only."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    CHAR = "char"
    BLOCK = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class SealEntry:
    """One inode's version, or one piece of it, as it goes to disc.

    Args:
        paths: Its names from the archive's root, without a leading slash; several are hard links.
        kind: What it is; `rdev` belongs to devices, `target` to symbolic links.
        inode: The archive's inode number, stable for ever.
        mode: Permission bits, 0-0o7777.
        mtime_ns: Nanoseconds since the epoch, as `atime_ns` and `ctime_ns`.
        size: Bytes of the whole file, also where this is only a piece of it.
        source: The file that holds the bytes; None for an entry read from a disc.
        source_offset: Where in `source` the bytes start.
        length: How many of them; None means `size - piece_offset`.
        sha256: Of these bytes; computed while sealing when None.
        version: Rises by one with each rewrite of the file.
        piece_index: Which piece, from 0, of `piece_count`; it starts at `piece_offset`.
        xattrs: Extended attributes, names and values as bytes.
        extra: JSON fields of the caller's own; they come back as they went in.
    """

    paths: tuple[bytes, ...]
    kind: NodeKind
    inode: int
    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    atime_ns: int = 0
    ctime_ns: int = 0
    rdev: int = 0
    size: int = 0
    source: Path | None = None
    source_offset: int = 0
    length: int | None = None
    sha256: str | None = None
    target: bytes = b""
    version: int = 1
    piece_index: int = 0
    piece_count: int = 1
    piece_offset: int = 0
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Return how many bytes this entry puts on the disc."""
        if self.kind is not NodeKind.FILE:
            return 0
        return self.size - self.piece_offset if self.length is None else self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageIdentity:
    """Which image this is; ids are 32 hex digits, `label` is the volume's name."""

    archive_id: str
    image_id: str
    label: str
    sequence: int

    def __post_init__(self) -> None:
        """Refuse what could not stand on a disc."""
        _check_hex(self.archive_id, "archive_id")
        _check_hex(self.image_id, "image_id")
        if not re.fullmatch(r"[A-Z0-9_]{1,30}", self.label):
            raise UsageError(f"label {self.label!r} is not 1-30 of A-Z, 0-9 and _")
        if self.sequence < 0:
            raise UsageError(f"sequence {self.sequence} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPosition:
    """Where an image stands in its array; `siblings` are the (image id, bytes) sealed before."""

    array_id: str
    index: int
    data_count: int
    parity_count: int
    siblings: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        """Refuse an index outside the array."""
        _check_hex(self.array_id, "array_id")
        if not 0 <= self.index < self.data_count + self.parity_count:
            raise UsageError(f"index {self.index} is outside the array")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A parsed `CATALOGUE.jsonl`; `disc_paths` are where each entry's names stand."""

    identity: ImageIdentity
    created_ns: int
    array: ArrayPosition | None
    entries: tuple[SealEntry, ...]
    disc_paths: tuple[tuple[str, ...], ...]
    records: tuple[dict[str, Any], ...]


def _check_hex(text: str, what: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise UsageError(f"{what} {text!r} is not 32 lower-case hex digits")


def encode_slice(
    *,
    identity: ImageIdentity,
    created_ns: int,
    array: ArrayPosition | None,
    entries: Sequence[tuple[SealEntry, tuple[str, ...]]],
    records: Iterable[Mapping[str, object]],
) -> bytes:
    """Return the slice: a header line, a line an entry, the caller's records, an end line."""
    head = {
        "record": "image", "format": FORMAT_VERSION, "archive_id": identity.archive_id,
        "image_id": identity.image_id, "label": identity.label, "sequence": identity.sequence,
        "created_ns": created_ns, "array": None if array is None else encode_position(array),
    }  # fmt: skip
    lines = [_line(head)]
    lines += [_line(_encode_entry(entry, disc_paths)) for entry, disc_paths in entries]
    for record in records:
        if record.get("record") in ("image", "entry", "end", None):
            raise UsageError(f"a catalogue record cannot be called {record.get('record')!r}")
        lines.append(_line(record))
    lines.append(_line({"record": "end", "num_lines": len(lines) + 1}))
    return b"".join(lines)


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def encode_position(array: ArrayPosition) -> dict[str, object]:
    """Return an array position as JSON values."""
    return {
        "array_id": array.array_id, "index": array.index, "data_count": array.data_count,
        "parity_count": array.parity_count, "siblings": [list(pair) for pair in array.siblings],
    }  # fmt: skip


def _encode_entry(entry: SealEntry, disc_paths: tuple[str, ...]) -> dict[str, object]:
    row: dict[str, object] = {
        "record": "entry", "kind": str(entry.kind), "paths": [escape_path(p) for p in entry.paths],
        "disc_paths": list(disc_paths), "inode": entry.inode, "version": entry.version,
        "mode": entry.mode, "uid": entry.uid, "gid": entry.gid, "mtime_ns": entry.mtime_ns,
        "atime_ns": entry.atime_ns, "ctime_ns": entry.ctime_ns, "size": entry.size,
    }  # fmt: skip
    if entry.kind is NodeKind.FILE:
        row |= {"length": entry.stored_bytes, "sha256": entry.sha256}
    if entry.piece_count > 1:
        row["piece"] = {
            "index": entry.piece_index, "count": entry.piece_count, "offset": entry.piece_offset
        }  # fmt: skip
    if entry.kind is NodeKind.SYMLINK:
        row["target"] = escape_path(entry.target)
    if entry.rdev:
        row["rdev"] = entry.rdev
    if entry.xattrs:
        row["xattrs"] = {
            escape_name(name): base64.b64encode(value).decode("ascii")
            for name, value in sorted(entry.xattrs.items())
        }
    if entry.extra:
        row["extra"] = dict(entry.extra)
    return row


def decode_slice(data: bytes) -> Slice:
    """Return a parsed slice.

    Raises:
        DataError: A line is missing or malformed, or the format is newer than this program.
    """
    rows = _rows(data)
    head = rows[0]
    if head.get("record") != "image":
        raise DataError(f"{CATALOGUE_NAME} does not start with its header")
    if head.get("format") != FORMAT_VERSION:
        raise DataError(
            f"the disc's format is {head.get('format')!r}, this program reads {FORMAT_VERSION}",
            hint="use a newer tierwise; FORMAT.txt on the disc says how to read it without any",
        )
    if rows[-1] != {"record": "end", "num_lines": len(rows)}:
        raise DataError(f"{CATALOGUE_NAME} is not complete")
    try:
        pairs = [_decode_entry(row) for row in rows[1:-1] if row["record"] == "entry"]
        return Slice(
            identity=ImageIdentity(
                archive_id=head["archive_id"], image_id=head["image_id"], label=head["label"],
                sequence=head["sequence"],
            ),
            created_ns=int(head["created_ns"]),
            array=None if head["array"] is None else decode_position(head["array"]),
            entries=tuple(entry for entry, _ in pairs),
            disc_paths=tuple(paths for _, paths in pairs),
            records=tuple(row for row in rows[1:-1] if row["record"] != "entry"),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise DataError(f"{CATALOGUE_NAME} has a malformed line: {error}") from error


def _rows(data: bytes) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{CATALOGUE_NAME}:{number} is not JSON") from error
        if not isinstance(row, dict) or "record" not in row:
            raise DataError(f"{CATALOGUE_NAME}:{number} is not a record")
        rows.append(row)
    if not rows:
        raise DataError(f"{CATALOGUE_NAME} is empty")
    return rows


def decode_position(row: Mapping[str, Any]) -> ArrayPosition:
    """Return an array position from JSON values."""
    return ArrayPosition(
        array_id=row["array_id"],
        index=int(row["index"]),
        data_count=int(row["data_count"]),
        parity_count=int(row["parity_count"]),
        siblings=tuple((str(image_id), int(length)) for image_id, length in row["siblings"]),
    )


def _decode_entry(row: Mapping[str, Any]) -> tuple[SealEntry, tuple[str, ...]]:
    piece = row.get("piece", {"index": 0, "count": 1, "offset": 0})
    entry = SealEntry(
        paths=tuple(unescape_path(text) for text in row["paths"]),
        kind=NodeKind(row["kind"]),
        inode=int(row["inode"]),
        version=int(row["version"]),
        mode=int(row["mode"]),
        uid=int(row["uid"]),
        gid=int(row["gid"]),
        mtime_ns=int(row["mtime_ns"]),
        atime_ns=int(row["atime_ns"]),
        ctime_ns=int(row["ctime_ns"]),
        size=int(row["size"]),
        rdev=int(row.get("rdev", 0)),
        length=row.get("length"),
        sha256=row.get("sha256"),
        target=unescape_path(row.get("target", "")),
        piece_index=int(piece["index"]),
        piece_count=int(piece["count"]),
        piece_offset=int(piece["offset"]),
        xattrs={
            unescape_name(name): base64.b64decode(value, validate=True)
            for name, value in row.get("xattrs", {}).items()
        },
        extra=row.get("extra", {}),
    )
    return entry, tuple(row["disc_paths"])


class ImageChecksum:
    """CRC-32 of a whole image, its own eight digits in sector 16 read as zeros; fed in order."""

    def __init__(self) -> None:
        self._value, self._position = 0, 0

    def update(self, block: bytes) -> None:
        """Take the next bytes of the image."""
        start = CHECKSUM_OFFSET - self._position
        self._position += len(block)
        if -8 < start < len(block):
            digits = slice(max(start, 0), min(start + 8, len(block)))
            patched = bytearray(block)
            patched[digits] = b"0" * (digits.stop - digits.start)
            block = bytes(patched)
        self._value = zlib.crc32(block, self._value)

    def digits(self) -> str:
        """Return the eight hex digits."""
        return f"{self._value:08x}"


def encode_manifest(digests: Mapping[str, str]) -> bytes:
    """Return `sha256sum -c` lines, sorted by path; disc paths hold no newline or backslash."""
    return "".join(f"{digests[path]}  {path}\n" for path in sorted(digests)).encode("utf-8")


def decode_manifest(data: bytes) -> dict[str, str]:
    """Return path -> SHA-256 hex.

    Raises:
        DataError: A line is malformed.
    """
    digests = {}
    for number, line in enumerate(data.decode("utf-8", errors="replace").split("\n")[:-1], start=1):
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if match is None:
            raise DataError(f"{MANIFEST_NAME}:{number} is malformed")
        digests[match[2]] = match[1]
    if not data.endswith(b"\n"):
        raise DataError(f"{MANIFEST_NAME} is not complete")
    return digests
