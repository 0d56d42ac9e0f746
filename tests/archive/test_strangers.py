"""What does not belong: another's buffer, damaged journals, impossible records, mislaid discs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierwise.archive.journal import README, journal_path, read_journal
from tierwise.archive.operations import SetAttributes
from tierwise.archive.slices import check_record
from tierwise.archive.vault import Archive
from tierwise.core.errors import DataError, MissingFileError, StateError

from .conftest import ARCHIVE_ID

Make = Callable[..., Archive]
OTHER_ID = "f" * 32


def put_away(archive: Archive) -> None:
    archive.seal(partial=True)
    archive.burn(partial=True)
    archive.evict()


def lose_catalogue(archive: Archive) -> Path:
    archive.close()
    shutil.rmtree(archive.root / "metadata")
    return archive.root


def contents(archive: Archive) -> dict[bytes, bytes]:
    return {
        path: archive.files.read_file(path)
        for path, found in archive.files.walk()
        if found.mode & 0o170000 == 0o100000
    }


# Whose buffer


def swap_buffers(mine: Path, other: Path) -> None:
    (mine / "buffer").rename(mine / "my buffer")
    shutil.copytree(other / "buffer", mine / "buffer")


def test_the_buffer_of_another_archive_is_refused(make_archive: Make) -> None:
    mine, other = make_archive("mine"), make_archive("other", archive_id=OTHER_ID)
    mine.files.write_file("on disc", b"mine")
    put_away(mine)
    mine.files.write_file("in the buffer", b"mine too")
    for number in range(9):
        other.files.write_file(f"theirs/{number}", b"theirs")
    for archive in (mine, other):
        archive.fs.syncfs()
        archive.close()
    expected = {b"on disc": b"mine", b"in the buffer": b"mine too"}

    swap_buffers(mine.root, other.root)
    with pytest.raises(StateError, match=f"another archive, {OTHER_ID}"):
        Archive.open(mine.root)
    shutil.rmtree(mine.root / "metadata")
    with pytest.raises(StateError, match=f"buffer of archive {OTHER_ID}"):
        Archive.rebuild(mine.root)

    shutil.rmtree(mine.root / "buffer")
    (mine.root / "my buffer").rename(mine.root / "buffer")
    assert Archive.rebuild(mine.root).faults == ()
    with Archive.open(mine.root) as again:
        assert contents(again) == expected


def test_a_lost_buffer_is_said_and_the_discs_are_enough(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("f", b"on disc")
    put_away(archive)
    archive.close()
    shutil.rmtree(archive.root / "buffer")
    with pytest.raises(MissingFileError, match="lost its buffer"):
        Archive.open(archive.root)
    (archive.root / "metadata").rename(archive.root / "away")
    Archive.rebuild(archive.root)
    with Archive.open(archive.root) as again:
        assert contents(again) == {b"f": b"on disc"}


def test_bytes_that_are_not_the_lost_content_never_stand_in_for_it(make_archive: Make) -> None:
    """The disc of a file is lost, its hash is known, and something lies where its copy was."""
    archive = make_archive(data_discs=1, parity_discs=0)
    archive.files.write_file("lost", b"right")
    archive.files.write_file("there", b"right too")
    put_away(archive)
    for name in ("lost", "there"):  # the next disc has their hashes, and not their bytes
        ino = archive.files.stat(name).inode
        archive.fs.setattr(ino, SetAttributes(mode=0o600), archive.files.caller)
    put_away(archive)
    first, _ = archive.shelf.written()
    archive.shelf.path_of(first).unlink()
    root = lose_catalogue(archive)
    paths = {name: root / "buffer" / "files" / f"0{n}" / str(n) for n, name in enumerate("-ab")}
    paths["a"].write_bytes(b"wrong")
    paths["b"].write_bytes(b"right too")
    report = Archive.rebuild(root)
    assert report.files_missing == ("lost",)
    assert report.faults == ((str(paths["a"]), "not the content of that number"),)
    with Archive.open(root) as again:
        with pytest.raises(OSError, match=os.strerror(5)):
            again.files.read_file("lost")
        assert again.files.read_file("there") == b"right too"
        found = [path for path, _ in again.files.walk("lost+found")]
        assert [again.files.read_file(path) for path in found] == [b"wrong"]


def test_a_damaged_copy_of_what_discs_have_is_read_from_disc(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("f", b"right" * 1000)
    archive.seal(partial=True)
    archive.burn(partial=True)
    root = lose_catalogue(archive)
    (root / "buffer" / "files" / "01" / "1").write_bytes(b"wrong" * 1000)
    report = Archive.rebuild(root)
    assert [fault for _, fault in report.faults] == ["not the content of that number"]
    with Archive.open(root) as again:
        assert contents(again) == {b"f": b"right" * 1000}
        assert again.fsck() == []


# The journal


def life_with_journal(archive: Archive) -> Path:
    archive.files.write_file("f/1", b"one")
    put_away(archive)
    for number in range(2, 5):
        archive.files.write_file(f"f/{number}", b"%d" % number)
    archive.fs.syncfs()
    archive.close()
    return archive.root


def test_every_bit_flip_in_a_journal_is_noticed(make_archive: Make) -> None:
    root = life_with_journal(make_archive())
    path, whole = journal_path(root), journal_path(root).read_bytes()
    sound = read_journal(root)
    assert sound.faults == []
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        found = read_journal(root)
        for record in found.of(ARCHIVE_ID):
            assert record in sound.of(ARCHIVE_ID)
        if whole[position : position + 1] != b"\n":
            assert found.faults, position


def test_a_damaged_line_loses_one_name_and_is_said(make_archive: Make) -> None:
    root = life_with_journal(make_archive())
    path = journal_path(root)
    path.write_bytes(path.read_bytes().replace(b'"path": "f/3"', b'"path": "f/8"'))
    shutil.rmtree(root / "metadata")
    report = Archive.rebuild(root)
    assert [fault for _, fault in report.faults] == ["a line that is damaged"]
    with Archive.open(root) as again:
        assert sorted(contents(again).values()) == [b"2", b"3", b"4", b"one"]
        assert [path for path in contents(again) if path.startswith(b"lost+found/")] != []


def test_lines_twice_change_nothing_and_those_of_another_archive_are_passed_over(
    make_archive: Make,
) -> None:
    root = life_with_journal(make_archive())
    stranger = make_archive("other", archive_id=OTHER_ID)
    for number in range(9):
        stranger.files.write_file(f"theirs/{number}", b"theirs")
    stranger.fs.syncfs()
    path = journal_path(root)
    mine, theirs = path.read_bytes(), journal_path(stranger.root).read_bytes()
    path.write_bytes(mine + mine + theirs + mine + theirs[:-30])
    shutil.rmtree(root / "metadata")
    report = Archive.rebuild(root)
    assert [fault for _, fault in report.faults] == ["11 inodes of another archive"]
    with Archive.open(root) as again:
        assert contents(again) == {b"f/1": b"one", b"f/2": b"2", b"f/3": b"3", b"f/4": b"4"}


def test_a_person_finds_a_file_with_what_the_readme_says(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("on disc", b"no line")
    put_away(archive)
    names = ["plain", "a folder/b c", 'a"quote', "ünïcode 文", "-dash", "100%", "new\nline"]
    for number, name in enumerate(names):
        archive.files.write_file(name, b"%d" % number)
    archive.files.write_file("deleted", b"gone")
    archive.fs.syncfs()
    archive.files.rename("plain", "renamed")
    archive.files.remove("deleted")
    archive.files.write_file("-dash", b"4 again")
    archive.fs.syncfs()
    folder = archive.root / "buffer"
    text = (folder / README).read_text(encoding="ascii")
    assert ARCHIVE_ID in text
    script = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    for shell in ("sh", "bash"):
        done = subprocess.run(
            [shell, "-c", script], cwd=folder, capture_output=True, check=False,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        )  # fmt: skip
        assert done.stderr == b""
        found = dict(line.split("  ", 1) for line in done.stdout.decode().splitlines())
        assert {path: (folder / file).read_bytes() for file, path in found.items()} == {
            "renamed": b"0", "a folder/b c": b"1", 'a"quote': b"2", "ünïcode 文": b"3",
            "-dash": b"4 again", "100%25": b"5", "new%0Aline": b"6",
        }  # fmt: skip


# Impossible records

SOUND = {
    "record": "inode", "inode": 7, "seq": 9, "mode": 0o100644, "uid": 0, "gid": 0, "rdev": 0,
    "size": 3, "atime_ns": 0, "mtime_ns": 0, "ctime_ns": 0, "names": [[1, "f"]], "path": "f",
    "versions": [[4, 1, 3, 0, 0, None]],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"names": [[1, ".."]]}, {"names": [[1, "."]]}, {"names": [[1, ""]]},
        {"names": [[1, "a%2Fb"]]}, {"names": [[1, "a/b"]]}, {"names": [[1, "%00"]]},
        {"names": [[1, "x" * 256]]}, {"names": [[7, "own parent"]]}, {"names": [[0, "f"]]},
        {"names": "f"}, {"names": None}, {"path": None}, {"path": "50%"}, {"mode": 0},
        {"mode": "rw"}, {"size": -1}, {"inode": 0}, {"inode": 1 << 70}, {"seq": None},
        {"mtime_ns": 1 << 63}, {"xattrs": {"user.x": "!"}}, {"xattrs": []},
        {"versions": [[4, 1]]}, {"versions": [[4, 1, 3, 0, 0, "abc"]]},
        {"versions": [[4, 1, 3, 0, 0, None], [4, 2, 3, 0, 0, None]]}, {"target": 5},
    ],
)  # fmt: skip
def test_records_no_archive_writes_are_refused(change: dict[str, Any]) -> None:
    check_record(SOUND)
    with pytest.raises(DataError):
        check_record(SOUND | change)


@pytest.mark.parametrize("missing", ["mode", "names", "seq", "inode", "size", "path"])
def test_records_without_a_field_are_refused(missing: str) -> None:
    with pytest.raises(DataError):
        check_record({key: value for key, value in SOUND.items() if key != missing})


def test_a_disc_with_a_name_that_leads_out_spoils_nothing(
    make_archive: Make, tmp_path: Path
) -> None:
    archive = make_archive()
    archive.files.write_file("d/f", b"bytes")
    archive.files.write_file("d/g", b"more")
    put_away(archive)
    evil = archive.files.stat("d/f").inode
    archive.catalogue.run("UPDATE names SET name = ? WHERE ino = ?", b"../../evil", evil)
    archive.catalogue.run("UPDATE inodes SET dirty = 1, seq = seq + 100 WHERE ino = ?", evil)
    put_away(archive)
    root = lose_catalogue(archive)
    report = Archive.rebuild(root)
    assert [fault for _, fault in report.faults if "is no name" in fault] != []
    with Archive.open(root) as again:
        assert contents(again) == {b"d/f": b"bytes", b"d/g": b"more"}  # as the disc before has it
        again.export(["/"], tmp_path / "a" / "b" / "out")
    assert not (tmp_path / "evil").exists()
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["out"]  # noqa: PTH208


def test_folders_that_name_each_other_as_parents_are_hung_up(make_archive: Make) -> None:
    """One's later state is only in the journal, the other's was on a disc that is lost."""
    archive = make_archive()
    archive.files.write_file("a/b/f", b"bytes")
    put_away(archive)
    archive.fs.syncfs()
    archive.files.rename("a/b", "b")
    archive.files.rename("a", "b/a")
    archive.fs.syncfs()
    root = lose_catalogue(archive)
    path = journal_path(root)
    inode = {name: f'"path": "{name}"' for name in ("b", "b/a")}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if inode["b"] not in line), encoding="utf-8")
    report = Archive.rebuild(root)
    assert [fault for _, fault in report.faults] == ["its folder is lost, see lost+found"]
    with Archive.open(root) as again:
        assert list(contents(again).values()) == [b"bytes"]
        assert again.fsck() == []


# Discs that come back


def test_discs_that_come_back_after_a_rebuild_without_them_take_nothing(
    make_archive: Make, tmp_path: Path
) -> None:
    """A whole array is mislaid, life goes on, and both are found in the next rebuild."""
    archive = make_archive()
    expected = {}
    for generation in range(3):
        for number in range(3):
            name, data = f"g{generation}/{number}", b"%d %d" % (generation, number)
            archive.files.write_file(name, data)
            expected[name.encode()] = data
        put_away(archive)
    slots = archive.shelf.written()[-2:]
    places = [archive.shelf.path_of(slot) for slot in slots]
    root = lose_catalogue(archive)
    for place in places:
        shutil.move(place, tmp_path / place.name)
    assert Archive.rebuild(root).images_missing == ()  # nothing that is left knew of them
    with Archive.open(root) as again:
        for number in range(3):
            again.files.write_file(f"new/{number}", b"new %d" % number)
            expected[b"new/%d" % number] = b"new %d" % number
        put_away(again)
    for free, place in enumerate(places, start=50):  # the new discs stand behind the old ones
        target = archive.shelf.path_of(free)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(place, target)
        shutil.move(tmp_path / place.name, place)
    shutil.rmtree(root / "metadata")
    report = Archive.rebuild(root)
    assert report.faults == ()
    with Archive.open(root) as again:
        assert contents(again) == expected
        assert again.fsck() == []
        assert json.dumps(again.status())  # and it goes on
        again.files.write_file("last", b"last")
        put_away(again)
        assert again.verify().problems == ()
