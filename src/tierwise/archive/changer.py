"""A real disc library: a SCSI changer moved with mtx, and its drives, behind `library.Library`.

```
library/slots.json     what is known of the discs: burned, spoiled; slots count as the changer's
        changer.lock   held while a disc is burned or read, so that nobody else moves it away
        *.copy         a disc copied from its drive while several are needed at once (repair)
```

A changer does not say what is on its discs, so each burn is noted before it starts and when it has
ended; a disc nobody has noted counts as blank until a drive has looked at it. After a burn the
disc goes back to its slot, so that it is read back as the drive finds it later, not as the kernel
remembers it. Tested with programs that play mtx, xorriso and growisofs on files; no changer was
at hand.

Left out: several drives at a time, bar codes, import and export slots (never used).

Source: mtx(1) 1.3.12.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from tierwise.archive.discs import copy_patiently
from tierwise.archive.drive import Devices, OpticalDrive, Run, require_programs, run_command
from tierwise.archive.iso_reader import SECTOR_BYTES, Pread
from tierwise.archive.library import POLL_S, DiscState, Geometry, NoDiscError, acquired
from tierwise.core.errors import AccessError, DataError, StateError, TierwiseError
from tierwise.core.records import write_whole


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
    """A changer and its drives as a `library.Library`; one disc at a time.

    Args:
        root: Folder for what is noted.
        changer: The robot.
        drives: The drives in the changer's order.
        geometry: Capacity and number of slots, as one tray.
        ready_s: How long a drive may take to recognise a disc, seconds.
        sleep: Lets seconds pass.
    """

    def __init__(
        self,
        root: Path,
        changer: MtxChanger,
        drives: Sequence[OpticalDrive],
        geometry: Geometry,
        *,
        ready_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.geometry = geometry
        self._root, self._changer, self._drives = root, changer, list(drives)
        self._ready_s, self._sleep = ready_s, sleep
        self._lock, self._depth = threading.RLock(), 0

    @classmethod
    def from_devices(
        cls, root: Path, devices: Devices, *, disc_capacity: int, num_slots: int
    ) -> PhysicalLibrary:
        """Return the library of an archive; touches no device."""
        return cls(
            root,
            MtxChanger(Path(devices.changer)),
            [OpticalDrive(Path(drive), burner=devices.burner) for drive in devices.drives],
            Geometry(disc_capacity=disc_capacity, layers=1, trays=1, discs=num_slots, drive_sets=1),
            ready_s=devices.ready_s,
        )

    def path_of(self, slot: int) -> Path:
        """Return a path that stands for a disc in messages; there is no such file."""
        return self._root / f"slot-{slot}"

    # What is known

    def states(self, *, look: bool = False) -> dict[int, DiscState]:
        """Return what is noted of discs, and slots that are empty or for import as gone."""
        with self._alone():
            status = self._changer.status()
            held = {slot for slot in status.drives.values() if slot is not None}
            empty = {slot for slot, full in status.slots.items() if not full and slot not in held}
            found = self._noted()
            if look:
                for slot in sorted(set(status.slots) - set(found) - empty - status.mail_slots):
                    found |= self._look(slot)
            gone = dict.fromkeys(empty | status.mail_slots, DiscState.GONE)
            return dict(sorted((found | gone).items()))

    def _look(self, slot: int) -> dict[int, DiscState]:
        """Return and note the state of a disc that nobody has noted; nothing if it is blank."""
        found = self._load(slot).medium()
        if found is None or found.state is DiscState.BLANK:
            return {}
        self._note(slot, found.state)
        return {slot: found.state}

    def _noted(self) -> dict[int, DiscState]:
        try:
            text = (self._root / "slots.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        return {int(slot): DiscState(state) for slot, state in json.loads(text).items()}

    def _note(self, slot: int, state: DiscState) -> None:
        noted = self._noted() | {slot: state}
        known = {str(key): value for key, value in noted.items() if value is not DiscState.BLANK}
        write_whole(self._root / "slots.json", json.dumps(known) + "\n")

    # Burning

    def burn(self, slot: int, image: Path) -> None:
        """Write an image to the blank disc in a slot and close it.

        Raises:
            StateError: The disc is not blank, or the burn failed; `states` tells whether the
                disc was spoiled by it.
            StorageFullError: The image is larger than the disc.
            NoDiscError: The slot is empty.
        """
        with self._alone():
            drive = self._load(slot)
            found = self._recognised(drive)
            if found is not DiscState.BLANK:
                self._note(slot, found)
            try:
                drive.burn(image, begin=lambda: self._note(slot, DiscState.SPOILED))
            except StateError:
                with contextlib.suppress(TierwiseError):
                    now = drive.medium()
                    if now is not None and now.state is DiscState.BLANK:
                        self._note(slot, DiscState.BLANK)  # it never began
                raise
            self._note(slot, DiscState.SEALED)
            self._unload(slot, self._drives.index(drive))

    def _recognised(self, drive: OpticalDrive) -> DiscState:
        """Return what a drive says of the disc it was given; one it does not know is spoiled."""
        found = drive.medium()
        waited = 0.0
        while found is None and waited < self._ready_s:
            self._sleep(1.0)
            waited += 1.0
            found = drive.medium()
        return DiscState.SPOILED if found is None else found.state

    # Reading

    @contextlib.contextmanager
    def reading(self, slot: int) -> Iterator[tuple[Pread, int]]:
        """Yield (pread, size) of a disc, without what the drive padded.

        Raises:
            NoDiscError: The slot is empty.
            OSError: The drive does not recognise the disc, or a sector cannot be read.
        """
        with self._alone(), contextlib.ExitStack() as stack:
            pread, size = self._opened(self._load(slot), stack)
            yield pread, min(size, _volume_bytes(pread) or size)

    def _opened(self, drive: OpticalDrive, stack: contextlib.ExitStack) -> tuple[Pread, int]:
        """Open a drive, waiting until it has recognised its disc."""
        waited = 0.0
        while True:
            try:
                return stack.enter_context(drive.open())
            except OSError as error:
                if error.errno != errno.ENOMEDIUM or waited >= self._ready_s:
                    raise
            self._sleep(1.0)
            waited += 1.0

    @contextlib.contextmanager
    def readable(self, slot: int) -> Iterator[Path]:
        """Yield a copy of a disc, there as long as the context; unreadable sectors are zeros."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        path = self._root / f"slot-{slot}.{os.getpid()}.copy"
        try:
            with self.reading(slot) as (pread, size):
                copy_patiently(pread, size, path)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove the copies of processes that died."""
        for path in self._root.glob("slot-*.*.copy"):
            if not Path(f"/proc/{path.name.split('.')[1]}").exists():
                path.unlink(missing_ok=True)

    # Moving

    def _load(self, slot: int) -> OpticalDrive:
        """Return the drive that holds a slot's disc, after moving it there if need be."""
        status = self._changer.status()
        for number, source in status.drives.items():
            if source == slot and number in status.full_drives and number < len(self._drives):
                return self._drives[number]
        if not status.slots.get(slot, False):
            raise NoDiscError(f"there is no disc in slot {slot}")
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
        self._unload(target, number)

    def _unload(self, slot: int, number: int) -> None:
        with contextlib.suppress(TierwiseError):
            self._drives[number].eject()
        self._changer.unload(slot, number)

    def turn(self, interrupted: Event) -> contextlib.AbstractContextManager[None]:
        """Return a context that has the library to itself, after waiting for others' work.

        Raises:
            OSError: EINTR, the event was set meanwhile.
        """
        return self._alone(interrupted)

    @contextlib.contextmanager
    def _alone(self, interrupted: Event | None = None) -> Iterator[None]:
        """Keep other processes and threads from moving discs meanwhile; may be nested."""
        with acquired(self._lock, interrupted), contextlib.ExitStack() as stack:
            if self._depth == 0:
                self._root.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                descriptor = os.open(self._root / "changer.lock", flags, 0o600)
                stack.callback(os.close, descriptor)
                _lock_file(descriptor, interrupted)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1


def _lock_file(descriptor: int, interrupted: Event | None) -> None:
    """Lock a file once nobody else has it; with an event, stop waiting when it is set."""
    if interrupted is None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if interrupted.wait(POLL_S):
                raise InterruptedError(errno.EINTR, "the wait for the library ended") from None
        else:
            return


def count_slots(devices: Devices) -> int:
    """Return how many slots a changer has.

    Raises:
        MissingFileError: A program that is needed is not installed.
        StateError: The changer does not answer.
    """
    require_programs(devices)
    return max(MtxChanger(Path(devices.changer)).status().slots, default=0)


def _volume_bytes(pread: Pread) -> int:
    """Return the size of the volume on a disc, 0 where that cannot be read.

    Source: ECMA-119, 8.4.8 (volume space size at byte 80 of sector 16).
    """
    try:
        sector = pread(16 * SECTOR_BYTES, SECTOR_BYTES)
    except OSError:
        return 0
    if sector[1:6] != b"CD001":
        return 0
    return int.from_bytes(sector[80:84], "little") * SECTOR_BYTES
