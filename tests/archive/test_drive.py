"""A real drive against recorded answers: command lines and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tierwise.archive.discs import check_disc
from tierwise.archive.drive import Answer, Burner, OpticalDrive, run_command
from tierwise.archive.image import ImageIdentity, seal_image
from tierwise.archive.library import DiscState
from tierwise.core.errors import (
    AccessError,
    DataError,
    MissingFileError,
    StateError,
    StorageFullError,
)

RECORDED = Path(__file__).parent / "recorded"


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


TOC = ("xorriso", "-outdev", "/dev/sr0", "-toc")
SR0 = Path("/dev/sr0")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.iso"
    path.write_bytes(bytes(4096))
    return path


def test_growisofs_burns_one_closed_session(image: Path) -> None:
    burn = (
        "growisofs", "-use-the-force-luke=notray", "-use-the-force-luke=spare:none",
        "-dvd-compat", "-Z", f"/dev/sr0={image}",
    )  # fmt: skip
    player = Player((TOC, recorded("xorriso_toc_blank.txt")), (burn, Answer(status=0, output="")))
    OpticalDrive(SR0, run=player).burn(image)
    assert player.finished()


def test_xorriso_burns_too(image: Path) -> None:
    burn = (
        "xorriso", "-as", "cdrecord", "-v", "dev=/dev/sr0", "-sao", "-eject",
        "stream_recording=on", str(image),
    )  # fmt: skip
    player = Player((TOC, recorded("xorriso_toc_blank.txt")), (burn, Answer(status=0, output="")))
    OpticalDrive(SR0, burner=Burner.XORRISO, run=player).burn(image)
    assert player.finished()


def test_what_is_in_the_drive() -> None:
    blank = OpticalDrive(SR0, run=Player((TOC, recorded("xorriso_toc_blank.txt")))).medium()
    assert blank is not None
    assert blank.kind == "BD-R sequential recording"
    assert blank.state is DiscState.BLANK
    assert blank.free_bytes == 25_025_314_816
    closed = OpticalDrive(SR0, run=Player((TOC, recorded("xorriso_toc_closed.txt")))).medium()
    assert closed is not None
    assert closed.state is DiscState.SEALED
    assert OpticalDrive(SR0, run=Player((TOC, recorded("xorriso_toc_empty.txt")))).medium() is None


def test_nothing_is_burned_on_a_written_disc_or_none(image: Path) -> None:
    for name, message in (
        ("xorriso_toc_closed.txt", "not blank"),
        ("xorriso_toc_empty.txt", "no disc"),
    ):
        player = Player((TOC, recorded(name)))
        with pytest.raises(StateError, match=message):
            OpticalDrive(SR0, run=player).burn(image)
        assert player.finished()


def test_an_image_larger_than_the_disc(tmp_path: Path) -> None:
    large = tmp_path / "large.iso"
    with large.open("wb") as stream:
        stream.truncate(30 * 10**9)
    with pytest.raises(StorageFullError):
        OpticalDrive(SR0, run=Player((TOC, recorded("xorriso_toc_blank.txt")))).burn(large)


def test_a_failed_burn_says_what_the_program_said(image: Path) -> None:
    def run(command: Sequence[str]) -> Answer:
        if command[0] == "xorriso":
            return recorded("xorriso_toc_blank.txt")
        return Answer(status=252, output="", errors=":-[ WRITE@LBA=0h failed: Input/output error\n")

    with pytest.raises(StateError, match=r"growisofs failed on /dev/sr0 \(252\).*WRITE@LBA=0h"):
        OpticalDrive(SR0, run=run).burn(image)


def test_permission_and_nonsense() -> None:
    denied = Answer(status=5, output="", errors="libburn : SORRY : /dev/sr0 Permission denied\n")
    with pytest.raises(AccessError):
        OpticalDrive(SR0, run=Player((TOC, denied))).medium()
    with pytest.raises(DataError):
        OpticalDrive(SR0, run=Player((TOC, Answer(status=0, output="hello")))).medium()


def test_xorriso_for_real_on_a_file_in_place_of_a_drive(tmp_path: Path) -> None:
    """The commands burn, and refuse a second burn, on xorriso's stdio pseudo-drive."""
    if shutil.which("xorriso") is None:
        pytest.skip("xorriso is not installed (Debian: xorriso)")
    identity = ImageIdentity(archive_id="a" * 32, image_id="b" * 32, label="REAL", sequence=1)
    sealed = seal_image(
        [], tmp_path / "image.iso", disc_capacity=1 << 21, identity=identity, created_ns=0
    )
    disc = tmp_path / "disc"
    with disc.open("wb") as stream:
        stream.truncate(0)
    drive = OpticalDrive(Path(f"stdio:{disc}"), burner=Burner.XORRISO)
    found = drive.medium()
    assert found is not None
    assert found.state is DiscState.BLANK
    drive.burn(sealed.path)
    assert disc.read_bytes()[: sealed.size_bytes] == sealed.path.read_bytes()
    assert disc.stat().st_size > sealed.size_bytes
    checked = check_disc(disc)
    assert (checked.fault, checked.sha256) == (None, sealed.sha256)
    assert checked.size_bytes == sealed.size_bytes
    with pytest.raises(StateError, match="not blank"):
        drive.burn(sealed.path)
    with pytest.raises(MissingFileError, match="no drive"):
        OpticalDrive(Path("/dev/sr99")).medium()


def test_a_missing_program_names_its_package() -> None:
    with pytest.raises(MissingFileError, match="no-such-burner is not installed"):
        run_command(["no-such-burner"])
    assert run_command(["echo", "hi"]).output == "hi\n"
