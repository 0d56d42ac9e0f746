"""Discs in trays in rollers, and drives: what a library does, and a simulator of one.

```
library/geometry.json            rollers, layers, trays, discs a tray, drive sets, disc capacity
        state.json               virtual time, trays in the drives, where the arm stands
        faults.json              unreadable sectors, broken drive sets (see `faults`)
        events.jsonl             one line a mechanical move, with its virtual time and duration
        roller-1/layer-01/tray-1/disc-01.img     a burned disc, mode 0444; no file: blank
                                 disc-01.gone    a disc that was destroyed or taken away
```

A tray of discs is the unit of loading, as a drive set has a drive for each. A disc is burned
once: a file that has bytes is never written again, whole or not. Time is virtual and accounted:
nothing sleeps. Every state change is one locked read-modify-write of state.json, so that a mount
and a verb may use a library at the same time. Left out: power, wear, and two arms.

Source: the structure (rollers, layers, trays of 12, drive sets) follows Yan et al., EuroSys 2017,
doi:10.1145/3064176.3064207; every duration is a row of timings.csv.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tierwise.archive.iso_reader import SECTOR_BYTES, Pread
from tierwise.core.errors import (
    DataError,
    MissingFileError,
    StateError,
    StorageFullError,
    TierwiseError,
    UsageError,
)
from tierwise.core.facts import Fact, load_facts
from tierwise.core.records import write_whole
from tierwise.core.units import format_size

if TYPE_CHECKING:
    from _thread import RLock

POLL_S = 0.1
"""How often a wait that may be interrupted looks whether it was, seconds."""
_COPY_BYTES = 1 << 20
T = TypeVar("T")


class DiscState(StrEnum):
    """What is in a slot."""

    BLANK = "blank"
    SEALED = "sealed"
    SPOILED = "spoiled"
    GONE = "gone"


class NoDiscError(MissingFileError):
    """Raised when a slot holds no burned disc; other slots and their discs are as they were."""


def is_disc_fault(error: Exception) -> bool:
    """Return whether an error speaks of a disc; others are trouble of drive, robot or program.

    >>> is_disc_fault(OSError(errno.EIO, "sector 7")), is_disc_fault(StateError("busy"))
    (True, False)
    """
    if isinstance(error, TierwiseError):
        return isinstance(error, NoDiscError)
    return isinstance(error, OSError)


def enter_disc(stack: ExitStack, disc: AbstractContextManager[T]) -> T | None:
    """Return what the context of a disc gives, or None for a disc that is gone or unreadable."""
    try:
        return stack.enter_context(disc)
    except (TierwiseError, OSError) as error:
        if not is_disc_fault(error):
            raise
        return None


@contextlib.contextmanager
def acquired(lock: RLock, interrupted: Event | None) -> Iterator[None]:
    """Hold a lock; with an event, waiting for it ends with EINTR when the event is set.

    Raises:
        OSError: EINTR.
    """
    while not lock.acquire(timeout=-1 if interrupted is None else POLL_S):
        if interrupted is not None and interrupted.is_set():
            raise InterruptedError(errno.EINTR, "the wait for the library ended")
    try:
        yield
    finally:
        lock.release()


class Library(Protocol):
    """What the archive asks of a disc library, simulated or real; slots count from 1.

    A disc that is gone or cannot be read is `NoDiscError` or a bare `OSError`; any other error is
    trouble of the machine, and says nothing of the disc.
    """

    geometry: Geometry

    def states(self, *, look: bool = False) -> Mapping[int, DiscState]:
        """Return the state of every slot whose disc is known not to be blank.

        Args:
            look: Find out about every disc, however long it takes.
        """

    def burn(self, slot: int, image: Path) -> None:
        """Write an image to the blank disc in a slot and close it."""

    def reading(self, slot: int) -> AbstractContextManager[tuple[Pread, int]]:
        """Return a context with (pread, size) of a loaded disc, which stays loaded meanwhile."""

    def readable(self, slot: int) -> AbstractContextManager[Path]:
        """Return a context with a path that reads as a disc, beside other discs' paths."""

    def turn(self, interrupted: Event) -> AbstractContextManager[None]:
        """Return a context entered when nobody else's work keeps the library busy.

        Raises:
            OSError: EINTR, the event was set while waiting.
        """

    def path_of(self, slot: int) -> Path:
        """Return the path that stands for a disc in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A library's shape; the default is one roller of 85 layers x 6 trays x 12 discs."""

    disc_capacity: int
    rollers: int = 1
    layers: int = 85
    trays: int = 6
    discs: int = 12
    drive_sets: int = 2

    def __post_init__(self) -> None:
        """Refuse an empty library."""
        if min(asdict(self).values()) < 1:
            raise UsageError("a library has at least one of everything, and discs of some size")

    @property
    def num_slots(self) -> int:
        """Return how many discs fit."""
        return self.rollers * self.layers * self.trays * self.discs

    def place(self, slot: int) -> tuple[int, int, int, int]:
        """Return (roller, layer, tray, disc), each from 1, of a slot from 1.

        >>> Geometry(disc_capacity=1).place(13)
        (1, 1, 2, 1)
        """
        if not 1 <= slot <= self.num_slots:
            raise UsageError(f"there is no slot {slot}; the library has {self.num_slots}")
        rest, disc = divmod(slot - 1, self.discs)
        rest, tray = divmod(rest, self.trays)
        roller, layer = divmod(rest, self.layers)
        return roller + 1, layer + 1, tray + 1, disc + 1


