"""An array's members as rows of bytes: where each starts, reading it whatever it lacks.

A data image is a row from its first byte; a parity row stands in PARITY.bin behind a header
sector, found by the disc's file systems or, when those are lost, by the header itself. What a disc
cannot give reads as zeros; the CRC-32 table of CHECKSUMS.bin says which blocks are right. Left
out: what to do about the others (`reconstruct`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierwise.archive.array_map import CHECKSUM_BLOCK_BYTES, ArrayMap
from tierwise.archive.disc_slice import CHECKSUMS_NAME, PARITY_NAME
from tierwise.archive.discs import find_place, find_places, open_image
from tierwise.archive.erasure import Bytes
from tierwise.archive.iso_reader import SECTOR_BYTES, Pread

HEADER_BYTES = SECTOR_BYTES
CHUNK_BLOCKS = 16  # blocks computed at a time: 1 MiB of every member
_MAGIC = b"TIERWISE PARITY1"
_HEADER = struct.Struct("<16sHHHHQI16s16s")  # magic k m row 0 stripe block array-id image-id


def parity_header(shape: tuple[int, int, int], *, row: int, array_id: str, image_id: str) -> bytes:
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


def member_header(array: ArrayMap, index: int) -> bytes:
    """Return the header of an array's parity member."""
    return parity_header(
        (array.data_count, array.parity_count, array.stripe_length),
        row=index - array.data_count,
        array_id=array.array_id,
        image_id=array.member(index).image_id,
    )


@dataclass(frozen=True, slots=True)
class RowSource:
    """A member's bytes: an open file, where its row starts in it, and how many bytes count."""

    descriptor: int
    start: int
    size: int

    @classmethod
    def open(cls, path: Path, stack: contextlib.ExitStack, start: int = 0) -> RowSource:
        """Return a file's row from byte `start` on; `stack` closes the file."""
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


def open_member(
    array: ArrayMap, index: int, path: Path, stack: contextlib.ExitStack
) -> RowSource | None:
    """Return a member's row, or None for a parity disc on which it cannot be found."""
    if index < array.data_count:
        source = RowSource.open(path, stack)
        return RowSource(source.descriptor, 0, min(source.size, array.member(index).length))
    with open_image(path) as (pread, size):
        start = find_row(pread, size, array, index)
    return None if start is None else RowSource.open(path, stack, start)


def find_row(pread: Pread, size: int, array: ArrayMap, index: int) -> int | None:
    """Return where a parity row starts: where its header is; else where a file system says."""
    header = member_header(array, index)  # fmt: skip
    place = find_place(pread, PARITY_NAME)
    starts = range(0, size - HEADER_BYTES, SECTOR_BYTES)
    for offset in starts if place is None else (place[0], *starts):
        with contextlib.suppress(OSError):
            if pread(offset, HEADER_BYTES) == header:
                return offset + HEADER_BYTES
    return None if place is None else place[0] + HEADER_BYTES


def checksum_table(array: ArrayMap, present: Mapping[int, Path]) -> npt.NDArray[np.uint32] | None:
    """Return (members, blocks) of CRC-32 from the first parity disc with a sound table."""
    for index in range(array.data_count, len(array.members)):
        if index not in present:
            continue
        with open_image(present[index]) as (pread, _), contextlib.suppress(OSError):
            for place in find_places(pread, CHECKSUMS_NAME):
                body = pread(*place)
                if hashlib.sha256(body).hexdigest() == array.checksums_sha256:
                    return np.frombuffer(body, "<u4").reshape(len(array.members), array.num_blocks)
    return None


def bad_blocks(
    array: ArrayMap, source: RowSource | None, expected: npt.NDArray[np.uint32]
) -> list[int]:
    """Return the blocks of a row that have not their CRC-32; all of a row that is not there."""
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
