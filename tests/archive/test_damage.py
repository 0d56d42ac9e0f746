"""Discs that are not what they should be: named by scrub, never read wrong, mended by repair."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tierwise.archive.faults import Faults
from tierwise.archive.vault import Archive

Make = Callable[..., Archive]
Damage = Callable[[Archive, Path], None]


def filled(make_archive: Make, **changes: object) -> tuple[Archive, dict[str, str]]:
    archive, source, found = make_archive(**changes), random.Random(9), {}
    for number in range(40):
        data = source.randbytes(source.randrange(600, 60_000))
        archive.files.write_file(f"f{number}", data)
        found[f"f{number}"] = hashlib.sha256(data).hexdigest()
    archive.seal(partial=True)
    archive.burn(partial=True)
    archive.evict()
    return archive, found


def hashes(archive: Archive, paths: dict[str, str]) -> dict[str, str]:
    return {p: hashlib.sha256(archive.files.read_file(p)).hexdigest() for p in paths}


def faults(archive: Archive) -> Faults:
    return Faults(archive.shelf.library)


def foreign(archive: Archive, folder: Path) -> None:
    other = Archive.init(
        folder / "other", archive_id="f" * 32, disc_size_bytes=2 << 20, data_discs=1,
        parity_discs=0, library_slots=5,
    )  # fmt: skip
    other.files.write_file("theirs", b"not ours")
    other.seal(partial=True)
    other.burn(partial=True)
    faults(archive).replace(1, other.shelf.path_of(1))
    other.close()


def junk(archive: Archive, folder: Path) -> None:
    (folder / "junk").write_bytes(b"holiday pictures" * 50_000)
    faults(archive).replace(1, folder / "junk")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "destroyed": (lambda a, _: faults(a).destroy(1), "no disc"),
    "one bit in a file": (lambda a, _: faults(a).flip_bit(1, 900_000), "damaged"),
    "one bit in a descriptor": (lambda a, _: faults(a).flip_bit(1, 16 * 2048 + 41), "damaged"),
    "truncated": (lambda a, _: faults(a).truncate(1, 700_000), "truncated"),
    "unreadable sectors": (lambda a, _: faults(a).spoil_sectors(1, [430, 431]), "unreadable"),
    "foreign": (foreign, "swapped: holds TW_FFFFFFFF"),
    "junk": (junk, "foreign"),
    "swapped within the array": (lambda a, _: faults(a).swap(1, 2), "swapped"),
    "swapped with parity": (lambda a, _: faults(a).swap(1, 3), "swapped"),
    "duplicated": (lambda a, _: faults(a).replace(1, a.shelf.path_of(2)), "swapped"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_never_read(make_archive: Make, tmp_path: Path, name: str) -> None:
    archive, written = filled(make_archive)
    damage, word = DAMAGES[name]
    damage(archive, tmp_path)
    assert hashes(archive, written) == written  # before anybody looked
    archive.evict()
    report = archive.scrub()
    assert any(word in fault for _, slot, fault in report.failed if slot == 1), report.failed
    archive.repair()
    archive.evict()
    assert archive.scrub().failed == ()
    assert hashes(archive, written) == written


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("one bit in a file", "foreign", "swapped with parity")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in DAMAGES
    ],
)
def test_damage_does_not_fool_a_rebuild(make_archive: Make, tmp_path: Path, name: str) -> None:
    archive, written = filled(make_archive)
    DAMAGES[name][0](archive, tmp_path)
    archive.close()
    for path in (archive.root / "metadata").iterdir():
        path.unlink()
    report = Archive.rebuild(archive.root, clock=archive.clock)
    assert report.files_missing == ()
    with Archive.open(archive.root, clock=archive.clock) as again:
        assert hashes(again, written) == written


def test_a_burn_that_stops_spoils_one_blank_and_the_next_is_taken(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("a", b"a" * 5000)
    archive.seal(partial=True)
    faults(archive).stop_next_burn(300_000)
    report = archive.burn(partial=True)
    assert (report.spoiled, report.discs) == (1, 2)
    archive.evict()
    assert archive.files.read_file("a") == b"a" * 5000
    assert archive.inventory()["num_discs_lost"] == 1


def test_a_broken_drive_set_is_done_without(make_archive: Make) -> None:
    archive, written = filled(make_archive)
    faults(archive).break_drives(1)
    assert hashes(archive, written) == written


def test_too_few_blanks_are_said_before_anything_is_burned(make_archive: Make) -> None:
    archive = make_archive(library_slots=3)
    source = random.Random(3)
    for number in range(40):
        archive.files.write_file(f"f{number}", source.randbytes(60_000))
    archive.seal(partial=True)
    with pytest.raises(OSError, match="blank discs are needed"):
        archive.burn(partial=True)
    assert archive.shelf.written() == []
