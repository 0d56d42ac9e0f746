"""docs/guide/archive.md, block by block, as a user would type it."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tierwise.archive.fuse import can_mount

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "archive.md"
_BLOCK = re.compile(r"<!-- walk(?:: ([^>]*))? -->\n```sh\n(.*?)```", re.DOTALL)


def plant_tree(root: Path, num_files: int) -> None:
    """Make a tree as people have them: deep, many small files, some large, odd names, links."""
    source = random.Random(5)
    for number in range(num_files):
        folder = root / f"year {2000 + number % 7}" / f"{number % 13:02d}" / f"set-{number % 31}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"file {number}.dat").write_bytes(source.randbytes(source.randrange(2000)))
    (root / "large.bin").write_bytes(source.randbytes(5_000_000))
    (root / "naïve\nname").write_text("odd")
    (root / "-dash").write_text("dash")
    (root / "empty").mkdir()
    (root / "link").symlink_to("large.bin")
    os.link(root / "-dash", root / "twin")


def walk(folder: Path, num_files: int, *, fuse: bool) -> None:
    for name in ("mnt", "tree"):
        (folder / name).mkdir()
    plant_tree(folder / "tree", num_files)
    scripts = Path(sys.executable).parent
    env = os.environ | {
        "VAULT": str(folder / "vault"), "MNT": str(folder / "mnt"), "TREE": str(folder / "tree"),
        "PATH": f"{scripts}:{os.environ['PATH']}",
    }  # fmt: skip
    blocks = _BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    assert len(blocks) >= 8
    for when, script in blocks:
        if when in ("fuse", "no fuse") and (when == "fuse") is not fuse:
            continue
        expected = int(when.rpartition(" ")[2]) if when.startswith("fails") else 0
        done = subprocess.run(
            ["bash", "-euc", script], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == expected, f"{script}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_the_guide_without_a_mount_though_there_could_be_one(fast_path: Path) -> None:
    walk(fast_path, 150, fuse=False)


def test_the_guide(fast_path: Path) -> None:
    walk(fast_path, 150, fuse=can_mount() is None)


@pytest.mark.fuse
@pytest.mark.slow
@pytest.mark.skipif(can_mount() is not None, reason="no FUSE here")
def test_the_guide_with_ten_thousand_files(fast_path: Path) -> None:
    walk(fast_path, 10_000, fuse=True)
