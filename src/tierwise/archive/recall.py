"""Bringing versions back from disc: read by extents, checked by hash, rebuilt when a disc fails.

The source of a piece is, in this order: the image if it is still in the buffer; its disc; the
image rebuilt from the rest of its array. A version becomes resident whole, under a temporary name
until its hash is right, so no reader ever sees bytes that are not what was written.

Left out: the queue (`requests`), and handing out parts of a file while the rest is still read;
the forepart does that job.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, RLock
from typing import TYPE_CHECKING, BinaryIO

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.library import acquired, enter_disc, is_disc_fault
from tierwise.archive.mend import Mender
from tierwise.archive.namespace import fail
from tierwise.archive.shelf import Shelf
from tierwise.archive.store import Store
from tierwise.core.errors import IntegrityError, MissingFileError, TierwiseError

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

_CHUNK_BYTES = 1 << 20
Read = Callable[[int, int], bytes]  # (offset, length) -> bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extent:
    image: int
    label: str
    buffered: bool
    offset: int
    length: int
    sha256: str


class Recaller:
    """Recalls versions of one archive.

    Args:
        catalogue: The open catalogue.
        store: The buffer.
        shelf: The disc library.
        mender: Rebuilds images.
    """

    def __init__(self, catalogue: Catalogue, store: Store, shelf: Shelf, mender: Mender) -> None:
        self._catalogue, self._store, self._shelf, self._mender = catalogue, store, shelf, mender
        self._lock = RLock()

    def recall_version(self, version: int, interrupted: Event) -> None:
        """Make a version resident, for the file system: only `OSError` leaves.

        EIO says that the bytes are beyond repair, EINTR that the wait was broken off.
        """
        try:
            self.bring_back(version, interrupted)
        except OSError as error:
            if error.errno is None:
                self._log_failure(version, error)
                fail(errno.EIO)
            raise
        except TierwiseError as error:
            self._log_failure(version, error)
            fail(errno.EIO)

    def _log_failure(self, version: int, error: Exception) -> None:
        self._catalogue.event("recovery", f"version {version}", "failure", str(error))

    def bring_back(self, version: int, interrupted: Event | None = None) -> int:
        """Make a version resident; return its size.

        Raises:
            IntegrityError: Its bytes are beyond repair; the message names file and discs.
        """
        interrupted = interrupted or Event()
        with acquired(self._lock, interrupted):
            row = self._catalogue.one(
                "SELECT size, sha256, resident FROM versions WHERE version = ?", version
            )
            if row is None:
                raise MissingFileError(f"no version {version}")
            size, sha256, resident = row
            if resident and self._store.path(version).exists():
                return int(size)
            with self._store.filling(version) as target:
                self._fill(version, target, sha256, interrupted)
            self._catalogue.run(
                "UPDATE versions SET resident = 2, used_ns = ? WHERE version = ?",
                self._catalogue.clock(), version,
            )  # fmt: skip
            return int(size)

    def _fill(self, version: int, target: Path, sha256: str, interrupted: Event) -> None:
        whole = hashlib.sha256()
        with target.open("wb") as stream:
            for extent in self._extents(version):
                whole = self._append(extent, stream, whole, interrupted)
        if whole.hexdigest() != sha256:
            raise IntegrityError(
                f"version {version} came back with another hash than it was written with",
                hint="run: tierwise archive scrub",
            )

    def _extents(self, version: int) -> list[_Extent]:
        rows = self._catalogue.all(
            "SELECT image, label, buffered, image_offset, length, e.sha256"
            " FROM extents e JOIN images USING (image) WHERE version = ? ORDER BY file_offset",
            version,
        )
        return [
            _Extent(
                image=image, label=label, buffered=bool(buffered), offset=offset, length=length,
                sha256=sha256,
            )
            for image, label, buffered, offset, length, sha256 in rows
        ]  # fmt: skip

    def _append(self, extent: _Extent, stream: BinaryIO, whole: Hash, interrupted: Event) -> Hash:
        """Append one extent's bytes from wherever they are right; return the hash so far."""
        if extent.length == 0:
            return whole
        with closing(self._sources(extent, interrupted)) as sources:
            for source in sources:
                with ExitStack() as stack:
                    read = enter_disc(stack, source)
                    found = read and self._copy(extent, stream, whole, read, interrupted)
                if found:
                    return found
        raise IntegrityError(f"{extent.label} is beyond repair at byte {extent.offset}")

    def _sources(
        self, extent: _Extent, interrupted: Event
    ) -> Generator[AbstractContextManager[Read]]:
        """Yield ways to read an extent, the cheapest first; going on says the last was wrong."""
        image_path = self._store.image_path(extent.label)
        if image_path.exists():
            yield nullcontext(partial(_pread, image_path))
        with self._shelf.turn(interrupted):
            for slot in self._mender.slots_of(extent.image):
                yield self._shelf.reading(slot)
                self._mender.suspect(slot, extent.label, f"reading at byte {extent.offset}")
            for slot in self._mender.strays_of(extent.image):
                yield self._shelf.reading(slot)
            self._mender.rebuild_image(extent.image)
            yield nullcontext(partial(_pread, image_path))

    def _copy(
        self, extent: _Extent, stream: BinaryIO, whole: Hash, read: Read, interrupted: Event
    ) -> Hash | None:
        """Append an extent; when its bytes are wrong or missing, take it back and return None."""
        start, done = stream.tell(), 0
        digest, whole = hashlib.sha256(), whole.copy()
        while done < extent.length:
            if interrupted.is_set():
                fail(errno.EINTR)
            try:
                chunk = read(extent.offset + done, min(_CHUNK_BYTES, extent.length - done))
            except (TierwiseError, OSError) as error:
                if not is_disc_fault(error):
                    raise
                chunk = b""  # another source is tried
            if not chunk:
                break
            digest.update(chunk)
            whole.update(chunk)
            stream.write(chunk)
            done += len(chunk)
        if digest.hexdigest() == extent.sha256:
            return whole
        stream.seek(start)
        stream.truncate()
        return None


def _pread(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)
