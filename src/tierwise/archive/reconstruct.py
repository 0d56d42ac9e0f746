"""Lost or damaged members of an array, written again from the rest.

Repair walks the stripe in runs of blocks that miss the same members, so damage may lie anywhere as
long as no more than m members are bad at one block. What comes out is compared with its SHA-256
before it gets its name. Left out: finding the damage (`parity.find_damage`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tierwise.archive.array_map import ArrayMap
from tierwise.archive.erasure import Bytes, Codec, best_codec, recovery_matrix
from tierwise.archive.parity_image import Encoder, seal_parity
from tierwise.archive.stripes import (
    CHUNK_BLOCKS,
    RowSource,
    checksum_table,
    member_header,
    open_member,
)
from tierwise.core.errors import IntegrityError, UsageError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import whole_file


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
                final = final.with_name(f".{final.name}.row.part")
                stack.callback(final.unlink, missing_ok=True)
            outputs[index] = _Output(array, index, final, stack)
        with progress.task("repair", float(array.stripe_length)) as task:
            rebuild.run(outputs, task.advance)
        for output in outputs.values():
            output.finish()
        for index in wanted:
            if index >= array.data_count:
                final = missing[index]
                row = final.with_name(f".{final.name}.row.part")
                checksums = _table_bytes(array, present, codec)
                seal_parity(array, index, row, checksums, final, limit=None, progress=progress)


def _table_bytes(array: ArrayMap, present: Mapping[int, Path], codec: Codec | None) -> bytes:
    """Return CHECKSUMS.bin from a parity disc, or computed again from all data images."""
    table = checksum_table(array, present)
    if table is not None:
        return table.tobytes()
    with contextlib.ExitStack() as stack:
        try:
            sources = [RowSource.open(present[i], stack) for i in range(array.data_count)]
        except KeyError as error:
            raise IntegrityError(
                f"array {array.array_id}: no table of checksums is left to put on a parity disc",
                hint="rebuild the data images first, then the parity",
            ) from error
        encoder = Encoder(
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
                    member_header(array, index)
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
        self._sources: dict[int, RowSource] = {}
        for index, path in present.items():
            source = open_member(array, index, path, stack)
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
        buffers = np.zeros((len(self._array.members), CHUNK_BLOCKS * size), np.uint8)
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
                or block - first == CHUNK_BLOCKS
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
