"""The catalogue deleted: everything comes back from discs, or is missing by name."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tierwise.archive.journal import journal_path
from tierwise.archive.operations import SetAttributes, XattrFlags
from tierwise.archive.vault import CATALOGUE, Archive
from tierwise.core.errors import DataError, MissingFileError, StateError

Make = Callable[..., Archive]
_COUNT = itertools.count()

# What must be the same after a rebuild. Left out: positions in listings, events, and what a
# restart may forget anyway (use times, copies in the buffer).
_TABLES = {
    "inodes": "SELECT ino, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns, target,"
    " version FROM inodes WHERE ino > 1 ORDER BY ino",
    "names": "SELECT parent, name, ino FROM names ORDER BY parent, name",
    "xattrs": "SELECT * FROM xattrs ORDER BY ino, name",
    "versions": "SELECT version, ino, number, size, mtime_ns, created_ns, sha256, state"
    " FROM versions ORDER BY version",
    "extents": "SELECT * FROM extents ORDER BY version, piece",
    "tombstones": "SELECT ino, path, deleted_ns, seq FROM tombstones ORDER BY ino",
    "arrays": "SELECT * FROM arrays ORDER BY number",
    "images": "SELECT image, label, image_id, kind, array, position, size, sha256, state"
    " FROM images ORDER BY image",
    "discs": "SELECT slot, image, state FROM discs ORDER BY slot",
    "root": "SELECT mode, uid, gid, nlink FROM inodes WHERE ino = 1",
}


def snapshot(archive: Archive) -> dict[str, Any]:
    return {name: archive.catalogue.all(sql) for name, sql in _TABLES.items()}


def put_away(archive: Archive) -> None:
    archive.seal(partial=True)
    archive.burn(partial=True)
    archive.evict()


def lose_catalogue(archive: Archive) -> Path:
    archive.close()
    shutil.rmtree(archive.root / "metadata")
    return archive.root


def contents(archive: Archive) -> dict[bytes, str]:
    return {
        path: hashlib.sha256(archive.files.read_file(path)).hexdigest()
        for path, found in archive.files.walk()
        if stat.S_ISREG(found.mode)
    }


def busy_life(archive: Archive, seed: int) -> None:
    """Write, rename, delete, link and change things over several generations of discs."""
    source, files, fs = random.Random(seed), archive.files, archive.fs
    for generation in range(3):
        for number in range(8):
            data = source.randbytes(source.randrange(20_000))
            files.write_file(f"g{generation}/{number % 2}/f{number}", data)
        files.write_file(f"g{generation}/large", source.randbytes(1_200_000))
        files.write_file("every", b"generation %d" % generation)
        files.symlink(b"../somewhere \xff", f"g{generation}/link")
        files.link(f"g{generation}/0/f0", f"g{generation}/twin")
        files.make_folders(f"g{generation}/empty")
        ino = files.stat(f"g{generation}/1/f1").inode
        fs.setxattr(ino, b"user.note", b"\0\xff", XattrFlags.NONE, files.caller)
        fs.setattr(ino, SetAttributes(mode=0o640, uid=7, gid=8, mtime_ns=-5), files.caller)
        files.write_file(b"odd \xff\n-%41 name", b"odd")
        put_away(archive)
        files.remove(f"g{generation}/0/f2")
        files.rename(f"g{generation}/1/f3", f"g{generation}/moved")
        files.rename(f"g{generation}/0", f"g{generation}/renamed")
    files.remove("g0/twin")
    files.remove("g1/empty")
    put_away(archive)


def test_a_catalogue_rebuilt_from_discs_is_the_one_that_was_lost(make_archive: Make) -> None:
    archive = make_archive()
    busy_life(archive, 1)
    before, bytes_before = snapshot(archive), contents(archive)
    archive.evict()
    root = lose_catalogue(archive)
    report = Archive.rebuild(root, clock=archive.clock)
    assert (report.faults, report.files_missing, report.images_missing) == ((), (), ())
    with Archive.open(root, clock=archive.clock) as again:
        after = snapshot(again)
        for name in _TABLES:
            assert after[name] == before[name], name
        assert contents(again) == bytes_before
        again.files.write_file("new", b"goes on")  # numbers go on where they were
        assert again.files.stat("new").inode > max(row[0] for row in before["inodes"])
        put_away(again)
        assert again.fsck() == []


def test_lost_discs_come_back_from_their_arrays(make_archive: Make) -> None:
    archive = make_archive(data_discs=3, parity_discs=2)
    busy_life(archive, 2)
    before, bytes_before = snapshot(archive), contents(archive)
    archive.evict()
    lost = archive.catalogue.all(
        "SELECT slot, label FROM discs JOIN images USING (image) WHERE label LIKE '%_D000'"
        " OR label LIKE '%_D002'"
    )
    for slot, _ in lost:
        archive.shelf.destroy(slot)
    root = lose_catalogue(archive)
    report = Archive.rebuild(root, clock=archive.clock)
    assert set(report.images_rebuilt) == {label for _, label in lost}
    assert report.files_missing == ()
    with Archive.open(root, clock=archive.clock) as again:
        after = snapshot(again)
        for name in set(_TABLES) - {"discs"}:
            assert after[name] == before[name], name
        assert contents(again) == bytes_before
        assert set(again.repair().repaired) == {label for _, label in lost}
        again.evict()
        assert contents(again) == bytes_before


def test_what_cannot_come_back_is_missing_by_name(make_archive: Make) -> None:
    archive = make_archive()
    source = random.Random(3)
    for number in range(40):
        archive.files.write_file(f"deep/er/f{number}", source.randbytes(60_000))
    put_away(archive)
    gone = archive.catalogue.all(
        "SELECT slot FROM discs JOIN images USING (image) WHERE array = 1 AND position < 2"
    )
    paths = {
        f"deep/er/f{number}" for number in range(40)
        if any("A00001" in label for label in archive.versions(f"deep/er/f{number}")[0]["discs"])
    }  # fmt: skip
    for (slot,) in gone:
        archive.shelf.destroy(slot)
    root = lose_catalogue(archive)
    report = Archive.rebuild(root, clock=archive.clock)
    assert len(report.images_missing) == 2
    with Archive.open(root, clock=archive.clock) as again:
        there = {os.fsdecode(path) for path, found in again.files.walk() if found.links == 1}
        assert there.isdisjoint(paths)  # nothing of them is on the discs that are left
        assert len(there) == 40 - len(paths)
        for path in there:
            assert len(again.files.read_file(path)) == 60_000


def test_a_file_with_a_lost_piece_is_listed_and_refused(make_archive: Make) -> None:
    archive = make_archive(data_discs=1, parity_discs=0)
    archive.files.write_file("large", random.Random(4).randbytes(2_000_000))
    put_away(archive)
    slots = [row[0] for row in archive.catalogue.all("SELECT slot FROM discs ORDER BY slot")]
    archive.shelf.destroy(slots[1])
    root = lose_catalogue(archive)
    report = Archive.rebuild(root, clock=archive.clock)
    assert report.files_missing == ("large",)
    with Archive.open(root, clock=archive.clock) as again:
        assert again.files.stat("large").size == 2_000_000
        with pytest.raises(OSError, match="Input/output error"):
            again.files.read_file("large")


def test_a_lost_folder_record_is_restored_from_the_paths_below(make_archive: Make) -> None:
    archive = make_archive(data_discs=1, parity_discs=0)
    archive.files.write_file("a/b/c/file", b"x" * 1000)
    put_away(archive)
    archive.files.write_file("a/b/d/other", b"y" * 1000)
    put_away(archive)
    first = archive.catalogue.value("SELECT MIN(slot) FROM discs")
    archive.shelf.destroy(first)
    root = lose_catalogue(archive)
    Archive.rebuild(root, clock=archive.clock)
    with Archive.open(root, clock=archive.clock) as again:
        assert again.files.read_file("a/b/d/other") == b"y" * 1000
        assert again.fsck() == []


def test_deleted_files_stay_deleted(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("gone", b"x")
    archive.files.write_file("kept", b"y")
    put_away(archive)
    archive.files.remove("gone")
    put_away(archive)
    root = lose_catalogue(archive)
    assert Archive.rebuild(root, clock=archive.clock).tombstones == 1
    with Archive.open(root, clock=archive.clock) as again:
        assert [path for path, _ in again.files.walk()] == [b"kept"]


def test_unsealed_files_are_taken_up_under_lost_and_found(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("burned", b"x" * 1000)
    archive.seal(partial=True)
    archive.burn(partial=True)
    archive.files.write_file("a/b", b"only in the buffer")
    root = lose_catalogue(archive)
    journal_path(root).unlink()
    Archive.rebuild(root, clock=archive.clock)
    with Archive.open(root, clock=archive.clock) as again:
        found = [path for path, _ in again.files.walk(b"lost+found")]
        assert len(found) == 1
        assert again.files.read_file(found[0]) == b"only in the buffer"
        assert again.listing("burned")[0]["state"] == "burned"


def state_of(archive: Archive) -> dict[str, Any]:
    """Return the tables that files never sealed show in."""
    found = snapshot(archive)
    return {name: found[name] for name in ("inodes", "names", "xattrs", "versions")}


def lives_in_the_buffer(archive: Archive) -> None:
    """Make, rename, link, replace, delete and mark files that no disc will know."""
    files, fs = archive.files, archive.fs
    for number in range(9):
        files.write_file(f"d/{number % 2}/f{number}", b"%d" % number * 5000)
    files.rename("d/0/f0", "renamed")
    files.rename("d/1", "moved")
    files.link("renamed", "twin")
    files.symlink("renamed", "link")
    files.remove("d/0/f2")
    files.write_file("d/0/f4", b"again")
    files.rename("d/0/f6", "d/0/f8")
    ino = files.stat("twin").inode
    fs.setxattr(ino, b"user.note", b"\xff", XattrFlags.NONE, files.caller)
    fs.setattr(ino, SetAttributes(mode=0o640, uid=7, mtime_ns=10**18), files.caller)


@pytest.mark.parametrize("on_discs", [False, True])
def test_files_never_sealed_keep_their_names(make_archive: Make, on_discs: bool) -> None:
    """The catalogue is lost; discs (if any) and the buffer bring all of it back."""
    archive = make_archive()
    if on_discs:
        archive.files.write_file("d/0/f4", b"older, on disc")
        archive.files.write_file("gone", b"burned, then deleted")
        archive.files.write_file("large", random.Random(1).randbytes(2_500_000))
        archive.seal(partial=True)
        archive.burn(partial=True)
        archive.files.remove("gone")
        archive.files.rename("large", "larger")
    lives_in_the_buffer(archive)
    expected = state_of(archive)
    root = lose_catalogue(archive)
    report = Archive.rebuild(root, clock=archive.clock)
    assert report.files_missing == ()
    with Archive.open(root, clock=archive.clock) as again:
        assert state_of(again) == expected
        assert again.fsck() == []
        assert again.files.read_file("twin") == b"0" * 5000
        assert not again.files.exists("gone")
        before = contents(again)
        put_away(again)
        assert again.fsck() == []
        assert contents(again) == before
        assert again.verify().problems == ()


def test_names_acknowledged_before_kill_9_survive_the_loss_of_the_catalogue(
    fast_path: Path,
) -> None:
    """write + fsync, renamed + fsync of the folder, kill -9, catalogue gone, rebuild."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tierwise.archive.vault import Archive\n"
        "a = Archive.init(Path(sys.argv[1]), archive_id='0123456789abcdef' * 2,\n"
        "                 disc_size_bytes=2 << 20, data_discs=2, parity_discs=1)\n"
        "for n in range(5):\n"
        "    a.files.write_file(f'd/f{n}', b'%d' % n * 7000)\n"
        "    ino = a.files.stat(f'd/f{n}').inode\n"
        "    h = a.fs.open(ino, os.O_RDWR, a.files.caller).handle\n"
        "    a.fs.fsync(ino, h, data_only=False)\n"
        "    a.fs.release(ino, h)\n"
        "a.files.rename('d/f1', 'd/one')\n"
        "a.fs.fsyncdir(a.files.stat('d').inode, 0, data_only=False)\n"
        "a.files.rename('d/f2', 'd/never acknowledged')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = fast_path / "v"
    done = subprocess.run([sys.executable, "-c", script, str(root)], check=False)
    assert done.returncode == -9
    journal = journal_path(root)
    journal.write_bytes(journal.read_bytes() + b'{"record":"inode","ino')  # torn by the crash
    shutil.rmtree(root / "metadata")
    Archive.rebuild(root)
    with Archive.open(root) as again:
        assert set(contents(again)) == {
            b"d/f0", b"d/one", b"d/f2", b"d/f3", b"d/f4"
        }  # fmt: skip
        assert again.files.read_file("d/one") == b"1" * 7000
        assert again.fsck() == []


