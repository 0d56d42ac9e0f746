"""Real discs: burn with growisofs or xorriso, change them with mtx, read the device itself.

The same calls as the simulator's (`library.Library`), made of subprocesses whose command lines are
written down here. They are tested against answers as the programs print them, and xorriso's for
real on a file in place of a drive; no drive was at hand, so nothing here has touched a disc yet. A
disc is burned in one closed session without spare areas, at the speed the drive chooses, and read
back through the device node. Left out: several drives at a time, barcode readers, cleaning.

Source: growisofs(1) of dvd+rw-tools, xorriso(1) and xorrecord(1) of GNU xorriso 1.5, mtx(1) 1.3.12.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tierwise.archive.discs import open_image
from tierwise.archive.iso_reader import SECTOR_BYTES, Pread
from tierwise.archive.library import DiscState
from tierwise.core.errors import (
    AccessError,
    DataError,
    MissingFileError,
    StateError,
    StorageFullError,
    TierwiseError,
)
from tierwise.core.units import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command said: exit status, standard output and standard error."""

    status: int
    output: str
    errors: str = ""


Run = Callable[[Sequence[str]], Answer]

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
        package = _PACKAGES.get(command[0], command[0])
        raise MissingFileError(
            f"{command[0]} is not installed", hint=f"apt install {package}"
        ) from error
    return Answer(status=done.returncode, output=done.stdout, errors=done.stderr)


