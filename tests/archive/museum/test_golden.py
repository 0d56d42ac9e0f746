"""Discs made long ago are read as they were meant: four of format 1, kept as they are."""

from __future__ import annotations

import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from tierwise.archive.discs import open_image, scan_discs
from tierwise.archive.image import NodeKind
from tierwise.archive.parity import find_damage, read_array_map, reconstruct
from tierwise.core.records import hash_file

GOLDEN = Path(__file__).parent / "golden"
SCRIPT = Path(__file__).parents[1] / "restore_without_tierwise.py"
BIG = b"".join(b"line %d of a file larger than a disc\n" % number for number in range(60))
TIME_NS = 1_795_000_000_000_000_001


@pytest.fixture(scope="module")
def discs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("golden")
    paths = []
    for source in sorted(GOLDEN.glob("*.xz")):
        path = folder / source.stem
        path.write_bytes(lzma.decompress(source.read_bytes()))
        paths.append(path)
    return paths


def test_they_are_sound_and_say_what_they_hold(discs: list[Path]) -> None:
    scans = list(scan_discs(discs))
    assert [scan.fault for scan in scans] == [None] * 4
    assert [scan.identity.label for scan in scans if scan.identity] == [
        f"GOLDEN_{number}" for number in range(4)
    ]
    found = {(e.entry.inode, e.entry.version): (s.path, e) for s in scans for e in s.entries}
    contents = {}
    for key, (path, entry) in found.items():
        if entry.entry.kind is NodeKind.FILE:
            with open_image(path) as (pread, _):
                contents[key] = pread(entry.offset, entry.length)
    assert contents[3, 1] == b"hello, reader of the future\n"
    assert (contents[4, 1], contents[4, 2]) == (b"first version\n", b"second version\n")
    assert contents[7, 1] == b""
    hello = found[3, 1][1].entry
    assert hello.paths == ("letters/grüße.txt".encode(), b"letters/twin")
    assert hello.xattrs == {b"user.lang": b"de\0"}
    assert (hello.mtime_ns, hello.atime_ns, hello.ctime_ns) == (TIME_NS, TIME_NS + 1, TIME_NS + 2)
    assert found[4, 2][1].entry.paths == (b"letters/\xff\xfe\n50%",)
    assert found[4, 1][1].disc_path.endswith("%v1")
    assert found[5, 1][1].entry.target == b"twin"
    assert found[7, 1][1].entry.paths == (b"n" * 255,)
    assert found[8, 1][1].entry.kind is NodeKind.FIFO
    assert scans[0].records == ({"record": "tombstone", "path": "gone"},)


def test_the_code_still_mends_them(discs: list[Path], tmp_path: Path) -> None:
    array = read_array_map(discs[3])
    out = {index: tmp_path / f"{index}.iso" for index in (0, 1)}
    reconstruct(array, {2: discs[2], 3: discs[3]}, out)
    assert [hash_file(out[i]) for i in (0, 1)] == [hash_file(path) for path in discs[:2]]
    assert find_damage(array, dict(enumerate(discs))) == {}


def test_a_stranger_still_reads_them(discs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for left in ([0, 1, 2], [0, 3], [2, 3]):
        images = [str(discs[index]) for index in left]
        command = [sys.executable, "-I", str(SCRIPT), "big", str(out), *images]
        subprocess.run(command, check=True, capture_output=True)
        assert out.read_bytes() == BIG