def test_a_journal_grows_no_longer_than_it_must(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("f", b"x")
    archive.fs.syncfs()
    assert journal_path(archive.root).stat().st_size > 0
    archive.fs.syncfs()
    size = journal_path(archive.root).stat().st_size
    archive.fs.syncfs()  # nothing has changed: nothing is written
    assert journal_path(archive.root).stat().st_size == size
    put_away(archive)
    archive.close()
    assert journal_path(archive.root).stat().st_size == 0


def test_images_that_were_sealed_and_not_burned_are_used(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("burned", b"x" * 1000)
    put_away(archive)
    archive.files.write_file("sealed", b"s" * 1000)
    archive.seal(partial=True)
    root = lose_catalogue(archive)
    Archive.rebuild(root, clock=archive.clock)
    with Archive.open(root, clock=archive.clock) as again:
        assert again.files.read_file("sealed") == b"s" * 1000
        put_away(again)
        assert again.files.read_file("sealed") == b"s" * 1000
        assert again.listing("sealed")[0]["state"] in ("burned", "offline")


def test_discs_elsewhere_make_a_new_archive(make_archive: Make, tmp_path: Path) -> None:
    archive = make_archive()
    busy_life(archive, 5)
    bytes_before = contents(archive)
    archive.close()
    pile = tmp_path / "pile"
    pile.mkdir()
    for number, slot in enumerate(archive.shelf.written()):
        shutil.copy(archive.shelf.path_of(slot), pile / f"disc {number}")
    root = tmp_path / "new vault"
    report = Archive.rebuild(root, [pile], clock=archive.clock)
    assert report.files_missing == ()
    with Archive.open(root, clock=archive.clock) as again:
        assert again.config.archive_id == archive.config.archive_id
        assert contents(again) == bytes_before
        again.repair()  # burns every image anew
        again.evict()
        assert contents(again) == bytes_before


def test_rebuilding_refuses_what_makes_no_sense(make_archive: Make, tmp_path: Path) -> None:
    archive = make_archive()
    archive.close()
    with pytest.raises(StateError, match="has a catalogue"):
        Archive.rebuild(archive.root)
    with pytest.raises(MissingFileError):
        Archive.rebuild(tmp_path / "new", [tmp_path / "nothing"])
    (tmp_path / "junk").write_bytes(b"junk" * 1000)
    with pytest.raises(DataError, match="none of these"):
        Archive.rebuild(tmp_path / "new", [tmp_path / "junk"])
    assert not (tmp_path / "new" / CATALOGUE).exists()


@pytest.mark.slow
@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_any_order_and_any_m_losses_rebuild_the_same(
    make_archive: Make, seed: int, data: st.DataObject
) -> None:
    archive = make_archive(f"vault-{next(_COUNT)}", data_discs=2, parity_discs=1)
    busy_life(archive, seed)
    before = snapshot(archive)
    by_array: dict[int, list[int]] = {}
    for slot, array in archive.catalogue.all(
        "SELECT slot, array FROM discs JOIN images USING (image)"
    ):
        by_array.setdefault(array, []).append(slot)
    for slots in by_array.values():
        chosen = data.draw(st.sampled_from([None, *slots]))
        if chosen is not None:
            archive.shelf.destroy(chosen)
    root = lose_catalogue(archive)
    Archive.rebuild(root, clock=archive.clock)
    with Archive.open(root, clock=archive.clock) as again:
        after = snapshot(again)
        for name in set(_TABLES) - {"discs", "images"}:
            assert after[name] == before[name], name
        again.repair()  # lost parity is computed anew, under a number of its own
        assert again.scrub().failed == ()
        assert {row[1] for row in snapshot(again)["images"]} == {r[1] for r in before["images"]}
