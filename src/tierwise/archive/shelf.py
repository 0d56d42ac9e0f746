"""The disc library as the archive uses it: which blank next, burn, read back, name what is wrong.

Discs of one array go to one tray, so that an array is loaded in one move. Left out: what the
library does to serve a request (robot, drives, virtual time); that is `library`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierwise.archive.config import ArchiveConfig
from tierwise.archive.discs import scan_discs
from tierwise.archive.faults import Faults
from tierwise.archive.library import DiscState, Geometry, SimulatedLibrary
from tierwise.core.errors import MissingFileError, StateError, StorageFullError

_CHUNK_BYTES = 1 << 20
_TRAYS, _MAX_LAYERS = 6, 85
SWAPPED = "swapped: holds "


class Shelf:
    """The discs of one archive.

    Args:
        root: The library's folder.
    """

    def __init__(self, root: Path) -> None:
        self.library = SimulatedLibrary.open(root)

    @staticmethod
    def create(root: Path, config: ArchiveConfig) -> None:
        """Make a library of blank discs whose trays hold one array each."""
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
        SimulatedLibrary.create(root, geometry)

    def path_of(self, slot: int) -> Path:
        """Return the file that is a disc."""
        return self.library.path_of(slot)

    def written(self) -> list[int]:
        """Return the slots whose discs have bytes on them."""
        states = self.library.states()
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

    def burn(self, slot: int, image: Path) -> bool:
        """Burn an image to a blank; return whether the drive says it went well."""
        try:
            self.library.burn(slot, image)
        except (StateError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            return False
        return True

    def pread(self, slot: int, offset: int, length: int) -> bytes:
        """Return bytes of a disc, loading it first."""
        return self.library.pread(slot, offset, length)

    @contextlib.contextmanager
    def readable(self, slot: int) -> Iterator[Path]:
        """Yield a path that reads as the disc in a slot, loaded into a drive.

        Raises:
            MissingFileError: There is no disc.
        """
        self.library.size_bytes(slot)
        with contextlib.suppress(OSError):
            self.library.pread(slot, 0, 1)  # loads the tray; bad sectors are found later
        yield self.library.path_of(slot)

    def holds(self, slot: int, size: int, sha256: str) -> bool:
        """Return whether a disc reads back as exactly these bytes."""
        try:
            return self.library.size_bytes(slot) == size and self._hash(slot, size) == sha256
        except (MissingFileError, OSError):
            return False

    def _hash(self, slot: int, size: int) -> str:
        digest, offset = hashlib.sha256(), 0
        while offset < size:
            chunk = self.library.pread(slot, offset, min(_CHUNK_BYTES, size - offset))
            if not chunk:
                break
            digest.update(chunk)
            offset += len(chunk)
        return digest.hexdigest()

    def fault(self, slot: int, label: str, size: int, sha256: str) -> str | None:
        """Return what is wrong with the disc in a slot, in words; None: it is what it should be."""
        if self.holds(slot, size, sha256):
            return None
        state = self.library.state_of(slot)
        if state in (DiscState.GONE, DiscState.BLANK):
            return f"there is no disc in slot {slot}" if state is DiscState.GONE else "blank"
        scan = next(iter(scan_discs([self.path_of(slot)], opener=self.library.open_disc)))
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
            text = self.library.pread(slot, 16 * 2048 + 40, 32)
        except (MissingFileError, OSError):
            return None
        return text.decode("ascii", errors="replace").strip()

    def destroy(self, slot: int) -> None:
        """Break a disc on purpose, for tests and demonstrations; `faults` has more of the kind."""
        Faults(self.library).destroy(slot)


def _any_in(used: dict[int, DiscState], tray: int, discs: int) -> bool:
    return any(slot in used for slot in range(tray * discs + 1, (tray + 1) * discs + 1))
