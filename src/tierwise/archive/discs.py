"""Which discs are these? Identify, read and judge images without any catalogue.

`check_disc` reads one image whole: both file systems on it must agree, every file must have the
manifest's hash, the slice must be complete. `scan_discs` does so for a pile of them in any order
and compares them: duplicates, two discs claiming one place, discs that are not where a label says.
What is wrong has one code each (`DiscFault`); a damaged disc still yields what is sound on it.
Left out: mending, which needs the rest of the array (`parity`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from tierwise.archive.array_map import ArrayMap, decode_array_map
from tierwise.archive.disc_slice import (
    APPLICATION,
    ARRAY_NAME,
    CATALOGUE_NAME,
    CHECKSUM_PREFIX,
    MANIFEST_NAME,
    ArrayPosition,
    ImageChecksum,
    ImageIdentity,
    NodeKind,
    SealEntry,
    Slice,
    decode_manifest,
    decode_slice,
)
from tierwise.archive.iso_reader import (
    SECTOR_BYTES,
    IsoNode,
    Pread,
    Volume,
    read_volume,
    walk_iso,
    walk_udf,
)
from tierwise.core.errors import DataError, MissingFileError, StorageFullError

_READ_BYTES = 1 << 20


class DiscFault(StrEnum):
    """What is wrong with a disc, one code each; docs/formats/image.md explains them."""

    BLANK = "blank"
    FOREIGN = "foreign"
    NEWER_FORMAT = "newer-format"
    HALF_BURNED = "half-burned"
    TRUNCATED = "truncated"
    UNREADABLE = "unreadable"
    TREE_DAMAGED = "tree-damaged"
    SLICE_DAMAGED = "slice-damaged"
    MANIFEST_DAMAGED = "manifest-damaged"
    FILE_DAMAGED = "file-damaged"
    DAMAGED = "damaged"
    SWAPPED = "swapped"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDisc:
    """What one reading of an image found; `places` are (offset, length) by path on the disc."""

    path: Path
    fault: DiscFault | None
    detail: str
    sha256: str
    size_bytes: int
    volume: Volume | None
    slice: Slice | None
    places: Mapping[str, tuple[int, int]]
    digests: Mapping[str, str]
    damaged_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedEntry:
    """An entry of a slice with where its bytes lie; `sound` says that they have their hash."""

    entry: SealEntry
    disc_path: str
    disc_paths: tuple[str, ...]
    offset: int
    length: int
    sha256: str | None
    sound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscScan:
    """One scanned disc; with a fault, `entries` holds what is known, each marked sound or not."""

    path: Path
    fault: DiscFault | None
    detail: str
    sha256: str
    size_bytes: int
    identity: ImageIdentity | None
    created_ns: int
    array: ArrayPosition | None
    array_map: ArrayMap | None
    entries: tuple[ScannedEntry, ...]
    records: tuple[dict[str, Any], ...]


Opener = Callable[[Path], contextlib.AbstractContextManager[tuple[Pread, int]]]


@contextlib.contextmanager
def open_image(path: Path) -> Iterator[tuple[Pread, int]]:
    """Yield (pread, size) of an image file or a drive's device node."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise MissingFileError(f"no disc image {path}") from error
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)

        def pread(offset: int, length: int) -> bytes:
            return os.pread(descriptor, max(0, min(length, size - offset)), offset)

        yield pread, size
    finally:
        os.close(descriptor)


