"""Import, export and rebuild, killed and interrupted in a process of their own, then run again."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierwise.archive.export import UNFINISHED
from tierwise.archive.vault import CATALOGUE, Archive
from tierwise.core.errors import StateError

Make = Callable[..., Archive]
CHILD = Path(__file__).with_name("cut_child.py")
SIGNALS = ("SIGINT", "SIGKILL")
_TABLES = ("inodes", "names", "xattrs", "versions", "extents", "tombstones", "arrays", "images",
           "discs")  # fmt: skip


def run_child(verb: str, number: str, step: int, root: Path, other: Path) -> int:
    done = subprocess.run(
        [sys.executable, str(CHILD), verb, number, str(step), str(root), str(other)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 130, -9), done.stderr
    return done.returncode


def make_tree(folder: Path) -> None:
    source = random.Random(3)
    for number in range(12):
        path = folder / f"d{number % 3}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.randbytes(source.randrange(60_000)))
        os.utime(path, ns=(number, 10**17 + number))
    (folder / "d0" / "link").symlink_to("f0")
    os.link(folder / "d0" / "f0", folder / "d1" / "twin")
    os.mkfifo(folder / "d2" / "fifo")
    (folder / "d2" / "empty").mkdir()


def facts(folder: Path) -> dict[str, Any]:
    """Return what is below a folder: bytes, targets, modes and times of files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name, state = str(path.relative_to(folder)), path.lstat()
        if path.is_symlink():
            found[name] = path.readlink()
        elif path.is_file():
            found[name] = (path.read_bytes(), state.st_mode, state.st_mtime_ns)
        else:
            found[name] = "other"
    return found


@pytest.fixture
def sealed(make_archive: Make, tmp_path: Path) -> Path:
    """An archive on discs, two of them lost, nothing in the buffer."""
    archive = make_archive()
    make_tree(tmp_path / "tree")
    archive.files.import_tree(tmp_path / "tree")
    archive.files.write_file("large", random.Random(4).randbytes(2_500_000))
    archive.files.remove("d1/f4")
    archive.seal(partial=True)
    archive.burn(partial=True)
    archive.evict()
    for slot in (1, 4):
        archive.shelf.destroy(slot)
    archive.close()
    return archive.root


@pytest.mark.parametrize("verb", ["export", "bag"])
def test_an_export_goes_on_and_never_looks_finished(
    sealed: Path, tmp_path: Path, verb: str
) -> None:
    import bagit

    assert run_child(verb, "SIGINT", 0, sealed, tmp_path / "whole") == 0
    expected = facts(tmp_path / "whole")
    target, chance, cuts = tmp_path / "out", random.Random(1), 0
    while True:
        status = run_child(verb, SIGNALS[cuts % 2], chance.randrange(1, 7), sealed, target)
        if status == 0:
            break
        cuts += 1
        assert (target / UNFINISHED).exists()
        assert not (target / "bagit.txt").exists()
        if cuts == 3:
            run_again = run_child(verb, "SIGINT", 0, sealed, target)
            assert run_again == 0
            break
    assert cuts >= 1
    assert not list(target.rglob(".*.part"))
    assert not (target / UNFINISHED).exists()
    if verb == "bag":
        bagit.Bag(str(target)).validate()
    else:
        assert facts(target) == expected


def test_another_export_does_not_go_on_there(sealed: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert run_child("export", "SIGKILL", 3, sealed, target) == -9
    kept = sorted(path.name for path in target.rglob("*"))
    with Archive.open(sealed, write=False) as archive:
        with pytest.raises(StateError, match="another export, unfinished"):
            archive.export(["d0"], target)
        with pytest.raises(StateError, match="another export, unfinished"):
            archive.export(["/"], target, bagit=True)
        assert sorted(path.name for path in target.rglob("*")) == kept
        archive.export(["/"], target)
        with pytest.raises(StateError, match="not empty"):
            archive.export(["/"], target)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_rebuild_comes_to_the_same(sealed: Path, tmp_path: Path, number: str) -> None:
    shutil.rmtree(sealed / "metadata")
    other = tmp_path / "vault"
    shutil.copytree(sealed, other)
    assert run_child("rebuild", number, 0, other, tmp_path) == 0
    step, cuts = 1, 0
    while (status := run_child("rebuild", number, step, sealed, tmp_path)) != 0:
        step, cuts = step + 1, cuts + 1
        if (sealed / CATALOGUE).exists():
            break
    assert cuts >= 6, status  # four discs of six are left, and the named points
    with Archive.open(sealed) as one, Archive.open(other) as two:
        for table in _TABLES:
            sql = f"SELECT * FROM {table} ORDER BY 1, 2"
            assert one.catalogue.all(sql) == two.catalogue.all(sql), table
        assert one.repair().beyond == ()
        assert one.verify().problems == ()


@pytest.mark.parametrize("number", SIGNALS)
def test_an_import_goes_on(make_archive: Make, tmp_path: Path, number: str) -> None:
    archive = make_archive()
    archive.close()
    make_tree(tmp_path / "tree")
    step, cuts = 2, 0
    while run_child("import", number, step, archive.root, tmp_path / "tree") != 0:
        step, cuts = step + 4, cuts + 1
    assert cuts >= 3
    (tmp_path / "tree" / "d2" / "fifo").unlink()  # exports leave those out
    with Archive.open(archive.root) as again:
        assert again.fsck() == []
        assert again.files.stat("d1/twin").inode == again.files.stat("d0/f0").inode
        again.export(["/"], tmp_path / "out")
        once = again.status()["content"]["resident"]["versions"]
    assert once == 12  # nothing was written twice
    assert facts(tmp_path / "out") == facts(tmp_path / "tree")