class VirtualClock:
    """Seconds that pass only when work is accounted."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def advance(self, seconds: float) -> None:
        """Let time pass; it cannot go back."""
        self.now_s += max(0.0, seconds)


def load_timings() -> dict[str, Fact]:
    """Return the sourced durations and speeds of timings.csv."""
    with resources.as_file(resources.files("tierwise.archive") / "timings.csv") as path:
        return load_facts(path)


class SimulatedLibrary:
    """A library in a folder; make one with `create`, use it with `open`.

    Args:
        root: The folder.
        geometry: Its shape.
        clock: Virtual time; moved on by every operation.
        timings: Facts by key, as from `load_timings`.
    """

    def __init__(
        self, root: Path, geometry: Geometry, clock: VirtualClock, timings: Mapping[str, Fact]
    ) -> None:
        self.root, self.geometry, self.clock = root, geometry, clock
        self._timings = {key: fact.value for key, fact in timings.items()}
        self._loaded: dict[int, int] = {}
        self._last_read: tuple[int, int] | None = None

    @classmethod
    def create(
        cls, root: Path, geometry: Geometry, *, clock: VirtualClock | None = None
    ) -> SimulatedLibrary:
        """Make a library of blank discs.

        Raises:
            StateError: There is one already.
        """
        if (root / "geometry.json").exists():
            raise StateError(f"{root} is a disc library already", hint="choose another folder")
        root.mkdir(parents=True, exist_ok=True)
        write_whole(root / "geometry.json", json.dumps(asdict(geometry)) + "\n")
        return cls.open(root, clock=clock)

    @classmethod
    def open(cls, root: Path, *, clock: VirtualClock | None = None) -> SimulatedLibrary:
        """Return the library in a folder; without a clock, time goes on where it stopped.

        Raises:
            MissingFileError: There is none.
            DataError: Its geometry is malformed.
        """
        try:
            geometry = Geometry(**json.loads((root / "geometry.json").read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise MissingFileError(f"no disc library in {root}") from error
        except (ValueError, TypeError) as error:
            raise DataError(f"{root / 'geometry.json'} is malformed: {error}") from error
        library = cls(root, geometry, clock or VirtualClock(), load_timings())
        with library._state() as state:
            library.clock.now_s = max(library.clock.now_s, state["now_s"])
        return library

    # Discs

    def path_of(self, slot: int) -> Path:
        """Return the file that is the disc of a slot."""
        roller, layer, tray, disc = self.geometry.place(slot)
        folder = self.root / f"roller-{roller}" / f"layer-{layer:02d}" / f"tray-{tray}"
        return folder / f"disc-{disc:02d}.img"

    def slot_of(self, path: Path) -> int:
        """Return the slot whose disc a file is."""
        names = path.relative_to(self.root).with_suffix("").parts
        roller, layer, tray, disc = (int(name.rpartition("-")[2]) - 1 for name in names)
        g = self.geometry
        return ((roller * g.layers + layer) * g.trays + tray) * g.discs + disc + 1

    def state_of(self, slot: int) -> DiscState:
        """Return what is in a slot."""
        path = self.path_of(slot)
        if path.with_suffix(".gone").exists():
            return DiscState.GONE
        try:
            info = path.stat()
        except FileNotFoundError:
            return DiscState.BLANK
        return DiscState.SPOILED if info.st_mode & 0o200 else DiscState.SEALED

    def states(self, *, look: bool = False) -> dict[int, DiscState]:
        """Return the state of every slot that is not blank, in order; it is always known."""
        found = [*self.root.glob("roller-*/layer-*/tray-*/disc-*.img")]
        found += self.root.glob("roller-*/layer-*/tray-*/disc-*.gone")
        slots = sorted({self.slot_of(path) for path in found})
        return {slot: self.state_of(slot) for slot in slots}

    def size_bytes(self, slot: int) -> int:
        """Return how many bytes a disc has.

        Raises:
            NoDiscError: The slot is empty or its disc blank.
        """
        self._require_disc(slot)
        return self.path_of(slot).stat().st_size

    def _require_disc(self, slot: int) -> None:
        if self.state_of(slot) in (DiscState.GONE, DiscState.BLANK):
            raise NoDiscError(f"there is no burned disc in slot {slot}")

    # Burning

    def burn(self, slot: int, image: Path) -> None:
        """Write an image to the blank disc in a slot and close it.

        Raises:
            StateError: The disc is not blank, or the burn failed and spoiled it.
            StorageFullError: The image is larger than the disc.
        """
        state, path = self.state_of(slot), self.path_of(slot)
        if state is not DiscState.BLANK:
            raise StateError(
                f"the disc in slot {slot} is {state}, not blank", hint="discs are written once"
            )
        size = image.stat().st_size
        if size > self.geometry.disc_capacity:
            raise StorageFullError(
                f"{image} is {format_size(size)}, a disc takes"
                f" {format_size(self.geometry.disc_capacity)}"
            )
        drive_set = self._load(slot)
        limit = self._faults().get("stop_burn_after")
        path.parent.mkdir(parents=True, exist_ok=True)
        written = _burn_file(image, path, size if limit is None else min(size, int(limit)))
        seconds = written / 1e6 / self._burn_mb_s()
        self._account("burn", seconds, slot=slot, drive_set=drive_set, bytes=written)
        if written < size:
            self._forget_fault("stop_burn_after")
            raise StateError(f"the burn of slot {slot} stopped after {format_size(written)}")
        path.chmod(0o444)

    def _burn_mb_s(self) -> float:
        """Return the mean burning speed for this disc size, in MB/s."""
        dense = self.geometry.disc_capacity > self._timings["bd_50_bytes"]
        speed = self._timings["burn_100_speed" if dense else "burn_25_speed"]
        return speed * self._timings["bd_1x_mb_s"]

    # Reading

    def pread(self, slot: int, offset: int, length: int) -> bytes:
        """Return bytes of a disc, shorter only at its end; loads its tray first.

        Raises:
            NoDiscError: There is no burned disc in the slot.
            OSError: EIO, a sector cannot be read.
        """
        self._require_disc(slot)
        self._load(slot)
        self._refuse_bad_sectors(slot, offset, length)
        with self.path_of(slot).open("rb", buffering=0) as stream:
            data = os.pread(stream.fileno(), length, offset)
        if self._last_read != (slot, offset):
            self.clock.advance(self._timings["seek_s"])
        self._last_read = (slot, offset + len(data))
        dense = self.geometry.disc_capacity > self._timings["bd_50_bytes"]
        speed = self._timings["read_100_mb_s" if dense else "read_25_mb_s"]
        self.clock.advance(len(data) / 1e6 / speed)
        return data

    def _refuse_bad_sectors(self, slot: int, offset: int, length: int) -> None:
        bad = self._faults().get("bad_sectors", {}).get(str(slot), ())
        first, last = offset // SECTOR_BYTES, (offset + max(length, 1) - 1) // SECTOR_BYTES
        if any(first <= sector <= last for sector in bad):
            raise OSError(errno.EIO, f"slot {slot}: sectors from {first} cannot be read")

    @contextlib.contextmanager
    def open_disc(self, path: Path) -> Iterator[tuple[Pread, int]]:
        """Yield (pread, size) of a disc by its file: an opener for `discs.scan_discs`."""
        with self.reading(self.slot_of(path)) as opened:
            yield opened

    @contextlib.contextmanager
    def reading(self, slot: int) -> Iterator[tuple[Pread, int]]:
        """Yield (pread, size) of a disc."""

        def pread(offset: int, length: int) -> bytes:
            return self.pread(slot, offset, length)

        yield pread, self.size_bytes(slot)

    @contextlib.contextmanager
    def readable(self, slot: int) -> Iterator[Path]:
        """Yield the file that is a disc, with its tray loaded; all discs may be read at once."""
        self._require_disc(slot)
        with contextlib.suppress(OSError):
            self.pread(slot, 0, 1)  # loads the tray; bad sectors are found later
        yield self.path_of(slot)

    def turn(self, interrupted: Event) -> AbstractContextManager[None]:
        """Return a context for reading; here nobody waits for another."""
        return contextlib.nullcontext()

    # Mechanics

    def events(self) -> list[dict[str, Any]]:
        """Return every mechanical move and burn so far."""
        path = self.root / "events.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def load_seconds(self, slot: int) -> float:
        """Return how long it would take, in virtual seconds, until a disc can be read."""
        tray = (slot - 1) // self.geometry.discs
        with self._state() as state:
            trays = state["trays"]
            if tray in trays.values():
                return 0.0
            full = len(trays) >= len(self._working_sets())
            return self._move_seconds(state, tray) + (self._collect_seconds() if full else 0.0)

    def _load(self, slot: int) -> int:
        """Bring a slot's tray into a drive set, unloading the one used longest ago if need be."""
        tray = (slot - 1) // self.geometry.discs
        working = self._working_sets()
        if self._loaded.get(tray) in working:
            return self._loaded[tray]
        with self._state() as state:
            trays: dict[str, int] = state["trays"]
            for name, loaded in trays.items():
                if loaded == tray and int(name) in working:
                    return int(name)
            if not working:
                raise StateError("no drive set works", hint="repair a drive")
            chosen = next((s for s in working if str(s) not in trays), None)
            if chosen is None:
                name = min((str(s) for s in working), key=lambda s: state["used_s"].get(s, 0.0))
                self._unload(state, name)
                chosen = int(name)
            state["trays"] = {name: loaded for name, loaded in trays.items() if loaded != tray}
            self._bring(state, tray, chosen)
        self._loaded = {tray: chosen}
        return chosen

    def _bring(self, state: dict[str, Any], tray: int, drive_set: int) -> None:
        roller, layer, place, _ = self.geometry.place(tray * self.geometry.discs + 1)
        passed = abs(layer - state["arm_layer"])
        self._move("turn roller", self._timings["roller_turn_s"], roller=roller, tray=place)
        self._move("move arm", passed * self._timings["arm_layer_s"], layer=layer)
        self._move(
            "separate discs", self._timings["separate_disc_s"] * self.geometry.discs,
            roller=roller, layer=layer, tray=place, drive_set=drive_set,
        )  # fmt: skip
        state["arm_layer"] = layer
        state["trays"][str(drive_set)] = tray
        state["used_s"][str(drive_set)] = self.clock.now_s

    def _unload(self, state: dict[str, Any], name: str) -> None:
        tray = state["trays"].pop(name)
        roller, layer, place, _ = self.geometry.place(tray * self.geometry.discs + 1)
        self._move("collect discs", self._collect_seconds(), roller=roller, layer=layer,
                   tray=place, drive_set=int(name))  # fmt: skip
        state["arm_layer"] = layer
        self._loaded.pop(tray, None)

    def _collect_seconds(self) -> float:
        return self._timings["collect_disc_s"] * self.geometry.discs

    def _move_seconds(self, state: Mapping[str, Any], tray: int) -> float:
        _, layer, _, _ = self.geometry.place(tray * self.geometry.discs + 1)
        arm_layer: int = state["arm_layer"]
        return (
            self._timings["roller_turn_s"]
            + abs(layer - arm_layer) * self._timings["arm_layer_s"]
            + self._timings["separate_disc_s"] * self.geometry.discs
        )

    def _move(self, event: str, seconds: float, **where: int) -> None:
        """Let time pass for one move and note it."""
        started = self.clock.now_s
        self.clock.advance(seconds)
        row = {"event": event, "time_s": round(started, 6), "seconds": round(seconds, 6), **where}
        descriptor = os.open(
            self.root / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
        )
        try:
            os.write(descriptor, json.dumps(row).encode("ascii") + b"\n")
        finally:
            os.close(descriptor)

    def _account(self, event: str, seconds: float, **where: int) -> None:
        with self._state():
            self._move(event, seconds, **where)

    @contextlib.contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        """Lock, yield and write back state.json; time never runs backwards between processes."""
        path = self.root / "state.json"
        descriptor = os.open(self.root / "state.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            state: dict[str, Any] = {"now_s": 0.0, "arm_layer": 1, "trays": {}, "used_s": {}}
            if path.exists():
                state |= json.loads(path.read_text(encoding="utf-8"))
            before = json.dumps(state)
            self.clock.now_s = max(self.clock.now_s, state["now_s"])
            yield state
            state["now_s"] = self.clock.now_s
            if json.dumps(state) != before:
                write_whole(path, json.dumps(state) + "\n")
        finally:
            os.close(descriptor)

    # Faults

    def _faults(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(
                (self.root / "faults.json").read_text(encoding="utf-8")
            )
        except FileNotFoundError:
            return {}
        return found

    def _forget_fault(self, name: str) -> None:
        faults = self._faults()
        faults.pop(name, None)
        write_whole(self.root / "faults.json", json.dumps(faults) + "\n")

    def _working_sets(self) -> list[int]:
        broken = self._faults().get("broken_sets", ())
        return [s for s in range(1, self.geometry.drive_sets + 1) if s not in broken]


def _burn_file(image: Path, disc: Path, limit: int) -> int:
    """Copy up to `limit` bytes to a new file, owner-writable until the session is closed."""
    written = 0
    descriptor = os.open(disc, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb", buffering=0) as output, image.open("rb") as source:
        while written < limit and (block := source.read(min(_COPY_BYTES, limit - written))):
            written += output.write(block)
        os.fsync(output.fileno())
    return written