def find_places(pread: Pread, name: str) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of a file on an image by each file system; two if they disagree."""
    first: tuple[int, int] | None = None
    for walk in (walk_iso, walk_udf):
        with contextlib.suppress(DataError, struct.error, IndexError):
            node = next((n for n in walk(pread) if n.path == name and n.is_file), None)
            if node is not None and (place := _place(node)) != first:
                first = place
                yield place


def find_place(pread: Pread, name: str) -> tuple[int, int] | None:
    """Return (offset, length) of a file on an image by the first file system that has it."""
    return next(find_places(pread, name), None)


def read_root_file(pread: Pread, name: str) -> bytes:
    """Return a file in an image's root, held against the manifest beside it.

    Raises:
        DataError: It is not there, or not what the manifest says.
    """
    bodies = [pread(*place) for place in find_places(pread, name)]
    if not bodies:
        raise DataError(f"the image has no {name}")
    for place in find_places(pread, MANIFEST_NAME):
        with contextlib.suppress(DataError):
            wanted = decode_manifest(pread(*place)).get(name)
            for body in bodies:
                if hashlib.sha256(body).hexdigest() == wanted:
                    return body
    raise DataError(f"{name} is not what the image's manifest says")


class _Patient:
    """Reads around bad sectors: they count, and come back as zeros."""

    def __init__(self, pread: Pread, size: int) -> None:
        self._pread, self._size = pread, size
        self.bad: set[int] = set()

    def __call__(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self._size - offset))
        try:
            return self._pread(offset, length)
        except OSError:
            return b"".join(
                self._sector(
                    at, min(length, SECTOR_BYTES - at % SECTOR_BYTES, offset + length - at)
                )
                for at in self._starts(offset, length)
            )

    def _starts(self, offset: int, length: int) -> Iterator[int]:
        at = offset
        while at < offset + length:
            yield at
            at = (at // SECTOR_BYTES + 1) * SECTOR_BYTES

    def _sector(self, offset: int, length: int) -> bytes:
        try:
            return self._pread(offset, length)
        except OSError:
            self.bad.add(offset // SECTOR_BYTES)
            return bytes(length)


def copy_patiently(pread: Pread, size: int, target: Path) -> None:
    """Copy a disc to a file; sectors that cannot be read become zeros.

    Raises:
        StorageFullError: The file's disk is full.
    """
    reader = _Patient(pread, size)
    try:
        with target.open("wb") as stream:
            for offset in range(0, size, _READ_BYTES):
                stream.write(reader(offset, min(_READ_BYTES, size - offset)))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StorageFullError(f"no space left for a copy of a disc: {target}") from error
        raise


def check_disc(
    path: Path,
    *,
    expected: Mapping[str, str] | None = None,
    opener: Opener = open_image,
    advance: Callable[[int], None] = lambda _: None,
) -> CheckedDisc:
    """Read one image whole and judge it.

    Args:
        path: The image, or a device node; bytes past the volume's end are the drive's padding.
        expected: Path on the disc -> SHA-256, to hold the manifest itself against.
        opener: How `path` is read; a library passes its drive's.
        advance: Called with the number of bytes read since the last call.

    Raises:
        MissingFileError: There is no such image. Everything else is a fault in the result.
    """
    with opener(path) as (pread, size):
        reader = _Patient(pread, size)
        return _Judge(path, reader, size, advance).judge(expected)


class _Judge:
    """One image's examination, step by step; each step may end it with a fault."""

    def __init__(
        self, path: Path, reader: _Patient, size: int, advance: Callable[[int], None]
    ) -> None:
        self._path, self._reader, self._size, self._advance = path, reader, size, advance
        self._volume: Volume | None = None
        self._places: dict[str, tuple[int, int]] = {}
        self._other: dict[str, tuple[int, int]] = {}
        self._digests: dict[str, str] = {}
        self._slice: Slice | None = None
        self._faults: list[tuple[DiscFault, str]] = []

    def judge(self, expected: Mapping[str, str] | None) -> CheckedDisc:
        if not any(self._reader(0, min(self._size, 1 << 20))):
            return self._result(DiscFault.BLANK, "nothing was ever burned on it", "")
        self._read_trees()
        if self._volume is not None and 0 < self._volume.size_bytes < self._size:
            self._size = self._volume.size_bytes  # the rest is what the drive padded
        manifest = self._read_manifest()
        sha256, checksum = self._hash_all()
        damaged = self._compare(manifest, expected)
        self._read_slice(manifest)
        if not self._is_ours():
            return self._result(DiscFault.FOREIGN, "not an image of an archive", sha256)
        self._note_cut()
        self._note_checksum(checksum)
        if self._reader.bad:
            self._fault(DiscFault.UNREADABLE, f"{len(self._reader.bad)} sectors cannot be read")
        fault, detail = min(
            self._faults, key=lambda pair: _GRAVITY.index(pair[0]), default=(None, "sound")
        )
        return self._result(fault, detail, sha256, damaged)

    def _fault(self, fault: DiscFault, detail: str) -> None:
        self._faults.append((fault, detail))

    def _result(
        self, fault: DiscFault | None, detail: str, sha256: str, damaged: tuple[str, ...] = ()
    ) -> CheckedDisc:
        return CheckedDisc(
            path=self._path, fault=fault, detail=detail, sha256=sha256, size_bytes=self._size,
            volume=self._volume, slice=self._slice, places=self._places, digests=self._digests,
            damaged_paths=damaged,
        )  # fmt: skip

    def _read_trees(self) -> None:
        """Walk both file systems; take what they agree on, or the one that is whole."""
        trees: list[dict[str, tuple[int, int]]] = []
        for walk, name in ((walk_iso, "ISO 9660"), (walk_udf, "UDF")):
            found: dict[str, tuple[int, int]] = {}
            try:
                for node in walk(self._reader):
                    if node.is_file:
                        found[node.path] = _place(node)
            except (DataError, struct.error, IndexError) as error:
                self._fault(DiscFault.TREE_DAMAGED, f"{name}: {error}")
            trees.append(found)
        with contextlib.suppress(DataError):
            self._volume = read_volume(self._reader)
        if trees[0] != trees[1] and not self._faults:
            self._fault(DiscFault.TREE_DAMAGED, "the two file systems on it disagree")
        self._places, self._other = sorted(trees, key=len, reverse=True)

    def _read(self, name: str) -> Iterator[bytes]:
        """Yield a root file's bytes from where each tree has it."""
        for place in dict.fromkeys((self._places.get(name), self._other.get(name))):
            if place is not None and len(data := self._reader(*place)) == place[1]:
                yield data

    def _read_manifest(self) -> dict[str, str] | None:
        reason = f"no readable {MANIFEST_NAME}"
        for body in self._read(MANIFEST_NAME):
            try:
                manifest = decode_manifest(body)
            except DataError as error:
                reason = str(error)
                continue
            for path in manifest.keys() - self._places.keys():
                if path in self._other:
                    self._places[path] = self._other[path]
            return manifest
        self._fault(DiscFault.MANIFEST_DAMAGED, reason)
        return None

    def _hash_all(self) -> tuple[str, str]:
        """Return the whole image's SHA-256 and CRC-32, taking every file's hash on the way."""
        whole, checksum = hashlib.sha256(), ImageChecksum()
        position, seen = 0, dict[tuple[int, int], str]()
        for place in sorted(set(self._places.values())):
            offset, length = place
            if offset >= position and offset + length <= self._size:
                self._feed(position, offset - position, checksum, whole)
                seen[place] = self._feed(offset, length, checksum, whole, hashlib.sha256())
                position = offset + length
            else:
                seen[place] = self._feed(offset, length, hashlib.sha256())
        self._feed(position, self._size - position, checksum, whole)
        self._digests = {path: seen[place] for path, place in self._places.items()}
        return whole.hexdigest(), checksum.digits()

    def _feed(self, offset: int, length: int, *digests: Any) -> str:
        end = min(offset + length, self._size)
        while offset < end:
            block = self._reader(offset, min(_READ_BYTES, end - offset))
            for digest in digests:
                digest.update(block)
            offset += len(block)
            self._advance(len(block))
        return str(digests[-1].hexdigest())

    def _compare(
        self, manifest: dict[str, str] | None, expected: Mapping[str, str] | None
    ) -> tuple[str, ...]:
        """Return the paths whose bytes are not what the manifest, or the caller, says."""
        if manifest is None:
            return ()
        if expected is not None and manifest != expected:
            self._fault(DiscFault.MANIFEST_DAMAGED, "the manifest is not the one that was meant")
        damaged = tuple(
            path
            for path, digest in sorted(manifest.items())
            if self._digests.get(path) != digest and not self._is_elsewhere(path, digest)
        )
        strange = self._places.keys() - manifest.keys() - {MANIFEST_NAME}
        if damaged:
            more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            self._fault(DiscFault.FILE_DAMAGED, f"{damaged[0]}{more} differ from the manifest")
        if strange:
            self._fault(DiscFault.MANIFEST_DAMAGED, f"{min(strange)} is not in the manifest")
        return damaged

    def _is_elsewhere(self, path: str, digest: str) -> bool:
        """Take the other tree's place of a file if the bytes there have the hash."""
        place = self._other.get(path)
        if place is None or self._feed(*place, hashlib.sha256()) != digest:
            return False
        self._places[path], self._digests[path] = place, digest
        return True

    def _read_slice(self, manifest: dict[str, str] | None) -> None:
        fault = (DiscFault.SLICE_DAMAGED, f"no readable {CATALOGUE_NAME}")
        for body in self._read(CATALOGUE_NAME):
            digest = hashlib.sha256(body).hexdigest()
            if manifest is not None and manifest.get(CATALOGUE_NAME) != digest:
                fault = (DiscFault.SLICE_DAMAGED, f"{CATALOGUE_NAME} has not its hash")
                continue
            try:
                self._slice = decode_slice(body)
                return
            except DataError as error:
                newer = "format is" in str(error)
                fault = (DiscFault.NEWER_FORMAT if newer else DiscFault.SLICE_DAMAGED, str(error))
        self._fault(*fault)

    def _is_ours(self) -> bool:
        """Return whether the descriptor, or a file found on it, says that the disc is an image."""
        signed = self._volume is not None and self._volume.application == APPLICATION
        return signed or bool((self._places.keys() | self._other.keys()) & _NOTES)

    def _note_checksum(self, checksum: str) -> None:
        """Tell damage that no file's hash covers: descriptors, directories, unused sectors."""
        if self._volume is None or self._volume.application_use != CHECKSUM_PREFIX + checksum:
            self._fault(DiscFault.DAMAGED, "bytes outside its files have changed")

    def _note_cut(self) -> None:
        """Tell a short image from a burn that stopped: the last sector is UDF's second anchor."""
        if self._volume is None:
            return
        wanted = self._volume.size_bytes
        if self._size < wanted:
            self._fault(DiscFault.TRUNCATED, f"{self._size} bytes of {wanted} are there")
        elif not any(self._reader(wanted - SECTOR_BYTES, SECTOR_BYTES)):
            self._fault(DiscFault.HALF_BURNED, "the burn stopped before the end")


