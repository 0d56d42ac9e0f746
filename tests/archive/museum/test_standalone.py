"""A stranger with the documents alone: a script without tierwise reads the discs."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "restore_without_tierwise.py"


def restore(name: bytes, out: Path, images: list[Path]) -> subprocess.CompletedProcess[str]:
    command: list[str | bytes] = [
        sys.executable,
        "-I",
        str(SCRIPT),
        name,
        str(out),
        *map(str, images),
    ]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_every_file_comes_back_with_discs_missing(exhibit: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = sorted(exhibit.contents)
    for number, lost in enumerate(itertools.combinations(range(4), 2)):
        left = [path for index, path in enumerate(exhibit.paths) if index not in lost]
        name = names[number % len(names)]
        done = restore(name, out, left)
        assert done.returncode == 0, done.stderr
        assert out.read_bytes() == exhibit.contents[name]


def test_four_lost_discs_and_a_split_file(tall: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = restore(b"big file.bin", out, list(tall.paths[4:]))
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == tall.contents[b"big file.bin"]


def test_too_few_discs_are_refused(exhibit: Any, tmp_path: Path) -> None:
    done = restore(b"big file.bin", tmp_path / "out", list(exhibit.paths[3:]))
    assert done.returncode != 0
    assert "3 discs are needed, 2 are left" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_script_is_a_stranger() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    modules = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"hashlib", "json", "struct", "sys", "pathlib", "urllib.parse"}


def test_the_script_is_a_hundred_lines() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 100
