"""A changer and its drives: recorded answers, and every verb through stand-ins on PATH."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tierwise.archive.changer import MtxChanger, PhysicalLibrary, parse_changer_status
from tierwise.archive.drive import Answer, OpticalDrive
from tierwise.archive.library import DiscState, Geometry
from tierwise.archive.vault import Archive
from tierwise.cli.main import run
from tierwise.core.errors import AccessError, DataError, MissingFileError, StateError

from .stand_ins import StandIns, install

RECORDED = Path(__file__).parent / "recorded"
STATUS = ("mtx", "-f", "/dev/sg3", "status")
MIB = 1 << 20
OK = Answer(status=0, output="")


def recorded(name: str) -> Answer:
    return Answer(status=0, output=(RECORDED / name).read_text(encoding="utf-8"))


class Player:
    """Answers commands from a script, in order, and refuses any other."""

    def __init__(self, *script: tuple[tuple[str, ...], Answer]) -> None:
        self._script = list(script)

    def __call__(self, command: Sequence[str]) -> Answer:
        wanted, answer = self._script.pop(0)
        assert tuple(command) == wanted
        return answer

    def finished(self) -> bool:
        return not self._script


def library_with(
    root: Path, drives: Sequence[str], *script: tuple[tuple[str, ...], Answer]
) -> tuple[PhysicalLibrary, Player]:
    player = Player(*script)
    library = PhysicalLibrary(
        root,
        MtxChanger(Path("/dev/sg3"), run=player),
        [OpticalDrive(Path(drive), run=player) for drive in drives],
        Geometry(disc_capacity=25 * 10**9, layers=1, trays=1, discs=6, drive_sets=1),
        ready_s=0,
    )
    return library, player


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.iso"
    path.write_bytes(bytes(4096))
    return path


# Recorded answers


def test_changer_status() -> None:
    status = parse_changer_status(recorded("mtx_status.txt").output)
    assert status.drives == {0: 3, 1: None}
    assert status.full_drives == {0}
    assert status.slots == {1: True, 2: True, 3: False, 4: True, 5: False, 6: False}
    assert status.mail_slots == {6}
    assert status.tags == {1: "TW0001", 2: "TW0002"}
    with pytest.raises(DataError):
        parse_changer_status("cannot open SCSI device")


def test_a_disc_goes_into_the_free_drive_and_back_to_its_slot(tmp_path: Path, image: Path) -> None:
    toc = ("xorriso", "-outdev", "/dev/sr1", "-toc")
    burn = (
        "growisofs", "-use-the-force-luke=notray", "-use-the-force-luke=spare:none",
        "-dvd-compat", "-Z", f"/dev/sr1={image}",
    )  # fmt: skip
    library, player = library_with(
        tmp_path / "l",
        ["/dev/sr0", "/dev/sr1"],
        (STATUS, recorded("mtx_status.txt")),
        (("mtx", "-f", "/dev/sg3", "load", "2", "1"), OK),
        (toc, recorded("xorriso_toc_blank.txt")),
        (toc, recorded("xorriso_toc_blank.txt")),
        (burn, OK),
        (("eject", "/dev/sr1"), OK),
        (("mtx", "-f", "/dev/sg3", "unload", "2", "1"), OK),
        (STATUS, recorded("mtx_status.txt")),
    )
    library.burn(2, image)
    assert library.states()[2] is DiscState.SEALED
    assert player.finished()


def test_full_drives_are_emptied_first(tmp_path: Path) -> None:
    busy = recorded("mtx_status.txt").output.replace(
        "Element 1:Empty\n", "Element 1:Full (Storage Element 5 Loaded)\n", 1
    )
    disc = tmp_path / "sr0"
    disc.write_bytes(b"0123456789")
    library, player = library_with(
        tmp_path / "l",
        [str(disc), "/dev/sr1"],
        (STATUS, Answer(status=0, output=busy)),
        (("eject", str(disc)), OK),
        (("mtx", "-f", "/dev/sg3", "unload", "3", "0"), OK),
        (("mtx", "-f", "/dev/sg3", "load", "1", "0"), OK),
        (STATUS, recorded("mtx_status.txt")),
    )
    with library.reading(1) as (pread, size):
        assert (pread(2, 3), size) == (b"234", 10)
    with library.reading(3) as (pread, _):
        assert pread(0, 2) == b"01"
    assert player.finished()


def test_empty_slots_and_refusals(tmp_path: Path) -> None:
    status = (STATUS, recorded("mtx_status.txt"))
    library, _ = library_with(tmp_path / "l", ["/dev/sr0", "/dev/sr1"], status, status)
    with pytest.raises(MissingFileError, match="no disc in slot 5"), library.reading(5):
        pass
    assert library.states() == {5: DiscState.GONE, 6: DiscState.GONE}
    refused = Answer(status=1, output="", errors="Drive 0 Full (Storage Element 3 loaded)\n")
    changer = MtxChanger(
        Path("/dev/sg3"), run=Player((("mtx", "-f", "/dev/sg3", "load", "1", "0"), refused))
    )
    with pytest.raises(StateError, match="refused load 1 0"):
        changer.load(1, 0)


def test_a_drive_is_given_time_to_recognise_its_disc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOMEDIUM is waited out; after that the disc, not the drive, is at fault."""
    disc = tmp_path / "sr0"
    disc.write_bytes(b"0123456789")
    library, _ = library_with(
        tmp_path / "l", [str(disc)], *[(STATUS, recorded("mtx_status.txt"))] * 2
    )
    left = 3

    def not_yet(path: Path) -> Any:
        nonlocal left
        left -= 1
        if left > 0:
            raise OSError(errno.ENOMEDIUM, "no medium found")
        return open_image(path)

    from tierwise.archive.discs import open_image

    monkeypatch.setattr("tierwise.archive.drive.open_image", not_yet)
    slept: list[float] = []
    library._ready_s, library._sleep = 5.0, slept.append
    with library.reading(3) as (pread, _):
        assert pread(0, 1) == b"0"
    assert len(slept) == 2
    left = 100
    with pytest.raises(OSError, match="no medium found"), library.reading(3):
        pass
    assert len(slept) == 2 + 5