_NOTES = {MANIFEST_NAME, CATALOGUE_NAME}
_GRAVITY = (
    DiscFault.BLANK,
    DiscFault.FOREIGN,
    DiscFault.NEWER_FORMAT,
    DiscFault.TRUNCATED,
    DiscFault.UNREADABLE,
    DiscFault.HALF_BURNED,
    DiscFault.TREE_DAMAGED,
    DiscFault.MANIFEST_DAMAGED,
    DiscFault.SLICE_DAMAGED,
    DiscFault.FILE_DAMAGED,
    DiscFault.DAMAGED,
)


def _place(node: IsoNode) -> tuple[int, int]:
    """Return a file's one extent; adjoining extents are one, an empty file is (0, 0).

    Raises:
        DataError: The file is in pieces, which no image of ours has.
    """
    extents = [extent for extent in node.extents if extent[1]]
    if not extents:
        return (0, 0)
    for (offset, length), (following, _) in itertools.pairwise(extents):
        if offset + length != following:
            raise DataError(f"{node.path!r} is in more than one place")
    return (extents[0][0], node.size)


def scan_discs(
    images: Iterable[Path],
    *,
    expected: Mapping[Path, str] | None = None,
    opener: Opener = open_image,
) -> Iterator[DiscScan]:
    """Yield what each disc holds, in the order given; a fault never ends the scan.

    Args:
        images: Images, or device nodes of drives, in any order.
        expected: Image id each path should have, where a label or a slot says so.
        opener: How a path is read.
    """
    seen: dict[str, str] = {}
    claims: dict[tuple[str, int], str] = {}
    wanted: dict[str, str] = {}
    for path in images:
        scan = _scan(path, opener)
        if scan.array_map is not None:
            wanted |= {m.image_id: m.sha256 for m in scan.array_map.members if m.role == "data"}
        yield _settle(scan, seen, claims, wanted, (expected or {}).get(path))


