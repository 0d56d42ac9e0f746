"""A bucket's entries -> one sealed disc image, verified, with the place of every file in it.

```
entries -> names on the disc -> hashes -> slice, manifest, notes -> ISO 9660 + UDF -> read back
```

An image holds `data/` with the files under their full paths, and in its root what makes it
readable without this program: FORMAT.txt, MANIFEST.sha256, CATALOGUE.jsonl, ARRAY.json
(docs/formats/image.md). It is written to a temporary file, read back by `discs.check_disc`, which
shares no code with the writer, and only then given its name. The same entries and time give the
same bytes. Left out: choosing what goes into an image, which is the catalogue's business.

Source: Yan et al., EuroSys 2017, doi:10.1145/3064176.3064207 (unified file path, disc images);
sizes of the structures from ECMA-119 and ECMA-167. The name escapes and the slice are our own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tierwise.archive.disc_names import (
    disc_name,
    disc_path,
    escape_path,
    piece_mark,
    version_mark,
)
from tierwise.archive.disc_slice import (
    ARRAY_NAME,
    CATALOGUE_NAME,
    DATA_NAME,
    FORMAT_NAME,
    MANIFEST_NAME,
    ArrayPosition,
    ImageIdentity,
    NodeKind,
    SealEntry,
    encode_manifest,
    encode_position,
    encode_slice,
)
from tierwise.archive.discs import check_disc
from tierwise.archive.format_note import format_note
from tierwise.archive.iso_writer import SECTOR_BYTES, NodeShape, PlanNode, write_iso
from tierwise.core.errors import IntegrityError, MissingFileError, UsageError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import whole_file
from tierwise.core.units import format_size

__all__ = [
    "ArrayPosition",
    "ImageIdentity",
    "NodeKind",
    "SealEntry",
    "Extent",
    "SealedImage",
    "seal_image",
    "entry_bytes_bound",
    "payload_capacity",
    "data_image_limit",
    "IMAGE_OVERHEAD_BYTES",
    "MAX_DIRECTORIES",
]

IMAGE_OVERHEAD_BYTES = 640 * 1024  # 257 sectors up to the UDF anchor, descriptors, root, notes
MAX_DIRECTORIES = 65_000  # ISO 9660's path table numbers directories with 16 bits
_READ_BYTES = 1 << 20
_MAX_TARGET = 1000  # a longer link target does not fit the disc's records; the slice has it
_CHECKSUM_BLOCK = 65536
_DIRECTORY_BYTES = 3 * SECTOR_BYTES + 64  # both sides' first sectors, a file entry, path tables
_RECORDS_BYTES = 350  # a directory record with its share of a sector's end, a UDF identifier
_ROW_BYTES = 620  # a line of the slice with every number at its longest
_MARK_BYTES = 40  # version and piece marks of a name
_MANIFEST_BYTES = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where a stored entry's bytes lie in its image: read them with one pread."""

    entry_index: int
    disc_path: str
    offset: int
    length: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedImage:
    """A finished image; one extent for each entry of kind file, in the order of the entries."""

    path: Path
    identity: ImageIdentity
    size_bytes: int
    sha256: str
    extents: tuple[Extent, ...]