def test_trouble_of_a_drive_has_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, kind, words in (
        (errno.EBUSY, StateError, "in use by another program"),
        (errno.EACCES, AccessError, "may not be used"),
        (errno.ENOENT, MissingFileError, "there is no drive"),
    ):

        def refuse(path: Path, code: int = number) -> Any:
            if code == errno.ENOENT:
                raise MissingFileError(str(path))
            raise OSError(code, "no")

        monkeypatch.setattr("tierwise.archive.drive.open_image", refuse)
        with pytest.raises(kind, match=words), OpticalDrive(tmp_path / "sr0").open():
            pass


def test_both_libraries_answer_the_same_calls(tmp_path: Path) -> None:
    from tierwise.archive.library import Library, SimulatedLibrary

    simulated: Library = SimulatedLibrary.create(tmp_path / "s", Geometry(disc_capacity=1 << 20))
    physical: Library = library_with(
        tmp_path / "l", ["/dev/sr0"], (STATUS, recorded("mtx_status.txt"))
    )[0]
    assert set(simulated.states()) == set()
    assert set(physical.states()) == {5, 6}


# The verbs, with stand-ins for the programs


@pytest.fixture
def robot(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    found = install(fast_path / "robot", slots=14, drives=1, disc_bytes=2 * MIB)
    monkeypatch.setenv("PATH", str(found.bin))
    return found


@pytest.fixture
def vault(fast_path: Path, robot: StandIns) -> Path:
    root = fast_path / "vault"
    made = ["init", str(root), "--disc", "2MiB", "--array", "2+1", "--forepart", "0B"]
    devices = ["--changer", robot.changer, "--drive", robot.drive()]
    assert run(["archive", *made, *devices]) == 0
    text = (root / "archive.toml").read_text()
    (root / "archive.toml").write_text(text.replace("ready_s = 60.0", "ready_s = 0.0"))
    return root


def fill(root: Path, fast_path: Path, *, num_files: int = 12) -> dict[str, str]:
    tree, source, found = fast_path / "tree", random.Random(5), {}
    tree.mkdir(exist_ok=True)
    for number in range(num_files):
        data = source.randbytes(110_000)
        (tree / f"f{number}").write_bytes(data)
        found[f"f{number}"] = hashlib.sha256(data).hexdigest()
    assert run(["archive", "import", str(root), str(tree)]) == 0
    return found


def on_disc(root: Path, fast_path: Path, *, num_files: int = 12) -> dict[str, str]:
    """Fill, seal, burn and evict; return what was written."""
    found = fill(root, fast_path, num_files=num_files)
    for verb in ("seal", "burn"):
        assert run(["archive", verb, str(root), "--partial"]) == 0, verb
    assert run(["archive", "evict", str(root)]) == 0
    return found


def exported(root: Path, target: Path) -> dict[str, str]:
    assert run(["archive", "export", str(root), "/", "--to", str(target)]) == 0
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in target.glob("f*")}


