"""Putting buffer and catalogue in step after a crash, before a mount may use them.

A clean close leaves a mark in the catalogue; without it, files in the buffer are compared with
the versions they belong to. Costs one stat per unsealed file. Left out: checking hashes (`scrub`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What recovery found: sizes that differed, and files that were gone."""

    resized: int
    emptied: int


def mark_open(catalogue: Catalogue) -> None:
    """Note, durably, that somebody may be writing."""
    catalogue.run("INSERT OR REPLACE INTO meta VALUES ('clean', 0)")
    catalogue.sync()


def mark_clean(catalogue: Catalogue) -> None:
    """Note, durably, that everything was closed in order."""
    catalogue.run("INSERT OR REPLACE INTO meta VALUES ('clean', 1)")
    catalogue.sync()


def was_clean(catalogue: Catalogue) -> bool:
    """Return whether the last session ended in order."""
    return bool(catalogue.value("SELECT value FROM meta WHERE key = 'clean'"))


def recover(catalogue: Catalogue, store: Store) -> Recovered:
    """Bring the catalogue in line with the files that are there; nobody else may be writing."""
    resized = emptied = 0
    with catalogue.transaction():
        stale = catalogue.all(
            "SELECT v.version FROM versions v LEFT JOIN inodes i USING (ino)"
            " WHERE v.state = 'bucket' AND i.version IS NOT v.version"
        )
        catalogue.many("DELETE FROM versions WHERE version = ?", stale)
        catalogue.run("UPDATE versions SET open = 0 WHERE open = 1")
        for version, ino, size in catalogue.all(
            "SELECT version, ino, size FROM versions WHERE state = 'bucket'"
        ):
            try:
                found = store.path(version).stat()
            except FileNotFoundError:
                _empty(catalogue, store, version, ino)
                emptied += 1
                continue
            if found.st_size != size:
                _resize(catalogue, version, ino, found.st_size, found.st_mtime_ns)
                resized += 1
    catalogue.event(
        "recovery", "buffer", "warning" if emptied else "success",
        f"{resized} sizes taken from the buffer, {emptied} files lost",
    )  # fmt: skip
    return Recovered(resized=resized, emptied=emptied)


def _resize(catalogue: Catalogue, version: int, ino: int, size: int, mtime_ns: int) -> None:
    """Take the size from the file: it was written and not closed, or not all reached the disk."""
    catalogue.run(
        "UPDATE versions SET size = ?, mtime_ns = ?, sha256 = NULL WHERE version = ?",
        size, mtime_ns, version,
    )  # fmt: skip
    catalogue.run(
        "UPDATE inodes SET size = ?, mtime_ns = ?, seq = ?, dirty = 1 WHERE ino = ?",
        size, mtime_ns, catalogue.next_seq(ino), ino,
    )  # fmt: skip


def _empty(catalogue: Catalogue, store: Store, version: int, ino: int) -> None:
    """Keep the name of a file whose bytes never reached the disk (nobody called fsync)."""
    store.path(version).touch()
    _resize(catalogue, version, ino, 0, store.path(version).stat().st_mtime_ns)
    catalogue.event("recovery", f"inode {ino}", "warning", "its bytes never reached the disk")


def remove_orphans(catalogue: Catalogue, store: Store) -> int:
    """Remove files in the buffer that nobody owns; no verb may be making any meanwhile."""
    resident = {row[0] for row in catalogue.all("SELECT version FROM versions WHERE resident > 0")}
    removed = 0
    for folder in store.files.iterdir():
        for path in folder.iterdir():
            if not (path.name.isdigit() and int(path.name) in resident):
                path.unlink()
                removed += 1
    buffered = {f"{row[0]}.iso" for row in catalogue.all("SELECT label FROM images")}
    for path in store.images.iterdir():
        if path.name not in buffered:
            path.unlink()
            removed += 1
    return removed
