"""Arrays that lost discs: every image back by hash, or a refusal; damage anywhere."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierwise.archive.array_map import ArrayMap
from tierwise.archive.discs import find_place, open_image
from tierwise.archive.erasure import NumpyCodec, isal_codec
from tierwise.archive.image import ImageIdentity
from tierwise.archive.parity import encode_array, find_damage, read_array_map, reconstruct
from tierwise.core.errors import DataError, IntegrityError, UsageError
from tierwise.core.records import hash_file

BLOCK = 65536


def survivors(exhibit: Any, lost: set[int]) -> dict[int, Path]:
    return {i: path for i, path in enumerate(exhibit.paths) if i not in lost}


def test_every_loss_up_to_m_is_made_good(exhibit: Any, tmp_path: Path) -> None:
    for count in (1, 2):
        for lost in itertools.combinations(range(5), count):
            out = {index: tmp_path / f"{index}.iso" for index in lost}
            reconstruct(exhibit.array, survivors(exhibit, set(lost)), out)
            assert {i: hash_file(p) for i, p in out.items()} == {i: exhibit.hashes[i] for i in lost}


def test_four_of_eight(tall: Any, tmp_path: Path) -> None:
    for lost in ((0, 1, 2, 3), (4, 5, 6, 7), (0, 2, 5, 7)):
        out = {index: tmp_path / f"{index}.iso" for index in lost}
        reconstruct(tall.array, survivors(tall, set(lost)), out)
        assert all(hash_file(out[i]) == tall.hashes[i] for i in lost)


def test_one_too_many_is_refused_and_writes_nothing(exhibit: Any, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="beyond repair"):
        reconstruct(exhibit.array, survivors(exhibit, {0, 1, 2}), {0: tmp_path / "0.iso"})
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_that_were_not_named_are_caught_by_the_hash(
    exhibit: Any, tmp_path: Path, copy_of: Callable[[Path], Path]
) -> None:
    present = survivors(exhibit, {0})
    present[1] = copy_of(present[1])
    data = bytearray(present[1].read_bytes())
    data[300_000] ^= 1
    present[1].write_bytes(data)
    out = tmp_path / "rebuilt.iso"
    with pytest.raises(IntegrityError, match="wrong hash"):
        reconstruct(exhibit.array, present, {0: out})
    assert not out.exists()
    assert find_damage(exhibit.array, present) == {1: [300_000 // BLOCK]}
    damage = find_damage(exhibit.array, present)
    reconstruct(exhibit.array, present, {0: out}, damage=damage)
    assert hash_file(out) == exhibit.hashes[0]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32), gone=st.integers(0, 1))
def test_scattered_damage_of_at_most_m_per_block_is_mended(
    exhibit: Any, tmp_path: Path, seed: int, gone: int
) -> None:
    """Flip bits in up to m - gone members per block, and lose `gone` discs outright."""
    generator = random.Random(seed)
    folder = tmp_path / str(seed)
    folder.mkdir(exist_ok=True)
    lost = set(generator.sample(range(5), gone))
    bodies = {i: bytearray(p.read_bytes()) for i, p in survivors(exhibit, lost).items()}
    with open_image(exhibit.paths[3]) as (pread, _):
        place = find_place(pread, "PARITY.bin")
    assert place is not None
    for block in range(exhibit.array.num_blocks):
        for index in generator.sample(sorted(bodies), generator.randrange(3 - gone)):
            start = block * BLOCK + (place[0] + 2048 if index >= 3 else 0)
            end = min(start + BLOCK, len(bodies[index]), exhibit.array.stripe_length + start)
            if start < end:
                bodies[index][generator.randrange(start, end)] ^= 1 << generator.randrange(8)
    present = {}
    for index, body in bodies.items():
        present[index] = folder / f"bad-{index}.iso"
        present[index].write_bytes(body)
    damage = find_damage(exhibit.array, present)
    wanted = {i: folder / f"good-{i}.iso" for i in {*lost, *damage}}
    reconstruct(exhibit.array, present, wanted, damage=damage)
    assert all(hash_file(wanted[i]) == exhibit.hashes[i] for i in wanted)


def test_truncated_discs_serve_with_what_they_have(exhibit: Any, tmp_path: Path) -> None:
    present = dict(enumerate(exhibit.paths))
    for index, keep in ((0, 200_000), (1, 600_000)):
        present[index] = tmp_path / f"cut-{index}.iso"
        present[index].write_bytes(exhibit.paths[index].read_bytes()[:keep])
    damage = find_damage(exhibit.array, present)
    assert sorted(damage) == [0, 1]
    assert min(damage[1]) == 600_000 // BLOCK
    out = {i: tmp_path / f"{i}.iso" for i in (0, 1)}
    reconstruct(exhibit.array, present, out, damage=damage)
    assert [hash_file(out[i]) for i in (0, 1)] == list(exhibit.hashes[:2])


def test_a_parity_row_is_found_without_its_file_systems(exhibit: Any, tmp_path: Path) -> None:
    """Both trees of a parity disc are wiped; its row still counts, and the disc is remade."""
    broken = tmp_path / "parity.iso"
    data = bytearray(exhibit.paths[4].read_bytes())
    data[16 * 2048 : 17 * 2048] = bytes(2048)
    data[256 * 2048 : 257 * 2048] = bytes(2048)
    broken.write_bytes(data)
    present = {**survivors(exhibit, {0, 1}), 4: broken}
    damage = find_damage(exhibit.array, present)
    assert damage == {4: [exhibit.array.num_blocks]}
    out = {i: tmp_path / f"{i}.iso" for i in (0, 1, 4)}
    reconstruct(exhibit.array, present, out, damage=damage)
    assert all(hash_file(out[i]) == exhibit.hashes[i] for i in out)


def test_a_tree_that_points_elsewhere_does_not_lose_the_row(exhibit: Any, tmp_path: Path) -> None:
    broken = tmp_path / "parity.iso"
    data = bytearray(exhibit.paths[4].read_bytes())
    with open_image(exhibit.paths[4]) as (pread, _):
        place = find_place(pread, "PARITY.bin")
    assert place is not None
    sector = place[0] // 2048
    old, new = (struct.pack("<I", s) + struct.pack(">I", s) for s in (sector, sector + 3))
    assert data.count(old) == 1
    broken.write_bytes(data.replace(old, new))
    with open_image(broken) as (pread, _):
        assert find_place(pread, "PARITY.bin") == (place[0] + 3 * 2048, place[1])
    present = {**survivors(exhibit, {0, 1}), 4: broken}
    damage = find_damage(exhibit.array, present)
    assert damage == {4: [exhibit.array.num_blocks]}
    out = {i: tmp_path / f"{i}.iso" for i in (0, 1, 4)}
    reconstruct(exhibit.array, present, out, damage=damage)
    assert all(hash_file(out[i]) == exhibit.hashes[i] for i in out)


def test_both_codecs_write_the_same_images(exhibit: Any, tmp_path: Path) -> None:
    isal = isal_codec()
    if isal is None:
        pytest.skip("ISA-L is not installed (Debian: libisal2)")
    hashes = []
    for codec in (NumpyCodec(), isal):
        out = tmp_path / f"{codec.name}.iso"
        encode_array(
            [image.path for image in exhibit.images],
            [out],
            array_id=exhibit.array.array_id,
            identities=[
                ImageIdentity(archive_id="a" * 32, image_id="b" * 32, label="P", sequence=9)
            ],
            created_ns=5,
            codec=codec,
        )
        hashes.append(hash_file(out))
    assert hashes[0] == hashes[1]


def test_map_and_checksums_are_what_the_document_says(exhibit: Any) -> None:
    array = exhibit.array
    for path in exhibit.paths[3:]:
        assert read_array_map(path) == array
        with open_image(path) as (pread, _):
            table, parity = find_place(pread, "CHECKSUMS.bin"), find_place(pread, "PARITY.bin")
            assert table is not None
            assert parity is not None
            values = struct.unpack(f"<{table[1] // 4}I", pread(*table))
            header = pread(parity[0], 2048)
        assert len(values) == array.num_blocks * 5
        first = exhibit.paths[1].read_bytes()[:BLOCK]
        assert values[array.num_blocks] == zlib.crc32(first)
        assert header[:16] == b"TIERWISE PARITY1"
        k, m, row, zero, stripe, block = struct.unpack_from("<HHHHQI", header, 16)
        assert (k, m, zero, stripe, block) == (3, 2, 0, array.stripe_length, BLOCK)
        assert row == exhibit.paths.index(path) - 3
        assert header[36:52].hex() == array.array_id
        assert struct.unpack_from("<I", header, 68)[0] == zlib.crc32(header[:68])


def test_maps_that_contradict_themselves_are_refused(exhibit: Any) -> None:
    row = json.loads(exhibit.array.encode())
    assert ArrayMap.from_json(row) == exhibit.array
    changes: list[dict[str, Any]] = [
        {"code": "other"}, {"data_count": 4}, {"members": []}, {"stripe_length": None}
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(DataError):
            ArrayMap.from_json(row | change)
    with pytest.raises(DataError, match="data image"):
        read_array_map(exhibit.paths[0])


def test_impossible_arrays_are_refused_before_writing(exhibit: Any, tmp_path: Path) -> None:
    images = [image.path for image in exhibit.images]
    identity = ImageIdentity(archive_id="a" * 32, image_id="b" * 32, label="P", sequence=9)
    common: dict[str, Any] = {"array_id": "c" * 32, "created_ns": 0}
    with pytest.raises(UsageError, match="not possible"):
        encode_array(images, [tmp_path / f"{i}" for i in range(5)],
                     identities=[identity] * 5, **common)  # fmt: skip
    with pytest.raises(UsageError, match="at most 255"):
        encode_array(images * 85, [tmp_path / "p"], identities=[identity], **common)
    with pytest.raises(UsageError, match="limit"):
        encode_array(images, [tmp_path / "p"], identities=[identity], disc_capacity=1 << 20,
                     **common)  # fmt: skip
    with pytest.raises(UsageError, match="no member 9"):
        reconstruct(exhibit.array, {9: images[0]}, {0: tmp_path / "p"})
    assert list(tmp_path.iterdir()) == []


def test_other_readers_extract_a_parity_disc(exhibit: Any, tmp_path: Path) -> None:
    tools = {
        "7z": ["7z", "x", "-y", "-tudf", f"-o{tmp_path / '7z'}"],
        "bsdtar": ["bsdtar", "-C", str(tmp_path / "bsdtar"), "-xf"],
    }
    for name, command in tools.items():
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed (Debian: p7zip-full, libarchive-tools)")
        out = tmp_path / name
        out.mkdir()
        subprocess.run([*command, str(exhibit.paths[4])], check=True, capture_output=True)
        check = ["sha256sum", "-c", "--quiet", "MANIFEST.sha256"]
        subprocess.run(check, cwd=out, check=True, capture_output=True)
        assert json.loads((out / "ARRAY.json").read_bytes()) == exhibit.array.to_json()
