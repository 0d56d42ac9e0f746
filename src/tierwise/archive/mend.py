"""Images made anew from the rest of their array, and what is known of each disc's health.

Up to as many members of an array as it has parity discs may be lost or damaged anywhere; good
blocks of a damaged disc still count. A rebuilt image stands in the buffer only after its whole
hash was found right. Left out: burning it (`scrub.repair` does), and codes (`parity`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierwise.archive.array_map import ArrayMap
from tierwise.archive.catalogue import Catalogue
from tierwise.archive.parity import find_damage, read_array_map, reconstruct
from tierwise.archive.shelf import Shelf
from tierwise.archive.store import Store
from tierwise.core.errors import IntegrityError, TierwiseError
from tierwise.core.records import hash_file


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    image: int
    position: int
    kind: str
    label: str
    size: int
    sha256: str


class Mender:
    """Rebuilds images of one archive.

    Args:
        catalogue: The open catalogue.
        store: The buffer, where rebuilt images go.
        shelf: The disc library.
    """

    def __init__(self, catalogue: Catalogue, store: Store, shelf: Shelf) -> None:
        self._catalogue, self._store, self._shelf = catalogue, store, shelf

    def slots_of(self, image: int) -> list[int]:
        """Return the slots of an image's good discs."""
        rows = self._catalogue.all(
            "SELECT slot FROM discs WHERE image = ? AND state = 'good' ORDER BY slot", image
        )
        return [row[0] for row in rows]

    def suspect(self, slot: int, label: str, what: str) -> None:
        """Note that a disc did not give what it should."""
        with self._catalogue.transaction():
            self._catalogue.run("UPDATE discs SET state = 'suspect' WHERE slot = ?", slot)
            self._catalogue.event("fixity check", label, "failure", f"slot {slot}: {what}")

    def rebuild_image(self, image: int) -> Path:
        """Return an image's path in the buffer, rebuilt from its array if it is not there.

        Raises:
            IntegrityError: More of the array is gone than its parity makes good.
        """
        wanted, others = self._members(image)
        path = self._store.image_path(wanted.label)
        if path.exists() and hash_file(path) == wanted.sha256:
            self._enter(image)
            return path
        with contextlib.ExitStack() as stack:
            present = dict(self._present(wanted, others, stack))
            array = self._array_map(wanted, others, present)
            self._reconstruct(wanted, array, present, path)
        self._enter(image)
        self._catalogue.event("recovery", wanted.label, detail="image rebuilt from its array")
        return path

    def _enter(self, image: int) -> None:
        self._catalogue.run("UPDATE images SET buffered = 1 WHERE image = ?", image)

    def _members(self, image: int) -> tuple[_Member, list[_Member]]:
        rows = self._catalogue.all(
            "SELECT image, position, kind, label, size, sha256 FROM images"
            " WHERE size IS NOT NULL AND array = (SELECT array FROM images WHERE image = ?)"
            " ORDER BY position", image,
        )  # fmt: skip
        members = [
            _Member(image=row[0], position=row[1], kind=row[2], label=row[3], size=row[4],
                    sha256=row[5])
            for row in rows
        ]  # fmt: skip
        wanted = next(member for member in members if member.image == image)
        return wanted, [member for member in members if member.image != image]

    def _present(
        self, wanted: _Member, others: list[_Member], stack: contextlib.ExitStack
    ) -> Iterator[tuple[int, Path]]:
        """Yield (position, readable file) of what is left of an array, the damaged disc too."""
        for member in (*others, wanted):
            buffered = self._store.image_path(member.label)
            if buffered.exists():
                yield member.position, buffered
                continue
            slots = self._catalogue.all(
                "SELECT slot FROM discs WHERE image = ? AND state <> 'lost'"
                " ORDER BY state = 'good' DESC", member.image,
            )  # fmt: skip
            for (slot,) in slots:
                with contextlib.suppress(TierwiseError, OSError):
                    yield member.position, stack.enter_context(self._shelf.readable(slot))
                    break

    def _array_map(
        self, wanted: _Member, others: list[_Member], present: dict[int, Path]
    ) -> ArrayMap:
        """Return the array's own description, from any parity disc that still has it."""
        for member in (*others, wanted):
            if member.kind == "parity" and member.position in present:
                with contextlib.suppress(TierwiseError):
                    return read_array_map(present[member.position])
        raise IntegrityError(
            f"{wanted.label} is beyond repair: its array has no readable parity disc",
            hint="tierwise archive which PATH names the discs a file needs",
        )

    def _reconstruct(
        self, wanted: _Member, array: ArrayMap, present: dict[int, Path], path: Path
    ) -> None:
        damage = find_damage(array, present)
        try:
            reconstruct(array, present, {wanted.position: path}, damage=damage)
        except IntegrityError as error:
            gone = [m.label for m in array.members if m.index not in present or damage.get(m.index)]
            raise IntegrityError(
                f"{wanted.label} is beyond repair: {', '.join(gone)} are lost or damaged",
                hint=f"the array survives the loss of {array.parity_count} discs",
            ) from error
        if hash_file(path) != wanted.sha256:
            path.unlink(missing_ok=True)
            raise IntegrityError(f"{wanted.label} was rebuilt with another hash than it was burned")
