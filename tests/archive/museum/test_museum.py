"""One broken disc per error code: each is named, and nothing wrong is ever called sound."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierwise.archive.discs import (
    DiscFault,
    DiscScan,
    check_disc,
    find_place,
    open_image,
    scan_discs,
)
from tierwise.archive.faults import Faults
from tierwise.archive.library import DiscState, Geometry, SimulatedLibrary

Copy = Callable[[Path], Path]


def scan(*paths: Path, **options: Any) -> list[DiscScan]:
    return list(scan_discs(paths, **options))


def place_of(path: Path, name: str) -> tuple[int, int]:
    with open_image(path) as (pread, _):
        place = find_place(pread, name)
    assert place is not None
    return place


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def flip(path: Path, offset: int) -> None:
    with path.open("rb") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
    patch(path, offset, bytes([byte ^ 0x10]))


def test_sound_discs_are_sound(exhibit: Any) -> None:
    scans = scan(*exhibit.paths)
    assert [s.fault for s in scans] == [None] * 5
    found = {e.entry.paths[0]: e for s in scans for e in s.entries if e.entry.piece_count == 1}
    for name, body in exhibit.contents.items():
        if name in found:
            disc = next(s.path for s in scans if found[name] in s.entries)
            with open_image(disc) as (pread, _):
                assert pread(found[name].offset, found[name].length) == body
    assert scans[0].records == ({"record": "inode", "inode": 0, "names": []},)
    assert scans[3].array_map == exhibit.array
    assert found[next(iter(found))].entry.xattrs == {b"user.note": b"\0\0\xff"}


def test_blank(tmp_path: Path) -> None:
    blank = tmp_path / "blank.iso"
    blank.write_bytes(bytes(1 << 20))
    empty = tmp_path / "empty.iso"
    empty.touch()
    assert [s.fault for s in scan(blank, empty)] == [DiscFault.BLANK] * 2


def test_foreign_bytes_and_foreign_volume(tmp_path: Path) -> None:
    import pycdlib

    noise = tmp_path / "noise.iso"
    noise.write_bytes(random.Random(1).randbytes(600_000))
    other = tmp_path / "other.iso"
    volume = pycdlib.PyCdlib()
    volume.new(rock_ridge="1.09", vol_ident="HOLIDAY")
    volume.add_directory("/D", rr_name="photos")
    volume.write(str(other))
    volume.close()
    assert [s.fault for s in scan(noise, other)] == [DiscFault.FOREIGN] * 2


def test_newer_format(exhibit: Any, copy_of: Copy) -> None:
    """A later format is refused by name, even where its hashes are right."""
    import hashlib

    disc = copy_of(exhibit.paths[0])
    offset, length = place_of(disc, "CATALOGUE.jsonl")
    body = disc.read_bytes()[offset : offset + length]
    newer = body.replace(b'"format":1', b'"format":2', 1)
    patch(disc, offset, newer)
    at, size = place_of(disc, "MANIFEST.sha256")
    manifest = disc.read_bytes()[at : at + size]
    old, new = (hashlib.sha256(b).hexdigest().encode() for b in (body, newer))
    patch(disc, at, manifest.replace(old, new))
    (found,) = scan(disc)
    assert found.fault is DiscFault.NEWER_FORMAT
    assert found.entries == ()


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_truncated(exhibit: Any, copy_of: Copy, keep: float) -> None:
    disc = copy_of(exhibit.paths[1])
    size = int(disc.stat().st_size * keep)
    with disc.open("r+b") as stream:
        stream.truncate(size)
    (found,) = scan(disc)
    assert found.fault is DiscFault.TRUNCATED
    assert all(e.offset + e.length <= size for e in found.entries if e.sound and e.length)


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_half_burned(exhibit: Any, copy_of: Copy, keep: float) -> None:
    disc = copy_of(exhibit.paths[1])
    size = disc.stat().st_size
    start = int(size * keep) // 2048 * 2048
    patch(disc, start, bytes(size - start))
    (found,) = scan(disc)
    assert found.fault is DiscFault.HALF_BURNED


def test_tree_damaged_is_read_by_the_other_tree(exhibit: Any, copy_of: Copy) -> None:
    for sector in (16, 256):
        disc = copy_of(exhibit.paths[0])
        patch(disc, sector * 2048, bytes(2048))
        (found,) = scan(disc)
        assert found.fault is DiscFault.TREE_DAMAGED
        assert len(found.entries) == 4
        assert all(entry.sound for entry in found.entries)


@pytest.mark.parametrize(
    "name", ["MANIFEST.sha256", "CATALOGUE.jsonl", "data/disc 0/file-1%0A.txt%FF"]
)
@pytest.mark.parametrize("endings", ["<>", "<"], ids=["iso", "udf"])
def test_a_tree_that_points_elsewhere_is_overruled(
    exhibit: Any, copy_of: Copy, name: str, endings: str
) -> None:
    """One file system names the wrong sectors; the hashes say which one to believe."""
    disc = copy_of(exhibit.paths[0])
    sector = place_of(disc, name)[0] // 2048
    data = disc.read_bytes()
    if endings == "<>":
        old, new = (struct.pack("<I", s) + struct.pack(">I", s) for s in (sector, sector + 2))
    else:  # a UDF allocation descriptor: length, then the block from the partition's start, 257
        length = place_of(disc, name)[1]
        old, new = (struct.pack("<II", length, s - 257) for s in (sector, sector + 2))
    assert data.count(old) == 1
    disc.write_bytes(data.replace(old, new))
    (found,) = scan(disc)
    assert found.fault is DiscFault.TREE_DAMAGED
    assert len(found.entries) == 4
    assert all(entry.sound for entry in found.entries)
    for entry, known in zip(found.entries, scan(exhibit.paths[0])[0].entries, strict=True):
        assert (entry.offset, entry.length) == (known.offset, known.length)


def test_tree_whose_names_disagree(exhibit: Any, copy_of: Copy) -> None:
    disc = copy_of(exhibit.paths[0])
    data = disc.read_bytes()
    patch(disc, data.index(b"file-1%0A.txt%FF"), b"file-7")
    (found,) = scan(disc)
    assert found.fault is DiscFault.TREE_DAMAGED


def test_slice_damaged_yields_no_entries(exhibit: Any, copy_of: Copy) -> None:
    disc = copy_of(exhibit.paths[0])
    offset, length = place_of(disc, "CATALOGUE.jsonl")
    flip(disc, offset + length // 2)
    (found,) = scan(disc)
    assert found.fault is DiscFault.SLICE_DAMAGED
    assert found.entries == ()
    assert found.records == ()


def test_manifest_damaged(exhibit: Any, copy_of: Copy) -> None:
    disc = copy_of(exhibit.paths[0])
    offset, _ = place_of(disc, "MANIFEST.sha256")
    patch(disc, offset + 10, b"\n")
    (found,) = scan(disc)
    assert found.fault is DiscFault.MANIFEST_DAMAGED
    assert all(entry.sound for entry in found.entries)


def test_file_damaged_names_the_file_and_keeps_the_rest(exhibit: Any, copy_of: Copy) -> None:
    disc = copy_of(exhibit.paths[2])
    victim = exhibit.images[2].extents[1]
    flip(disc, victim.offset + 17)
    (found,) = scan(disc)
    assert found.fault is DiscFault.FILE_DAMAGED
    assert victim.disc_path in found.detail
    assert [entry.sound for entry in found.entries] == [True, False, True, True]


def test_damage_outside_files(exhibit: Any, copy_of: Copy) -> None:
    disc = copy_of(exhibit.paths[0])
    flip(disc, 5 * 2048)
    (found,) = scan(disc)
    assert found.fault is DiscFault.DAMAGED
    assert all(entry.sound for entry in found.entries)


def test_an_image_that_its_array_does_not_list(exhibit: Any, copy_of: Copy) -> None:
    """Sound by itself, with the right id, but with other bytes: only the map shows it."""
    disc = copy_of(exhibit.paths[0])
    body = bytearray(disc.read_bytes())
    body[5 * 2048] ^= 1
    place = 16 * 2048 + 883 + 15
    body[place : place + 8] = b"00000000"
    body[place : place + 8] = b"%08x" % zlib.crc32(body)
    disc.write_bytes(body)
    assert scan(disc)[0].fault is None
    assert scan(exhibit.paths[3], disc)[1].fault is DiscFault.DAMAGED


def test_swapped(exhibit: Any) -> None:
    first, second = exhibit.paths[:2]
    identity = exhibit.images[1].identity.image_id
    (found,) = scan(first, expected={first: identity})
    assert found.fault is DiscFault.SWAPPED
    assert scan(second, expected={second: identity})[0].fault is None


def test_duplicate(exhibit: Any, copy_of: Copy) -> None:
    again = copy_of(exhibit.paths[1])
    assert [s.fault for s in scan(exhibit.paths[1], again)] == [None, DiscFault.DUPLICATE]


def test_a_damaged_copy_does_not_make_the_good_one_a_duplicate(exhibit: Any, copy_of: Copy) -> None:
    bad = copy_of(exhibit.paths[1])
    flip(bad, exhibit.images[1].extents[0].offset)
    scans = scan(bad, exhibit.paths[1])
    assert [s.fault for s in scans] == [DiscFault.FILE_DAMAGED, None]


def test_conflict(exhibit: Any, rival: Any) -> None:
    """Another image claims the same place in the same array."""
    scans = scan(exhibit.paths[0], rival.paths[0])
    assert [s.fault for s in scans] == [None, DiscFault.CONFLICT]


def test_unreadable_sectors(exhibit: Any, tmp_path: Path) -> None:
    library = SimulatedLibrary.create(
        tmp_path / "library", Geometry(disc_capacity=4 << 20, layers=1, trays=1, discs=5)
    )
    for slot, path in enumerate(exhibit.paths, start=1):
        library.burn(slot, path)
    Faults(library).spoil_sectors(2, [300, exhibit.images[1].extents[0].offset // 2048])
    scans = scan(*map(library.path_of, range(1, 6)), opener=library.open_disc)
    assert [s.fault for s in scans] == [None, DiscFault.UNREADABLE, None, None, None]
    assert next(entry.sound for entry in scans[1].entries) is False
    assert library.state_of(2) is DiscState.SEALED


def test_every_code_has_an_exhibit() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [f.name for f in DiscFault if f"DiscFault.{f.name}" not in source] == []


def test_any_bit_flip_is_seen(exhibit: Any, copy_of: Copy) -> None:
    """Flip single bits all over a disc: each is seen, and what is sound has the right bytes."""
    generator = random.Random(5)
    good = scan(exhibit.paths[0])[0]
    for _ in range(150):
        disc = copy_of(exhibit.paths[0])
        offset = generator.randrange(disc.stat().st_size)
        flip(disc, offset)
        (found,) = scan(disc)
        assert found.fault is not None, offset
        for entry, known in zip(found.entries, good.entries, strict=False):
            if entry.sound:
                assert entry.entry == known.entry
                with open_image(disc) as (pread, _), open_image(good.path) as (right, _):
                    assert pread(entry.offset, entry.length) == right(known.offset, known.length)


def test_check_disc_never_raises_on_noise(exhibit: Any, copy_of: Copy) -> None:
    generator = random.Random(6)
    for _ in range(40):
        disc = copy_of(exhibit.paths[3])
        for _ in range(20):
            sector = generator.randrange(disc.stat().st_size // 2048)
            patch(disc, sector * 2048, generator.randbytes(generator.choice([4, 64, 2048])))
        check_disc(disc)