class Burner(StrEnum):
    """Which program writes discs."""

    GROWISOFS = "growisofs"
    XORRISO = "xorriso"


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
            DataError: The answer is not understood.
        """
        answer = self._run(["xorriso", "-outdev", str(self.device), "-toc"])
        text = answer.output + answer.errors
        if "Permission denied" in text:
            raise AccessError(
                f"{self.device} may not be used", hint="join the group that owns it (cdrom)"
            )
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

    def burn(self, image: Path) -> None:
        """Write an image to the blank disc in the drive, as one closed session.

        Raises:
            StateError: No disc, or not a blank one; or the burn failed and spoiled it.
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
        answer = self._run(self.burn_command(image))
        if answer.status != 0:
            last = (answer.errors or answer.output).strip().splitlines()[-1:]
            raise StateError(
                f"{self._burner} failed on {self.device} ({answer.status}): {''.join(last)}",
                hint="the disc is spoiled; mark it and burn another",
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
        """Yield (pread, size) of the disc in the drive."""
        with open_image(self.device) as opened:
            yield opened

    def eject(self) -> None:
        """Open the tray, so that the kernel forgets the old disc.

        Raises:
            StateError: The drive refuses.
        """
        answer = self._run(["eject", str(self.device)])
        if answer.status != 0:
            raise StateError(f"{self.device} does not open: {answer.errors.strip()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangerStatus:
    """A changer's answer: drive -> (slot it came from or None), slot -> full, volume tags."""

    drives: Mapping[int, int | None]
    full_drives: frozenset[int]
    slots: Mapping[int, bool]
    mail_slots: frozenset[int]
    tags: Mapping[int, str]


class MtxChanger:
    """A SCSI media changer through mtx; its slots count from 1 and its drives from 0."""

    def __init__(self, device: Path, *, run: Run = run_command) -> None:
        self.device, self._run = device, run

    def status(self) -> ChangerStatus:
        """Return what is where.

        Raises:
            DataError: The answer is not understood.
        """
        return parse_changer_status(self._ask("status"))

    def load(self, slot: int, drive: int) -> None:
        """Move a disc from its slot into a drive."""
        self._ask("load", str(slot), str(drive))

    def unload(self, slot: int, drive: int) -> None:
        """Move a disc from a drive back into a slot."""
        self._ask("unload", str(slot), str(drive))

    def _ask(self, *words: str) -> str:
        answer = self._run(["mtx", "-f", str(self.device), *words])
        if answer.status != 0:
            said = (answer.errors or answer.output).strip()
            if "Permission denied" in said:
                raise AccessError(f"{self.device} may not be used", hint="run as root")
            raise StateError(f"the changer refused {' '.join(words)}: {said.splitlines()[-1:]}")
        return answer.output


_ELEMENT = re.compile(
    r"^[ \t]*(?P<what>Data Transfer|Storage) Element (?P<number>\d+)"
    r"(?P<mail> IMPORT/EXPORT)?[ \t]*:[ \t]*(?P<state>Full|Empty)[ \t]*"
    r"(?:\((?:Storage Element (?P<source>\d+)|Unknown[^)\n]*) Loaded\))?[ \t]*"
    r"(?::?[ \t]*VolumeTag[ \t]*=[ \t]*(?P<tag>\S*))?",
    re.MULTILINE,
)


def parse_changer_status(text: str) -> ChangerStatus:
    """Return the answer of `mtx status`.

    Raises:
        DataError: It names no drive.
    """
    drives: dict[int, int | None] = {}
    full_drives, mail, slots, tags = set(), set(), {}, {}
    for match in _ELEMENT.finditer(text):
        number, full = int(match["number"]), match["state"] == "Full"
        if match["what"] == "Data Transfer":
            drives[number] = int(match["source"]) if match["source"] else None
            if full:
                full_drives.add(number)
            continue
        slots[number] = full
        if match["mail"]:
            mail.add(number)
        if match["tag"]:
            tags[number] = match["tag"]
    if not drives:
        raise DataError(f"the changer's answer is not understood: {text.strip()[:200]!r}")
    return ChangerStatus(
        drives=drives, full_drives=frozenset(full_drives), slots=slots,
        mail_slots=frozenset(mail), tags=tags,
    )  # fmt: skip


class PhysicalLibrary:
    """A changer and its drives as a `library.Library`; one disc at a time, in the first free drive.

    Args:
        changer: The robot.
        drives: The drives in the changer's order.
    """

    def __init__(self, changer: MtxChanger, drives: Sequence[OpticalDrive]) -> None:
        self._changer, self._drives = changer, list(drives)

    def states(self) -> dict[int, DiscState]:
        """Return slots that are empty as gone; what a disc holds shows only in a drive."""
        status = self._changer.status()
        held = {slot for slot in status.drives.values() if slot is not None}
        return {
            slot: DiscState.GONE
            for slot, full in sorted(status.slots.items())
            if not full and slot not in held
        }

    def burn(self, slot: int, image: Path) -> None:
        """Write an image to the blank disc in a slot and close it."""
        drive = self._load(slot)
        drive.burn(image)

    def pread(self, slot: int, offset: int, length: int) -> bytes:
        """Return bytes of a disc, loading it first."""
        with self._load(slot).open() as (pread, _):
            return pread(offset, length)

    def size_bytes(self, slot: int) -> int:
        """Return how many bytes a disc has, as the kernel sees it."""
        with self._load(slot).open() as (_, size):
            return size

    def _load(self, slot: int) -> OpticalDrive:
        """Return the drive that holds a slot's disc, after moving it there if need be."""
        status = self._changer.status()
        for number, source in status.drives.items():
            if source == slot and number in status.full_drives:
                return self._drives[number]
        if not status.slots.get(slot, False):
            raise MissingFileError(f"there is no disc in slot {slot}")
        free = [n for n in range(len(self._drives)) if n not in status.full_drives]
        if free:
            number = free[0]
        else:
            number = 0
            self._put_back(number, status)
        self._changer.load(slot, number)
        return self._drives[number]

    def _put_back(self, number: int, status: ChangerStatus) -> None:
        source = status.drives[number]
        empty = [s for s, full in status.slots.items() if not full and s not in status.mail_slots]
        target = source if source is not None else next(iter(empty), None)
        if target is None:
            raise StateError("there is no empty slot for the disc in the drive")
        with contextlib.suppress(TierwiseError):
            self._drives[number].eject()
        self._changer.unload(target, number)
