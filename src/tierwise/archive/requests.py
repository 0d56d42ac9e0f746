"""The recall queue: prepare, query, cancel, serve, release; and which discs a restore needs.

A request names versions. Serving goes array by array, disc by disc and along each disc, so that
every disc is loaded once. What was brought back stays in the buffer while any request counts on
it (`evict` leaves it alone) and may go once the last one is released.

Left out: priorities; the order of the discs is the order of the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.recall import Recaller
from tierwise.archive.store import Store
from tierwise.core.errors import IntegrityError, MissingFileError
from tierwise.core.progress import SILENT, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """How far a request is: versions by state, and why any failed."""

    request: int
    queued: int
    done: int
    failed: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallReport:
    """What serving the queue brought back; `failed` are (version, why)."""

    files: int
    bytes: int
    failed: tuple[tuple[int, str], ...]


class RecallQueue:
    """The queue of one archive."""

    def __init__(self, catalogue: Catalogue, store: Store, recaller: Recaller) -> None:
        self._catalogue, self._store, self._recaller = catalogue, store, recaller

    def prepare(self, versions: Sequence[int]) -> int:
        """Ask for versions; return the request's number."""
        with self._catalogue.transaction():
            request = 1 + int(
                self._catalogue.value("SELECT COALESCE(MAX(request), 0) FROM recalls")
            )
            self._catalogue.many(
                "INSERT OR IGNORE INTO recalls SELECT ?, version,"
                " CASE resident WHEN 0 THEN 'queued' ELSE 'done' END, '' FROM versions"
                " WHERE version = ?",
                [(request, version) for version in versions],
            )
        return request

    def query(self, request: int) -> RequestState:
        """Return how far a request is.

        Raises:
            MissingFileError: There is no such request (any more).
        """
        rows = self._catalogue.all("SELECT state, note FROM recalls WHERE request = ?", request)
        if not rows:
            raise MissingFileError(
                f"no recall request {request}", hint="it was released, cancelled or never made"
            )
        states = [state for state, _ in rows]
        return RequestState(
            request=request,
            queued=states.count("queued"),
            done=states.count("done"),
            failed=states.count("failed"),
            notes=tuple(note for _, note in rows if note),
        )

    def requests(self) -> list[RequestState]:
        """Return every request there is."""
        rows = self._catalogue.all("SELECT DISTINCT request FROM recalls ORDER BY request")
        return [self.query(row[0]) for row in rows]

    def cancel(self, request: int) -> int:
        """Drop what a request has not got yet; return how many versions that was."""
        self.query(request)
        return self._catalogue.run(
            "DELETE FROM recalls WHERE request = ? AND state <> 'done'", request
        )

    def release(self, request: int) -> int:
        """Let go of a request: its versions may be evicted when no other counts on them."""
        self.query(request)
        return self._catalogue.run("DELETE FROM recalls WHERE request = ?", request)

    def serve(
        self, *, interrupted: Event | None = None, progress: Progress = SILENT
    ) -> RecallReport:
        """Bring back everything that is queued, in the order of arrays, discs and places.

        Raises:
            TierwiseError: Drive, robot or disk are in trouble; what is not back stays queued.
        """
        rows = self._catalogue.all(
            "SELECT r.version, MIN(i.array), MIN(i.position), MIN(e.image_offset) FROM recalls r"
            " LEFT JOIN extents e USING (version) LEFT JOIN images i USING (image)"
            " WHERE r.state = 'queued' GROUP BY r.version ORDER BY 2, 3, 4, 1"
        )
        files = num_bytes = 0
        failed: list[tuple[int, str]] = []
        with progress.task("recall", len(rows)) as task:
            for version, *_ in rows:
                state, note = "done", ""
                try:
                    num_bytes += self._recaller.bring_back(version, interrupted)
                    files += 1
                except IntegrityError as error:
                    state, note = "failed", str(error)
                    failed.append((version, note))
                self._catalogue.run(
                    "UPDATE recalls SET state = ?, note = ? WHERE version = ?"
                    " AND state = 'queued'", state, note, version,
                )  # fmt: skip
                task.advance()
        self._store.keep_recalled()
        return RecallReport(files=files, bytes=num_bytes, failed=tuple(failed))


def which_discs(catalogue: Catalogue, versions: Sequence[int]) -> list[dict[str, Any]]:
    """Return the discs that reading some versions would need: label, slot, files, bytes.

    Versions that are in the buffer, or whose image is, need none. `good` false means that the
    disc is suspect or lost and its array would have to stand in for it.
    """
    wanted: dict[int, list[int]] = {}
    for version in versions:
        for image, length in catalogue.all(
            "SELECT e.image, e.length FROM extents e JOIN versions v USING (version)"
            " JOIN images i USING (image) WHERE version = ? AND v.resident = 0 AND i.buffered = 0",
            version,
        ):
            wanted.setdefault(image, []).append(length)
    rows = []
    for image, lengths in sorted(wanted.items()):
        label, array, slot, state = catalogue.one(
            "SELECT label, array, d.slot, d.state FROM images i LEFT JOIN discs d USING (image)"
            " WHERE i.image = ? ORDER BY d.state = 'good' DESC, d.burned_ns DESC LIMIT 1", image,
        ) or ("", 0, None, None)  # fmt: skip
        rows.append({
            "label": label, "array": array, "slot": slot, "good": state == "good",
            "num_files": len(lengths), "bytes": sum(lengths),
        })  # fmt: skip
    return rows