def _settle(
    scan: DiscScan,
    seen: dict[str, str],
    claims: dict[tuple[str, int], str],
    wanted: Mapping[str, str],
    expected: str | None,
) -> DiscScan:
    """Return the scan with faults that only show beside other discs; a fault of its own stays."""
    if scan.identity is None or scan.fault is not None:
        return scan
    image_id = scan.identity.image_id
    fault, detail = None, scan.detail
    if expected is not None and expected != image_id:
        fault, detail = DiscFault.SWAPPED, f"holds {scan.identity.label}, another was expected"
    elif image_id in wanted and wanted[image_id] != scan.sha256:
        fault, detail = DiscFault.DAMAGED, "it is not the image that its array's map lists"
    elif image_id in seen:
        same = seen[image_id] == scan.sha256
        fault = DiscFault.DUPLICATE if same else DiscFault.CONFLICT
        detail = f"{scan.identity.label} was found before" + ("" if same else ", with other bytes")
    elif scan.array is not None:
        place = (scan.array.array_id, scan.array.index)
        if claims.setdefault(place, image_id) != image_id:
            fault, detail = DiscFault.CONFLICT, f"member {place[1]} of its array was found before"
    if fault not in (DiscFault.DAMAGED, DiscFault.CONFLICT):
        seen.setdefault(image_id, scan.sha256)
    return scan if fault is None else replace(scan, fault=fault, detail=detail)


