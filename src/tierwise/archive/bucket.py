"""Filling a bucket: which closed versions, and which changes of the tree, go to the next image.

One call plans one image in one transaction: versions are taken in the order they were made, first
fit, together with the folders above them; each file's record of state goes along. A file larger
than a disc is cut into pieces of nearly a disc. What the plan holds is frozen from then on, and a
crash before the image exists finds the plan in the catalogue.

The size is bounded from above before anything is promised, so an image never outgrows its disc.
Left out: packing better than first fit; the last image of a batch is the only one with room left,
and the bound is not the bottleneck.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.config import ArchiveConfig
from tierwise.archive.image import NodeKind, SealEntry, entry_bytes_bound, payload_capacity
from tierwise.archive.plans import (
    Piece,
    digest_id,
    entry_json,
    image_id,
    image_label,
    with_piece,
)
from tierwise.archive.slices import (
    Record,
    archive_record,
    inode_record,
    line_bytes,
    tombstone_record,
)
from tierwise.archive.store import Store
from tierwise.core.errors import UsageError

_MISFITS_BEFORE_FULL = 64
_KINDS = {
    stat.S_IFREG: NodeKind.FILE, stat.S_IFDIR: NodeKind.DIRECTORY, stat.S_IFLNK: NodeKind.SYMLINK,
    stat.S_IFIFO: NodeKind.FIFO, stat.S_IFSOCK: NodeKind.SOCKET, stat.S_IFCHR: NodeKind.CHAR,
    stat.S_IFBLK: NodeKind.BLOCK,
}  # fmt: skip


@dataclass(slots=True)
class _Bucket:
    """What has been taken so far for one image."""

    room: int
    entries: list[tuple[SealEntry, Record]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    known: set[int] = field(default_factory=set)  # inodes whose record is in already
    folders: set[int] = field(default_factory=set)  # folders whose entry is in already


class BucketPlanner:
    """Plans images for one archive.

    Args:
        catalogue: The open catalogue.
        store: The buffer.
        config: Disc size and array shape.
        settings: What the archive's own record says of it.
    """

    def __init__(self, catalogue: Catalogue, store: Store, config: ArchiveConfig) -> None:
        self._catalogue, self._store, self._config = catalogue, store, config
        self._capacity = payload_capacity(
            config.disc_size_bytes, num_members=config.data_discs + config.parity_discs
        )
        self._paths: dict[int, tuple[bytes, ...]] = {}
        self._settings = {
            "disc_size_bytes": config.disc_size_bytes,
            "media": config.media,
            "data_discs": config.data_discs,
            "parity_discs": config.parity_discs,
            "forepart_bytes": config.forepart_bytes,
            "versions_kept": config.versions_kept,
        }

    def plan_next(self, *, partial: bool) -> int | None:
        """Plan one image and return its number; None when there is not enough for one.

        Args:
            partial: Plan an image even if more would fit.
        """
        self._hash_large_files()
        self._paths.clear()
        with self._catalogue.transaction():
            self._catalogue.run("SAVEPOINT plan")
            bucket = self._empty_bucket()
            full = self._take_versions(bucket)
            full = self._take_tree(bucket) or full
            if not (bucket.entries or len(bucket.records) > 1) or not (full or partial):
                self._catalogue.run("ROLLBACK TO plan")
                self._catalogue.run("RELEASE plan")
                return None
            image = self._write_plan(bucket)
            self._catalogue.run("RELEASE plan")
            return image

    def _empty_bucket(self) -> _Bucket:
        record = archive_record(self._catalogue, self._settings)
        return _Bucket(self._capacity - line_bytes(record), records=[record])

    # The tree

    def _take_tree(self, bucket: _Bucket) -> bool:
        """Take changed inodes that need no bytes, and tombstones; return whether some are left."""
        for row in self._catalogue.all(
            "SELECT ino, path, deleted_ns, seq FROM tombstones WHERE dirty = 1 ORDER BY seq"
        ):
            record = tombstone_record(*row)
            if line_bytes(record) > bucket.room:
                return True
            bucket.records.append(record)
            bucket.room -= line_bytes(record)
            self._catalogue.run("UPDATE tombstones SET dirty = 0 WHERE ino = ?", row[0])
        for ino, version in self._catalogue.all(
            "SELECT i.ino, i.version FROM inodes i LEFT JOIN versions v ON v.version = i.version"
            " WHERE i.dirty = 1 AND i.nlink > 0 AND (v.state IS NULL OR v.state <> 'bucket')"
            " ORDER BY i.ino"
        ):
            if ino not in bucket.known and not self._take(bucket, ino, stands=version is None):
                return True
        return False

    # Versions

    def _take_versions(self, bucket: _Bucket) -> bool:
        """Take closed versions while they fit; return whether one did not."""
        misfits = 0
        for piece in self._candidates():
            if self._take_piece(bucket, piece):
                continue
            misfits += 1
            if misfits >= _MISFITS_BEFORE_FULL:
                break
        if misfits and not bucket.entries:
            raise UsageError(
                f"discs of {self._config.disc_size_bytes} bytes are too small for the names above"
                " one of the files",
                hint="use larger discs or shorter paths",
            )
        return misfits > 0

    def _candidates(self) -> Iterator[Piece]:
        """Yield what is left of files being cut, then closed versions in the order of making."""
        for version, ino, size, number, done, index, length in self._catalogue.all(
            "SELECT v.version, v.ino, v.size, v.number, SUM(e.length), COUNT(*), MAX(e.length)"
            " FROM versions v JOIN extents e USING (version) JOIN inodes i ON i.ino = v.ino"
            " WHERE v.state = 'sealing' AND i.nlink > 0"
            " GROUP BY v.version HAVING SUM(e.length) < v.size ORDER BY v.version"
        ):
            count = -(-size // length)
            yield Piece(
                version=version, ino=ino, size=size, number=number, index=index, count=count,
                offset=done, length=min(length, size - done),
            )  # fmt: skip
        for version, ino, size, number in self._catalogue.all(
            "SELECT v.version, v.ino, v.size, v.number FROM versions v JOIN inodes i USING (ino)"
            " WHERE v.state = 'bucket' AND v.open = 0 AND i.nlink > 0 AND i.version = v.version"
            " ORDER BY v.version"
        ):
            yield Piece(
                version=version, ino=ino, size=size, number=number, index=0, count=1,
                offset=0, length=size,
            )  # fmt: skip

    def _take_piece(self, bucket: _Bucket, piece: Piece) -> bool:
        """Take a piece (of a large file: its first) if it fits; nothing changes if not."""
        if piece.count == 1 and piece.length >= bucket.room:
            if bucket.entries or bucket.room < self._capacity // 2:
                return False
            length = self._piece_bytes(bucket, piece)
            if self._sha256(piece.version) is None:
                return False  # hashed before the next plan
            count = -(-piece.size // length)
            piece = Piece(
                version=piece.version, ino=piece.ino, size=piece.size, number=piece.number,
                index=0, count=count, offset=0, length=min(length, piece.size),
            )  # fmt: skip
        return self._take(bucket, piece.ino, piece=piece)

    def _piece_bytes(self, bucket: _Bucket, piece: Piece) -> int:
        """Return the size of the pieces a file is cut into: an image less all that goes along."""
        along = sum(
            entry_bytes_bound(self._entry(ino)) + line_bytes(inode_record(self._catalogue, ino))
            for ino in self._above(piece.ino)
        )
        bare = entry_bytes_bound(self._entry(piece.ino, piece)) - piece.length
        record = line_bytes(inode_record(self._catalogue, piece.ino))
        empty = self._empty_bucket().room
        slack = min(64 * 1024, self._capacity // 64)
        return max((empty - along - bare - record - slack) // 2048 * 2048, 2048)

    # Taking

    def _take(
        self, bucket: _Bucket, ino: int, *, piece: Piece | None = None, stands: bool = True
    ) -> bool:
        """Take an inode's record, the folders above it, and its entry; all of it or nothing."""
        if piece is not None:
            self._freeze(piece)
        folders = [folder for folder in self._above(ino) if folder not in bucket.folders]
        entries = [(self._entry(folder), _note(folder)) for folder in folders]
        if (piece is not None or stands) and ino != 1 and ino not in bucket.folders:
            entries.append((self._entry(ino, piece), _note(ino, piece)))
        inodes = [number for number in (*folders, ino) if number not in bucket.known]
        records = [inode_record(self._catalogue, number) for number in inodes]
        cost = sum(entry_bytes_bound(entry) + len(json.dumps(note)) for entry, note in entries)
        cost += sum(line_bytes(record) for record in records)
        if cost > bucket.room:
            if piece is not None:
                self._unfreeze(piece)
            return False
        bucket.room -= cost
        bucket.entries += entries
        bucket.records += records
        bucket.known.update(inodes)
        bucket.folders.update(folders)
        if entries and entries[-1][0].kind is NodeKind.DIRECTORY:
            bucket.folders.add(ino)
        self._catalogue.many(
            "UPDATE inodes SET dirty = 0, recorded = 1 WHERE ino = ?", [(n,) for n in inodes]
        )
        return True

    def _freeze(self, piece: Piece) -> None:
        self._catalogue.run(
            "UPDATE versions SET state = 'sealing' WHERE version = ?", piece.version
        )
        self._catalogue.run(
            "INSERT INTO extents (version, piece, file_offset, length, image)"
            " VALUES (?, ?, ?, ?, 0)",
            piece.version, piece.index, piece.offset, piece.length,
        )  # fmt: skip

    def _unfreeze(self, piece: Piece) -> None:
        self._catalogue.run(
            "DELETE FROM extents WHERE version = ? AND piece = ?", piece.version, piece.index
        )
        if piece.index == 0:
            self._catalogue.run(
                "UPDATE versions SET state = 'bucket' WHERE version = ?", piece.version
            )

    def _above(self, ino: int) -> tuple[int, ...]:
        """Return the folders above all names of an inode, without the root, top first."""
        found: dict[int, None] = {}
        for (parent,) in self._catalogue.all(
            "SELECT parent FROM names WHERE ino = ? ORDER BY cookie", ino
        ):
            if parent != 1:
                found.update(dict.fromkeys((*self._above(parent), parent)))
        return tuple(found)

    def _paths_of(self, ino: int) -> tuple[bytes, ...]:
        if ino in self._paths:
            return self._paths[ino]
        paths: list[bytes] = []
        for parent, name in self._catalogue.all(
            "SELECT parent, name FROM names WHERE ino = ? ORDER BY cookie", ino
        ):
            if parent == 1:
                paths.append(name)
            else:
                paths += [above + b"/" + name for above in self._paths_of(parent)]
        self._paths[ino] = tuple(paths)
        return self._paths[ino]

    def _entry(self, ino: int, piece: Piece | None = None) -> SealEntry:
        row = self._catalogue.one(
            "SELECT mode, uid, gid, rdev, mtime_ns, atime_ns, ctime_ns, target FROM inodes"
            " WHERE ino = ?", ino,
        )  # fmt: skip
        assert row is not None
        mode, uid, gid, rdev, mtime_ns, atime_ns, ctime_ns, target = row
        xattrs = self._catalogue.all(
            "SELECT name, value FROM xattrs WHERE ino = ? ORDER BY name", ino
        )
        plain = SealEntry(
            paths=self._paths_of(ino),
            kind=_KINDS[stat.S_IFMT(mode)],
            inode=ino,
            mode=stat.S_IMODE(mode),
            uid=uid,
            gid=gid,
            rdev=rdev,
            mtime_ns=mtime_ns,
            atime_ns=atime_ns,
            ctime_ns=ctime_ns,
            target=target or b"",
            xattrs={bytes(name): bytes(value) for name, value in xattrs},
        )
        return plain if piece is None else with_piece(plain, piece, self._store)

    # Promising

    def unplan(self, image: int) -> None:
        """Take back the last plan and fill less from now on: its image outgrew the disc.

        The bounds of `image` should not let that happen; if one is wrong after all, sealing goes
        on with smaller images instead of failing for ever on one plan.
        """
        self._capacity = self._capacity * 3 // 4
        with self._catalogue.transaction():
            rows = self._catalogue.all("SELECT version FROM extents WHERE image = ?", image)
            self._catalogue.run("DELETE FROM extents WHERE image = ?", image)
            self._catalogue.many(
                "UPDATE versions SET state = 'bucket' WHERE version = ?1 AND NOT EXISTS"
                " (SELECT 1 FROM extents WHERE version = ?1)", rows,
            )  # fmt: skip
            for (body,) in self._catalogue.all(
                "SELECT body FROM plans WHERE image = ? AND kind = 'record'", image
            ):
                table = "tombstones" if json.loads(body)["record"] == "tombstone" else "inodes"
                self._catalogue.run(
                    f"UPDATE {table} SET dirty = 1 WHERE ino = ?", json.loads(body).get("inode")
                )
            self._catalogue.run(
                "UPDATE arrays SET state = 'filling' WHERE state = 'closed' AND number ="
                " (SELECT array FROM images WHERE image = ?)", image,
            )  # fmt: skip
            self._catalogue.run("DELETE FROM plans WHERE image = ?", image)
            self._catalogue.run("DELETE FROM images WHERE image = ?", image)

    def _write_plan(self, bucket: _Bucket) -> int:
        array, position = self._place()
        label = image_label(self._config.archive_id, array, "data", position)
        image = self._catalogue.insert(
            "INSERT INTO images (label, image_id, kind, array, position, state, buffered,"
            " created_ns) VALUES (?, ?, 'data', ?, ?, 'planned', 0, ?)",
            label, image_id(self._config.archive_id, label), array, position,
            self._catalogue.clock(),
        )  # fmt: skip
        self._catalogue.run("UPDATE extents SET image = ? WHERE image = 0", image)
        lines = [("entry", json.dumps(entry_json(entry, note))) for entry, note in bucket.entries]
        lines += [("record", json.dumps(record)) for record in bucket.records]
        self._catalogue.many(
            "INSERT INTO plans VALUES (?, ?, ?, ?)",
            [(image, ordinal, kind, body) for ordinal, (kind, body) in enumerate(lines)],
        )
        return image

    def _place(self) -> tuple[int, int]:
        """Return the array and position of the next data image, opening an array if need be."""
        row = self._catalogue.one(
            "SELECT number, k, (SELECT COUNT(*) FROM images WHERE array = number) FROM arrays"
            " WHERE state = 'filling'"
        )
        if row is None:
            number = 1 + int(self._catalogue.value(
                "SELECT MAX(COALESCE((SELECT value FROM meta WHERE key = 'last_array'), 0),"
                " COALESCE((SELECT MAX(number) FROM arrays), 0))"
            ))  # fmt: skip
            row = (number, self._config.data_discs, 0)
            self._catalogue.run(
                "INSERT INTO arrays VALUES (?, ?, ?, ?, 'filling')",
                number, digest_id(self._config.archive_id, f"array {number}"),
                self._config.data_discs, self._config.parity_discs,
            )  # fmt: skip
        number, k, position = row
        if position == k - 1:
            self._catalogue.run("UPDATE arrays SET state = 'closed' WHERE number = ?", number)
        return number, position

    def _sha256(self, version: int) -> str | None:
        found: str | None = self._catalogue.value(
            "SELECT sha256 FROM versions WHERE version = ?", version
        )
        return found

    def _hash_large_files(self) -> None:
        """Hash files that will be cut, before their record is written; outside a transaction."""
        for version, writes in self._catalogue.all(
            "SELECT version, writes FROM versions WHERE state = 'bucket' AND open = 0"
            " AND sha256 IS NULL AND size > ?", self._capacity // 2,
        ):  # fmt: skip
            with self._store.path(version).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            self._catalogue.run(
                "UPDATE versions SET sha256 = ? WHERE version = ? AND writes = ? AND open = 0"
                " AND state = 'bucket'", digest, version, writes,
            )  # fmt: skip


def _note(ino: int, piece: Piece | None = None) -> Record:
    return {} if piece is None else {"version": piece.version}
