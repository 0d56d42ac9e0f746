"""Delayed parity: k sealed images -> m parity images; any m discs lost -> every image back.

Parity is computed once all images of an array are sealed, in one pass over all of them, each
extended with zeros to the longest. A parity image is an ISO of its own that says everything
needed: PARITY.bin (a header sector, then the row), CHECKSUMS.bin (a CRC-32 of every 64 KiB of
every member, so that silent damage has a place), ARRAY.json, FORMAT.txt. Repair works block by
block: damage may lie anywhere as long as no more than m members are bad at the same block.
What is rebuilt is compared with its SHA-256 before it gets its name. Left out: parity inside one
disc, and growing an array after its parity was made.

Source: delayed parity images over an array of discs: Yan et al., EuroSys 2017,
doi:10.1145/3064176.3064207. The code is in `erasure`, the layout is our own
(docs/formats/parity.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tierwise.archive.array_map import (
    CHECKSUM_BLOCK_BYTES,
    ArrayMap,
    ArrayMember,
    decode_array_map,
)
from tierwise.archive.disc_slice import (
    ARRAY_NAME,
    CATALOGUE_NAME,
    CHECKSUMS_NAME,
    FORMAT_NAME,
    PARITY_NAME,
    ArrayPosition,
    ImageIdentity,
    decode_slice,
    encode_slice,
)
from tierwise.archive.discs import check_disc, find_place, open_image, read_root_file
from tierwise.archive.erasure import Bytes, Codec, best_codec, parity_matrix, recovery_matrix
from tierwise.archive.format_note import format_note
from tierwise.archive.image import write_image
from tierwise.archive.iso_reader import SECTOR_BYTES, Pread
from tierwise.archive.iso_writer import NodeShape, PlanNode
from tierwise.core.errors import DataError, IntegrityError, UsageError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import whole_file

HEADER_BYTES = SECTOR_BYTES
_MAGIC = b"TIERWISE PARITY1"
_HEADER = struct.Struct(
    "<16sHHHHQI16s16s"
)  # magic, k, m, row, 0, stripe, block, array id, image id
_CHUNK_BLOCKS = 16


def encode_array(
    images: Sequence[Path],
    out_paths: Sequence[Path],
    *,
    array_id: str,
    identities: Sequence[ImageIdentity],
    created_ns: int,
    disc_capacity: int | None = None,
    codec: Codec | None = None,
    progress: Progress = SILENT,
) -> ArrayMap:
    """Write the parity images of an array and return its map.

    Args:
        images: The k data images, in the order of their indices.
        out_paths: Where the m parity images go; each is written whole or not at all.
        array_id: 32 hex digits.
        identities: Of the parity images.
        created_ns: Nanoseconds since the epoch, stamped on them.
        disc_capacity: Bytes a disc takes, or None for no limit.
        codec: How to compute; None for the fastest installed. The bits do not depend on it.
        progress: Counts bytes of the stripe.

    Raises:
        UsageError: The array is not possible, or the parity does not fit the disc.
        DataError: A data image is not one of ours.
    """
    if len(identities) != len(out_paths):
        raise UsageError(f"{len(out_paths)} parity images need as many identities")
    parity_matrix(len(images), len(out_paths))  # refuses impossible arrays
    rows = [path.with_name(f".{path.name}.row.part") for path in out_paths]
    try:
        with contextlib.ExitStack() as stack:
            sources = [_Source.open(path, stack) for path in images]
            stripe = max(source.size for source in sources)
            outputs = [stack.enter_context(row.open("wb")) for row in rows]
            headers = [
                _header(
                    (len(images), len(rows), stripe),
                    row=row,
                    array_id=array_id,
                    image_id=identity.image_id,
                )
                for row, identity in enumerate(identities)
            ]
            encoder = _Encoder(sources, stripe, codec or best_codec(), headers)
            with progress.task("parity", float(stripe)) as task:
                encoder.run(outputs, task.advance)
        known = [
            (_identity_of(image), source.size)
            for image, source in zip(images, sources, strict=True)
        ]
        known += [(identity, stripe) for identity in identities]
        array = ArrayMap(
            array_id=array_id,
            archive_id=known[0][0].archive_id,
            created_ns=created_ns,
            data_count=len(images),
            parity_count=len(rows),
            stripe_length=stripe,
            checksums_sha256=hashlib.sha256(encoder.checksums).hexdigest(),
            members=tuple(
                ArrayMember(
                    index=index, role="data" if index < len(images) else "parity",
                    image_id=identity.image_id, label=identity.label, sequence=identity.sequence,
                    length=length, sha256=digest,
                )
                for index, ((identity, length), digest) in enumerate(
                    zip(known, encoder.digests, strict=True)
                )
            ),
        )  # fmt: skip
        for index, (path, row) in enumerate(zip(out_paths, rows, strict=True), len(images)):
            _seal_parity(
                array, index, row, encoder.checksums, path, limit=disc_capacity, progress=progress
            )
        return array
    finally:
        for row in rows:
            row.unlink(missing_ok=True)


def _header(shape: tuple[int, int, int], *, row: int, array_id: str, image_id: str) -> bytes:
    """Return PARITY.bin's first sector, by which a row is found when its disc's trees are lost.

    Args:
        shape: k, m and the stripe's length in bytes.
        row: From 0.
        array_id: 32 hex digits.
        image_id: Of the parity image.
    """
    data_count, parity_count, stripe = shape
    body = _HEADER.pack(
        _MAGIC, data_count, parity_count, row, 0, stripe, CHECKSUM_BLOCK_BYTES,
        bytes.fromhex(array_id), bytes.fromhex(image_id),
    )  # fmt: skip
    return (body + struct.pack("<I", zlib.crc32(body))).ljust(HEADER_BYTES, b"\0")


def _member_header(array: ArrayMap, index: int) -> bytes:
    return _header(
        (array.data_count, array.parity_count, array.stripe_length),
        row=index - array.data_count,
        array_id=array.array_id,
        image_id=array.member(index).image_id,
    )


def _identity_of(image: Path) -> ImageIdentity:
    with open_image(image) as (pread, _):
        return decode_slice(read_root_file(pread, CATALOGUE_NAME)).identity


@dataclass(frozen=True, slots=True)
class _Source:
    """A member's bytes: an open file, where its row starts in it, and how many bytes count."""

    descriptor: int
    start: int
    size: int

    @classmethod
    def open(cls, path: Path, stack: contextlib.ExitStack, start: int = 0) -> _Source:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        return cls(descriptor, start, max(0, os.lseek(descriptor, 0, os.SEEK_END) - start))

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill `out` from the row's `offset`; what is not there, or cannot be read, is zero."""
        done, view = 0, out.data
        while done < len(out):
            try:
                got = os.preadv(self.descriptor, [view[done:]], self.start + offset + done)
            except OSError:
                got = self._read_sectors(self.start + offset + done, view[done:])
            if got <= 0:
                break
            done += got
        out[done:] = 0

    def _read_sectors(self, offset: int, view: memoryview) -> int:
        """Read one sector, or leave it zero where the drive refuses."""
        length = min(len(view), SECTOR_BYTES - offset % SECTOR_BYTES)
        try:
            return os.preadv(self.descriptor, [view[:length]], offset)
        except OSError:
            view[:length] = bytes(length)
            return length