def data_image_limit(disc_capacity: int, *, num_members: int = 12) -> int:
    """Return the largest data image, in bytes, whose array's parity images still fit the disc.

    Args:
        disc_capacity: Bytes a blank disc takes.
        num_members: Discs of the array, data and parity.

    Raises:
        UsageError: The disc cannot hold an image at all.
    """
    checksums = 4 * num_members * (disc_capacity // _CHECKSUM_BLOCK + 1)
    limit = (disc_capacity - IMAGE_OVERHEAD_BYTES - checksums) // SECTOR_BYTES * SECTOR_BYTES
    if limit < IMAGE_OVERHEAD_BYTES + 64 * 1024:
        raise UsageError(
            f"a disc of {format_size(disc_capacity)} is too small for an image and its parity",
            hint="use discs of 2 MB or more",
        )
    return limit


def payload_capacity(disc_capacity: int, *, num_members: int = 12) -> int:
    """Return what the bounds of an image's entries and records may add up to, in bytes."""
    return data_image_limit(disc_capacity, num_members=num_members) - IMAGE_OVERHEAD_BYTES


def entry_bytes_bound(entry: SealEntry, *, with_ancestors: bool = False) -> int:
    """Return an upper bound of what an entry adds to an image.

    Args:
        entry: What would be sealed.
        with_ancestors: Count the directories above each name as well. Leave it out where these
            are entries of the image themselves; many files then share one count.
    """
    num_bytes = -(-entry.stored_bytes // SECTOR_BYTES) * SECTOR_BYTES
    row = _ROW_BYTES + len(json.dumps(dict(entry.extra)))
    row += sum(16 + 4 * len(name) + 4 * len(value) // 3 for name, value in entry.xattrs.items())
    row += 6 * len(escape_path(entry.target)) + 4 * len(entry.target)
    for path in entry.paths:
        place = disc_path(path)
        last = min(len(disc_name(path.rpartition(b"/")[2]).encode("utf-8")) + _MARK_BYTES, 254)
        row += len(json.dumps(escape_path(path))) + len(json.dumps(place)) + 2 * _MARK_BYTES
        row += _MANIFEST_BYTES + len(place.encode("utf-8"))
        num_bytes += _RECORDS_BYTES + 4 * last + SECTOR_BYTES
        if entry.kind is NodeKind.DIRECTORY:
            num_bytes += _DIRECTORY_BYTES - SECTOR_BYTES
        if with_ancestors:
            num_bytes += path.count(b"/") * (_DIRECTORY_BYTES + _RECORDS_BYTES + 4 * 254)
    return num_bytes + row


def seal_image(
    entries: Iterable[SealEntry],
    out_path: Path,
    *,
    disc_capacity: int,
    identity: ImageIdentity,
    created_ns: int,
    array: ArrayPosition | None = None,
    records: Iterable[Mapping[str, object]] = (),
    progress: Progress = SILENT,
) -> SealedImage:
    """Write one image of `entries` and return where each file lies in it.

    Args:
        entries: Directories, files (whole or pieces), links; any order. Ancestors that are not
            among them are made with mode 0755.
        out_path: The image; written whole or not at all, an existing file is replaced.
        disc_capacity: Bytes a disc takes.
        identity: Which image this is.
        created_ns: Nanoseconds since the epoch, stamped on the volume.
        array: Its place in an array; then the image leaves room for the array's parity.
        records: The caller's own lines for the slice, such as tombstones.
        progress: Counts bytes.

    Raises:
        UsageError: The entries contradict each other, or do not fit (said before writing).
        MissingFileError: A source is not there.
        IntegrityError: A source is not what its hash says, or changed while it was read.
        StorageFullError: No space left beside `out_path`.
    """
    if array is None:
        limit = disc_capacity
    else:
        members = array.data_count + array.parity_count
        limit = data_image_limit(disc_capacity, num_members=members)
    placed = _place(tuple(entries))
    hashed = [(_with_hash(entry), paths) for entry, paths in placed]
    catalogue = encode_slice(
        identity=identity, created_ns=created_ns, array=array, entries=hashed, records=records
    )
    roots = {
        FORMAT_NAME: format_note(identity, created_ns, array),
        CATALOGUE_NAME: catalogue,
        ARRAY_NAME: _array_note(array),
    }
    digests = {
        path: entry.sha256 or "" for entry, paths in hashed if _is_data(entry) for path in paths
    }
    return write_image(
        _data_nodes(hashed, created_ns),
        roots,
        digests,
        out_path,
        limit=limit,
        identity=identity,
        created_ns=created_ns,
        wanted=[
            (index, paths[0], entry)
            for index, (entry, paths) in enumerate(hashed)
            if _is_data(entry)
        ],
        progress=progress,
    )


def write_image(
    nodes: Sequence[PlanNode],
    roots: Mapping[str, bytes],
    digests: Mapping[str, str],
    out_path: Path,
    *,
    limit: int,
    identity: ImageIdentity,
    created_ns: int,
    wanted: Sequence[tuple[int, str, SealEntry]] = (),
    progress: Progress = SILENT,
) -> SealedImage:
    """Write nodes and root notes as one image with a manifest, and read it back.

    Args:
        nodes: The plan below the root, directories before what they hold.
        roots: Root file name -> content.
        digests: Path on the disc -> SHA-256 of every file among `nodes`.
        out_path: The image.
        limit: Bytes it may take.
        identity: Which image this is.
        created_ns: Stamped on the volume.
        wanted: (entry index, path on the disc, entry) whose extents are asked for.
        progress: Counts bytes.
    """
    created_s = created_ns // 1_000_000_000
    all_digests = dict(digests)
    all_digests |= {name: hashlib.sha256(body).hexdigest() for name, body in roots.items()}
    notes = {**roots, MANIFEST_NAME: encode_manifest(all_digests)}
    plan = [
        PlanNode(
            path=name, shape=NodeShape.FILE, mode=0o444, mtime_s=created_s, source=body,
            length=len(body),
        )
        for name, body in sorted(notes.items())
    ]  # fmt: skip
    plan += nodes

    def check_size(size: int) -> None:
        if size > limit:
            raise UsageError(
                f"image {identity.label} would take {format_size(size)}, the limit is"
                f" {format_size(limit)}",
                hint="seal fewer files at a time, or use larger discs",
            )

    with whole_file(out_path) as temporary:
        with (
            progress.task(f"write {identity.label}", None) as task,
            temporary.open("wb+") as stream,
        ):
            size = write_iso(
                plan, stream, label=identity.label, volume_set=identity.archive_id,
                created_s=created_s, bits=int(identity.image_id[:8], 16), check_size=check_size,
                advance=task.advance,
            )  # fmt: skip
        with progress.task(f"verify {identity.label}", float(size)) as task:
            checked = check_disc(temporary, expected=all_digests, advance=task.advance)
        if checked.fault is not None:
            raise IntegrityError(
                f"image {identity.label} read back wrong: {checked.detail}",
                hint="a source file changed meanwhile, or the disk is failing; seal it again",
            )
    places = checked.places
    return SealedImage(
        path=out_path,
        identity=identity,
        size_bytes=size,
        sha256=checked.sha256,
        extents=tuple(
            Extent(
                entry_index=index, disc_path=path, offset=places[path][0],
                length=places[path][1], sha256=entry.sha256 or "",
            )
            for index, path, entry in wanted
        ),
    )  # fmt: skip


def _array_note(array: ArrayPosition | None) -> bytes:
    """Return ARRAY.json of a data image: its position and what was sealed before it."""
    note = None if array is None else {"role": "data", **encode_position(array)}
    return json.dumps(note, indent=1).encode("ascii") + b"\n"


def _is_data(entry: SealEntry) -> bool:
    return entry.kind is NodeKind.FILE


# Names on the disc


def _place(entries: Sequence[SealEntry]) -> list[tuple[SealEntry, tuple[str, ...]]]:
    """Return each entry with the places of its names on the disc, newest version first served."""
    taken = _directories(entries)
    order = sorted(
        range(len(entries)),
        key=lambda i: (-entries[i].version, entries[i].piece_index, -entries[i].inode, i),
    )
    places: dict[int, tuple[str, ...]] = {}
    for index in order:
        entry = entries[index]
        _check_entry(entry)
        if entry.kind is NodeKind.DIRECTORY:
            places[index] = (f"{DATA_NAME}/{disc_path(entry.paths[0])}",)
        elif entry.kind in (NodeKind.FILE, NodeKind.SYMLINK):
            places[index] = tuple(_claim(entry, path, taken) for path in entry.paths)
        else:
            places[index] = ()
    return [(entry, places[index]) for index, entry in enumerate(entries)]


def _check_entry(entry: SealEntry) -> None:
    if not entry.paths:
        raise UsageError(f"inode {entry.inode} has no path")
    for path in entry.paths:
        parts = path.split(b"/")
        if any(part in (b"", b".", b"..") or b"\0" in part for part in parts):
            raise UsageError(f"{path!r} is not a path from the archive's root")
    if _is_data(entry) and entry.source is None and entry.stored_bytes:
        raise UsageError(f"{entry.paths[0]!r} has bytes but no source")
    if entry.stored_bytes < 0 or entry.piece_index >= entry.piece_count:
        raise UsageError(f"{entry.paths[0]!r} has an impossible piece")


def _directories(entries: Sequence[SealEntry]) -> set[str]:
    """Return every directory the entries name or imply, as places on the disc."""
    found: set[bytes] = set()
    for entry in entries:
        for path in entry.paths:
            if entry.kind is NodeKind.DIRECTORY:
                found.add(path)
            parent = path.rpartition(b"/")[0]
            while parent and parent not in found:
                found.add(parent)
                parent = parent.rpartition(b"/")[0]
    return {DATA_NAME} | {f"{DATA_NAME}/{disc_path(path)}" for path in found}


def _claim(entry: SealEntry, path: bytes, taken: set[str]) -> str:
    """Return a free place for a name: plain, or marked with the version, or with the inode too."""
    parent, _, name = path.rpartition(b"/")
    prefix = f"{DATA_NAME}/{disc_path(parent)}/" if parent else f"{DATA_NAME}/"
    piece = piece_mark(entry.piece_index, entry.piece_count) if entry.piece_count > 1 else ""
    version = version_mark(entry.version)
    for mark in ("", version, f"{version}.{entry.inode}"):
        place = prefix + disc_name(name) + mark + piece
        if place not in taken:
            taken.add(place)
            return place
    raise UsageError(f"{path!r} version {entry.version} is given twice")


# Bytes


def _with_hash(entry: SealEntry) -> SealEntry:
    """Return the entry with its SHA-256, read from the source where the caller has none."""
    if not _is_data(entry):
        return entry
    if entry.source is None:
        return replace(entry, sha256=hashlib.sha256().hexdigest(), length=0)
    if not entry.source.is_file():
        raise MissingFileError(f"{entry.source}, the bytes of {entry.paths[0]!r}, is not there")
    if entry.sha256 is not None:
        return replace(entry, length=entry.stored_bytes)
    digest = hashlib.sha256()
    for block in _blocks(entry.source, entry.source_offset, entry.stored_bytes):
        digest.update(block)
    return replace(entry, sha256=digest.hexdigest(), length=entry.stored_bytes)


def _blocks(path: Path, offset: int, length: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while length > 0:
            block = stream.read(min(length, _READ_BYTES))
            if not block:
                raise IntegrityError(f"{path} is {length} bytes shorter than its entry says")
            length -= len(block)
            yield block


def _data_nodes(
    placed: Sequence[tuple[SealEntry, tuple[str, ...]]], created_ns: int
) -> list[PlanNode]:
    """Return the plan below `data/`, parents first, in the order of the paths."""
    nodes: dict[str, PlanNode] = {}
    for entry, places in placed:
        for number, place in enumerate(places):
            node = _node(entry, place, places[0] if number else None)
            if node is not None:
                nodes[place] = node
    for place in [f"{DATA_NAME}/", *nodes]:
        parent = place.rpartition("/")[0]
        while parent and parent not in nodes:
            nodes[parent] = _implied(parent, created_ns)
            parent = parent.rpartition("/")[0]
    num_directories = sum(node.shape is NodeShape.DIRECTORY for node in nodes.values())
    if num_directories > MAX_DIRECTORIES:
        raise UsageError(
            f"an image holds at most {MAX_DIRECTORIES} directories, not {num_directories}",
            hint="seal fewer files at a time",
        )
    ordered = sorted(nodes.values(), key=lambda node: node.path.split("/"))
    return [n for n in ordered if n.link_to is None] + [n for n in ordered if n.link_to]


def _implied(path: str, created_ns: int) -> PlanNode:
    return PlanNode(
        path=path, shape=NodeShape.DIRECTORY, mode=0o755, mtime_s=created_ns // 1_000_000_000
    )


def _node(entry: SealEntry, place: str, link_to: str | None) -> PlanNode | None:
    """Return what stands at a place; None for a link target no disc record can hold."""
    shape = {NodeKind.DIRECTORY: NodeShape.DIRECTORY, NodeKind.SYMLINK: NodeShape.SYMLINK}.get(
        entry.kind, NodeShape.FILE
    )
    target = ""
    if shape is NodeShape.SYMLINK:
        root = "/" if entry.target.startswith(b"/") else ""
        target = root + disc_path(b"/".join(p for p in entry.target.split(b"/") if p))
        if not 0 < len(target.encode("utf-8")) <= _MAX_TARGET:
            return None
    return PlanNode(
        path=place,
        shape=shape,
        mode=entry.mode & 0o7777,
        uid=entry.uid,
        gid=entry.gid,
        mtime_s=entry.mtime_ns // 1_000_000_000,
        length=entry.stored_bytes,
        source=entry.source if entry.source is not None else b"",
        source_offset=entry.source_offset,
        link_to=link_to if shape is NodeShape.FILE else None,
        target=target,
        num_links=len(entry.paths),
    )
