"""Freeing the buffer: the copies that discs make unnecessary, least recently used first.

A copy may go when every disc it is on was read back after burning and the arrays of those discs
have their parity; that is what the states `burned` of versions and arrays say. Before a file goes
its head is kept and the catalogue is on disk. Left out: freeing anything earlier, however full the
buffer is; then writers wait and in the end get ENOSPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tierwise.archive.catalogue import Catalogue, Row
from tierwise.archive.store import Store
from tierwise.core.progress import SILENT, Progress

_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictReport:
    """What eviction freed."""

    files: int
    images: int
    bytes: int


def evict(
    catalogue: Catalogue,
    store: Store,
    *,
    forepart_bytes: int,
    versions: Iterable[int] | None = None,
    target_bytes: int | None = None,
    progress: Progress = SILENT,
    crash_point: Callable[[str], None] = lambda name: None,
) -> EvictReport:
    """Remove buffer copies of burned images and versions.

    Args:
        catalogue: The open catalogue.
        store: The buffer.
        forepart_bytes: Head to keep of each file.
        versions: Only these versions, and no images; None: everything that may go.
        target_bytes: Stop when so much is free; None: go on to the end.
        progress: Counts files.
        crash_point: Called between steps with their names; tests die there.
    """
    freed_images = freed_bytes = 0
    if versions is None:
        freed_images, freed_bytes = _evict_images(catalogue, store, target_bytes)
    files = 0
    rows = _candidates(catalogue, versions)
    with progress.task("evict", len(rows)) as task:
        for start in range(0, len(rows), _BATCH):
            if target_bytes is not None and freed_bytes >= target_bytes:
                break
            batch = _within(rows[start : start + _BATCH], target_bytes, freed_bytes)
            for version, _ in batch:
                store.keep_forepart(version, forepart_bytes)
            crash_point("evict: foreparts kept")
            gone = _mark_offline(catalogue, batch)
            catalogue.sync()
            crash_point("evict: catalogue says offline")
            for version, size in gone:
                store.remove(version)
                files, freed_bytes = files + 1, freed_bytes + size
            task.advance(len(gone))
            crash_point("evict: files removed")
    return EvictReport(files=files, images=freed_images, bytes=freed_bytes)


def _candidates(catalogue: Catalogue, versions: Iterable[int] | None) -> list[Row]:
    rows = catalogue.all(
        "SELECT version, size FROM versions WHERE resident > 0 AND state = 'burned'"
        " AND version NOT IN (SELECT version FROM recalls) ORDER BY used_ns, version"
    )
    if versions is None:
        return rows
    wanted = set(versions)
    return [row for row in rows if row[0] in wanted]


def _within(rows: list[Row], target_bytes: int | None, freed_bytes: int) -> list[Row]:
    if target_bytes is None:
        return rows
    taken: list[Row] = []
    for row in rows:
        if freed_bytes >= target_bytes:
            break
        taken.append(row)
        freed_bytes += row[1]
    return taken


def _mark_offline(catalogue: Catalogue, batch: list[Row]) -> list[Row]:
    """Mark versions offline, unless one was asked for in the meantime."""
    with catalogue.transaction():
        return [
            row
            for row in batch
            if catalogue.run(
                "UPDATE versions SET resident = 0 WHERE version = ? AND state = 'burned'"
                " AND version NOT IN (SELECT version FROM recalls)", row[0],
            )
        ]  # fmt: skip


def _evict_images(catalogue: Catalogue, store: Store, target_bytes: int | None) -> tuple[int, int]:
    images = freed = 0
    for image, label, size in catalogue.all(
        "SELECT image, label, i.size FROM images i JOIN arrays a ON a.number = i.array"
        " WHERE i.buffered = 1 AND i.state = 'burned' AND a.state = 'burned' ORDER BY image"
    ):
        if target_bytes is not None and freed >= target_bytes:
            break
        catalogue.run("UPDATE images SET buffered = 0 WHERE image = ?", image)
        catalogue.sync()
        store.image_path(label).unlink(missing_ok=True)
        images, freed = images + 1, freed + size
    return images, freed
