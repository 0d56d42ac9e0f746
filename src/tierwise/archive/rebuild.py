"""The catalogue from discs alone: any subset of them, in any order; what is missing has a name.

What the discs tell (`gather`) is written as a new catalogue in one transaction. Where a folder's
own state is lost, it comes back from the paths on the discs; files whose bytes are gone keep
their names and are listed. What the buffer still holds is taken up again: copies of burned
versions by their hash, and unsealed files, known to no disc, by the buffer's journal; those it does
not know (never made durable) come under lost+found.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.disc_names import escape_path, unescape_path
from tierwise.archive.gather import Found, FoundImage
from tierwise.archive.operations import ROOT_INODE
from tierwise.archive.plans import image_id, image_label
from tierwise.archive.slices import (
    Record,
    decode_names,
    decode_target,
    decode_xattrs,
    inode_values,
    path_of,
)
from tierwise.archive.store import Store
from tierwise.core.records import hash_file

LOST_AND_FOUND = b"lost+found"

# How far numbers skip ahead: what discs that are not here used, and may come back with, must never
# be given twice. Far more than a library holds, and inodes stay below 2^32 for 15 rebuilds.
_SKIPPED = {"inodes": 1 << 28, "versions": 1 << 28, "images": 1 << 20}
_SKIPPED_SEQ = 1 << 32
_SKIPPED_ARRAYS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildReport:
    """What came back, and what did not.

    Attributes:
        discs: Discs that were read.
        faults: (path, what is wrong) of discs that could not be used, or only in part.
        images_rebuilt: Labels of images made anew from their arrays.
        images_missing: Labels of images known from others, but gone.
        files, folders, tombstones: What the catalogue has now.
        files_missing: Paths of files whose bytes are not on any disc that is left.
    """

    discs: int
    faults: tuple[tuple[str, str], ...]
    images_rebuilt: tuple[str, ...]
    images_missing: tuple[str, ...]
    files: int
    folders: int
    tombstones: int
    files_missing: tuple[str, ...]


class Refill:
    """Writes what discs tell into an empty catalogue.

    Args:
        catalogue: New, with its root and nothing else.
        store: The buffer.
        found: What the discs tell.
    """

    def __init__(self, catalogue: Catalogue, store: Store, found: Found) -> None:
        self._catalogue, self._store, self._found = catalogue, store, found
        self._numbers: dict[str, int] = {}  # image_id -> images.image

    def run(self) -> RebuildReport:
        """Write everything and say what came back."""
        with self._catalogue.transaction():
            self._counters()
            self._images()
            self._inodes()
            self._names()
            self._break_cycles()
            self._extents()
            self._current_versions()
            self._link_counts()
            self._buffer()
            self._skip_numbers()
            self._catalogue.event("recovery", "catalogue", detail="rebuilt from discs")
        return self._report()

    # Counters and discs

    def _counters(self) -> None:
        archive = self._found.archive
        last = max((int(r["seq"]) for r in self._found.records.values()), default=0)
        self._catalogue.run(
            "UPDATE meta SET value = ? WHERE key = 'seq'", max(last, int(archive.get("seq", 0)))
        )
        for table in ("inode", "version"):
            self._catalogue.run(
                "INSERT OR REPLACE INTO sqlite_sequence (rowid, name, seq) VALUES"
                " ((SELECT rowid FROM sqlite_sequence WHERE name = ?1), ?1, ?2)",
                f"{table}s", int(archive.get(f"last_{table}", 0)),
            )  # fmt: skip

    def _skip_numbers(self) -> None:
        """Leave out the numbers that discs beyond these may have used."""
        run = self._catalogue.run
        run("UPDATE meta SET value = value + ? WHERE key = 'seq'", _SKIPPED_SEQ)
        for table, numbers in _SKIPPED.items():
            run("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = ?", numbers, table)
        run(
            "INSERT INTO meta SELECT 'last_array', COALESCE(MAX(number), 0) + ? FROM arrays",
            _SKIPPED_ARRAYS,
        )

    def _images(self) -> None:
        now = self._catalogue.clock()
        images = sorted(self._found.images.values(), key=lambda image: image.sequence or 1 << 60)
        taken: set[int] = set()
        for image in images:
            number = image.sequence if image.sequence not in {0, *taken} else None
            taken.add(image.sequence)
            self._numbers[image.image_id] = self._catalogue.insert(
                "INSERT INTO images (image, label, image_id, kind, array, position, size, sha256,"
                " state, buffered, created_ns) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                number, image.label, image.image_id, image.kind, image.array, image.position,
                image.size or None, image.sha256 or None,
                "sealed" if image.buffered and image.slot is None and not image.rebuilt
                else "burned", int(image.buffered), image.created_ns,
            )  # fmt: skip
            if image.slot is not None:
                self._catalogue.run(
                    "INSERT INTO discs VALUES (?, ?, ?, ?, ?)", image.slot,
                    self._numbers[image.image_id], "suspect" if _faulty(image) else "good",
                    now, now,
                )  # fmt: skip
        for number, (array_id, planned, m) in sorted(self._found.arrays.items()):
            known = number in self._found.maps
            k = planned if known else self._parity_unknown(number, m)
            sealed = self._catalogue.value(
                "SELECT COUNT(*) FROM images WHERE array = ? AND state = 'sealed'", number
            )
            self._catalogue.run(
                "INSERT INTO arrays VALUES (?, ?, ?, ?, ?)", number, array_id, k, m,
                "protected" if sealed else "burned",
            )  # fmt: skip

    def _parity_unknown(self, number: int, m: int) -> int:
        """Enter an array's parity images when every one of them is lost; return its k.

        What they held is known: `repair` computes them anew from the data images.
        """
        data = self._catalogue.all(
            "SELECT position, label FROM images WHERE array = ? AND kind = 'data'"
            " ORDER BY position", number,
        )  # fmt: skip
        k = int(data[-1][0]) + 1
        for index in range(m):
            label = image_label(self._found.archive_id, number, "parity", k + index)
            self._catalogue.insert(
                "INSERT INTO images (label, image_id, kind, array, position, state, buffered,"
                " created_ns) VALUES (?, ?, 'parity', ?, ?, 'burned', 0, 0)",
                label, image_id(self._found.archive_id, label), number, k + index,
            )  # fmt: skip
        return k

    # Inodes and names

    def _live(self) -> Iterator[tuple[int, Record]]:
        for ino, record in sorted(self._found.records.items()):
            if record["record"] == "inode":
                yield ino, record

    def _versions_of(self, ino: int, record: Record, taken: set[int]) -> list[tuple[Any, ...]]:
        """Return the contents a record lists, without those another inode has."""
        rows = record.get("versions", [])
        for version in taken.intersection(row[0] for row in rows):
            self._found.faults.append(
                (f"inode {ino}", f"content {version} is listed for another file too")
            )
        rows = [row for row in rows if row[0] not in taken]
        taken.update(row[0] for row in rows)
        return [(row[0], ino, *row[1:]) for row in rows]

    def _inodes(self) -> None:
        taken: set[int] = set()
        for ino, record in sorted(self._found.records.items()):
            if record["record"] == "tombstone":
                self._catalogue.run(
                    "INSERT INTO tombstones VALUES (?, ?, ?, ?, ?)", ino,
                    unescape_path(record["path"]), record["time_ns"], record["seq"],
                    int("journal" in record),
                )  # fmt: skip
                continue
            if record["record"] != "inode":
                continue
            self._catalogue.run(
                "INSERT OR REPLACE INTO inodes (ino, mode, uid, gid, rdev, size, atime_ns,"
                " mtime_ns, ctime_ns, target, nlink, seq, dirty, recorded)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, 1)",
                ino, *inode_values(record), decode_target(record), record["seq"],
                int("journal" in record),
            )  # fmt: skip
            self._catalogue.many(
                "INSERT INTO xattrs VALUES (?, ?, ?)",
                [(ino, name, value) for name, value in decode_xattrs(record).items()],
            )
            self._catalogue.many(
                "INSERT INTO versions (version, ino, number, size, mtime_ns, created_ns, sha256,"
                " state, resident) VALUES (?, ?, ?, ?, ?, ?, ?, 'sealed', 0)",
                self._versions_of(ino, record, taken),
            )

    def _names(self) -> None:
        live = {ino for ino, _ in self._live()} | {ROOT_INODE}
        for ino, record in self._live():
            for parent, name in decode_names(record):
                self._add_name(parent, name, ino)
        for _, record in self._live():
            for parent, _ in decode_names(record):
                if parent not in live:
                    live.add(parent)
                    self._restore_folder(parent, unescape_path(record["path"]), live)

    def _break_cycles(self) -> None:
        """Hang up under lost+found what no way leads to from the root.

        States of two folders from different times may name each other as parents, when the disc
        with the later state of one is gone.
        """
        unreachable = (
            "WITH RECURSIVE below(ino) AS (VALUES (1) UNION SELECT n.ino FROM names n JOIN below b"
            " ON n.parent = b.ino) SELECT MIN(n.ino) FROM names n JOIN inodes i ON i.ino = n.parent"
            " WHERE n.ino NOT IN below AND i.mode & 61440 = 16384"
        )
        while (ino := self._catalogue.value(unreachable)) is not None:
            self._catalogue.run("DELETE FROM names WHERE ino = ?", ino)
            folder = self._folder(LOST_AND_FOUND, set())
            self._add_name(folder, b"inode-%d" % ino, int(ino))
            self._found.faults.append((f"inode {ino}", "its folder is lost, see lost+found"))

    def _add_name(self, parent: int, name: bytes, ino: int) -> None:
        """Add a name; of two inodes that claim it on different discs, the last to change has it."""
        self._catalogue.run(
            "INSERT INTO names (parent, name, ino) VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET"
            " ino = ?3 WHERE (SELECT seq FROM inodes WHERE ino = ?3) >"
            " (SELECT seq FROM inodes WHERE inodes.ino = names.ino)", parent, name, ino,
        )  # fmt: skip

    def _restore_folder(self, ino: int, below: bytes, live: set[int]) -> None:
        """Make a folder whose own state is lost, from the path of something in it."""
        path = below.rpartition(b"/")[0]
        above, _, name = path.rpartition(b"/")
        now = self._catalogue.clock()
        self._catalogue.run(
            "INSERT INTO inodes (ino, mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, seq)"
            " VALUES (?, ?, 0, 0, 0, ?, ?, ?, ?)",
            ino, stat.S_IFDIR | 0o755, now, now, now, self._catalogue.next_seq(),
        )  # fmt: skip
        parent = self._folder(above, live)
        self._add_name(parent, name or b"folder-%d" % ino, ino)

    def _folder(self, path: bytes, live: set[int]) -> int:
        """Return the inode of a folder by path, making what is missing."""
        ino = ROOT_INODE
        for name in filter(None, path.split(b"/")):
            found = self._catalogue.value(
                "SELECT ino FROM names WHERE parent = ? AND name = ?", ino, name
            )
            if found is None:
                now = self._catalogue.clock()
                found = self._catalogue.insert(
                    "INSERT INTO inodes (mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, seq)"
                    " VALUES (?, 0, 0, 0, ?, ?, ?, ?)",
                    stat.S_IFDIR | 0o755, now, now, now, self._catalogue.next_seq(),
                )  # fmt: skip
                live.add(found)
                self._add_name(ino, name, found)
            ino = int(found)
        return ino

    # Contents

    def _extents(self) -> None:
        versions = {row[0] for row in self._catalogue.all("SELECT version FROM versions")}
        for image in self._found.images.values():
            if image.scan is None:
                continue
            for place in image.scan.entries:
                version = place.entry.extra.get("version")
                if not isinstance(version, int) or version not in versions:
                    continue
                self._catalogue.run(
                    "INSERT OR REPLACE INTO extents VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    version, place.entry.piece_index, place.entry.piece_offset, place.length,
                    self._numbers[image.image_id], place.sha256, place.disc_paths[0], place.offset,
                )  # fmt: skip
                if place.entry.piece_count == 1:
                    self._catalogue.run(
                        "UPDATE versions SET sha256 = ? WHERE version = ?", place.sha256, version
                    )
        self._catalogue.run(
            "UPDATE versions SET state = 'burned' WHERE NOT EXISTS (SELECT 1 FROM extents e"
            " JOIN images i USING (image) JOIN arrays a ON a.number = i.array"
            " WHERE e.version = versions.version AND a.state <> 'burned')"
        )

    def _current_versions(self) -> None:
        self._catalogue.run(
            "UPDATE inodes SET version = (SELECT v.version FROM versions v WHERE v.ino = inodes.ino"
            " ORDER BY number DESC LIMIT 1)"
        )

    def _link_counts(self) -> None:
        self._catalogue.run(
            "UPDATE inodes SET nlink = CASE WHEN mode & 61440 = 16384 THEN 2 + (SELECT COUNT(*)"
            " FROM names n JOIN inodes c ON c.ino = n.ino WHERE n.parent = inodes.ino"
            " AND c.mode & 61440 = 16384)"
            " ELSE (SELECT COUNT(*) FROM names n WHERE n.ino = inodes.ino) END"
        )

    # The buffer

    def _buffer(self) -> None:
        """Take up what the buffer still holds."""
        lost: list[int] = []
        for path in sorted(self._store.files.glob("*/*")):
            if not path.name.isdigit():
                continue
            version = int(path.name)
            row = self._catalogue.one(
                "SELECT sha256, size, (SELECT SUM(length) FROM extents e"
                " WHERE e.version = versions.version) FROM versions WHERE version = ?", version,
            )  # fmt: skip
            if row is None:
                lost.append(version)
            elif row[2] is None and row[0] in (None, hash_file(path)):
                self._keep_unsealed(version, path)
            elif hash_file(path) == row[0]:
                self._keep_sealed(version, whole=row[2] == row[1])
            else:
                self._found.faults.append((str(path), "not the content of that number"))
                lost += self._move_away(version, path, whole=row[2] == row[1])
        if lost:
            folder_ino = self._folder(LOST_AND_FOUND, set())
            for version in sorted(lost):
                self._take_up(version, folder_ino)
            self._link_counts()

    def _move_away(self, version: int, path: Path, *, whole: bool) -> list[int]:
        """Free a number of bytes that are not its own; return the one they got.

        Where discs have the whole content, they are a damaged copy of it, and go.
        """
        if whole:
            path.unlink()
            return []
        number = 1 + max(
            int(self._catalogue.value("SELECT seq FROM sqlite_sequence WHERE name = 'versions'")),
            *(int(found.name) for found in self._store.files.glob("*/*") if found.name.isdigit()),
        )
        path.rename(self._store.path(number))
        return [number]

    def _keep_sealed(self, version: int, *, whole: bool) -> None:
        """Enter a buffer copy; where its discs have not all of it, it is sealed once more."""
        self._catalogue.run("UPDATE versions SET resident = 1 WHERE version = ?", version)
        if not whole:
            self._catalogue.run("DELETE FROM extents WHERE version = ?", version)
            self._catalogue.run("UPDATE versions SET state = 'bucket' WHERE version = ?", version)

    def _keep_unsealed(self, version: int, path: Path) -> None:
        """Enter a content that is on no disc, as long as its file is."""
        found = path.stat()
        self._catalogue.run(
            "UPDATE versions SET state = 'bucket', resident = 1, sha256 = NULL, size = ?"
            " WHERE version = ?", found.st_size, version,
        )  # fmt: skip
        self._catalogue.run(
            "UPDATE inodes SET dirty = 1, size = ?1,"
            " mtime_ns = CASE WHEN size = ?1 THEN mtime_ns ELSE ?2 END WHERE version = ?3",
            found.st_size, found.st_mtime_ns, version,
        )  # fmt: skip

    def _take_up(self, version: int, folder: int) -> None:
        found = self._store.path(version).stat()
        now = self._catalogue.clock()
        ino = self._catalogue.insert(
            "INSERT INTO inodes (mode, uid, gid, nlink, size, atime_ns, mtime_ns, ctime_ns,"
            " version, seq) VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?, ?)",
            stat.S_IFREG | 0o600, found.st_uid, found.st_gid, found.st_size, now,
            found.st_mtime_ns, now, version, self._catalogue.next_seq(),
        )  # fmt: skip
        self._catalogue.run(
            "INSERT INTO versions (version, ino, number, size, mtime_ns, created_ns, state,"
            " resident) VALUES (?, ?, 1, ?, ?, ?, 'bucket', 1)",
            version, ino, found.st_size, found.st_mtime_ns, now,
        )  # fmt: skip
        self._add_name(folder, b"%d" % version, ino)

    # The report

    def _report(self) -> RebuildReport:
        found = self._found
        images = sorted(found.images.values(), key=lambda image: image.label)
        missing = self._catalogue.all(
            "SELECT i.ino FROM inodes i JOIN versions v ON v.version = i.version"
            " WHERE v.resident = 0 AND v.size > (SELECT COALESCE(SUM(e.length), 0) FROM extents e"
            " JOIN images m USING (image) WHERE e.version = v.version AND (m.buffered = 1 OR"
            " EXISTS (SELECT 1 FROM discs d WHERE d.image = m.image)))"
        )
        paths = sorted(escape_path(path_of(self._catalogue, ino) or b"") for (ino,) in missing)
        return RebuildReport(
            discs=sum(1 for image in images if image.path is not None),
            faults=tuple(found.faults),
            images_rebuilt=tuple(image.label for image in images if image.rebuilt),
            images_missing=tuple(image.label for image in images if image.path is None),
            files=self._count("inodes WHERE mode & 61440 = 32768"),
            folders=self._count("inodes WHERE mode & 61440 = 16384"),
            tombstones=self._count("tombstones"),
            files_missing=tuple(paths),
        )

    def _count(self, what: str) -> int:
        return int(self._catalogue.value(f"SELECT COUNT(*) FROM {what}"))


def _faulty(image: FoundImage) -> bool:
    return image.scan is not None and image.scan.fault is not None