def test_seal_burn_evict_recall_scrub_verify(vault: Path, robot: StandIns, fast_path: Path) -> None:
    written = on_disc(vault, fast_path, num_files=24)
    burns = robot.calls("growisofs")
    images = [Path(row[-1].split("=", 1)[1]).name for row in burns]
    assert len(burns) == len({*images}) >= 4
    assert [row[1:5] for row in burns] == [
        ["-use-the-force-luke=notray", "-use-the-force-luke=spare:none", "-dvd-compat", "-Z"]
    ] * len(burns)
    with Archive.open(vault, write=False) as archive:
        assert archive.status()["buffer_bytes"] == 0
        assert archive.config.library_slots == 14
    loads = len(robot.calls("mtx", "load"))
    assert run(["archive", "recall", str(vault), "/"]) == 0
    data_discs = sum("_D" in name for name in images)
    assert len(robot.calls("mtx", "load")) - loads <= data_discs  # each disc is loaded once
    assert exported(vault, fast_path / "out") == written
    for verb in ("scrub", "verify", "fsck", "repair"):
        assert run(["archive", verb, str(vault)]) == 0, verb


def test_waiting_for_a_burn_can_be_interrupted(
    vault: Path, robot: StandIns, fast_path: Path
) -> None:
    """One reader waits for the library, another for the first; both leave when told to."""
    written = on_disc(vault, fast_path)
    with Archive.open(vault) as archive, (vault / "library" / "changer.lock").open() as burning:
        fcntl.flock(burning, fcntl.LOCK_EX)
        calls = len(robot.calls("mtx"))
        inode = archive.files.stat("f0").inode
        version = archive.catalogue.value("SELECT version FROM inodes WHERE ino = ?", inode)
        ends: list[OSError] = []

        def recall(interrupted: Event) -> None:
            try:
                archive.recaller.recall_version(version, interrupted)
            except OSError as error:
                ends.append(error)

        events = [Event(), Event()]
        readers = [Thread(target=recall, args=(event,), daemon=True) for event in events]
        for reader in readers:
            reader.start()
        for event, reader in zip(reversed(events), reversed(readers), strict=True):
            reader.join(0.3)
            assert reader.is_alive()
            event.set()
            reader.join(10)
            assert not reader.is_alive()
        assert [error.errno for error in ends] == [errno.EINTR, errno.EINTR]
        assert len(robot.calls("mtx")) == calls
        assert archive.listing("f0")[0]["state"] == "offline"
        assert list((vault / "buffer" / "files").glob("*/*")) == []
        fcntl.flock(burning, fcntl.LOCK_UN)
        assert hashlib.sha256(archive.files.read_file("f0")).hexdigest() == written["f0"]


