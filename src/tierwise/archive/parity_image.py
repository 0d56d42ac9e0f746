"""Parity images: the one pass that computes an array's rows, and the discs they are put on.

Left out: which images make an array (the catalogue), and the way back (`reconstruct`).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tierwise.archive.array_map import CHECKSUM_BLOCK_BYTES, ArrayMap
from tierwise.archive.disc_slice import (
    ARRAY_NAME,
    CATALOGUE_NAME,
    CHECKSUMS_NAME,
    FORMAT_NAME,
    PARITY_NAME,
    ArrayPosition,
    ImageIdentity,
    encode_slice,
)
from tierwise.archive.erasure import Bytes, Codec, parity_matrix
from tierwise.archive.format_note import format_note
from tierwise.archive.image import write_image
from tierwise.archive.iso_writer import NodeShape, PlanNode
from tierwise.archive.stripes import CHUNK_BLOCKS, HEADER_BYTES, RowSource
from tierwise.core.progress import Progress


class Encoder:
    """One pass over k images: parity rows, every member's hash and block checksums."""

    def __init__(
        self, sources: Sequence[RowSource], stripe: int, codec: Codec, headers: Sequence[bytes]
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
        size = CHUNK_BLOCKS * CHECKSUM_BLOCK_BYTES
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


def seal_parity(
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