class _Encoder:
    """One pass over k images: parity rows, every member's hash and block checksums."""

    def __init__(
        self, sources: Sequence[_Source], stripe: int, codec: Codec, headers: Sequence[bytes]
    ) -> None:
        self._sources, self._stripe, self._codec = sources, stripe, codec
        self._matrix = parity_matrix(len(sources), len(headers))
        self._headers = headers
        self._hashes = [hashlib.sha256() for _ in sources]
        self._hashes += [hashlib.sha256(header) for header in headers]
        self._crcs: list[list[int]] = [[] for _ in self._hashes]

    @property
    def digests(self) -> list[str]:
        """Return the SHA-256 of each data image and each PARITY.bin."""
        return [digest.hexdigest() for digest in self._hashes]

    @property
    def checksums(self) -> bytes:
        """Return the content of CHECKSUMS.bin."""
        return b"".join(struct.pack(f"<{len(row)}I", *row) for row in self._crcs)

    def run(self, outputs: Sequence[BinaryIO], advance: Callable[[int], None]) -> None:
        """Read the images once and write the headers and rows."""
        size = _CHUNK_BLOCKS * CHECKSUM_BLOCK_BYTES
        k = len(self._sources)
        buffers = np.zeros((len(self._hashes), size), np.uint8)
        for output, header in zip(outputs, self._headers, strict=True):
            output.write(header)
        for offset in range(0, self._stripe, size):
            length = min(size, self._stripe - offset)
            rows = [buffers[i, :length] for i in range(len(self._hashes))]
            for source, row in zip(self._sources, rows[:k], strict=True):
                source.read_into(offset, row)
            self._codec.multiply(self._matrix, rows[:k], rows[k:])
            for index, row in enumerate(rows):
                self._note(index, offset, row)
            for output, row in zip(outputs, rows[k:], strict=True):
                output.write(row.data)
            advance(length)

    def _note(self, index: int, offset: int, row: Bytes) -> None:
        counted = row
        if index < len(self._sources):
            counted = row[: max(0, self._sources[index].size - offset)]
        self._hashes[index].update(counted.data)
        for start in range(0, len(row), CHECKSUM_BLOCK_BYTES):
            self._crcs[index].append(zlib.crc32(row[start : start + CHECKSUM_BLOCK_BYTES].data))


