"""The disk buffer: one file per resident version, named by number, and the heads of the rest.

```
buffer/files/4f/335      the whole content of version 335 (335 % 256 = 0x4f)
buffer/images/LABEL.iso  disc images until their array is burned
metadata/foreparts.db    the first bytes of versions that are only on disc
```

Departure from OLFS, whose buckets hold files under their full path: here the path lives in the
catalogue alone, so that a rename moves nothing, hard links cost nothing, and an unlinked open
file keeps its place. The full path is written when the bucket becomes an image. Left out: a
directory per bucket; which image a version goes to is decided when it is sealed (`bucket`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tierwise.archive.catalogue import Catalogue

_COPY_BYTES = 64 << 20


class Store:
    """The buffer of one archive.

    Args:
        root: The archive's root.
        catalogue: For the foreparts.
    """

    def __init__(self, root: Path, catalogue: Catalogue) -> None:
        self.files = root / "buffer" / "files"
        self.images = root / "buffer" / "images"
        self._catalogue = catalogue

    @staticmethod
    def make_folders(root: Path) -> None:
        """Make the buffer's folders for a new archive."""
        (root / "buffer" / "images").mkdir(parents=True, exist_ok=True)
        for number in range(256):
            (root / "buffer" / "files" / f"{number:02x}").mkdir(parents=True, exist_ok=True)

    def path(self, version: int) -> Path:
        """Return where a version's content is when it is resident."""
        return self.files / f"{version % 256:02x}" / str(version)

    def image_path(self, label: str) -> Path:
        """Return where an image is while it is in the buffer."""
        return self.images / f"{label}.iso"

    def create(self, version: int) -> int:
        """Make an empty file for a new version and return a descriptor to read and write it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.open(self.path(version), flags, 0o600)

    def open(self, version: int, *, write: bool) -> int:
        """Return a descriptor of a resident version."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        return os.open(self.path(version), flags)

    def copy(self, source_fd: int, target_fd: int) -> None:
        """Copy a whole file, sharing blocks where the disk can."""
        size = os.fstat(source_fd).st_size
        offset = 0
        while offset < size:
            try:
                done = os.copy_file_range(
                    source_fd, target_fd, min(size - offset, _COPY_BYTES), offset, offset
                )
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                done = os.pwrite(target_fd, os.pread(source_fd, 1 << 20, offset), offset)
            if done == 0:
                break
            offset += done

    @contextlib.contextmanager
    def filling(self, version: int) -> Iterator[Path]:
        """Yield a temporary path; on a clean exit it is the version's file, not yet durable."""
        temporary = self.path(version).with_suffix(f".{os.getpid()}.part")
        try:
            yield temporary
            temporary.replace(self.path(version))
        finally:
            temporary.unlink(missing_ok=True)

    def keep_recalled(self) -> None:
        """Make recalled copies durable, all at once; until then a restart drops them."""
        recalled = self._catalogue.all("SELECT version FROM versions WHERE resident = 2")
        if recalled:
            self.sync_all()
            self._catalogue.many(
                "UPDATE versions SET resident = 1 WHERE version = ? AND resident = 2", recalled
            )

    def drop_recalled(self) -> None:
        """Drop recalled copies that a crash may have torn; their bytes are on discs."""
        recalled = self._catalogue.all("SELECT version FROM versions WHERE resident = 2")
        for (version,) in recalled:
            self.remove(version)
        self._catalogue.run("UPDATE versions SET resident = 0 WHERE resident = 2")

    def remove(self, version: int) -> None:
        """Remove a version's resident file, if it is there."""
        self.path(version).unlink(missing_ok=True)

    def forget_versions(self, condition: str, *values: object) -> list[int]:
        """Delete versions from the catalogue; return them, for their files to be removed after.

        Args:
            condition: SQL over the columns of `versions`.
            values: Its parameters.
        """
        rows = self._catalogue.all(f"SELECT version FROM versions WHERE {condition}", *values)
        for table in ("versions", "extents", "recalls", "heads.foreparts"):
            self._catalogue.many(f"DELETE FROM {table} WHERE version = ?", rows)
        return [row[0] for row in rows]

    def prune_versions(self, kept: int) -> None:
        """Forget burned contents older than the last `kept` of a file; discs still have them."""
        with self._catalogue.transaction():
            gone = self.forget_versions(
                "state = 'burned' AND number <= -? + (SELECT MAX(number) FROM versions newer"
                " WHERE newer.ino = versions.ino)", kept,
            )  # fmt: skip
        for version in gone:
            self.remove(version)

    def sync_folder(self, version: int) -> None:
        """Make the directory entry of a version's file durable."""
        descriptor = os.open(self.path(version).parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_all(self) -> None:
        """Make everything in the buffer durable: one syncfs(2) of the disk it is on."""
        descriptor = os.open(self.files, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
        finally:
            os.close(descriptor)

    def keep_forepart(self, version: int, num_bytes: int) -> None:
        """Copy the head of a resident version to the metadata volume."""
        if num_bytes <= 0:
            return
        with self.path(version).open("rb") as stream:
            self.put_forepart(version, stream.read(num_bytes))

    def put_forepart(self, version: int, data: bytes) -> None:
        """Store the head of a version."""
        self._catalogue.run("INSERT OR REPLACE INTO heads.foreparts VALUES (?, ?)", version, data)

    def forepart(self, version: int) -> bytes:
        """Return the head of a version, b"" if none is kept."""
        found = self._catalogue.value("SELECT data FROM heads.foreparts WHERE version = ?", version)
        return b"" if found is None else bytes(found)

    def drop_forepart(self, version: int) -> None:
        """Forget the head of a version."""
        self._catalogue.run("DELETE FROM heads.foreparts WHERE version = ?", version)

    def free_bytes(self) -> int:
        """Return what the disk under the buffer has left."""
        found = os.statvfs(self.files)
        return found.f_bavail * found.f_frsize
