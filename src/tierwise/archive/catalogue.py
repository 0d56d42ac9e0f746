"""The catalogue: one SQLite file in WAL mode, its transactions, its locks and its counters.

Who changes what lives elsewhere: the tree in `namespace`, images in `seal` and `burn`. Several
processes may share a catalogue: a mount and a maintenance verb each hold their own lock file,
and SQLite's transactions keep them apart. Left out: an object layer; SQL stands where it is
used. The columns are explained in `schema.sql`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from tierwise.core.errors import DataError, MissingFileError, StateError, StorageFullError

SCHEMA_VERSION = 1
Row = tuple[Any, ...]
Clock = Callable[[], int]  # nanoseconds since 1970-01-01 UTC
_BUSY_S = 600.0  # planning an image of a million files is one transaction of minutes; then EIO


class Catalogue:
    """An open catalogue; safe to use from several threads, one transaction at a time.

    Args:
        path: The database; it must exist (see `create`).
        foreparts: The second database, with the heads of files.
        clock: Nanoseconds since 1970; stamps events and new rows.
    """

    def __init__(self, path: Path, foreparts: Path, clock: Clock) -> None:
        if not path.exists():
            raise MissingFileError(
                f"no catalogue {path}", hint="rebuild it from discs: tierwise archive rebuild"
            )
        self.path, self.clock = path, clock
        self._lock = threading.RLock()
        self._depth = 0
        self._db = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=_BUSY_S
        )
        try:
            self._prepare(path, foreparts)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise DataError(
                f"{path} is not a usable catalogue: {error}",
                hint="move it away and rebuild it from discs: tierwise archive rebuild",
            ) from error
        self._wal_fd: int | None = None
        self.touched: set[int] = set()  # inodes changed and not in the journal yet

    def _prepare(self, path: Path, foreparts: Path) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found != SCHEMA_VERSION:
            self._db.close()
            raise DataError(
                f"{path} has schema {found}, this tierwise reads {SCHEMA_VERSION}",
                hint="use the tierwise that made it",
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA cache_size = -65536")
        self._db.execute("ATTACH DATABASE ? AS heads", (str(foreparts),))
        self._db.execute("PRAGMA heads.journal_mode = WAL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS heads.foreparts (version INTEGER PRIMARY KEY, data BLOB)"
        )

    @staticmethod
    def create(path: Path, archive_id: str) -> None:
        """Make an empty catalogue whole: it is there with its schema, or not at all."""
        temporary = path.with_name(path.name + ".part")
        temporary.unlink(missing_ok=True)
        schema = resources.files("tierwise.archive").joinpath("schema.sql").read_text("utf-8")
        db = sqlite3.connect(temporary, isolation_level=None)
        db.executescript("BEGIN;" + schema)
        db.execute("INSERT INTO meta VALUES ('archive_id', ?)", (archive_id,))
        db.execute("COMMIT")
        db.close()
        temporary.replace(path)

    def close(self) -> None:
        """Close the database; the WAL is folded in by SQLite when nobody else has it open."""
        with self._lock:
            if self._wal_fd is not None:
                os.close(self._wal_fd)
                self._wal_fd = None
            self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block's changes, or none; nested blocks belong to the outermost."""
        with self._lock:
            try:
                if self._depth == 0:
                    self._db.execute("BEGIN IMMEDIATE")
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                if self._depth == 0:
                    self._db.execute("COMMIT")
            except BaseException as error:
                if self._depth == 0 and self._db.in_transaction:  # a full disk undoes it by itself
                    self._db.execute("ROLLBACK")
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                    raise StorageFullError(f"no space left while writing {self.path}") from error
                raise

    def run(self, sql: str, *values: object) -> int:
        """Execute one statement; return the number of rows changed."""
        with self._lock:
            return self._db.execute(sql, values).rowcount

    def insert(self, sql: str, *values: object) -> int:
        """Execute an INSERT; return the new row's number."""
        with self._lock:
            number = self._db.execute(sql, values).lastrowid
        assert number is not None
        return number

    def many(self, sql: str, rows: list[Row]) -> None:
        """Execute one statement for each row of values."""
        with self._lock:
            self._db.executemany(sql, rows)

    def all(self, sql: str, *values: object) -> list[Row]:
        """Return every row."""
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def one(self, sql: str, *values: object) -> Row | None:
        """Return the first row, or None."""
        with self._lock:
            row: Row | None = self._db.execute(sql, values).fetchone()
            return row

    def value(self, sql: str, *values: object) -> Any:
        """Return the first column of the first row, or None."""
        row = self.one(sql, *values)
        return None if row is None else row[0]

    def next_seq(self, ino: int | None = None) -> int:
        """Count one more change, of an inode, and return its number; inside a transaction."""
        if ino is not None:
            self.touched.add(ino)
        return int(
            self.value("UPDATE meta SET value = value + 1 WHERE key = 'seq' RETURNING value")
        )

    def sync(self) -> None:
        """Return when everything committed so far would survive a power cut.

        Commits at synchronous=NORMAL leave the WAL to the system's cache; one fdatasync of it
        covers all of them, at the price of one disk flush instead of one per operation.
        """
        with self._lock:
            wal = Path(f"{self.path}-wal")
            if self._wal_fd is None and wal.exists():
                self._wal_fd = os.open(wal, os.O_RDONLY)
            if self._wal_fd is not None:
                os.fdatasync(self._wal_fd)

    def event(self, kind: str, about: str, outcome: str = "success", detail: str = "") -> None:
        """Log one event in PREMIS terms.

        Source: PREMIS Data Dictionary 3.0 (2015), and the Library of Congress eventType list.
        """
        self.run(
            "INSERT INTO events (time_ns, type, object, outcome, detail) VALUES (?, ?, ?, ?, ?)",
            self.clock(), kind, about, outcome, detail,
        )  # fmt: skip


class FileLock:
    """An exclusive lock held by an open file; the system drops it when its holder dies."""

    def __init__(self, path: Path, busy: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise StateError(busy, hint="wait until it is done, or stop it") from error

    def release(self) -> None:
        """Let others have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
