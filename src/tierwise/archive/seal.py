"""Planned images become files: written, read back by another reader, entered in the catalogue.

Every step can be cut off: a plan without an image is made again, an image without its catalogue
entries is overwritten by the same bytes. Left out: choosing what goes in (`bucket`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.config import ArchiveConfig
from tierwise.archive.image import ArrayPosition, ImageIdentity, SealedImage, SealEntry, seal_image
from tierwise.archive.plans import entry_from_json
from tierwise.archive.store import Store
from tierwise.core.errors import MissingFileError
from tierwise.core.progress import SILENT, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReport:
    """One image that was sealed."""

    label: str
    files: int
    bytes: int


class Sealer:
    """Makes planned images.

    Args:
        catalogue: The open catalogue.
        store: The buffer.
        config: The archive's.
    """

    def __init__(self, catalogue: Catalogue, store: Store, config: ArchiveConfig) -> None:
        self._catalogue, self._store, self._config = catalogue, store, config

    def planned(self) -> list[int]:
        """Return the images that are planned and not made."""
        rows = self._catalogue.all(
            "SELECT image FROM images WHERE state = 'planned' ORDER BY image"
        )
        return [row[0] for row in rows if row]

    def seal(
        self, image: int, *, crash_point: Callable[[str], None], progress: Progress = SILENT
    ) -> ImageReport:
        """Make one planned image in the buffer and enter where its files are."""
        label, image_id, array, position, created_ns = self._row(image)
        bodies = self._catalogue.all(
            "SELECT kind, body FROM plans WHERE image = ? ORDER BY ordinal", image
        )
        entries = [
            entry_from_json(json.loads(body), self._store)
            for kind, body in bodies
            if kind == "entry"
        ]
        records = [json.loads(body) for kind, body in bodies if kind == "record"]
        try:
            sealed = seal_image(
                entries,
                self._store.image_path(label),
                disc_capacity=self._config.disc_size_bytes,
                identity=ImageIdentity(
                    archive_id=self._config.archive_id,
                    image_id=image_id,
                    label=label,
                    sequence=image,
                ),
                created_ns=created_ns,
                array=self._position(array, position),
                records=records,
                progress=progress,
            )
        except FileNotFoundError as error:
            raise MissingFileError(
                f"the buffer has lost a file that {label} needs: {error.filename}",
                hint="restore buffer/ from a backup, or run: tierwise archive fsck",
            ) from error
        crash_point("seal: image written")
        self._enter(image, sealed, entries)
        return ImageReport(
            label=label,
            files=len(sealed.extents),
            bytes=sealed.size_bytes,
        )

    def _row(self, image: int) -> tuple[str, str, int, int, int]:
        row = self._catalogue.one(
            "SELECT label, image_id, array, position, created_ns FROM images WHERE image = ?", image
        )
        assert row is not None
        return row[0], row[1], row[2], row[3], row[4]

    def _position(self, array: int, position: int) -> ArrayPosition:
        row = self._catalogue.one("SELECT array_id, k, m FROM arrays WHERE number = ?", array)
        assert row is not None
        siblings = self._catalogue.all(
            "SELECT image_id, size FROM images WHERE array = ? AND size IS NOT NULL"
            " AND position < ? ORDER BY position", array, position,
        )  # fmt: skip
        return ArrayPosition(
            array_id=row[0],
            index=position,
            data_count=row[1],
            parity_count=row[2],
            siblings=tuple((sibling, size) for sibling, size in siblings),
        )

    def forget_deleted(self) -> None:
        """Forget sealed versions whose file was deleted while they were being sealed."""
        with self._catalogue.transaction():
            gone = self._store.forget_versions(
                "ino NOT IN (SELECT ino FROM inodes) AND NOT EXISTS (SELECT 1 FROM extents e"
                " JOIN images i USING (image) WHERE e.version = versions.version"
                " AND i.state = 'planned')"
            )
        for version in gone:
            self._store.remove(version)

    def _enter(self, image: int, sealed: SealedImage, entries: list[SealEntry]) -> None:
        with self._catalogue.transaction():
            for extent in sealed.extents:
                entry = entries[extent.entry_index]
                version = entry.extra.get("version")
                if version is None:
                    continue
                self._catalogue.run(
                    "UPDATE extents SET image_offset = ?, path = ?, sha256 = ?"
                    " WHERE version = ? AND piece = ?",
                    extent.offset, extent.disc_path, extent.sha256, version, entry.piece_index,
                )  # fmt: skip
                if entry.piece_count == 1:
                    self._catalogue.run(
                        "UPDATE versions SET sha256 = ? WHERE version = ?", extent.sha256, version
                    )
            self._catalogue.run(
                "UPDATE images SET size = ?, sha256 = ?, state = 'sealed', buffered = 1"
                " WHERE image = ?", sealed.size_bytes, sealed.sha256, image,
            )  # fmt: skip
            self._catalogue.run("DELETE FROM plans WHERE image = ?", image)
            self._catalogue.run(
                "UPDATE versions SET state = 'sealed' WHERE state = 'sealing'"
                " AND version IN (SELECT version FROM extents WHERE image = ?1)"
                " AND size = (SELECT SUM(length) FROM extents e WHERE e.version = versions.version)"
                " AND NOT EXISTS (SELECT 1 FROM extents e JOIN images USING (image)"
                " WHERE e.version = versions.version AND images.state = 'planned')", image,
            )  # fmt: skip
            self._catalogue.event(
                "replication", sealed.identity.label, detail=f"sealed, sha256 {sealed.sha256}"
            )
