"""The attempt log: every answer a model gave, kept once, safe against kill -9 and many writers.

One SQLite file in WAL mode. A row's key is (sample, probe, masked share, k, seed, model hash,
prompt hash); whatever else could change an answer is part of the prompt hash. Batches are written
in one transaction, so a killed run loses at most the batch it was working on and never pays for a
row twice. Several processes may work on one log: each claims a batch for a time, and a claim that
runs out (its process was killed) may be taken over. docs/formats/attempts.md has the columns.

An attempt that no server answered is no attempt of the model's: it is recorded, and a later run
may ask again and put the answer in its place. Everything else stays as it was first written.

Left out: deleting attempts (a log only grows), network databases.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields
from enum import StrEnum
from operator import attrgetter
from pathlib import Path

from tierwise.core.errors import AccessError, DataError, StorageFullError
from tierwise.curriculum.verdicts import Verdict

LOG_NAME = "attempts.sqlite"
_NO_ACCESS = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE attempt (          -- one answer of one model to one question, or the error instead
  sample_id     TEXT    NOT NULL,
  probe         TEXT    NOT NULL,  -- masked | grey | blind | greedy | tree
  mask_permille INTEGER NOT NULL,  -- share of the pixels masked, in 1/1000
  k             INTEGER NOT NULL,  -- number of the repetition, or place of the leaf, from 0
  seed          INTEGER NOT NULL,  -- the run's seed
  model_hash    TEXT    NOT NULL,
  prompt_hash   TEXT    NOT NULL,
  text          TEXT    NOT NULL,  -- what the model wrote; '' for an error
  extracted     TEXT    NOT NULL,  -- the answer taken out of it
  verdict       TEXT    NOT NULL,  -- right | wrong | error
  score         REAL    NOT NULL,  -- the reward, 0 to 1
  error         TEXT    NOT NULL,  -- class of the error, '' without one
  num_tokens    INTEGER NOT NULL,  -- generated, end token included
  finished      INTEGER NOT NULL,  -- 0 when cut at the token limit
  seconds       REAL    NOT NULL,  -- share of the batch's wall time; the one column that varies
  PRIMARY KEY (sample_id, probe, mask_permille, k, seed, model_hash, prompt_hash)
) STRICT, WITHOUT ROWID;
CREATE TABLE balance (          -- attention on the picture against attention on the text
  sample_id   TEXT NOT NULL,
  variant     TEXT NOT NULL,       -- sum | mean | sink_masked | question_only
  model_hash  TEXT NOT NULL,
  prompt_hash TEXT NOT NULL,
  ratio       REAL,                -- NULL with an error
  num_tokens  INTEGER NOT NULL,    -- generated tokens averaged over
  error       TEXT NOT NULL,
  PRIMARY KEY (sample_id, variant, model_hash, prompt_hash)
) STRICT, WITHOUT ROWID;
CREATE TABLE claim (            -- which batch some process works on, and until when it may
  batch         TEXT PRIMARY KEY,
  owner         TEXT NOT NULL,
  until_seconds REAL NOT NULL
) STRICT, WITHOUT ROWID;
"""


