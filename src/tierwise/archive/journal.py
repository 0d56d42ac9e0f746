"""Names kept beside the bytes: what no disc knows yet, so that a lost catalogue loses no name.

`buffer/journal.jsonl` gets, whenever something is made durable, one line for every inode changed
since: the record an image would carry (`slices`), with its unsealed contents too. The highest
sequence number of an inode wins, as on discs, so old lines do no harm; what was deleted before any
disc knew it is `forgotten`. Nothing is written between two syncs: creating a file costs nothing.

Left out: changes never made durable; those are promised nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.slices import Record, inode_record, tombstone_record
from tierwise.core.records import write_whole

_COMPACT_BYTES = 64 << 20


def journal_path(root: Path) -> Path:
    """Return where an archive keeps its journal: in the buffer, not in the metadata volume."""
    return root / "buffer" / "journal.jsonl"


class Journal:
    """The journal of the one session that may write names.

    Args:
        path: Its file; made when needed.
        catalogue: The open catalogue, which notes what changes.
    """

    def __init__(self, path: Path, catalogue: Catalogue) -> None:
        self._path, self._catalogue = path, catalogue
        self._compacted_bytes = path.stat().st_size if path.exists() else 0

    def catch_up(self) -> None:
        """Note what an earlier session changed and did not journal: it was cut off."""
        last = self._catalogue.value("SELECT value FROM meta WHERE key = 'journalled'") or 0
        for table in ("inodes", "tombstones"):
            rows = self._catalogue.all(
                f"SELECT ino FROM {table} WHERE dirty = 1 AND seq > ?", int(last)
            )
            self._catalogue.touched.update(row[0] for row in rows)

    def write(self) -> None:
        """Return when the state of everything changed so far is in the journal, durably."""
        touched = self._catalogue.touched
        if not touched:
            return
        with self._catalogue.transaction():
            seq = self._catalogue.value("SELECT value FROM meta WHERE key = 'seq'")
            lines = [json.dumps(self._record(ino, seq)) for ino in sorted(touched)]
            self._catalogue.run("INSERT OR REPLACE INTO meta VALUES ('journalled', ?)", seq)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        is_new = not self._path.exists()
        descriptor = os.open(self._path, flags, 0o600)
        try:
            data = memoryview(("\n" + "\n".join(lines) + "\n").encode("ascii"))
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if is_new:
            _sync_folder(self._path.parent)
        touched.clear()
        if size > max(_COMPACT_BYTES, 2 * self._compacted_bytes):
            self.compact()

    def compact(self) -> None:
        """Keep only what no image carries yet."""
        with self._catalogue.transaction():
            inodes = self._catalogue.all("SELECT ino FROM inodes WHERE dirty = 1")
            graves = self._catalogue.all("SELECT ino FROM tombstones WHERE dirty = 1")
            lines = [json.dumps(self._record(ino, 0)) + "\n" for (ino,) in (*inodes, *graves)]
        write_whole(self._path, "".join(lines))
        self._compacted_bytes = self._path.stat().st_size

    def close(self) -> None:
        """Leave a short journal where everything is on images."""
        dirty = self._catalogue.value("SELECT EXISTS (SELECT 1 FROM inodes WHERE dirty = 1)")
        if not dirty and self._path.exists() and self._path.stat().st_size > 0:
            self.compact()

    def _record(self, ino: int, seq: int) -> Record:
        if self._catalogue.one("SELECT 1 FROM inodes WHERE ino = ? AND nlink > 0", ino):
            return inode_record(self._catalogue, ino, unsealed=True)
        grave = self._catalogue.one(
            "SELECT ino, path, deleted_ns, seq FROM tombstones WHERE ino = ?", ino
        )
        if grave is not None:
            return tombstone_record(*grave)
        return {"record": "forgotten", "inode": ino, "seq": seq}


def read_journal(path: Path) -> list[Record]:
    """Return the last record of each inode in a journal; lines a crash tore are passed over."""
    if not path.exists():
        return []
    found: dict[int, Record] = {}
    with path.open(encoding="ascii", errors="replace") as stream:
        for line in stream:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                record = json.loads(line)
                known = found.get(int(record["inode"]))
                if known is None or int(record["seq"]) >= int(known["seq"]):
                    found[int(record["inode"])] = record
    return list(found.values())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