def _scan(path: Path, opener: Opener) -> DiscScan:
    try:
        checked = check_disc(path, opener=opener)
    except OSError as error:
        return DiscScan(
            path=path, fault=DiscFault.UNREADABLE, detail=str(error), sha256="", size_bytes=0,
            identity=None, created_ns=0, array=None, array_map=None, entries=(), records=(),
        )  # fmt: skip
    found = checked.slice
    return DiscScan(
        path=path,
        fault=checked.fault,
        detail=checked.detail,
        sha256=checked.sha256,
        size_bytes=checked.size_bytes,
        identity=found.identity if found else None,
        created_ns=found.created_ns if found else 0,
        array=found.array if found else None,
        array_map=_array_map(checked, opener),
        entries=tuple(_entries(checked)),
        records=found.records if found else (),
    )


def _array_map(checked: CheckedDisc, opener: Opener) -> ArrayMap | None:
    place = checked.places.get(ARRAY_NAME)
    if place is None or ARRAY_NAME in checked.damaged_paths:
        return None
    with opener(checked.path) as (pread, size), contextlib.suppress(DataError):
        return decode_array_map(_Patient(pread, size)(*place))
    return None


def _entries(checked: CheckedDisc) -> Iterator[ScannedEntry]:
    if checked.slice is None:
        return
    for entry, paths in zip(checked.slice.entries, checked.slice.disc_paths, strict=True):
        first = paths[0] if paths else ""
        offset, length = checked.places.get(first, (0, 0))
        is_file = entry.kind is NodeKind.FILE
        yield ScannedEntry(
            entry=entry,
            disc_path=first,
            disc_paths=paths,
            offset=offset,
            length=length,
            sha256=entry.sha256,
            sound=not is_file or checked.digests.get(first) == entry.sha256,
        )
