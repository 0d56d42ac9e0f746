"""Small arrays of discs, made by a seed rather than kept: the exhibits before they are broken."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tierwise.archive.array_map import ArrayMap
from tierwise.archive.image import (
    ArrayPosition,
    ImageIdentity,
    NodeKind,
    SealedImage,
    SealEntry,
    seal_image,
)
from tierwise.archive.parity import encode_array
from tierwise.core.records import hash_file

ARCHIVE_ID = "0123456789abcdef" * 2
ARRAY_ID = "fedcba9876543210" * 2
CREATED_NS = 1_700_000_000_123_456_789
BIG = b"big file.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """An array with everything known about it."""

    folder: Path
    images: tuple[SealedImage, ...]
    paths: tuple[Path, ...]
    array: ArrayMap
    contents: dict[bytes, bytes]
    hashes: tuple[str, ...]


def make_exhibit(folder: Path, *, data: int = 3, parity: int = 2, seed: int = 1) -> Exhibit:
    """Return an array of `data` + `parity` discs with a few files each and one split over all."""
    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    big = folder / "big.bin"
    big.write_bytes(generator.randbytes(5000 * data))
    contents = {BIG: big.read_bytes()}
    images = []
    for index in range(data):
        entries = []
        for number in range(3):
            name = f"disc {index}/file-{number}\n.txt".encode() + b"\xff"
            body = generator.randbytes(generator.randrange(60_000) + index * 70_000)
            source = folder / f"source-{index}-{number}"
            source.write_bytes(body)
            contents[name] = body
            entries.append(
                SealEntry(
                    paths=(name,), kind=NodeKind.FILE, inode=100 * index + number, mode=0o640,
                    size=len(body), source=source, mtime_ns=CREATED_NS - number,
                    xattrs={b"user.note": bytes([index, 0, 255])},
                )
            )  # fmt: skip
        entries.append(
            SealEntry(
                paths=(BIG,), kind=NodeKind.FILE, inode=7, mode=0o600, size=5000 * data,
                source=big, source_offset=5000 * index, length=5000, piece_index=index,
                piece_count=data, piece_offset=5000 * index,
            )
        )  # fmt: skip
        images.append(
            seal_image(
                entries,
                folder / f"data-{index}.iso",
                disc_capacity=4 << 20,
                identity=ImageIdentity(
                    archive_id=ARCHIVE_ID, image_id=f"{seed:016x}{index:016x}",
                    label=f"TW_{seed}_D{index}", sequence=index,
                ),
                created_ns=CREATED_NS,
                array=ArrayPosition(
                    array_id=ARRAY_ID, index=index, data_count=data, parity_count=parity
                ),
                records=[{"record": "inode", "inode": 100 * index, "names": []}],
            )
        )  # fmt: skip
    out_paths = [folder / f"parity-{row}.iso" for row in range(parity)]
    array = encode_array(
        [image.path for image in images],
        out_paths,
        array_id=ARRAY_ID,
        identities=[
            ImageIdentity(
                archive_id=ARCHIVE_ID, image_id=f"{seed:016x}{data + row:016x}",
                label=f"TW_{seed}_P{row}", sequence=data + row,
            )
            for row in range(parity)
        ],
        created_ns=CREATED_NS,
        disc_capacity=4 << 20,
    )  # fmt: skip
    paths = (*(image.path for image in images), *out_paths)
    return Exhibit(
        folder=folder, images=tuple(images), paths=paths, array=array, contents=contents,
        hashes=tuple(hash_file(path) for path in paths),
    )  # fmt: skip


@pytest.fixture(scope="session")
def exhibit(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    """An array of 3 + 2 discs; tests copy what they break."""
    return make_exhibit(tmp_path_factory.mktemp("museum"))


@pytest.fixture(scope="session")
def rival(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    """Other discs that claim the first places of the same array."""
    return make_exhibit(tmp_path_factory.mktemp("rival"), data=1, parity=1, seed=2)


@pytest.fixture(scope="session")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    """An array of 4 + 4 discs."""
    return make_exhibit(tmp_path_factory.mktemp("tall"), data=4, parity=4, seed=3)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Return a function that copies a disc into the test's folder."""

    def copy(path: Path) -> Path:
        target = tmp_path / path.name
        target.write_bytes(path.read_bytes())
        return target

    return copy