def _seal_parity(
    array: ArrayMap,
    index: int,
    row: Path,
    checksums: bytes,
    out_path: Path,
    *,
    limit: int | None,
    progress: Progress,
) -> None:
    """Write one parity image around its finished PARITY.bin."""
    member = array.member(index)
    identity = ImageIdentity(
        archive_id=array.archive_id, image_id=member.image_id, label=member.label,
        sequence=member.sequence,
    )  # fmt: skip
    position = ArrayPosition(
        array_id=array.array_id, index=index, data_count=array.data_count,
        parity_count=array.parity_count,
        siblings=tuple((m.image_id, m.length) for m in array.members if m.role == "data"),
    )  # fmt: skip
    node = PlanNode(
        path=PARITY_NAME, shape=NodeShape.FILE, mode=0o444, source=row,
        mtime_s=array.created_ns // 1_000_000_000, length=HEADER_BYTES + array.stripe_length,
    )  # fmt: skip
    catalogue = encode_slice(
        identity=identity, created_ns=array.created_ns, array=position, entries=(), records=()
    )
    write_image(
        [node],
        {
            FORMAT_NAME: format_note(identity, array.created_ns, position),
            ARRAY_NAME: array.encode(),
            CHECKSUMS_NAME: checksums,
            CATALOGUE_NAME: catalogue,
        },
        {PARITY_NAME: member.sha256},
        out_path,
        limit=(1 << 62) if limit is None else limit,
        identity=identity,
        created_ns=array.created_ns,
        progress=progress,
    )


# Reading back


def read_array_map(parity_image: Path) -> ArrayMap:
    """Return the map on a parity disc, held against the disc's manifest.

    Raises:
        DataError: The image is no parity image, or its map is damaged.
    """
    with open_image(parity_image) as (pread, _):
        array = decode_array_map(read_root_file(pread, ARRAY_NAME))
    if array is None:
        raise DataError(f"{parity_image} is a data image; a parity image has the array's map")
    return array


def find_damage(array: ArrayMap, present: Mapping[int, Path]) -> dict[int, list[int]]:
    """Return the 64 KiB blocks of each present member that are wrong, by member index.

    Blocks are held against the CRC-32 table of any parity disc whose table has its own hash. For
    a parity member, the number one past the last block stands for everything else on its disc
    (file system, notes). Members without damage are left out.

    Args:
        array: The array's map.
        present: Member index -> image, damaged or not.

    Raises:
        IntegrityError: No present parity disc has a sound table.
    """
    table = _checksum_table(array, present)
    if table is None:
        raise IntegrityError(
            f"array {array.array_id} has no sound table of checksums among the discs present",
            hint="bring any parity disc of the array",
        )
    damage = {}
    for index, path in sorted(present.items()):
        with contextlib.ExitStack() as stack:
            source = _open_member(array, index, path, stack)
            bad = _bad_blocks(array, source, table[index])
        if index >= array.data_count and not bad and check_disc(path).fault is not None:
            bad.append(array.num_blocks)
        if bad:
            damage[index] = bad
    return damage


def _bad_blocks(
    array: ArrayMap, source: _Source | None, expected: npt.NDArray[np.uint32]
) -> list[int]:
    if source is None:
        return list(range(array.num_blocks))
    bad = []
    buffer = np.empty(array.block_size, np.uint8)
    for block in range(array.num_blocks):
        start = block * array.block_size
        view = buffer[: min(array.block_size, array.stripe_length - start)]
        source.read_into(start, view)
        if zlib.crc32(view.data) != expected[block]:
            bad.append(block)
    return bad


