"""kill -9 between every two steps: what was acknowledged is there, and the work goes on."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from tierwise.archive.vault import Archive

CHILD = Path(__file__).with_name("crash_child.py")
POINTS = [
    ("write: file made", 3),
    ("write: version current", 5),
    ("write: content copied", 1),
    ("write: before the catalogue knows the size", 9),
    ("fsync: bytes durable", 4),
    ("fsync: catalogue durable", 7),
    ("fsync: names journalled", 5),
    ("seal: image planned", 1),
    ("seal: image planned", 2),
    ("seal: image written", 2),
    ("seal: image entered", 1),
    ("burn: parity written", 1),
    ("burn: parity entered", 1),
    ("burn: disc written", 2),
    ("burn: disc entered", 1),
    ("burn: array burned", 1),
    ("evict: foreparts kept", 1),
    ("evict: catalogue says offline", 1),
    ("evict: files removed", 1),
    ("scrub: disc checked", 2),
    ("repair: image rebuilt", 1),
    ("repair: disc replaced", 1),
    ("burn: disc written", 6),  # of a repair, as the next
    ("burn: disc entered", 6),
]
FAST = [POINTS[i] for i in (2, 3, 6, 9, 11, 13, 17, 20, 23)]


def run_child(root: Path, point: str, count: int) -> tuple[int, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, str(CHILD), str(root), point, str(count)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONHASHSEED": "0"},
    )  # fmt: skip
    if done.returncode not in (0, -9):
        pytest.fail(done.stderr)
    acknowledged = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    return done.returncode, acknowledged


def check(root: Path, acknowledged: dict[str, str]) -> None:
    with Archive.open(root) as archive:
        # a disc that was destroyed and not yet repaired is all that may be amiss
        assert [text for text in archive.fsck() if "no good disc" not in text] == []
        for path, digest in acknowledged.items():
            data = archive.files.read_file(path)
            if path == "d/f1":  # a crash may come between its change and the acknowledgement
                continue
            assert hashlib.sha256(data).hexdigest() == digest, path
        archive.seal(partial=True)  # takes up whatever was interrupted
        archive.burn(partial=True)
        archive.evict()
        archive.scrub()
        archive.repair()
        assert archive.scrub().failed == ()
        assert archive.verify().problems == ()
        archive.evict()
        for path, digest in acknowledged.items():
            if path != "d/f1":
                assert hashlib.sha256(archive.files.read_file(path)).hexdigest() == digest, path
        assert {row[0] for row in archive.catalogue.all("SELECT state FROM versions")} <= {"burned"}
        assert archive.fsck() == []


def cases(points: list[tuple[str, int]]) -> list[ParameterSet]:
    return [pytest.param(*point, id=f"{point[0]} {point[1]}") for point in points]


@pytest.mark.parametrize(("point", "count"), cases(FAST))
def test_what_was_acknowledged_survives_a_kill(fast_path: Path, point: str, count: int) -> None:
    code, acknowledged = run_child(fast_path / "vault", point, count)
    assert code == -9, f"never came by {point!r} {count} times"
    check(fast_path / "vault", acknowledged)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "count"), cases(POINTS))
def test_every_point(fast_path: Path, point: str, count: int) -> None:
    code, acknowledged = run_child(fast_path / "vault", point, count)
    assert code == -9, f"never came by {point!r} {count} times"
    check(fast_path / "vault", acknowledged)


def test_every_crash_point_in_the_source_is_tried() -> None:
    source = Path(__file__).parents[2] / "src" / "tierwise" / "archive"
    named = {
        part.split('"', 1)[0]
        for path in source.glob("*.py")
        for part in path.read_text(encoding="utf-8").split('crash_point("')[1:]
    }
    rebuilding = {name for name in named if name.startswith("rebuild: ")}  # by test_cut_off, all
    assert named - rebuilding == {name for name, _ in POINTS}
