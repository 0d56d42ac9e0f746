"""What nobody would do on purpose: clocks, names, crowds, formats, and leaving in the middle."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bagit
import pytest

from tierwise.archive import vault
from tierwise.archive.fuse import can_mount, mounted_process
from tierwise.archive.vault import Archive, mountable
from tierwise.core.errors import DataError, StateError, UsageError

Make = Callable[..., Archive]
ID = "0123456789abcdef" * 2
DAY_NS = 86_400 * 10**9


class Backwards:
    """A clock that goes back an hour at every look, past 1970 in the end."""

    def __init__(self) -> None:
        self.now_ns = DAY_NS

    def __call__(self) -> int:
        self.now_ns -= 3600 * 10**9
        return self.now_ns


def put_away(archive: Archive) -> None:
    archive.seal(partial=True)
    archive.burn(partial=True)
    archive.evict()


def rebuilt(archive: Archive) -> Archive:
    """Close an archive, delete its catalogue, and return it rebuilt from its discs."""
    archive.close()
    shutil.rmtree(archive.root / "metadata")
    Archive.rebuild(archive.root, clock=archive.clock)
    return Archive.open(archive.root, clock=archive.clock)


# The clock


def test_a_clock_that_goes_backwards(make_archive: Make) -> None:
    archive = make_archive(clock=Backwards())
    for number in range(4):
        archive.files.write_file("f", b"version %d" % number)
        archive.files.write_file(f"other {number}", b"x" * 3000)
        put_away(archive)
    archive.files.remove("other 2")
    assert [row["number"] for row in archive.versions("f")] == [1, 2, 3, 4]
    assert archive.files.read_file("f") == b"version 3"
    days = [row["day"] for row in archive.inventory()["growth"]]
    assert days == sorted(days)
    assert archive.events(1000)
    put_away(archive)
    archive = rebuilt(archive)
    try:
        assert archive.clock() < 0  # before 1970 by now
        assert archive.files.read_file("f") == b"version 3"
        assert [row["number"] for row in archive.versions("f")] == [1, 2, 3, 4]
        assert not archive.files.exists("other 2")
        assert archive.fsck() == []
        assert archive.verify().problems == ()
    finally:
        archive.close()


def test_every_disc_is_scrubbed_though_the_clock_went_backwards(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("f", b"x" * 3000)
    put_away(archive)
    total = archive.catalogue.value("SELECT COUNT(*) FROM discs")
    archive.clock.now_ns -= 400 * DAY_NS  # type: ignore[attr-defined]
    assert archive.scrub().checked == total
    # a check in the future is none: it counts as the oldest
    archive.catalogue.run(
        "UPDATE discs SET verified_ns = ? WHERE slot = (SELECT MAX(slot) FROM discs)",
        archive.clock() + 900 * DAY_NS,
    )
    latest = archive.catalogue.value("SELECT MAX(slot) FROM discs")
    archive.shelf.destroy(latest)
    report = archive.scrub(max_discs=1)
    assert [slot for _, slot, _ in report.failed] == [latest]


def test_least_recently_used_goes_first_though_the_clock_went_backwards(
    make_archive: Make,
) -> None:
    archive = make_archive(clock=Backwards())
    for number in range(5):
        archive.files.write_file(f"f{number}", b"x" * 4000)
    archive.seal(partial=True)
    archive.burn(partial=True)
    archive.evict()
    for number in range(5):
        assert archive.files.read_file(f"f{number}") == b"x" * 4000
    archive.evict(target_bytes=8000)
    assert archive.catalogue.value("SELECT COUNT(*) FROM versions WHERE resident > 0") == 3
    assert archive.fsck() == []


# Names


NAMES = [
    b"-rf", b"--help", b"-", b"Case", b"case", b"CASE", b"new\nline", b"\n", b"tab\there", b" ",
    b"trailing ", b"trailing.", b"CON", b"a;1", b"\xff\xfe", b"x" * 255, "é".encode(),
    "e\u0301".encode(), b"%41", b"A", b"*?", b'"', b"back\\slash", b"\x01", b"MANIFEST.sha256",
    b"FORMAT.txt", b"_TIERWISE", b".hidden",
]  # fmt: skip


def test_odd_names_through_discs_rebuild_and_export(make_archive: Make, tmp_path: Path) -> None:
    archive = make_archive(disc_size_bytes=4 << 20)
    for name in NAMES:
        for path in (name, b"-Folder\n/" + name, b"-folder\n/" + name, name[:250] + b".d/" + name):
            archive.files.write_file(path, hashlib.sha256(path).digest() * 40)
    before = [path for path, _ in archive.files.walk()]
    put_away(archive)
    for number, label in archive.catalogue.all(
        "SELECT slot, label FROM discs JOIN images USING (image)"
    ):
        if label.endswith("D000"):
            archive.shelf.destroy(number)
    archive = rebuilt(archive)
    try:
        assert [path for path, _ in archive.files.walk()] == before
        for path, found in archive.files.walk():
            if found.size:
                assert archive.files.read_file(path) == hashlib.sha256(path).digest() * 40
        archive.export([""], tmp_path / "out")
        found_names = sorted(os.listdir(os.fsencode(tmp_path / "out")))  # noqa: PTH208 - bytes
        assert set(NAMES) <= set(found_names)
    finally:
        archive.close()


def test_other_programs_read_odd_names_and_the_manifest_fits(
    make_archive: Make, tmp_path: Path
) -> None:
    archive = make_archive()
    for name in (b"-rf", b"Case", b"case", b"new\nline", b"--help"):
        archive.files.write_file(name, name * 100)
    archive.seal(partial=True)
    (image,) = archive.store.images.glob("*.iso")
    subprocess.run(["bsdtar", "-xf", str(image), "-C", str(tmp_path)], check=True)
    subprocess.run(
        ["sha256sum", "--quiet", "-c", "MANIFEST.sha256"], cwd=tmp_path, check=True,
        capture_output=True,
    )  # fmt: skip
    contents = {path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {name * 100 for name in (b"-rf", b"Case", b"case", b"new\nline", b"--help")} <= contents


# Crowds


def crowd(archive: Archive, count: int) -> None:
    """Put empty files into one directory, as rows of one transaction."""
    fs, caller = archive.fs, archive.files.caller
    folder = archive.files.make_folders("crowd")
    with archive.catalogue.transaction():
        for number in range(count):
            fs.mknod(folder, b"file %07d" % number, 0o100644, 0, caller)


def check_crowd(archive: Archive, count: int) -> None:
    folder = archive.files.stat("crowd").inode
    fs = archive.fs
    seen, cookie = 0, 0
    while batch := [e for _, e in zip(range(1000), fs.readdir(folder, 0, cookie, plus=True))]:  # noqa: B905
        seen, cookie = seen + len(batch), batch[-1].cookie
    assert seen == count
    start = time.monotonic()
    for number in range(0, count, max(1, count // 100)):
        assert fs.lookup(folder, b"file %07d" % number).size == 0
    assert time.monotonic() - start < 5  # 100 look-ups do not read the directory
    assert len(archive.listing("crowd")) == count


def test_many_files_in_one_directory(make_archive: Make) -> None:
    archive = make_archive()
    crowd(archive, 20_000)
    check_crowd(archive, 20_000)


@pytest.mark.slow
def test_a_million_files_in_one_directory(make_archive: Make) -> None:
    archive = make_archive()
    crowd(archive, 1_000_000)
    check_crowd(archive, 1_000_000)


def test_a_crowd_is_sealed_burned_and_rebuilt(make_archive: Make) -> None:
    archive = make_archive(disc_size_bytes=8 << 20)
    crowd(archive, 3000)
    put_away(archive)
    archive = rebuilt(archive)
    try:
        check_crowd(archive, 3000)
    finally:
        archive.close()


# Formats


@pytest.mark.parametrize("part", ["archive", "catalogue"])
def test_a_newer_format_is_refused_and_left_alone(make_archive: Make, part: str) -> None:
    archive = make_archive()
    archive.files.write_file("f", b"kept")
    archive.close()
    path = archive.root / "archive.toml"
    text = path.read_text()
    if part == "archive":
        path.write_text(text.replace("format = 1", "format = 2") + 'news = "unknown"\n')
    else:
        archive = Archive.open(archive.root)
        archive.catalogue.run("PRAGMA user_version = 2")
        archive.close()
    with pytest.raises(DataError, match=r"newer|schema 2") as caught:
        Archive.open(archive.root)
    assert "tierwise that made it" in (caught.value.hint or "")
    if part == "archive":
        aside = (archive.root / "metadata").rename(archive.root.parent / "aside")
        with pytest.raises(DataError, match="newer"):
            Archive.rebuild(archive.root)
        aside.rename(archive.root / "metadata")
        path.write_text(text)
        with Archive.open(archive.root) as again:
            assert again.files.read_file("f") == b"kept"


# Leaving in the middle


def found(root: Path, archive_id: str) -> Archive:
    return Archive.init(
        root, archive_id=archive_id, disc_size_bytes=2 << 20, data_discs=2, parity_discs=1,
        library_slots=20,
    )  # fmt: skip


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "step", ["Store.make_folders", "Shelf.create", "Catalogue.create", "write_archive_config"]
)
def test_an_init_cut_off_anywhere_can_be_run_again(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    root = fast_path / "vault"
    owner, _, name = step.rpartition(".")
    target = getattr(vault, owner) if owner else vault
    real = getattr(target, name)

    def cut_off(*arguments: object) -> None:
        if after:
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, name, staticmethod(cut_off) if owner else cut_off)
        with pytest.raises(KeyboardInterrupt):
            found(root, "f" * 32)
    if after and not owner:  # it was an archive already
        with Archive.open(root) as archive:
            assert archive.config.archive_id == "f" * 32
        assert not (root / "init.unfinished").exists()
        return
    with found(root, ID) as archive:
        archive.files.write_file("f", b"x")
        put_away(archive)
        assert archive.files.read_file("f") == b"x"
        assert archive.catalogue.value("SELECT value FROM meta WHERE key = 'archive_id'") == ID
    assert not (root / "init.unfinished").exists()
    with pytest.raises(StateError, match="an archive already"):
        found(root, ID)


def test_an_init_killed_half_way_can_be_run_again(fast_path: Path) -> None:
    root = fast_path / "vault"
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tierwise.archive import vault\n"
        "vault.write_archive_config = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"vault.Archive.init(Path(sys.argv[1]), archive_id={ID!r}, disc_size_bytes=2 << 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root)], check=False)
    assert done.returncode == -9
    with found(root, "f" * 32) as archive:
        assert archive.config.archive_id == "f" * 32


def test_init_leaves_a_folder_alone_that_is_somebody_elses(fast_path: Path) -> None:
    root = fast_path / "vault"
    (root / "metadata").mkdir(parents=True)
    (root / "metadata" / "theirs").write_text("x")
    with pytest.raises(StateError, match="something else"):
        Archive.init(root, archive_id=ID, disc_size_bytes=2 << 20)
    (root / "init.unfinished").touch()
    with pytest.raises(StateError, match="something else"):
        Archive.init(root, archive_id=ID, disc_size_bytes=2 << 20)
    assert (root / "metadata" / "theirs").read_text() == "x"


def test_an_archive_that_lost_its_configuration_is_no_unfinished_one(make_archive: Make) -> None:
    archive = make_archive()
    archive.files.write_file("f", b"kept")
    archive.close()
    (archive.root / "archive.toml").rename(archive.root.parent / "archive.toml")
    (archive.root / "init.unfinished").touch()
    with pytest.raises(StateError, match="something else"):
        found(archive.root, "f" * 32)
    (archive.root.parent / "archive.toml").rename(archive.root / "archive.toml")
    with Archive.open(archive.root) as again:
        assert again.files.read_file("f") == b"kept"


def test_a_large_file_deleted_half_way_through_sealing_leaves_nothing(make_archive: Make) -> None:
    stop: list[bool] = [True]

    def interrupt(name: str) -> None:
        if stop and name == "seal: image entered":
            stop.clear()
            raise KeyboardInterrupt

    archive = make_archive(crash_point=interrupt)
    archive.files.write_file("large", random.Random(1).randbytes(5 << 20))
    archive.files.write_file("small", b"s")
    with pytest.raises(KeyboardInterrupt):
        archive.seal(partial=True)
    archive.files.remove("large")
    put_away(archive)
    assert archive.files.read_file("small") == b"s"
    assert [path for folder in archive.store.files.iterdir() for path in folder.iterdir()
            if path.stat().st_size > 1] == []  # fmt: skip
    assert archive.catalogue.value("SELECT COUNT(*) FROM versions") == 1
    assert archive.fsck() == []
    archive = rebuilt(archive)
    try:
        assert [path for path, _ in archive.files.walk()] == [b"small"]
    finally:
        archive.close()


@pytest.mark.fuse
@pytest.mark.skipif(can_mount() is not None, reason="no FUSE here")
def test_unmounting_while_another_process_burns(fast_path: Path) -> None:
    root, mountpoint = fast_path / "vault", fast_path / "mnt"
    mountpoint.mkdir()
    Archive.init(
        root, archive_id=ID, disc_size_bytes=2 << 20, data_discs=2, parity_discs=1,
        library_slots=60,
    ).close()  # fmt: skip
    source, written = random.Random(2), {}
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tierwise.archive.vault import Archive\n"
        "def slow(name):\n"
        "    if name == 'burn: disc written':\n"
        "        print(name, flush=True)\n"
        "        time.sleep(0.3)\n"
        "with Archive.open(Path(sys.argv[1]), write=False, crash_point=slow) as archive:\n"
        "    archive.seal(partial=True)\n"
        "    print(archive.burn(partial=True).discs, flush=True)\n"
    )
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        for number in range(12):
            data = source.randbytes(400_000)
            (mount.path / f"f{number}").write_bytes(data)
            written[f"f{number}"] = data
        burning = subprocess.Popen(
            [sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE, text=True
        )
        assert burning.stdout is not None
        assert burning.stdout.readline() == "burn: disc written\n"
        assert burning.poll() is None
    assert burning.poll() is None  # unmounted, and still at work
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        assert {name: (mount.path / name).read_bytes() for name in written} == written
        output, _ = burning.communicate(timeout=60)
    assert burning.returncode == 0, output
    with Archive.open(root) as archive:
        assert archive.fsck() == []
        archive.evict()
        assert {name: archive.files.read_file(name) for name in written} == written


# Bags


def bag_of(archive: Archive, names: list[str], target: Path) -> Path:
    for name in names:
        archive.files.write_file(name, b"" if name == "empty" else name.encode() * 50)
    put_away(archive)
    archive.export([""], target, bagit=True)
    return target


def test_a_bag_is_valid_to_another_program(make_archive: Make, tmp_path: Path) -> None:
    names = ["a/b/plain", "a/-dash", "Case", "case", "naïve", "a/new\nline", "cr\r", "empty"]
    bag = bag_of(make_archive(), names, tmp_path / "bag")
    found = bagit.Bag(str(bag))
    found.validate()
    assert len(found.payload_entries()) == len(names)
    (bag / "data" / "a" / "b" / "plain").write_bytes(b"plaiN/" * 50)
    with pytest.raises(bagit.BagValidationError):
        bagit.Bag(str(bag)).validate()


def test_a_name_that_no_manifest_can_hold_makes_no_bag(make_archive: Make, tmp_path: Path) -> None:
    archive = make_archive()
    archive.files.write_file(b"d/\xff", b"x")
    with pytest.raises(UsageError, match="d/%FF is not UTF-8"):
        archive.export(["/"], tmp_path / "bag", bagit=True)
    assert not (tmp_path / "bag").exists()
    archive.export(["/"], tmp_path / "plain")
    assert (tmp_path / "plain" / "d" / "\udcff").read_bytes() == b"x"


def test_a_percent_sign_in_a_bag_is_encoded_as_the_rfc_says(
    make_archive: Make, tmp_path: Path
) -> None:
    # bagit-python 1.9 does not decode %25 and calls such a bag incomplete (RFC 8493, 2.1.3)
    bag = bag_of(make_archive(), ["100%"], tmp_path / "bag")
    assert (bag / "manifest-sha256.txt").read_text().endswith("  data/100%25\n")


def test_a_full_disk_under_the_library_wastes_no_blanks(
    make_archive: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make_archive()
    archive.files.write_file("f", b"f" * 5000)
    archive.seal(partial=True)
    tries = []

    def full(image: Path, disc: Path, limit: int) -> int:
        tries.append(disc)
        disc.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tierwise.archive.library._burn_file", full)
        with pytest.raises(OSError, match="No space left"):
            archive.burn(partial=True)
    assert len(tries) == 1
    archive.burn(partial=True)
    assert archive.verify().problems == ()
