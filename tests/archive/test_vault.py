"""The path of a byte, there and back, through the archive as a library."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierwise.archive import bucket
from tierwise.archive.faults import Faults
from tierwise.archive.vault import Archive
from tierwise.core.errors import ConfigError, IntegrityError, MissingFileError, StateError

Make = Callable[..., Archive]


def fill(archive: Archive, *, seed: int = 1, files: int = 30, most: int = 60_000) -> dict[str, str]:
    """Write random files, empty and split ones among them; return path -> sha256."""
    source, found = random.Random(seed), {}
    sizes = [0, 1, 2_500_000] + [source.randrange(most) for _ in range(files)]
    for number, size in enumerate(sizes):
        data, path = source.randbytes(size), f"set {number % 3}/sub/file-{number}.bin"
        archive.files.write_file(path, data)
        found[path] = hashlib.sha256(data).hexdigest()
    return found


def hashes(archive: Archive, paths: dict[str, str]) -> dict[str, str]:
    return {p: hashlib.sha256(archive.files.read_file(p)).hexdigest() for p in paths}


def put_away(archive: Archive) -> None:
    archive.seal(partial=True)
    archive.burn(partial=True)
    archive.evict()


def slot_of(archive: Archive, label: str) -> int:
    found: int = archive.catalogue.value(
        "SELECT slot FROM discs JOIN images USING (image) WHERE label = ? AND discs.state = 'good'",
        label,
    )
    return found


def states(archive: Archive) -> dict[str, int]:
    return dict(archive.catalogue.all("SELECT state, COUNT(*) FROM versions GROUP BY state"))


def test_a_byte_goes_to_disc_and_comes_back(make_archive: Make) -> None:
    archive = make_archive()
    written = fill(archive)
    put_away(archive)
    assert states(archive) == {"burned": len(written)}
    assert archive.catalogue.value("SELECT COUNT(*) FROM versions WHERE resident > 0") == 0
    assert not list(archive.store.images.iterdir())
    assert hashes(archive, written) == written
    assert archive.fsck() == []


def test_the_head_of_an_offline_file_is_read_without_a_disc(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("a", b"x" * 5000)
    put_away(archive)
    ino = archive.files.stat("a").inode
    handle = archive.fs.open(ino, 0, archive.files.caller).handle
    assert archive.fs.read(ino, handle, 10, 100, archive.files.caller) == b"x" * 100
    assert archive.catalogue.value("SELECT resident FROM versions") == 0
    archive.fs.release(ino, handle)


@pytest.mark.parametrize("lost", ["D000", "D001", "P002"])
def test_any_disc_of_an_array_may_be_lost(make_archive: Make, lost: str) -> None:
    archive = make_archive()
    written = fill(archive)
    put_away(archive)
    labels = [row[0] for row in archive.catalogue.all("SELECT label FROM images")]
    for label in labels:
        if label.endswith(lost):
            archive.shelf.destroy(slot_of(archive, label))
    assert hashes(archive, written) == written
    archive.evict()
    assert archive.scrub().failed
    assert archive.repair().beyond == ()
    assert archive.verify().problems == ()
    archive.evict()
    assert hashes(archive, written) == written


def test_two_discs_of_an_array_with_two_parities_may_be_lost(make_archive: Make) -> None:
    archive = make_archive(data_discs=3, parity_discs=2)
    written = fill(archive)
    put_away(archive)
    for position in ("D000", "D002"):
        archive.shelf.destroy(slot_of(archive, f"TW_01234567_A00001_{position}"))
    assert hashes(archive, written) == written


def test_more_losses_than_parity_are_refused_by_name(make_archive: Make) -> None:
    archive = make_archive()
    written = fill(archive)
    put_away(archive)
    for position in ("D000", "D001"):
        archive.shelf.destroy(slot_of(archive, f"TW_01234567_A00001_{position}"))
    paths = [
        row["name"] for row in archive.listing("set 0/sub")
        if row["size"] > 512 and any("A00001" in label for label in row["discs"])
    ]  # fmt: skip
    with pytest.raises(OSError, match="Input/output error"):
        archive.files.read_file(f"set 0/sub/{paths[0]}")
    report = archive.recall(list(written))
    assert report.failed
    assert all("A00001" in why for _, why in report.failed)
    assert archive.repair().beyond


def test_scrub_finds_a_flipped_bit_and_repair_mends_it(make_archive: Make) -> None:
    archive = make_archive()
    written = fill(archive)
    put_away(archive)
    slot = slot_of(archive, "TW_01234567_A00001_D001")
    Faults(archive.shelf.library).flip_bit(slot, 700_000)
    report = archive.scrub()
    assert [(label, where) for label, where, _ in report.failed] == [
        ("TW_01234567_A00001_D001", slot)
    ]
    assert archive.repair().repaired == ("TW_01234567_A00001_D001",)
    assert archive.scrub().failed == ()
    archive.evict()
    assert hashes(archive, written) == written


def test_scrub_goes_on_where_it_stopped(make_archive: Make) -> None:
    archive = make_archive()
    fill(archive)
    put_away(archive)
    total = archive.catalogue.value("SELECT COUNT(*) FROM discs")
    start = archive.clock()
    checked = 0
    while done := archive.scrub(older_than_ns=start, max_discs=2).checked:
        checked += done
    assert checked == total


def test_a_new_version_leaves_the_old_one_readable(make_archive: Make, tmp_path: Path) -> None:
    archive = make_archive()
    archive.files.write_file("a/b", b"one")
    put_away(archive)
    archive.files.write_at("a/b", b"TWO", 0)
    assert archive.files.read_file("a/b") == b"TWO"
    assert [row["number"] for row in archive.versions("a/b")] == [1, 2]
    archive.export(["a/b"], tmp_path / "old", number=1)
    assert (tmp_path / "old" / "a" / "b").read_bytes() == b"one"
    put_away(archive)
    assert archive.files.read_file("a/b") == b"TWO"


def test_opening_to_write_and_not_writing_makes_no_version(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("a", b"one")
    put_away(archive)
    ino, caller = archive.files.stat("a").inode, archive.files.caller
    handle = archive.files.wait(lambda: archive.fs.open(ino, 2, caller)).handle
    archive.fs.release(ino, handle)
    assert len(archive.versions("a")) == 1


def test_which_names_the_discs_and_the_buffer_needs_none(make_archive: Make) -> None:
    archive = make_archive()
    written = fill(archive)
    assert archive.which(["set 0"]) == []
    put_away(archive)
    needed = archive.which(list(written))
    assert sum(row["num_files"] for row in needed) >= len(written)
    assert all(row["good"] for row in needed)
    archive.recall(list(written))
    assert archive.which(list(written)) == []


def test_requests_pin_what_they_brought_back(make_archive: Make) -> None:
    archive = make_archive()
    written = fill(archive)
    put_away(archive)
    request = archive.prepare(["set 1"])
    assert archive.queue.query(request).queued > 0
    archive.serve_recalls()
    state = archive.queue.query(request)
    assert (state.queued, state.failed) == (0, 0)
    archive.evict()
    kept = archive.catalogue.value("SELECT COUNT(*) FROM versions WHERE resident > 0")
    assert kept == state.done
    archive.queue.release(request)
    archive.evict()
    assert archive.catalogue.value("SELECT COUNT(*) FROM versions WHERE resident > 0") == 0
    with pytest.raises(MissingFileError):
        archive.queue.query(request)
    assert hashes(archive, written) == written


def test_cancel_drops_what_is_still_queued(make_archive: Make) -> None:
    archive = make_archive()
    fill(archive)
    put_away(archive)
    request = archive.prepare(["set 1"])
    assert archive.queue.cancel(request) > 0
    assert archive.serve_recalls().files == 0


def test_seal_leaves_a_bucket_that_is_not_full(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("a", b"one")
    assert archive.seal() == []
    assert len(archive.seal(partial=True)) == 1
    assert archive.seal(partial=True) == []


def test_burning_twice_burns_once(make_archive: Make) -> None:
    archive = make_archive()
    fill(archive)
    archive.seal(partial=True)
    assert archive.burn(partial=True).discs > 0
    assert archive.burn(partial=True).discs == 0


def test_nothing_goes_from_the_buffer_before_it_is_burned(make_archive: Make) -> None:
    archive = make_archive()
    written = fill(archive)
    archive.seal(partial=True)
    report = archive.evict()
    assert (report.files, report.images) == (0, 0)
    assert hashes(archive, written) == written


def test_the_same_content_gives_the_same_discs(make_archive: Make) -> None:
    found = []
    for name in ("one", "two"):
        archive = make_archive(name)
        fill(archive)
        put_away(archive)
        found.append(archive.catalogue.all("SELECT label, size, sha256 FROM images ORDER BY label"))
        assert archive.inventory()["num_files"] == 33
    assert found[0] == found[1]


def test_a_second_writer_is_refused(make_archive: Make) -> None:
    archive = make_archive()
    with pytest.raises(StateError, match="locked by another mount"):
        Archive.open(archive.root)
    with Archive.open(archive.root, write=False) as reader:
        assert reader.status()["files"] == 0
        with pytest.raises(StateError):
            _ = reader.files


def test_verbs_work_beside_an_open_namespace(make_archive: Make) -> None:
    archive = make_archive()
    written = fill(archive)
    with Archive.open(archive.root, write=False, clock=archive.clock) as other:
        put_away(other)
    assert hashes(archive, written) == written


@pytest.mark.parametrize(
    "changes",
    [
        {"disc_size_bytes": 1000},
        {"data_discs": 0},
        {"parity_discs": 5},
        {"data_discs": 70, "library_slots": 60},
        {"versions_kept": 0},
    ],
)
def test_impossible_archives_are_refused(make_archive: Make, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_archive(**changes)


def test_no_archive_and_a_newer_one(tmp_path: Path, make_archive: Make) -> None:
    with pytest.raises(MissingFileError, match="no archive"):
        Archive.open(tmp_path)
    archive = make_archive()
    with pytest.raises(StateError, match="an archive already"):
        Archive.init(archive.root, archive_id="0" * 32, disc_size_bytes=1 << 21)
    text = (archive.root / "archive.toml").read_text()
    (archive.root / "archive.toml").write_text(text.replace("format = 1", "format = 2"))
    with pytest.raises(ValueError, match="newer"):
        Archive.open(archive.root)


def test_a_full_buffer_is_no_space_and_nothing_is_lost(make_archive: Make) -> None:
    archive = make_archive(buffer_size_bytes=300_000)
    archive.files.write_file("a", b"x" * 250_000)
    with pytest.raises(OSError, match="No space left"):
        archive.files.write_file("b", b"y" * 250_000)
    assert archive.files.read_file("a") == b"x" * 250_000
    archive.seal(partial=True)
    with pytest.raises(OSError, match="No space left"):
        archive.files.write_file("c", b"z" * 1000)
    archive.burn(partial=True)
    archive.files.write_file("c", b"z" * 250_000)  # makes room by itself
    assert archive.files.read_file("c") == b"z" * 250_000


def test_a_damaged_buffer_copy_is_never_sealed_silently_nor_served_wrong(
    make_archive: Make,
) -> None:
    archive = make_archive()
    written = fill(archive)
    archive.seal(partial=True)
    version = archive.catalogue.value("SELECT MAX(version) FROM versions WHERE size > 100")
    path = archive.store.path(version)
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    assert archive.verify().problems == (f"version {version} is damaged in the buffer",)
    archive.burn(partial=True)
    archive.evict()
    assert hashes(archive, written) == written


def test_integrity_error_is_known_to_library_callers() -> None:
    assert issubclass(IntegrityError, RuntimeError)


def test_only_the_last_versions_stay_listed(make_archive: Make) -> None:
    archive = make_archive(versions_kept=3, data_discs=1, parity_discs=0)
    for number in range(6):
        archive.files.write_file("a", b"version %d" % number)
        put_away(archive)
    assert [row["number"] for row in archive.versions("a")] == [4, 5, 6]
    assert archive.files.read_file("a") == b"version 5"
    assert archive.fsck() == []


def test_a_plan_that_outgrows_its_disc_is_made_smaller(
    make_archive: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "payload_capacity", lambda disc, num_members: disc * 2)
    archive = make_archive()
    written = fill(archive, files=60)
    archive.files.symlink("set 0", "link")
    put_away(archive)
    assert states(archive) == {"burned": len(written)}
    assert archive.fsck() == []
    assert hashes(archive, written) == written
    assert archive.status()["unrecorded_changes"] == 0
