"""What can happen to discs and drives, done to a simulated library on purpose.

For tests, for `tierwise demo`, and for an owner who wants to see a repair before needing one.
Every fault is what it says on the medium itself: later reads find it, nothing announces it. Left
out: faults of the arm.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tierwise.archive.iso_reader import SECTOR_BYTES
from tierwise.archive.library import DiscState, Library, SimulatedLibrary
from tierwise.core.errors import MissingFileError, UsageError
from tierwise.core.records import write_whole


class Faults:
    """Injects faults into one library.

    Raises:
        UsageError: Its discs are real.
    """

    def __init__(self, library: Library) -> None:
        if not isinstance(library, SimulatedLibrary):
            raise UsageError("only simulated discs are broken on purpose")
        self._library = library

    def destroy(self, slot: int) -> None:
        """Break a disc: the slot is empty from now on."""
        path = self._disc(slot)
        path.with_suffix(".gone").touch()
        path.unlink()

    def flip_bits(self, slot: int, *, num_bits: int, seed: int) -> list[int]:
        """Flip bits at random places of a disc and return their byte offsets."""
        path = self._disc(slot)
        generator = random.Random(seed)
        offsets = sorted(generator.sample(range(path.stat().st_size), num_bits))
        for offset in offsets:
            self.flip_bit(slot, offset, bit=generator.randrange(8))
        return offsets

    def flip_bit(self, slot: int, offset: int, *, bit: int = 0) -> None:
        """Flip one bit of a disc."""
        self._patch(slot, offset, bytes([self._byte(slot, offset) ^ (1 << bit)]))

    def truncate(self, slot: int, size_bytes: int) -> None:
        """Lose everything of a disc from `size_bytes` on."""
        path = self._disc(slot)
        mode = path.stat().st_mode & 0o777
        path.chmod(0o644)
        with path.open("r+b") as stream:
            stream.truncate(size_bytes)
        path.chmod(mode)

    def swap(self, first: int, second: int) -> None:
        """Put two discs into each other's slots."""
        one, other = self._disc(first), self._disc(second)
        aside = one.with_suffix(".aside")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)

    def replace(self, slot: int, image: Path) -> None:
        """Put another disc, such as a foreign one, into a slot."""
        path = self._library.path_of(slot)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(image.read_bytes())
        path.chmod(0o444)

    def spoil_sectors(self, slot: int, sectors: Collection[int]) -> None:
        """Make sectors unreadable: EIO by the library, wrong bytes for whoever reads the file."""
        for sector in sectors:
            self._patch(slot, sector * SECTOR_BYTES, b"\xba" * SECTOR_BYTES)
        faults = self._read()
        bad = faults.setdefault("bad_sectors", {})
        bad[str(slot)] = sorted({*bad.get(str(slot), ()), *sectors})
        self._write(faults)

    def break_drives(self, drive_set: int) -> None:
        """Let a drive set fail: its tray must be loaded into another."""
        if not 1 <= drive_set <= self._library.geometry.drive_sets:
            raise UsageError(f"there is no drive set {drive_set}")
        faults = self._read()
        faults["broken_sets"] = sorted({*faults.get("broken_sets", ()), drive_set})
        self._write(faults)

    def stop_next_burn(self, after_bytes: int) -> None:
        """Let the next burn stop: the disc is spoiled."""
        self._write(self._read() | {"stop_burn_after": after_bytes})

    def _disc(self, slot: int) -> Path:
        if self._library.state_of(slot) not in (DiscState.SEALED, DiscState.SPOILED):
            raise MissingFileError(f"there is no burned disc in slot {slot}")
        return self._library.path_of(slot)

    def _byte(self, slot: int, offset: int) -> int:
        with self._disc(slot).open("rb") as stream:
            stream.seek(offset)
            return stream.read(1)[0]

    def _patch(self, slot: int, offset: int, data: bytes) -> None:
        path = self._disc(slot)
        mode = path.stat().st_mode & 0o777
        path.chmod(0o644)
        with path.open("r+b") as stream:
            stream.seek(offset)
            stream.write(data[: max(0, path.stat().st_size - offset)])
        path.chmod(mode)

    def _read(self) -> dict[str, Any]:
        path = self._library.root / "faults.json"
        if not path.exists():
            return {}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def _write(self, faults: dict[str, Any]) -> None:
        write_whole(self._library.root / "faults.json", json.dumps(faults) + "\n")