@pytest.mark.slow
def test_lost_and_damaged_discs_are_repaired(vault: Path, robot: StandIns, fast_path: Path) -> None:
    written = on_disc(vault, fast_path, num_files=24)
    lost = robot.disc(1)
    lost.write_bytes(b"")  # a blank stands where the disc was
    damaged = robot.disc(3)
    data = bytearray(damaged.read_bytes())
    data[900_000] ^= 1
    damaged.write_bytes(data)
    assert run(["archive", "verify", str(vault)]) == 9
    assert run(["archive", "scrub", str(vault)]) == 9
    assert run(["archive", "repair", str(vault)]) == 0
    assert run(["archive", "scrub", str(vault)]) == 0
    assert run(["archive", "evict", str(vault)]) == 0
    assert exported(vault, fast_path / "out") == written
    assert not list((vault / "library").glob("*.copy"))


@pytest.mark.slow
def test_catalogue_and_notes_lost(vault: Path, robot: StandIns, fast_path: Path) -> None:
    written = on_disc(vault, fast_path)
    robot.disc(2).unlink()
    if robot.slot(2).exists() is False:
        (robot.root / "loaded.json").write_text(
            json.dumps(
                {
                    drive: slot
                    for drive, slot in json.loads((robot.root / "loaded.json").read_text()).items()
                    if slot != 2
                }
            )
        )
    shutil.rmtree(vault / "metadata")
    (vault / "library" / "slots.json").unlink()
    assert run(["archive", "rebuild", str(vault)]) == 0
    assert run(["archive", "repair", str(vault)]) == 0
    assert run(["archive", "verify", str(vault)]) == 0
    assert exported(vault, fast_path / "out") == written


