"""A real drive: ask it with xorriso, burn with growisofs or xorriso, read the device itself.

Every command line is written down here. They are tested against answers as the programs print
them, and xorriso's for real on a file in place of a drive; no drive was at hand, so nothing here
has touched a disc yet. A disc is burned in one closed session without spare areas, at the speed
the drive chooses, and read back through the device node. Left out: which disc is in the drive
(`changer`), cleaning.

Source: growisofs(1) of dvd+rw-tools, xorriso(1) and xorrecord(1) of GNU xorriso 1.5.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tierwise.archive.discs import open_image
from tierwise.archive.iso_reader import SECTOR_BYTES, Pread
from tierwise.archive.library import DiscState
from tierwise.core.errors import (
    AccessError,
    ConfigError,
    DataError,
    MissingFileError,
    StateError,
    StorageFullError,
)
from tierwise.core.units import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command said: exit status, standard output and standard error."""

    status: int
    output: str
    errors: str = ""


Run = Callable[[Sequence[str]], Answer]

_BUSY = ("cannot open busy device", "device or resource busy")  # libburn, and the system's word
_PACKAGES = {"growisofs": "growisofs", "xorriso": "xorriso", "mtx": "mtx", "eject": "eject"}


def run_command(command: Sequence[str]) -> Answer:
    """Run a command and return its answer, in the C locale.

    Raises:
        MissingFileError: The program is not installed.
    """
    try:
        done = subprocess.run(
            list(command),
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise _not_installed(command[0]) from error
    return Answer(status=done.returncode, output=done.stdout, errors=done.stderr)


class Burner(StrEnum):
    """Which program writes discs."""

    GROWISOFS = "growisofs"
    XORRISO = "xorriso"


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """A real library: the table `[devices]` of archive.toml.

    Attributes:
        changer: The robot's SCSI node, such as /dev/sg3.
        drives: Its drives in its own order, such as /dev/sr0.
        burner: The program that writes discs.
        ready_s: How long a drive may take to recognise a disc it was just given, seconds.
    """

    changer: str
    drives: tuple[str, ...]
    burner: Burner = Burner.GROWISOFS
    ready_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.drives or not self.changer:
            raise ConfigError(
                "a real library needs its changer and at least one drive",
                hint="name them like --changer /dev/sg3 --drive /dev/sr0",
            )


def require_programs(devices: Devices) -> None:
    """Raise `MissingFileError` for the first program of a real library that is not installed."""
    for program in ("mtx", "xorriso", "eject", str(devices.burner)):
        if shutil.which(program) is None:
            raise _not_installed(program)


def _not_installed(program: str) -> MissingFileError:
    package = _PACKAGES.get(program, program)
    return MissingFileError(f"{program} is not installed", hint=f"apt install {package}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """What a drive says is in it; `free_bytes` is what a blank disc takes."""

    kind: str
    state: DiscState
    free_bytes: int


class OpticalDrive:
    """One drive.

    Args:
        device: Its block device, such as /dev/sr0.
        burner: The program that writes.
        run: How commands are run.
    """

    def __init__(
        self, device: Path, *, burner: Burner = Burner.GROWISOFS, run: Run = run_command
    ) -> None:
        self.device, self._burner, self._run = device, burner, run

    def medium(self) -> Medium | None:
        """Return what is in the drive, or None for nothing.

        Raises:
            AccessError: The drive may not be used.
            StateError: Another program has it.
            DataError: The answer is not understood.
        """
        answer = self._run(["xorriso", "-outdev", str(self.device), "-toc"])
        text = answer.output + answer.errors
        if any(words in text.lower() for words in _BUSY):
            raise self._busy()
        if "Permission denied" in text:
            raise self._denied()
        kind = re.search(r"^Media current:\s*(.+)$", text, re.MULTILINE)
        status = re.search(r"^Media status\s*:\s*(.+)$", text, re.MULTILINE)
        writable = re.search(r"(\d+) writable", text)
        if f"'{self.device}' not found" in text or "rejected because: not existing" in text:
            raise MissingFileError(f"there is no drive {self.device}")
        if "no medium present" in text.lower() or (kind and "is not recognizable" in kind[1]):
            return None
        if kind is None or status is None:
            raise DataError(f"the answer of {self.device} is not understood: {text.strip()[:200]}")
        blank = status[1].startswith("is blank")
        state = DiscState.BLANK if blank else DiscState.SEALED
        if "appendable" in status[1]:
            state = DiscState.SPOILED
        free_bytes = int(writable[1]) * SECTOR_BYTES if writable else 0
        return Medium(kind=kind[1].strip(), state=state, free_bytes=free_bytes)

    def _denied(self) -> AccessError:
        return AccessError(
            f"{self.device} may not be used", hint="join the group that owns it (cdrom)"
        )

    def _busy(self) -> StateError:
        return StateError(
            f"{self.device} is in use by another program", hint="end that program and run it again"
        )

    def burn(self, image: Path, *, begin: Callable[[], None] = lambda: None) -> None:
        """Write an image to the blank disc in the drive, as one closed session.

        Args:
            image: The image.
            begin: Called when the disc was found blank and large enough, just before it is
                written.

        Raises:
            StateError: No disc, or not a blank one; or the burn failed.
            StorageFullError: The image is larger than the disc.
        """
        found = self.medium()
        if found is None:
            raise StateError(f"{self.device} has no disc", hint="put a blank disc in")
        if found.state is not DiscState.BLANK:
            raise StateError(
                f"the disc in {self.device} is {found.state}, not blank",
                hint="discs are written once; put a blank one in",
            )
        size = image.stat().st_size
        if found.free_bytes and size > found.free_bytes:
            raise StorageFullError(
                f"{image} is {format_size(size)}, the disc takes {format_size(found.free_bytes)}"
            )
        begin()
        answer = self._run(self.burn_command(image))
        if answer.status != 0:
            last = (answer.errors or answer.output).strip().splitlines()[-1:]
            raise StateError(
                f"{self._burner} failed on {self.device} ({answer.status}): {''.join(last)}",
                hint="the disc may be spoiled; mark it and burn another",
            )

    def burn_command(self, image: Path) -> list[str]:
        """Return the command line that writes an image."""
        if self._burner is Burner.GROWISOFS:
            return [
                "growisofs", "-use-the-force-luke=notray", "-use-the-force-luke=spare:none",
                "-dvd-compat", "-Z", f"{self.device}={image}",
            ]  # fmt: skip
        return [
            "xorriso", "-as", "cdrecord", "-v", f"dev={self.device}", "-sao", "-eject",
            "stream_recording=on", str(image),
        ]  # fmt: skip

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Pread, int]]:
        """Yield (pread, size) of the disc in the drive.

        Raises:
            MissingFileError: There is no such drive.
            AccessError: It may not be read.
            StateError: Another program has it.
            OSError: ENOMEDIUM for no disc, or none that the drive recognises; EIO.
        """
        with contextlib.ExitStack() as stack:
            try:
                opened = stack.enter_context(open_image(self.device))
            except MissingFileError as error:
                raise MissingFileError(f"there is no drive {self.device}") from error
            except PermissionError as error:
                raise self._denied() from error
            except OSError as error:
                if error.errno == errno.EBUSY:
                    raise self._busy() from error
                raise
            yield opened

    def eject(self) -> None:
        """Open the tray, so that the kernel forgets the old disc.

        Raises:
            StateError: The drive refuses.
        """
        answer = self._run(["eject", str(self.device)])
        if answer.status != 0:
            raise StateError(f"{self.device} does not open: {answer.errors.strip()}")
