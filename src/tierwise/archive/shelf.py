"""The disc library as the archive uses it: which blank next, burn, read back, name what is wrong.

Discs of one array go to one tray, so that an array is loaded in one move. Left out: what the
library does to serve a request (robot, drives, virtual time); that is `library`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event

from tierwise.archive.changer import PhysicalLibrary
from tierwise.archive.config import ArchiveConfig
from tierwise.archive.discs import open_image, scan_discs
from tierwise.archive.faults import Faults
from tierwise.archive.iso_reader import Pread
from tierwise.archive.library import (
    DiscState,
    Geometry,
    Library,
    SimulatedLibrary,
    is_disc_fault,
)
from tierwise.core.errors import StateError, StorageFullError, TierwiseError

_CHUNK_BYTES = 1 << 20
_TRAYS, _MAX_LAYERS = 6, 85
SWAPPED = "swapped: holds "


class Shelf:
    """The discs of one archive.

    Args:
        root: The archive's folder.
        config: Which library it has: real devices, or a simulated one in a folder.
    """

    def __init__(self, root: Path, config: ArchiveConfig) -> None:
        folder = root / config.library
        self.library: Library
        if config.devices is None:
            self.library = SimulatedLibrary.open(folder)
        else:
            self.library = PhysicalLibrary.from_devices(
                folder, config.devices, disc_capacity=config.disc_size_bytes,
                num_slots=config.library_slots,
            )  # fmt: skip

    @staticmethod
    def create(root: Path, config: ArchiveConfig) -> None:
        """Make a library of blank discs whose trays hold one array each; real ones are there."""
        if config.devices is not None:
            return
        discs = config.data_discs + config.parity_discs
        trays = min(_TRAYS, -(-config.library_slots // discs))
        layers = -(-config.library_slots // (discs * trays))
        geometry = Geometry(
            disc_capacity=config.disc_size_bytes,
            rollers=-(-layers // _MAX_LAYERS),
            layers=min(layers, _MAX_LAYERS),
            trays=trays,
            discs=discs,
        )
        SimulatedLibrary.create(root / config.library, geometry)

    def path_of(self, slot: int) -> Path:
        """Return the path that stands for a disc: simulated, its file."""
        return self.library.path_of(slot)

    def written(self, *, look: bool = False) -> list[int]:
        """Return the slots whose discs have bytes on them.

        Args:
            look: Load discs nobody has noted, to see what they are.
        """
        states = self.library.states(look=look)
        return [slot for slot, state in states.items() if state is not DiscState.GONE]

    def num_blanks(self) -> int:
        """Return how many blank discs there are."""
        return self.library.geometry.num_slots - len(self.library.states())

    def blank(self, beside: Sequence[int] = ()) -> int:
        """Return the slot of a blank disc.

        Args:
            beside: Slots of the same array: their tray is preferred, else an empty tray.

        Raises:
            StorageFullError: There is none.
        """
        geometry, used = self.library.geometry, self.library.states()
        num = geometry.discs
        trays = [(slot - 1) // num for slot in beside]
        trays += [tray for tray in range(geometry.num_slots // num) if not _any_in(used, tray, num)]
        for tray in trays:
            for slot in range(tray * num + 1, (tray + 1) * num + 1):
                if slot not in used:
                    return slot
        for slot in range(1, geometry.num_slots + 1):
            if slot not in used:
                return slot
        raise StorageFullError(
            "the library has no blank disc left", hint="add blank discs and run it again"
        )

    def burn(self, image: Path, beside: Sequence[int] = ()) -> tuple[int, str]:
        """Burn an image to a blank disc; return its slot and what went wrong, "" for nothing.

        Args:
            image: The image.
            beside: Slots of the same array, as for `blank`.

        Raises:
            StorageFullError: There is no blank disc.
            TierwiseError: Drive or robot are in trouble and no disc was spoiled.
        """
        while True:
            slot = self.blank(beside)
            try:
                self.library.burn(slot, image)
            except (StateError, OSError) as error:
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise  # the disc of a file in a full folder; other blanks would fare no better
                state = self.library.states().get(slot, DiscState.BLANK)
                if state is DiscState.SPOILED:
                    return slot, str(error)
                if state is not DiscState.SEALED:
                    raise
            else:
                return slot, ""

    @contextlib.contextmanager
    def reading(self, slot: int) -> Iterator[Pread]:
        """Yield a disc's pread; the disc stays loaded meanwhile."""
        with self.library.reading(slot) as (pread, _):
            yield pread

    def turn(self, interrupted: Event) -> contextlib.AbstractContextManager[None]:
        """Return a context that has the library's turn; EINTR when the event is set meanwhile."""
        return self.library.turn(interrupted)

    def readable(self, slot: int) -> contextlib.AbstractContextManager[Path]:
        """Return a context with a path that reads as the disc in a slot, beside other discs'.

        Raises:
            NoDiscError: There is no disc.
        """
        return self.library.readable(slot)

    def opener(
        self, slots: Mapping[Path, int | None]
    ) -> Callable[[Path], contextlib.AbstractContextManager[tuple[Pread, int]]]:
        """Return an opener for `discs.scan_discs`: discs of the library by slot, others as files.

        Args:
            slots: Path -> slot, or None for a file.
        """

        def open_one(path: Path) -> contextlib.AbstractContextManager[tuple[Pread, int]]:
            slot = slots.get(path)
            return open_image(path) if slot is None else self.library.reading(slot)

        return open_one

    def holds(self, slot: int, size: int, sha256: str) -> bool:
        """Return whether a disc reads back as exactly these bytes."""
        try:
            with self.library.reading(slot) as (pread, found):
                return found == size and _hash(pread, size) == sha256
        except (TierwiseError, OSError) as error:
            if not is_disc_fault(error):
                raise
            return False

    def fault(self, slot: int, label: str, size: int, sha256: str) -> str | None:
        """Return what is wrong with the disc in a slot, in words; None: it is what it should be."""
        if self.holds(slot, size, sha256):
            return None
        state = self.library.states().get(slot, DiscState.BLANK)
        if state in (DiscState.GONE, DiscState.BLANK):
            return f"there is no disc in slot {slot}" if state is DiscState.GONE else "blank"
        path = self.path_of(slot)
        scan = next(iter(scan_discs([path], opener=self.opener({path: slot}))))
        if scan.identity is not None and scan.identity.label != label:
            return SWAPPED + scan.identity.label
        if scan.fault is not None:
            return f"{scan.fault}: {scan.detail}"
        return "damaged: bytes outside its files are not those that were burned"

    def volume_label(self, slot: int) -> str | None:
        """Return what a disc calls itself in its first descriptor, or None if it cannot be read.

        Source: ECMA-119, 8.4.7 (volume identifier at byte 40 of sector 16).
        """
        try:
            with self.library.reading(slot) as (pread, _):
                text = pread(16 * 2048 + 40, 32)
        except (TierwiseError, OSError) as error:
            if not is_disc_fault(error):
                raise
            return None
        return text.decode("ascii", errors="replace").strip()

    def destroy(self, slot: int) -> None:
        """Break a simulated disc on purpose, for demonstrations; `faults` has more of the kind."""
        Faults(self.library).destroy(slot)


def _hash(pread: Pread, size: int) -> str:
    digest, offset = hashlib.sha256(), 0
    while offset < size:
        chunk = pread(offset, min(_CHUNK_BYTES, size - offset))
        if not chunk:
            break
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


def _any_in(used: Mapping[int, DiscState], tray: int, discs: int) -> bool:
    return any(slot in used for slot in range(tray * discs + 1, (tray + 1) * discs + 1))
