"""Sealed images -> arrays with parity -> discs, each read back before it counts.

Parity is delayed until an array has its data images (or is closed early), computed once, and
burned with them. A disc counts when its whole image was read back with the right hash; an array
when all its discs count; only then may the buffer let go. Every step can be cut off: parity files
are overwritten by the same bytes, and a disc that was burned without the catalogue hearing of it
is found by its hash and adopted.

Left out: burning several discs at a time, which needs several drives and gives no other result.

Source: delayed parity over disc images, patent CN107728943B (abstract); Yan et al., EuroSys 2017.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.config import ArchiveConfig
from tierwise.archive.image import ImageIdentity
from tierwise.archive.parity import encode_array
from tierwise.archive.plans import image_id, image_label
from tierwise.archive.shelf import Shelf
from tierwise.archive.store import Store
from tierwise.core.errors import IntegrityError, StorageFullError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import hash_file

_MAX_BLANKS_SPOILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnReport:
    """What was burned: arrays finished, discs written, bytes on them, discs spoiled."""

    arrays: int
    discs: int
    bytes: int
    spoiled: int


class Burner:
    """Burns what is sealed.

    Args:
        catalogue: The open catalogue.
        store: The buffer.
        config: The archive's.
        shelf: The disc library.
        crash_point: Called between steps with their names; tests die there.
    """

    def __init__(
        self, catalogue: Catalogue, store: Store, config: ArchiveConfig, shelf: Shelf,
        crash_point: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._catalogue, self._store, self._config = catalogue, store, config
        self._shelf, self._crash_point = shelf, crash_point
        self._discs = self._bytes = self._spoiled = 0

    def burn(self, *, partial: bool, progress: Progress = SILENT) -> BurnReport:
        """Give closed arrays their parity and burn them.

        Args:
            partial: Close an array that is still filling, with the images it has.
            progress: Counts discs.
        """
        if partial:
            self._close_filling()
        arrays = [row[0] for row in self._catalogue.all(
            "SELECT number FROM arrays a WHERE state IN ('closed', 'protected') AND NOT EXISTS"
            " (SELECT 1 FROM images i WHERE i.array = a.number AND i.state = 'planned')"
            " ORDER BY number"
        )]  # fmt: skip
        self._make_room(arrays)
        with progress.task("burn", self._discs_wanted(arrays)) as task:
            for array in arrays:
                self._protect(array, progress)
                self._burn_array(array, task.advance)
        return BurnReport(
            arrays=len(arrays), discs=self._discs, bytes=self._bytes, spoiled=self._spoiled
        )

    def _close_filling(self) -> None:
        with self._catalogue.transaction():
            for number, have in self._catalogue.all(
                "SELECT number, (SELECT COUNT(*) FROM images WHERE array = number) FROM arrays"
                " WHERE state = 'filling'"
            ):
                if have:
                    self._catalogue.run(
                        "UPDATE arrays SET state = 'closed', k = ? WHERE number = ?", have, number
                    )

    def _discs_wanted(self, arrays: list[int]) -> int:
        return sum(
            int(self._catalogue.value(
                "SELECT k + m - (SELECT COUNT(*) FROM images WHERE array = number AND"
                " state = 'burned') FROM arrays WHERE number = ?", array,
            ))
            for array in arrays
        )  # fmt: skip

    def _make_room(self, arrays: list[int]) -> None:
        wanted, there = self._discs_wanted(arrays), self._shelf.num_blanks()
        if wanted > there:
            raise StorageFullError(
                f"{wanted} blank discs are needed and the library has {there}",
                hint="add blank discs; what is in the buffer stays there",
            )

    # Parity

    def _protect(self, array: int, progress: Progress) -> None:
        row = self._catalogue.one(
            "SELECT array_id, k, m, state FROM arrays WHERE number = ?", array
        )
        assert row is not None
        array_id, k, m, state = row
        if state != "closed":
            return
        members = self._catalogue.all(
            "SELECT label, created_ns FROM images WHERE array = ? AND kind = 'data'"
            " ORDER BY position", array,
        )  # fmt: skip
        created_ns = max(row[1] for row in members)
        sequence = int(self._catalogue.value("SELECT MAX(image) FROM images"))
        identities = [self._identity(array, k + index, sequence + 1 + index) for index in range(m)]
        paths = [self._store.image_path(identity.label) for identity in identities]
        if m:
            encode_array(
                [self._store.image_path(label) for label, _ in members],
                paths,
                array_id=array_id,
                identities=identities,
                created_ns=created_ns,
                disc_capacity=self._config.disc_size_bytes,
                progress=progress,
            )
        self._crash_point("burn: parity written")
        with self._catalogue.transaction():
            for index, (identity, path) in enumerate(zip(identities, paths, strict=True)):
                self._catalogue.run(
                    "INSERT INTO images (image, label, image_id, kind, array, position, size,"
                    " sha256, state, buffered, created_ns) VALUES (?, ?, ?, 'parity', ?, ?, ?, ?,"
                    " 'sealed', 1, ?)",
                    identity.sequence, identity.label, identity.image_id, array, k + index,
                    path.stat().st_size, hash_file(path), created_ns,
                )  # fmt: skip
            self._catalogue.run("UPDATE arrays SET state = 'protected' WHERE number = ?", array)
        self._crash_point("burn: parity entered")

    def _identity(self, array: int, position: int, sequence: int) -> ImageIdentity:
        label = image_label(self._config.archive_id, array, "parity", position)
        return ImageIdentity(
            archive_id=self._config.archive_id,
            image_id=image_id(self._config.archive_id, label),
            label=label,
            sequence=sequence,
        )

    # Discs

    def _burn_array(self, array: int, advance: Callable[[], None]) -> None:
        for image, label, size, sha256 in self._catalogue.all(
            "SELECT image, label, size, sha256 FROM images WHERE array = ? AND state = 'sealed'"
            " ORDER BY position", array,
        ):  # fmt: skip
            self.burn_image(image, label, size, sha256)
            advance()
        with self._catalogue.transaction():
            self._catalogue.run("UPDATE arrays SET state = 'burned' WHERE number = ?", array)
            self._catalogue.run(
                "UPDATE versions SET state = 'burned' WHERE state = 'sealed' AND version IN"
                " (SELECT version FROM extents JOIN images USING (image) WHERE array = ?)"
                " AND NOT EXISTS (SELECT 1 FROM extents e JOIN images i USING (image)"
                " JOIN arrays a ON a.number = i.array"
                " WHERE e.version = versions.version AND a.state <> 'burned')", array,
            )  # fmt: skip
        self._catalogue.sync()
        self._crash_point("burn: array burned")

    def burn_image(self, image: int, label: str, size: int, sha256: str) -> int:
        """Burn a buffered image to a blank disc, or adopt the disc an earlier run made of it."""
        slot, problem = self._adopt(size, sha256), ""
        for _ in range(_MAX_BLANKS_SPOILED):
            if slot is not None:
                break
            slot, problem = self._burn_once(image, label, size, sha256)
        if slot is None:
            raise IntegrityError(
                f"{label} could not be burned: {_MAX_BLANKS_SPOILED} discs failed verification, the"
                f" last: {problem}",
                hint="look after the drive; the image is still in the buffer",
            )
        now = self._catalogue.clock()
        with self._catalogue.transaction():
            self._catalogue.run(
                "INSERT OR REPLACE INTO discs VALUES (?, ?, 'good', ?, ?)", slot, image, now, now
            )
            self._catalogue.run("UPDATE images SET state = 'burned' WHERE image = ?", image)
            self._catalogue.event("replication", label, detail=f"burned to slot {slot}, verified")
        self._crash_point("burn: disc entered")
        self._discs += 1
        self._bytes += size
        return slot

    def _adopt(self, size: int, sha256: str) -> int | None:
        """Return the slot of a disc that holds exactly this image and that nobody knows of."""
        known = {row[0] for row in self._catalogue.all("SELECT slot FROM discs")}
        for slot in self._shelf.written():
            if slot not in known and self._shelf.holds(slot, size, sha256):
                return slot
        return None

    def _burn_once(self, image: int, label: str, size: int, sha256: str) -> tuple[int | None, str]:
        """Return the slot of a disc that was burned and read back, or None and what was wrong."""
        beside = self._catalogue.all(
            "SELECT slot FROM discs WHERE image IN (SELECT image FROM images WHERE array ="
            " (SELECT array FROM images WHERE image = ?))", image,
        )  # fmt: skip
        slot, problem = self._shelf.burn(self._store.image_path(label), [row[0] for row in beside])
        self._crash_point("burn: disc written")
        if not problem:
            if self._shelf.holds(slot, size, sha256):
                return slot, ""
            problem = "it does not read back as it was written"
        now = self._catalogue.clock()
        self._catalogue.run(
            "INSERT OR REPLACE INTO discs VALUES (?, ?, 'lost', ?, ?)", slot, image, now, now
        )
        self._catalogue.event(
            "fixity check", label, "failure", f"slot {slot} after burning: {problem}"
        )
        self._spoiled += 1
        return None, problem
