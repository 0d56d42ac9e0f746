"""Sealed images: every reader extracts the same bytes, the same input gives the same image."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierwise.archive.disc_names import escape_path
from tierwise.archive.disc_slice import decode_slice
from tierwise.archive.discs import check_disc, find_place, open_image, scan_discs
from tierwise.archive.image import (
    IMAGE_OVERHEAD_BYTES,
    MAX_DIRECTORIES,
    ArrayPosition,
    ImageIdentity,
    NodeKind,
    SealedImage,
    SealEntry,
    data_image_limit,
    entry_bytes_bound,
    payload_capacity,
    seal_image,
)
from tierwise.archive.iso_reader import walk_iso, walk_udf
from tierwise.core.errors import (
    IntegrityError,
    MissingFileError,
    StorageFullError,
    UsageError,
)

IDENTITY = ImageIdentity(archive_id="ab" * 16, image_id="cd" * 16, label="TW_TEST_1", sequence=1)
CREATED_NS = 1_700_000_000_123_456_789
ODD_NAMES = [
    b"plain.txt", b"caf\xc3\xa9", b"\xff\xfebad", b"new\nline", b"-dash", b"x" * 255, b"README",
    b"readme", b"back\\slash", b"50%", "日本".encode() * 42, "emoji😀".encode(), b" lead",
    b"trail ", b"a:b*?", b"%part00001of00002", b"%v3", b"CON", b"dot.", b"\x01\x7f", b"'\"$(rm)",
]  # fmt: skip


def seal(entries: list[SealEntry], path: Path, **changes: Any) -> SealedImage:
    options: dict[str, Any] = {
        "disc_capacity": 1 << 26, "identity": IDENTITY, "created_ns": CREATED_NS,
    }  # fmt: skip
    return seal_image(entries, path, **(options | changes))


def file_entry(path: bytes, source: Path, *, inode: int = 9, **changes: Any) -> SealEntry:
    fields: dict[str, Any] = {
        "paths": (path,), "kind": NodeKind.FILE, "inode": inode, "mode": 0o640,
        "size": source.stat().st_size, "source": source,
    }  # fmt: skip
    return SealEntry(**(fields | changes))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[SealedImage, dict[str, bytes]]:
    """An image of everything awkward, and disc path -> content of its files."""
    folder = tmp_path_factory.mktemp("odd")
    generator = random.Random(4)
    entries = [
        SealEntry(paths=(b"dir",), kind=NodeKind.DIRECTORY, inode=2, mode=0o750, uid=10, gid=20,
                  mtime_ns=CREATED_NS),
        SealEntry(paths=(b"link",), kind=NodeKind.SYMLINK, inode=3, mode=0o777,
                  target=b"dir/plain.txt"),
        SealEntry(paths=(b"far",), kind=NodeKind.SYMLINK, inode=4, mode=0o777, target=b"/a//b/"),
        SealEntry(paths=(b"long link",), kind=NodeKind.SYMLINK, inode=5, mode=0o777,
                  target=b"t/" * 2000),
        SealEntry(paths=(b"pipe",), kind=NodeKind.FIFO, inode=6, mode=0o600),
        SealEntry(paths=(b"null",), kind=NodeKind.CHAR, inode=7, mode=0o666, rdev=os.makedev(1, 3)),
        SealEntry(paths=(b"hollow/" + b"/".join([b"deep"] * 20),), kind=NodeKind.DIRECTORY,
                  inode=8, mode=0o700),
    ]  # fmt: skip
    for number, name in enumerate(ODD_NAMES):
        source = folder / str(number)
        source.write_bytes(generator.randbytes(number * 700))
        entries.append(
            file_entry(
                b"dir/" + name, source, inode=100 + number, uid=1000 + number, gid=5,
                mtime_ns=CREATED_NS + number, atime_ns=-5, ctime_ns=1 << 62,
                xattrs={b"user.\xff\n": b"\0\1", b"security.x": b""},
            )
        )  # fmt: skip
    some = folder / "20"
    entries += [
        file_entry(b"hard/one", some, inode=200, paths=(b"hard/one", b"hard/two"), mode=0o4755),
        file_entry(b"twice", some, inode=201, version=1),
        file_entry(b"twice", folder / "19", inode=201, version=2),
        file_entry(b"was a file", some, inode=202, version=4),
        file_entry(b"was a file/now a folder", some, inode=203),
        file_entry(b"big", some, inode=204, source_offset=3000, length=2000, piece_index=1,
                   piece_count=7, piece_offset=3000),
    ]  # fmt: skip
    image = seal(entries, folder / "odd.iso", records=[{"record": "tombstone", "path": "gone"}])
    contents = {}
    for extent in image.extents:
        entry = entries[extent.entry_index]
        assert entry.source is not None
        start = entry.source_offset
        body = entry.source.read_bytes()[start : start + entry.stored_bytes]
        contents[extent.disc_path] = body
    contents["data/hard/two"] = some.read_bytes()
    return image, contents


def test_extents_are_where_the_bytes_are(odd: tuple[SealedImage, dict[str, bytes]]) -> None:
    image, contents = odd
    data = image.path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == image.sha256
    assert len(data) == image.size_bytes
    for extent in image.extents:
        body = data[extent.offset : extent.offset + extent.length]
        assert body == contents[extent.disc_path]
        assert hashlib.sha256(body).hexdigest() == extent.sha256
    paths = {extent.disc_path for extent in image.extents}
    assert {"data/twice", "data/twice%v1", "data/was a file%v4"} <= paths
    assert "data/big%part00002of00007" in paths


def extract(tool: list[str], image: Path, out: Path) -> None:
    """Run one extraction tool, skipping where it is not installed."""
    packages = {"7z": "p7zip-full", "bsdtar": "libarchive-tools", "xorriso": "xorriso"}
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not installed (Debian: {packages[tool[0]]})")
    out.mkdir()
    command = [part.format(image=image, out=out) for part in tool]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode in (0, 2), done.stdout + done.stderr  # 7z 2: a link it will not make


@pytest.mark.parametrize(
    "tool",
    [
        ["7z", "x", "-y", "-o{out}", "{image}"],
        ["7z", "x", "-y", "-tudf", "-o{out}", "{image}"],
        ["bsdtar", "-xf", "{image}", "-C", "{out}"],
        ["xorriso", "-osirrox", "on", "-indev", "{image}", "-extract", "/", "{out}"],
    ],
    ids=["7z-iso", "7z-udf", "bsdtar", "xorriso"],
)
def test_other_readers_extract_every_file(
    odd: tuple[SealedImage, dict[str, bytes]], tmp_path: Path, tool: list[str]
) -> None:
    image, contents = odd
    out = tmp_path / "out"
    extract(tool, image.path, out)
    for disc_path, body in contents.items():
        assert (out / disc_path).read_bytes() == body, disc_path
    assert (out / "data/hollow/deep/deep/deep/deep/deep/deep/deep/deep/deep/deep").is_dir()
    manifest = subprocess.run(
        ["sha256sum", "-c", "--quiet", "MANIFEST.sha256"],
        cwd=out, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (manifest.returncode, manifest.stdout) == (0, "")
    listed = (out / "MANIFEST.sha256").read_text(encoding="utf-8").splitlines()
    assert len(listed) == len(contents) + 3


def test_rock_ridge_keeps_owner_mode_time_and_links(
    odd: tuple[SealedImage, dict[str, bytes]], tmp_path: Path
) -> None:
    if shutil.which("bsdtar") is None:
        pytest.skip("bsdtar is not installed (Debian: libarchive-tools)")
    listing = subprocess.run(
        ["bsdtar", "-tvf", str(odd[0].path), "--numeric-owner"],
        check=True, capture_output=True, text=True, env={"TZ": "UTC", "LC_ALL": "C.UTF-8"},
    ).stdout.splitlines()  # fmt: skip
    row = next(line for line in listing if line.endswith(" data/dir/50%25")).split()
    assert row[:4] == ["-rw-r-----", "1", "1009", "5"]
    assert row[5:8] == ["Nov", "14", "2023"]
    assert any(line.endswith(" data/link -> dir/plain.txt") for line in listing)
    assert any(line.endswith(" data/far -> /a/b") for line in listing)
    assert any(line.startswith("-rwsr-xr-x") and "hard/one" in line for line in listing)
    assert not any("rr_moved" in line for line in listing)


def test_slice_brings_back_every_entry(odd: tuple[SealedImage, dict[str, bytes]]) -> None:
    (scan,) = scan_discs([odd[0].path])
    assert scan.fault is None
    assert scan.identity == IDENTITY
    assert scan.created_ns == CREATED_NS
    assert scan.records == ({"record": "tombstone", "path": "gone"},)
    by_inode = {(e.entry.inode, e.entry.version): e for e in scan.entries}
    assert all(e.sound for e in scan.entries)
    for number, name in enumerate(ODD_NAMES):
        entry = by_inode[100 + number, 1].entry
        assert entry.paths == (b"dir/" + name,)
        assert (entry.uid, entry.mtime_ns, entry.atime_ns) == (
            1000 + number,
            CREATED_NS + number,
            -5,
        )
        assert entry.ctime_ns == 1 << 62
        assert entry.xattrs == {b"user.\xff\n": b"\0\1", b"security.x": b""}
    assert by_inode[4, 1].entry.target == b"/a//b/"
    assert by_inode[5, 1].entry.target == b"t/" * 2000
    assert by_inode[7, 1].entry.rdev == os.makedev(1, 3)
    assert by_inode[200, 1].entry.paths == (b"hard/one", b"hard/two")
    piece = by_inode[204, 1].entry
    assert (piece.piece_index, piece.piece_count, piece.piece_offset) == (1, 7, 3000)


def test_same_input_same_bytes_whatever_the_clock_and_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    source = tmp_path / "f"
    source.write_bytes(b"x" * 5000)
    entries = [file_entry(b"a/f", source, mtime_ns=10**18), file_entry(b"g", source, inode=10)]
    first = seal(entries, tmp_path / "1.iso")
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    later = time.time() + 1e6
    monkeypatch.setattr(time, "time", lambda: later)
    try:
        second = seal(list(reversed(entries)), tmp_path / "2.iso")
        third = seal(entries, tmp_path / "3.iso")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert third.sha256 == first.sha256
    assert second.size_bytes == first.size_bytes
    other = seal(entries, tmp_path / "4.iso", created_ns=CREATED_NS + 10**9)
    assert other.sha256 != first.sha256


def test_images_sealed_by_several_threads_are_right(tmp_path: Path) -> None:
    """The clock lent to pycdlib is one for all: images of different times do not mix."""
    source = tmp_path / "f"
    source.write_bytes(b"x" * 5000)
    entries = [file_entry(b"d/%d" % number, source, inode=number) for number in range(40)]

    def make(number: int) -> str:
        path = tmp_path / f"{number}.iso"
        return seal(entries, path, created_ns=number % 2 * 10**18).sha256

    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(make, range(8)))
    assert hashes == hashes[:2] * 4
    assert len(set(hashes)) == 2


def test_both_trees_agree_and_sit_on_sectors(odd: tuple[SealedImage, dict[str, bytes]]) -> None:
    with open_image(odd[0].path) as (pread, _):
        iso = {n.path: n for n in walk_iso(pread) if n.is_file}
        udf = {n.path: n for n in walk_udf(pread) if n.is_file}
    assert iso.keys() == udf.keys()
    for path, node in iso.items():
        assert udf[path].size == node.size
        assert all(offset % 2048 == 0 for offset, length in node.extents if length)


def test_format_note_names_the_disc(odd: tuple[SealedImage, dict[str, bytes]]) -> None:
    with open_image(odd[0].path) as (pread, _):
        place = find_place(pread, "FORMAT.txt")
        assert place is not None
        note = pread(*place).decode("ascii")
    for word in ("TW_TEST_1", "ab" * 16, "2023-11-14 22:13:20", "sha256sum -c", "stands alone"):
        assert word in note
    assert max(map(len, note.splitlines())) <= 84


# Bad input


def test_too_small_a_disc_is_said_before_writing(tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_bytes(bytes(1_000_000))
    with pytest.raises(UsageError, match="limit is") as caught:
        seal([file_entry(b"f", source)], tmp_path / "o.iso", disc_capacity=1 << 20)
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    with pytest.raises(UsageError, match="too small"):
        payload_capacity(1_000_000)


def test_data_images_leave_room_for_their_parity(tmp_path: Path) -> None:
    """The largest data image of an array, and then its parity, fit the disc."""
    from tierwise.archive.parity import encode_array

    capacity = 3 << 20
    limit = data_image_limit(capacity, num_members=6)
    source = tmp_path / "f"
    source.write_bytes(bytes(limit - 575_488 - 8192))
    array = ArrayPosition(array_id="e" * 32, index=0, data_count=2, parity_count=4)
    image = seal(
        [file_entry(b"f", source)], tmp_path / "0.iso", disc_capacity=capacity, array=array
    )
    assert limit - 20_000 < image.size_bytes <= limit
    encode_array(
        [image.path, image.path],
        [tmp_path / f"p{i}.iso" for i in range(4)],
        array_id="e" * 32,
        identities=[
            ImageIdentity(archive_id="ab" * 16, image_id=f"{i:032x}", label=f"P{i}", sequence=i)
            for i in range(4)
        ],
        created_ns=CREATED_NS,
        disc_capacity=capacity,
    )


def test_a_source_that_is_not_what_its_hash_says(tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_bytes(b"right")
    wrong = file_entry(b"f", source, sha256=hashlib.sha256(b"wrong").hexdigest())
    with pytest.raises(IntegrityError, match="read back wrong"):
        seal([wrong], tmp_path / "o.iso")
    short = file_entry(b"f", source, size=9)
    with pytest.raises(IntegrityError, match="shorter"):
        seal([short], tmp_path / "o.iso")
    known = file_entry(b"f", source, size=9, sha256="0" * 64)
    with pytest.raises(IntegrityError, match="shorter"):
        seal([known], tmp_path / "o.iso")
    twin = file_entry(b"f", source)
    with pytest.raises(MissingFileError):
        seal([replace(twin, source=tmp_path / "gone")], tmp_path / "o.iso")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("path", [b"", b"/abs", b"a//b", b"a/../b", b"./a", b"a\0b", b"a/"])
def test_paths_that_are_none(tmp_path: Path, path: bytes) -> None:
    with pytest.raises(UsageError):
        seal([SealEntry(paths=(path,), kind=NodeKind.FIFO, inode=1, mode=0)], tmp_path / "o.iso")


def test_contradictions_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_bytes(b"x")
    twin = file_entry(b"f", source)
    with pytest.raises(UsageError, match="twice"):
        seal([twin, twin, twin, twin], tmp_path / "o.iso")
    with pytest.raises(UsageError, match="no source"):
        seal([replace(twin, source=None)], tmp_path / "o.iso")
    with pytest.raises(UsageError, match="cannot be called"):
        seal([], tmp_path / "o.iso", records=[{"record": "entry"}])
    with pytest.raises(UsageError, match="label"):
        ImageIdentity(archive_id="a" * 32, image_id="a" * 32, label="no dash-es", sequence=0)
    with pytest.raises(UsageError, match="hex"):
        ImageIdentity(archive_id="xyz", image_id="a" * 32, label="A", sequence=0)


def test_more_directories_than_a_path_table_numbers(tmp_path: Path) -> None:
    entries = [
        SealEntry(paths=(b"%d" % number,), kind=NodeKind.DIRECTORY, inode=number, mode=0o755)
        for number in range(MAX_DIRECTORIES)
    ]
    with pytest.raises(UsageError, match="at most 65000 directories"):
        seal(entries, tmp_path / "o.iso")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    out = tmp_path / "o.iso"
    out.write_bytes(b"old")

    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("tierwise.archive.image.write_iso", fails)
    with pytest.raises(StorageFullError):
        seal([], out)
    assert out.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["o.iso"]


# Properties

component = st.one_of(
    st.sampled_from(ODD_NAMES[:16]),
    st.binary(min_size=1, max_size=40).filter(
        lambda b: b"/" not in b and b"\0" not in b and b not in (b".", b"..")
    ),
)
path_of = st.lists(component, min_size=1, max_size=4).map(b"/".join)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    files=st.dictionaries(
        path_of, st.tuples(st.binary(max_size=5000), st.integers(1, 9)), max_size=8
    ),
    mode=st.integers(0, 0o7777),
)
def test_any_tree_survives_and_stays_within_its_bound(
    tmp_path: Path, files: dict[bytes, tuple[bytes, int]], mode: int
) -> None:
    prefixes = {path[:i] for path in files for i in range(len(path)) if path[i : i + 1] == b"/"}
    files = {path: value for path, value in files.items() if path not in prefixes}
    entries = []
    for number, (path, (body, version)) in enumerate(sorted(files.items())):
        source = tmp_path / f"source-{number}"
        source.write_bytes(body)
        entries.append(file_entry(path, source, inode=number, version=version, mode=mode))
    image = seal(entries, tmp_path / "o.iso")
    bound = sum(entry_bytes_bound(entry, with_ancestors=True) for entry in entries)
    assert image.size_bytes <= IMAGE_OVERHEAD_BYTES + bound
    (scan,) = scan_discs([image.path])
    assert scan.fault is None
    data = image.path.read_bytes()
    found = {
        e.entry.paths[0]: (data[e.offset : e.offset + e.length], e.entry.version)
        for e in scan.entries
    }
    assert found == files
    assert all(entry.entry.mode == mode for entry in scan.entries)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32), length=st.sampled_from([1, 20, 100, 255]), depth=st.integers(0, 4)
)
def test_the_bound_holds_where_entries_share_their_folders(
    tmp_path: Path, seed: int, length: int, depth: int
) -> None:
    """Hundreds of names of one length: no slack of the fixed part hides a bound that is too low."""
    generator = random.Random(seed)
    source = tmp_path / "source"
    source.write_bytes(bytes(5000))
    alphabet = [
        chr(c).encode() for c in (*range(48, 58), *range(97, 123), 233, 0x65E5, 10, 0x1F600)
    ]
    entries: dict[bytes, SealEntry] = {}
    for number in range(400):
        parts = [b"d%d" % generator.randrange(3) for _ in range(depth)]
        for end in range(1, depth + 1):
            folder = b"/".join(parts[:end])
            entries[folder] = SealEntry(
                paths=(folder,), kind=NodeKind.DIRECTORY, inode=10**18 + end, mode=0o7777,
                mtime_ns=-(1 << 62), atime_ns=-(1 << 62), ctime_ns=-(1 << 62),
                xattrs={b"user.x": b"y" * 50},
            )  # fmt: skip
        name = b"%d" % number
        while len(name) < length:
            name += generator.choice(alphabet)
        path = b"/".join([*parts, name[:255]])
        kind = generator.choice(
            [NodeKind.FILE, NodeKind.FILE, NodeKind.SYMLINK, NodeKind.DIRECTORY]
        )
        entries[path] = SealEntry(
            paths=(path,), kind=kind, inode=2**64 - 1 - number, mode=0o7777, uid=2**32 - 1,
            gid=2**32 - 1, mtime_ns=(1 << 62) + number, atime_ns=-(1 << 62), ctime_ns=1 << 62,
            size=generator.randrange(5000) if kind is NodeKind.FILE else 0, source=source,
            sha256=None, version=generator.randrange(1, 10**9),
            target=b"/".join([name[:200]] * 3) if kind is NodeKind.SYMLINK else b"",
            piece_index=1 if kind is NodeKind.FILE else 0,
            piece_count=3 if kind is NodeKind.FILE else 1,
        )  # fmt: skip
    sizes = [seal(some, tmp_path / "o.iso").size_bytes for some in ([], list(entries.values()))]
    assert sizes[1] - sizes[0] <= sum(map(entry_bytes_bound, entries.values()))


@settings(deadline=None)
@given(garbage=st.binary(max_size=300))
def test_a_slice_is_refused_or_right(garbage: bytes) -> None:
    from tierwise.core.errors import TierwiseError

    try:
        decode_slice(garbage)
    except TierwiseError:
        return
    pytest.fail("garbage was taken for a slice")


def test_thousands_of_files_in_one_directory(tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_bytes(b"0123456789")
    entries = [
        file_entry(b"many/%05d" % i, source, inode=i, size=10, sha256=None) for i in range(3000)
    ]
    image = seal(entries, tmp_path / "o.iso")
    checked = check_disc(image.path)
    assert checked.fault is None
    assert checked.slice is not None
    assert len(checked.slice.entries) == 3000
    bound = IMAGE_OVERHEAD_BYTES + sum(map(entry_bytes_bound, entries))
    assert image.size_bytes <= bound


@pytest.mark.slow
def test_a_file_beyond_four_gib(tmp_path: Path) -> None:
    """One file of several ISO records and many UDF extents, from a sparse source."""
    source = tmp_path / "big"
    size = (1 << 32) + 12_345
    with source.open("wb") as stream:
        stream.seek((1 << 31) + 5)
        stream.write(b"middle")
        stream.seek(size - 3)
        stream.write(b"end")
    image = seal([file_entry(b"big", source)], tmp_path / "o.iso", disc_capacity=10**10)
    (extent,) = image.extents
    assert extent.length == size
    with open_image(image.path) as (pread, _):
        assert pread(extent.offset + (1 << 31) + 5, 6) == b"middle"
        assert pread(extent.offset + size - 3, 3) == b"end"
        (node,) = [n for n in walk_iso(pread) if n.path == "data/big"]
        assert len(node.extents) == 2


def test_catalogue_lines_are_plain_json(odd: tuple[SealedImage, dict[str, bytes]]) -> None:
    with open_image(odd[0].path) as (pread, _):
        place = find_place(pread, "CATALOGUE.jsonl")
        assert place is not None
        rows = [json.loads(line) for line in pread(*place).decode("ascii").splitlines()]
    assert rows[0]["record"] == "image"
    assert rows[-1] == {"record": "end", "num_lines": len(rows)}
    assert {"dir/" + escape_path(name) for name in ODD_NAMES} <= {
        row["paths"][0] for row in rows if row["record"] == "entry"
    }