def _checksum_table(array: ArrayMap, present: Mapping[int, Path]) -> npt.NDArray[np.uint32] | None:
    """Return (members, blocks) of CRC-32 from the first parity disc with a sound table."""
    for index in range(array.data_count, len(array.members)):
        if index not in present:
            continue
        with open_image(present[index]) as (pread, _), contextlib.suppress(OSError):
            place = find_place(pread, CHECKSUMS_NAME)
            body = b"" if place is None else pread(*place)
            if hashlib.sha256(body).hexdigest() == array.checksums_sha256:
                return np.frombuffer(body, "<u4").reshape(len(array.members), array.num_blocks)
    return None


def _open_member(
    array: ArrayMap, index: int, path: Path, stack: contextlib.ExitStack
) -> _Source | None:
    """Return a member's row, or None for a parity disc on which it cannot be found."""
    if index < array.data_count:
        source = _Source.open(path, stack)
        return _Source(source.descriptor, 0, min(source.size, array.member(index).length))
    with open_image(path) as (pread, size):
        start = _find_row(pread, size, array, index)
    return None if start is None else _Source.open(path, stack, start)


def _find_row(pread: Pread, size: int, array: ArrayMap, index: int) -> int | None:
    """Return where a parity row starts: by the file systems, or else by its header's magic."""
    header = _member_header(array, index)  # fmt: skip
    place = find_place(pread, PARITY_NAME)
    if place is not None:
        return place[0] + HEADER_BYTES
    for offset in range(0, size - HEADER_BYTES, SECTOR_BYTES):
        with contextlib.suppress(OSError):
            if pread(offset, HEADER_BYTES) == header:
                return offset + HEADER_BYTES
    return None


# Repair


def reconstruct(
    array: ArrayMap,
    present: Mapping[int, Path],
    missing: Mapping[int, Path],
    *,
    damage: Mapping[int, Collection[int]] | None = None,
    codec: Codec | None = None,
    progress: Progress = SILENT,
) -> None:
    """Write the images of lost or damaged members anew, each whole or not at all.

    Args:
        array: The array's map.
        present: Member index -> image; a damaged one still serves with its good blocks.
        missing: Member index -> where the image made anew goes; may name present members.
        damage: Bad blocks of present members, as from `find_damage`; None: all are good.
        codec: How to compute; None for the fastest installed.
        progress: Counts bytes of the stripe.

    Raises:
        IntegrityError: More than m members are bad at one block (the message counts the blocks),
            or what came out has not its hash; nothing is written then.
        UsageError: An index is not in the array.
    """
    for index in (*present, *missing):
        if not 0 <= index < len(array.members):
            raise UsageError(f"array {array.array_id} has no member {index}")
    wanted = tuple(sorted(missing))
    with contextlib.ExitStack() as stack:
        rebuild = _Rebuild(
            array, present, wanted, damage or {}, codec=codec or best_codec(), stack=stack
        )
        rebuild.refuse_beyond_repair()
        outputs = {}
        for index in wanted:
            final = missing[index]
            if index >= array.data_count:
                final = final.with_name(f".{final.name}.row")
                stack.callback(final.unlink, missing_ok=True)
            outputs[index] = _Output(array, index, final, stack)
        with progress.task("repair", float(array.stripe_length)) as task:
            rebuild.run(outputs, task.advance)
        for output in outputs.values():
            output.finish()
        for index in wanted:
            if index >= array.data_count:
                final = missing[index]
                row = final.with_name(f".{final.name}.row")
                checksums = _table_bytes(array, present, codec)
                _seal_parity(array, index, row, checksums, final, limit=None, progress=progress)


def _table_bytes(array: ArrayMap, present: Mapping[int, Path], codec: Codec | None) -> bytes:
    """Return CHECKSUMS.bin from a parity disc, or computed again from all data images."""
    table = _checksum_table(array, present)
    if table is not None:
        return table.tobytes()
    with contextlib.ExitStack() as stack:
        try:
            sources = [_Source.open(present[i], stack) for i in range(array.data_count)]
        except KeyError as error:
            raise IntegrityError(
                f"array {array.array_id}: no table of checksums is left to put on a parity disc",
                hint="rebuild the data images first, then the parity",
            ) from error
        encoder = _Encoder(
            sources, array.stripe_length, codec or best_codec(), [b""] * array.parity_count
        )
        sinks = [
            stack.enter_context(Path(os.devnull).open("wb")) for _ in range(array.parity_count)
        ]
        encoder.run(sinks, lambda _: None)
        return encoder.checksums