class Probe(StrEnum):
    """How a question was put."""

    MASKED = "masked"
    GREY = "grey"
    BLIND = "blind"
    GREEDY = "greedy"
    TREE = "tree"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AttemptKey:
    """Which attempt: what it was made of, and nothing about how it ended.

    Attributes:
        sample_id: The sample.
        probe: How the question was put.
        mask_permille: Share of the pixels masked, in 1/1000.
        k: Number of the repetition, from 0.
        seed: The run's seed.
        model_hash: From `LocalModel.model_hash`.
        prompt_hash: Hash of the rendered prompt, the pictures and the sampling settings.
    """

    sample_id: str
    probe: str
    mask_permille: int
    k: int
    seed: int
    model_hash: str
    prompt_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One answer, or the error that came instead."""

    key: AttemptKey
    text: str
    extracted: str
    verdict: Verdict
    score: float
    error: str = ""
    num_tokens: int = 0
    finished: bool = True
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The attention balance of one sample under one variant; `ratio` is None with an error."""

    sample_id: str
    variant: str
    model_hash: str
    prompt_hash: str
    ratio: float | None
    num_tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What one probe of one sample has taken.

    Attributes:
        sample_id: The sample.
        probe: The probe.
        usable: Different attempts among those that were asked for.
        rows: All of them, asked again under other settings included.
        seconds: What all of them took.
    """

    sample_id: str
    probe: str
    usable: int
    rows: int
    seconds: float


_KEY_COLUMNS = tuple(field.name for field in fields(AttemptKey))
_VALUE_COLUMNS = tuple(field.name for field in fields(Attempt) if field.name != "key")
_COLUMNS = (*_KEY_COLUMNS, *_VALUE_COLUMNS)
_UNREACHED = "(attempt.verdict = 'error' AND attempt.error GLOB 'server_*')"


class AttemptLog:
    """The log in one file; made if absent. Use as a context manager, one instance a thread.

    Args:
        path: The SQLite file.

    Raises:
        AccessError: It may not be written to, or lies in a folder that may not.
        DataError: The file is not an attempt log, or one of a later version.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._db = sqlite3.connect(path, timeout=60.0, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._migrate()
        except sqlite3.DatabaseError as error:
            self._db.close()
            self._refuse_full(error)
            if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _NO_ACCESS:
                raise AccessError(
                    f"{path} cannot be opened for writing: {error}",
                    hint="a log is written to even when it is read: copy it first",
                ) from error
            raise DataError(f"{path} is not an attempt log: {error}") from error

    def __enter__(self) -> AttemptLog:
        """Return the log itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; everything written is in it already."""
        self._db.close()

    def _migrate(self) -> None:
        with self._transaction():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _SCHEMA.split(";\n"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
            elif version != _SCHEMA_VERSION:
                raise DataError(
                    f"{self.path} has version {version}, this tierwise knows {_SCHEMA_VERSION}"
                )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:  # SQLite undoes it by itself when the disk is full
                self._db.execute("ROLLBACK")
            self._refuse_full(error)
            raise

    def _refuse_full(self, error: BaseException) -> None:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise StorageFullError(f"no space left while writing {self.path}") from error

    def add(
        self,
        attempts: Iterable[Attempt],
        balances: Iterable[Balance] = (),
        *,
        batch: str | None = None,
    ) -> None:
        """Write rows in one transaction, and give the claim on `batch` back.

        A row whose key is there already is kept as it was, since the first outcome counts, unless
        it says that no server answered.
        """
        marks = ",".join("?" * len(_COLUMNS))
        values = ",".join(f"{name} = excluded.{name}" for name in _VALUE_COLUMNS)
        insert = (
            f"INSERT INTO attempt ({','.join(_COLUMNS)}) VALUES ({marks}) "
            f"ON CONFLICT ({','.join(_KEY_COLUMNS)}) DO UPDATE SET {values} WHERE {_UNREACHED}"
        )
        with self._transaction():
            self._db.executemany(insert, (_row_of(attempt) for attempt in attempts))
            self._db.executemany(
                "INSERT OR IGNORE INTO balance VALUES (?,?,?,?,?,?,?)",
                (astuple(balance) for balance in balances),
            )
            if batch is not None:
                self._db.execute("DELETE FROM claim WHERE batch = ?", (batch,))

    def missing(
        self, keys: Sequence[AttemptKey], *, again: Set[AttemptKey] = frozenset()
    ) -> list[AttemptKey]:
        """Return the keys that have no row yet, in their order.

        Args:
            keys: Where to look.
            again: Of these a row that says that no server answered does not count.
        """
        where = " AND ".join(f"{name} = ?" for name in _KEY_COLUMNS)
        query = f"SELECT {_UNREACHED} FROM attempt WHERE {where}"
        rows = ((key, self._db.execute(query, _key_row(key)).fetchone()) for key in keys)
        return [key for key, row in rows if row is None or (row[0] and key in again)]

    def unreached(self, *, model_hash: str) -> set[AttemptKey]:
        """Return the keys of a model's attempts that no server answered."""
        query = (
            f"SELECT {','.join(_KEY_COLUMNS)} FROM attempt WHERE model_hash = ? AND {_UNREACHED}"
        )
        return {_key_of(row) for row in self._db.execute(query, (model_hash,))}

    def verdict(self, key: AttemptKey) -> Verdict:
        """Return how one attempt ended.

        Raises:
            KeyError: It was never made.
        """
        where = " AND ".join(f"{name} = ?" for name in _KEY_COLUMNS)
        row = self._db.execute(
            f"SELECT verdict FROM attempt WHERE {where}", _key_row(key)
        ).fetchone()
        if row is None:
            raise KeyError(key)
        return Verdict(row[0])

    def missing_balances(self, keys: Sequence[AttemptKey]) -> list[AttemptKey]:
        """Return the keys of greedy attempts whose attention balance has no row yet."""
        query = (
            "SELECT 1 FROM balance WHERE sample_id = ? AND model_hash = ? AND prompt_hash = ? "
            "LIMIT 1"
        )
        return [
            key
            for key in keys
            if self._db.execute(query, (key.sample_id, key.model_hash, key.prompt_hash)).fetchone()
            is None
        ]

    def attempts(
        self, *, model_hash: str | None = None, seed: int | None = None
    ) -> Iterator[Attempt]:
        """Yield attempts in the order of their keys."""
        query = (
            f"SELECT {','.join(_COLUMNS)} FROM attempt WHERE (?1 IS NULL OR model_hash = ?1) "
            "AND (?2 IS NULL OR seed = ?2) ORDER BY 1, 2, 3, 4, 5, 6, 7"
        )
        with closing(self._db.cursor()) as cursor:
            for row in cursor.execute(query, (model_hash, seed)):
                yield _attempt_of(row)

    def balances(self, *, model_hash: str) -> Iterator[Balance]:
        """Yield attention balances in the order of their keys."""
        names = tuple(field.name for field in fields(Balance))
        query = f"SELECT {','.join(names)} FROM balance WHERE model_hash = ? ORDER BY 1, 2, 4"
        for row in self._db.execute(query, (model_hash,)):
            yield Balance(**dict(zip(names, row, strict=True)))

    def claim(self, batch: str, *, owner: str, now: float, lease_s: float) -> bool:
        """Return whether the batch is now this owner's; False while another's claim holds.

        Args:
            batch: Name of the batch, the same in every process.
            owner: Name of the process.
            now: Seconds on a clock that all processes share.
            lease_s: How long the claim holds if nothing is heard, in seconds.
        """
        with self._transaction():
            changed = self._db.execute(
                "INSERT INTO claim VALUES (?1, ?2, ?3 + ?4) ON CONFLICT (batch) DO UPDATE SET "
                "owner = ?2, until_seconds = ?3 + ?4 WHERE owner = ?2 OR until_seconds < ?3",
                (batch, owner, now, lease_s),
            ).rowcount
        return changed == 1

    def owners(self) -> list[str]:
        """Return who holds a claim, run out or not."""
        return [row[0] for row in self._db.execute("SELECT DISTINCT owner FROM claim ORDER BY 1")]

    def release(self, *, owner: str) -> None:
        """Give back every claim of an owner, as an interrupted run does."""
        with self._transaction():
            self._db.execute("DELETE FROM claim WHERE owner = ?", (owner,))

    def spending(
        self,
        *,
        model_hash: str,
        seed: int,
        permilles: Iterable[int],
        num_attempts: int | None = None,
    ) -> Iterator[Spending]:
        """Yield what each probe of each sample has taken under a model and a seed.

        Args:
            model_hash: The model.
            seed: The run's seed; greedy answers have none.
            permilles: Masked shares that count as usable.
            num_attempts: Repetitions that count as usable, but for trees; None for all.
        """
        shares = ",".join(str(int(permille)) for permille in permilles)
        usable = f"mask_permille IN ({shares}) AND (?3 IS NULL OR k < ?3 OR probe = 'tree')"
        query = (
            "SELECT sample_id, probe, count(DISTINCT CASE WHEN "
            f"{usable} THEN mask_permille || ':' || k END), count(*), sum(seconds) FROM attempt "
            "WHERE model_hash = ?1 AND (seed = ?2 OR probe = 'greedy') GROUP BY 1, 2"
        )
        for row in self._db.execute(query, (model_hash, seed, num_attempts)):
            yield Spending(
                sample_id=row[0], probe=row[1], usable=row[2], rows=row[3], seconds=row[4]
            )

    def main_model(self) -> tuple[str, int] | None:
        """Return the model and the seed with the most attempts, or None of an empty log."""
        row = self._db.execute(
            "SELECT model_hash, max(seed) FROM attempt GROUP BY model_hash "
            "ORDER BY count(*) DESC LIMIT 1"
        ).fetchone()
        return None if row is None else (row[0], row[1])

    def totals(self) -> Mapping[str, float]:
        """Return what the log has cost: rows, errors, tokens, seconds."""
        row = self._db.execute(
            "SELECT count(*), coalesce(sum(verdict = 'error'), 0), coalesce(sum(num_tokens), 0), "
            "coalesce(sum(seconds), 0) FROM attempt"
        ).fetchone()
        return dict(zip(("attempts", "errors", "tokens", "seconds"), row, strict=True))


def _row_of(attempt: Attempt) -> tuple[object, ...]:
    values = (getattr(attempt, name) for name in _VALUE_COLUMNS)
    return (
        *_key_row(attempt.key),
        *(int(value) if isinstance(value, bool) else value for value in values),
    )


_key_row = attrgetter(*_KEY_COLUMNS)  # dataclasses.astuple copies deeply: 40 times slower


def _key_of(row: Sequence[object]) -> AttemptKey:
    return AttemptKey(**dict(zip(_KEY_COLUMNS, row, strict=True)))  # type: ignore[arg-type]


def _attempt_of(row: Sequence[object]) -> Attempt:
    values = dict(zip(_VALUE_COLUMNS, row[len(_KEY_COLUMNS) :], strict=True))
    values["verdict"] = Verdict(str(values["verdict"]))
    values["finished"] = bool(values["finished"])
    return Attempt(key=_key_of(row[: len(_KEY_COLUMNS)]), **values)  # type: ignore[arg-type]