def test_a_burn_that_fails_spoils_one_disc_and_keeps_the_words(
    vault: Path, robot: StandIns, fast_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = fill(vault, fast_path)
    assert run(["archive", "seal", str(vault), "--partial"]) == 0
    robot.fail(":-[ WRITE@LBA=200h failed with SK=3h/ASC=0Ch/ACQ=00h: Input/output error")
    assert run(["archive", "burn", str(vault), "--partial", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["spoiled"] == 1
    assert json.loads((vault / "library" / "slots.json").read_text())["1"] == "spoiled"
    with Archive.open(vault, write=False) as archive:
        failed = [row for row in archive.events(99) if row["outcome"] == "failure"]
    assert "growisofs failed" in failed[0]["detail"]
    assert "WRITE@LBA=200h failed with SK=3h" in failed[0]["detail"]
    assert run(["archive", "evict", str(vault)]) == 0
    assert exported(vault, fast_path / "out") == written


def test_a_burn_refused_before_it_began_spoils_nothing(
    vault: Path, robot: StandIns, fast_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(vault, fast_path)
    assert run(["archive", "seal", str(vault), "--partial"]) == 0
    robot.fail(":-( unable to anonymously mmap 33554432: Resource temporarily unavailable")
    assert run(["archive", "burn", str(vault), "--partial"]) == 10
    assert "unable to anonymously mmap" in capsys.readouterr().err
    assert json.loads((vault / "library" / "slots.json").read_text()) == {}
    robot.hold(0)
    assert run(["archive", "burn", str(vault), "--partial"]) == 10
    assert f"{robot.drive()} is in use by another program" in capsys.readouterr().err
    robot.hold(None)
    assert run(["archive", "burn", str(vault), "--partial"]) == 0
    assert run(["archive", "verify", str(vault)]) == 0


def test_discs_that_hold_something_are_passed_over(
    vault: Path, robot: StandIns, fast_path: Path
) -> None:
    fill(vault, fast_path)
    robot.slot(1).write_bytes(b"somebody's holiday" * 5000)
    before = robot.slot(1).read_bytes()
    assert run(["archive", "seal", str(vault), "--partial"]) == 0
    assert run(["archive", "burn", str(vault), "--partial"]) == 0
    assert robot.disc(1).read_bytes() == before
    assert run(["archive", "verify", str(vault)]) == 0


def test_a_burn_cut_off_is_adopted(vault: Path, robot: StandIns, fast_path: Path) -> None:
    """The disc is whole and nobody noted it: it is found by its hash and no blank is wasted."""
    fill(vault, fast_path, num_files=5)

    def die(name: str) -> None:
        if name == "burn: disc written":
            raise KeyboardInterrupt

    with Archive.open(vault, write=False, crash_point=die) as archive:
        archive.seal(partial=True)
        with pytest.raises(KeyboardInterrupt):
            archive.burn(partial=True)
    burned = len(robot.calls("growisofs"))
    assert run(["archive", "burn", str(vault), "--partial"]) == 0
    assert burned == 1
    with Archive.open(vault, write=False) as archive:
        assert archive.status()["discs"] == {"good": len(robot.calls("growisofs"))}


def test_no_blank_left_and_no_disc(
    vault: Path, robot: StandIns, fast_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(vault, fast_path)
    assert run(["archive", "seal", str(vault), "--partial"]) == 0
    away = fast_path / "away"
    away.mkdir()
    for number in range(1, 15):
        robot.slot(number).rename(away / str(number))
    assert run(["archive", "burn", str(vault), "--partial"]) == 7
    assert "the library has 0" in capsys.readouterr().err
    for number in range(1, 15):
        (away / str(number)).rename(robot.slot(number))
    assert run(["archive", "burn", str(vault), "--partial"]) == 0


def test_a_busy_drive_is_no_fault_of_the_discs(
    vault: Path, robot: StandIns, fast_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    written = on_disc(vault, fast_path)
    with monkeypatch.context() as patch:

        def busy(path: Path) -> Any:
            raise OSError(errno.EBUSY, "Device or resource busy")

        patch.setattr("tierwise.archive.drive.open_image", busy)
        for verb in (["recall", "/"], ["scrub"], ["verify"]):
            assert run(["archive", verb[0], str(vault), *verb[1:]]) == 10, verb
            assert "in use by another program" in capsys.readouterr().err
    with Archive.open(vault, write=False) as archive:
        assert set(archive.status()["discs"]) == {"good"}
    assert exported(vault, fast_path / "out") == written


@pytest.mark.parametrize(
    ("program", "package"),
    [("mtx", "mtx"), ("xorriso", "xorriso"), ("growisofs", "growisofs"), ("eject", "eject")],
)
def test_programs_that_are_not_installed_are_named(
    robot: StandIns, fast_path: Path, program: str, package: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (robot.bin / program).unlink()
    root = fast_path / "v"
    devices = ["--changer", robot.changer, "--drive", robot.drive()]
    assert run(["archive", "init", str(root), "--disc", "2MiB", *devices]) == 6
    said = capsys.readouterr().err
    assert f"{program} is not installed" in said
    assert f"apt install {package}" in said
    assert not root.exists()


def test_a_program_that_went_missing_stops_the_verb(
    vault: Path, robot: StandIns, fast_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_disc(vault, fast_path)
    (robot.bin / "mtx").unlink()
    for verb in ("scrub", "verify"):
        assert run(["archive", verb, str(vault)]) == 6
        assert "mtx is not installed" in capsys.readouterr().err
    assert run(["archive", "status", str(vault)]) == 0
    assert run(["archive", "ls", str(vault)]) == 0


def test_a_real_library_needs_both(
    fast_path: Path, robot: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["archive", "init", str(fast_path / "v"), "--drive", robot.drive()]) == 4
    assert "its changer and at least one drive" in capsys.readouterr().err
    made = ["init", str(fast_path / "v"), "--disc", "2MiB", "--array", "13+2"]
    assert run(["archive", *made, "--changer", robot.changer, "--drive", robot.drive()]) == 4
    assert "a library of 14" in capsys.readouterr().err


def test_xorriso_burns_as_well(fast_path: Path, robot: StandIns) -> None:
    root = fast_path / "v"
    made = ["init", str(root), "--disc", "2MiB", "--array", "2+1", "--burner", "xorriso"]
    assert run(["archive", *made, "--changer", robot.changer, "--drive", robot.drive()]) == 0
    fill(root, fast_path, num_files=4)
    assert run(["archive", "seal", str(root), "--partial"]) == 0
    assert run(["archive", "burn", str(root), "--partial"]) == 0
    assert run(["archive", "verify", str(root)]) == 0
    assert robot.calls("growisofs") == []
    assert robot.calls("xorriso", "-as", "cdrecord", "-v")
