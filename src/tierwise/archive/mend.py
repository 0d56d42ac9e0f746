"""Images made anew from the rest of their array, and what is known of each disc's health.

Up to as many members of an array as it has parity discs may be lost or damaged anywhere; good
blocks of a damaged disc still count. A rebuilt image stands in the buffer only after its whole
hash was found right. Left out: burning it (`scrub.repair` does), and codes (`parity`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierwise.archive.array_map import ArrayMap
from tierwise.archive.catalogue import Catalogue
from tierwise.archive.image import ImageIdentity
from tierwise.archive.library import enter_disc
from tierwise.archive.parity import encode_array, find_damage, read_array_map, reconstruct
from tierwise.archive.plans import digest_id
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
    size: int | None
    sha256: str | None


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

    def strays_of(self, image: int) -> Iterator[int]:
        """Yield slots of the same array where a disc by this image's label stands by mistake."""
        label = self._catalogue.value("SELECT label FROM images WHERE image = ?", image)
        for (slot,) in self._catalogue.all(
            "SELECT slot FROM discs d JOIN images i USING (image) WHERE i.array ="
            " (SELECT array FROM images WHERE image = ?1) AND i.image <> ?1 ORDER BY slot", image,
        ):  # fmt: skip
            if self._shelf.volume_label(slot) == label:
                yield slot

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
            if array is not None:
                self._reconstruct(wanted, array, present, path)
            elif wanted.kind == "parity":
                self._make_parity(wanted, others, present)
            else:
                raise IntegrityError(
                    f"{wanted.label} is beyond repair: its array has no readable parity disc",
                    hint="tierwise archive which PATH names the discs a file needs",
                )
        self._enter(image)
        self._catalogue.event("recovery", wanted.label, detail="image rebuilt from its array")
        return path

    def _enter(self, image: int) -> None:
        self._catalogue.run("UPDATE images SET buffered = 1 WHERE image = ?", image)

    def _members(self, image: int) -> tuple[_Member, list[_Member]]:
        rows = self._catalogue.all(
            "SELECT image, position, kind, label, size, sha256 FROM images"
            " WHERE array = (SELECT array FROM images WHERE image = ?)"
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
        labels = {member.label for member in (*others, wanted)}
        for member in (*others, wanted):
            buffered = self._store.image_path(member.label)
            if buffered.exists():
                yield member.position, buffered
                continue
            slots = self._catalogue.all(
                "SELECT slot FROM discs WHERE image = ? AND state <> 'lost'"
                " ORDER BY state = 'good' DESC", member.image,
            )  # fmt: skip
            strays = ((slot,) for slot in self.strays_of(member.image))
            for (slot,) in itertools.chain(slots, strays):
                other = self._shelf.volume_label(slot)
                if other in labels - {member.label}:
                    continue  # another member of the array stands there
                path = enter_disc(stack, self._shelf.readable(slot))
                if path is not None:
                    yield member.position, path
                    break

    def _array_map(
        self, wanted: _Member, others: list[_Member], present: dict[int, Path]
    ) -> ArrayMap | None:
        """Return the array's own description, from any parity disc that still has it."""
        for member in (*others, wanted):
            if member.kind == "parity" and member.position in present:
                with contextlib.suppress(TierwiseError):
                    return read_array_map(present[member.position])
        return None

    def _make_parity(
        self, wanted: _Member, others: list[_Member], present: dict[int, Path]
    ) -> None:
        """Compute an array's parity anew from its data images, when no parity disc is left."""
        data = [member for member in others if member.kind == "data"]
        for member in data:
            path = present.get(member.position)
            if path is None or hash_file(path) != member.sha256:
                raise IntegrityError(
                    f"{wanted.label} cannot be made anew: {member.label} is lost or damaged too",
                    hint="tierwise archive scrub names the discs that are",
                )
        parity = sorted(
            [member for member in (*others, wanted) if member.kind == "parity"],
            key=lambda member: member.position,
        )
        row = self._catalogue.one(
            "SELECT a.array_id, MAX(i.created_ns), (SELECT value FROM meta WHERE key ="
            " 'archive_id') FROM images i JOIN arrays a ON a.number = i.array"
            " WHERE i.kind = 'data' AND i.array = (SELECT array FROM images WHERE image = ?)",
            wanted.image,
        )
        assert row is not None
        paths = [self._store.image_path(member.label) for member in parity]
        encode_array(
            [present[member.position] for member in data],
            paths,
            array_id=row[0],
            identities=[
                ImageIdentity(
                    archive_id=row[2],
                    image_id=digest_id(row[2], member.label),
                    label=member.label,
                    sequence=member.image,
                )
                for member in parity
            ],
            created_ns=row[1],
        )
        for member, path in zip(parity, paths, strict=True):
            self._catalogue.run(
                "UPDATE images SET size = ?, sha256 = ?, buffered = 1 WHERE image = ?",
                path.stat().st_size, hash_file(path), member.image,
            )  # fmt: skip

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
