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
from collections.abc import Mapping, Sequence
from pathlib import Path

from tierwise.archive.array_map import ArrayMap, ArrayMember, decode_array_map
from tierwise.archive.disc_slice import ARRAY_NAME, CATALOGUE_NAME, ImageIdentity, decode_slice
from tierwise.archive.discs import check_disc, open_image, read_root_file
from tierwise.archive.erasure import Codec, best_codec, parity_matrix
from tierwise.archive.parity_image import Encoder, seal_parity
from tierwise.archive.reconstruct import reconstruct
from tierwise.archive.stripes import (
    RowSource,
    bad_blocks,
    checksum_table,
    open_member,
    parity_header,
)
from tierwise.core.errors import DataError, IntegrityError, UsageError
from tierwise.core.progress import SILENT, Progress

__all__ = [
    "ArrayMap",
    "ArrayMember",
    "encode_array",
    "read_array_map",
    "find_damage",
    "reconstruct",
]


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
            sources = [RowSource.open(path, stack) for path in images]
            stripe = max(source.size for source in sources)
            outputs = [stack.enter_context(row.open("wb")) for row in rows]
            headers = [
                parity_header(
                    (len(images), len(rows), stripe),
                    row=row,
                    array_id=array_id,
                    image_id=identity.image_id,
                )
                for row, identity in enumerate(identities)
            ]
            encoder = Encoder(sources, stripe, codec or best_codec(), headers)
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
            seal_parity(
                array, index, row, encoder.checksums, path, limit=disc_capacity, progress=progress
            )
        return array
    finally:
        for row in rows:
            row.unlink(missing_ok=True)


def _identity_of(image: Path) -> ImageIdentity:
    with open_image(image) as (pread, _):
        return decode_slice(read_root_file(pread, CATALOGUE_NAME)).identity


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
    table = checksum_table(array, present)
    if table is None:
        raise IntegrityError(
            f"array {array.array_id} has no sound table of checksums among the discs present",
            hint="bring any parity disc of the array",
        )
    damage = {}
    for index, path in sorted(present.items()):
        with contextlib.ExitStack() as stack:
            source = open_member(array, index, path, stack)
            bad = bad_blocks(array, source, table[index])
        if index >= array.data_count and not bad and check_disc(path).fault is not None:
            bad.append(array.num_blocks)
        if bad:
            damage[index] = bad
    return damage