class _Output:
    """One member being written again, hashed on the way."""

    def __init__(
        self, array: ArrayMap, index: int, path: Path, stack: contextlib.ExitStack
    ) -> None:
        member = array.member(index)
        self._member, self._left = member, member.length
        self._whole = whole_file(path)
        self._stack = contextlib.ExitStack()
        stack.push(self._abandon)
        self._stream = self._stack.enter_context(self._stack.enter_context(self._whole).open("wb"))
        self._digest = hashlib.sha256()
        if index >= array.data_count:
            self._put(
                memoryview(
                    _member_header(array, index)
                )
            )  # fmt: skip

    def _put(self, data: memoryview) -> None:
        self._digest.update(data)
        self._stream.write(data)

    def write(self, row: Bytes) -> None:
        """Append what belongs to the member; the rest of a row is the array's zero padding."""
        counted = row[: self._left]
        self._left -= len(counted)
        self._put(counted.data)

    def finish(self) -> None:
        """Give the file its name, if it has its hash."""
        if self._digest.hexdigest() != self._member.sha256:
            raise IntegrityError(
                f"{self._member.label} came out of repair with a wrong hash",
                hint="a disc gave wrong bytes; run it again with the damage found first",
            )
        self._stack.close()

    def _abandon(self, *error: Any) -> bool:
        """Drop the temporary file where the repair did not come to an end."""
        self._stack.__exit__(*error)
        return False


class _Rebuild:
    """Walks the stripe in runs of blocks that miss the same members."""

    def __init__(
        self,
        array: ArrayMap,
        present: Mapping[int, Path],
        wanted: tuple[int, ...],
        damage: Mapping[int, Collection[int]],
        *,
        codec: Codec,
        stack: contextlib.ExitStack,
    ) -> None:
        self._array, self._wanted, self._codec = array, wanted, codec
        self._sources: dict[int, _Source] = {}
        for index, path in present.items():
            source = _open_member(array, index, path, stack)
            if source is not None:
                self._sources[index] = source
        self._bad: dict[int, set[int]] = {}
        for index, blocks in damage.items():
            for block in blocks:
                self._bad.setdefault(block, set()).add(index)

    def _available(self, block: int) -> tuple[int, ...]:
        bad = self._bad.get(block, ())
        return tuple(index for index in sorted(self._sources) if index not in bad)

    def refuse_beyond_repair(self) -> None:
        """Raise if some block cannot be computed, before anything is written."""
        lost = [
            block
            for block in range(self._array.num_blocks)
            if len(self._available(block)) < self._array.data_count
            and not set(self._wanted) <= set(self._available(block))
        ]
        if lost:
            raise IntegrityError(
                f"array {self._array.array_id}: {len(lost)} of {self._array.num_blocks} blocks are"
                f" beyond repair, the first at byte {lost[0] * self._array.block_size}",
                hint=f"the array survives {self._array.parity_count} bad members at a block",
            )

    def run(self, outputs: Mapping[int, _Output], advance: Callable[[int], None]) -> None:
        """Compute every wanted member from start to end."""
        size = self._array.block_size
        buffers = np.zeros((len(self._array.members), _CHUNK_BLOCKS * size), np.uint8)
        for first, last in self._runs():
            offset = first * size
            length = min(last * size, self._array.stripe_length) - offset
            rows = [buffers[i, :length] for i in range(len(self._array.members))]
            self._fill(rows, offset, self._available(first))
            for index in self._wanted:
                outputs[index].write(rows[index])
            advance(length)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield (first, one past the last) block of runs with one set of good members."""
        first = 0
        for block in range(1, self._array.num_blocks + 1):
            if (
                block == self._array.num_blocks
                or block - first == _CHUNK_BLOCKS
                or self._available(block) != self._available(first)
            ):
                yield first, block
                first = block

    def _fill(self, rows: Sequence[Bytes], offset: int, available: tuple[int, ...]) -> None:
        """Read what is good and compute the rest of the wanted rows."""
        k = self._array.data_count
        lost = tuple(index for index in self._wanted if index not in available)
        needed = set(available[:k]) if lost else set()
        for index in sorted(needed | (set(self._wanted) & set(available))):
            self._sources[index].read_into(offset, rows[index])
        if lost:
            matrix = recovery_matrix(k, self._array.parity_count, available[:k], lost)
            self._codec.multiply(matrix, [rows[i] for i in available[:k]], [rows[i] for i in lost])
