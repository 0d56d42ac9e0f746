"""A simulated power cut: whatever nobody asked to be durable is gone; what was acknowledged is not.

`Disk` stands between the archive and the system's sync calls and keeps what each of them made
durable; `cut` then leaves exactly that: the synced content of synced names. SQLite's files are
taken as of the last sync of its log, since its own checkpoints are synced by itself.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tierwise.archive.store import Store
from tierwise.archive.vault import Archive
from tierwise.core.errors import TierwiseError

Make = Callable[..., Archive]


class PowerCutError(BaseException):
    """The lights went out."""


class Disk:
    """What would be on the platter of everything below a folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.shadow = root, {}  # type: Path, dict[Path, bytes]
        self.countdown: int | None = None
        self._real = {name: getattr(os, name) for name in ("fsync", "fdatasync")}
        monkeypatch.setattr(os, "fsync", self._fsync)
        monkeypatch.setattr(os, "fdatasync", self._fdatasync)
        monkeypatch.setattr(Store, "sync_all", lambda store: self.keep_all())

    def _fsync(self, descriptor: int) -> None:
        self._keep(Path(os.readlink(f"/proc/self/fd/{descriptor}")))  # noqa: PTH115
        self._tick()

    def _fdatasync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        if path.name.endswith("-wal"):
            for name in (path.name, path.name.removesuffix("-wal")):
                self._keep(path.with_name(name))
            self._keep(self.root / "metadata" / "foreparts.db")
            self._keep(self.root / "metadata" / "foreparts.db-wal")
        else:
            self._keep(path)
        self._tick()

    def _tick(self) -> None:
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown == 0:
                raise PowerCutError

    def _keep(self, path: Path) -> None:
        if path.is_file() and self.root in path.parents:
            self.shadow[path] = path.read_bytes()

    def keep_all(self) -> None:
        for path in self.root.rglob("*"):
            self._keep(path)

    def cut(self) -> None:
        """Leave only what was made durable. Renames of synced files keep their new names."""
        logs = [path for path in self.shadow if path.name.endswith("-wal")]
        for path in [*logs, *(found for found in self.root.rglob("*") if found.is_file())]:
            if "library" in path.parts:
                continue  # discs and their library have their own tests
            kept = self.shadow.get(path)
            renamed = kept is None and path.suffix in (".iso", ".toml")
            if renamed:
                continue  # written whole: synced under a temporary name, then renamed
            if kept is None:
                path.write_bytes(b"")
            else:
                path.write_bytes(kept)
        for shm in self.root.rglob("*-shm"):
            shm.unlink()


def durable(archive: Archive, path: str, data: bytes) -> None:
    archive.files.write_file(path, data)
    ino, fs, caller = archive.files.stat(path).inode, archive.fs, archive.files.caller
    handle = archive.files.wait(lambda: fs.open(ino, os.O_RDWR, caller)).handle
    fs.fsync(ino, handle, data_only=False)
    fs.release(ino, handle)


def abandon(archive: Archive) -> None:
    """Forget an archive as a dead process would: nothing is flushed, its locks go."""
    archive.catalogue._db.close()
    assert archive._namespace_lock is not None
    archive._namespace_lock.release()


@pytest.mark.parametrize("cut_at", [None, 1, 3, 6, 10, 15, 21, 28, 36, 45, 60])
def test_acknowledged_bytes_survive_a_power_cut(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, cut_at: int | None
) -> None:
    root = fast_path / "vault"
    archive = Archive.init(
        root, archive_id="0123456789abcdef" * 2, disc_size_bytes=2 << 20, data_discs=2,
        parity_discs=1, forepart_bytes=64, library_slots=60,
    )  # fmt: skip
    archive.close()
    disk = Disk(root, monkeypatch)
    disk.keep_all()
    archive = Archive.open(root)
    source, acknowledged = random.Random(2), {}
    for number in range(5):
        data = source.randbytes(source.randrange(1, 50_000))
        durable(archive, f"d/f{number}", data)
        acknowledged[f"d/f{number}"] = hashlib.sha256(data).hexdigest()
        archive.files.write_file(f"d/unsynced{number}", data)
    disk.countdown = cut_at
    try:
        archive.seal(partial=True)
        archive.burn(partial=True)
        archive.evict()
        archive.recall(["d"])
        archive.files.write_at("d/f1", b"changed", 0)  # copies f1, must not lose its rest
        durable(archive, "other", b"syncs the catalogue")
    except PowerCutError:
        pass
    disk.countdown = None
    abandon(archive)
    disk.cut()
    with Archive.open(root) as again:
        for path, digest in acknowledged.items():
            data = again.files.read_file(path)
            if path == "d/f1" and data[:7] == b"changed":
                continue
            assert hashlib.sha256(data).hexdigest() == digest, path
        again.seal(partial=True)
        again.burn(partial=True)
        again.evict()
        for path, digest in acknowledged.items():
            data = again.files.read_file(path)
            if not (path == "d/f1" and data[:7] == b"changed"):
                assert hashlib.sha256(data).hexdigest() == digest, path
    shutil.rmtree(root)


def test_a_file_nobody_synced_may_be_empty_but_is_no_error(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fast_path / "vault"
    Archive.init(
        root, archive_id="0123456789abcdef" * 2, disc_size_bytes=2 << 20, library_slots=60
    ).close()
    disk = Disk(root, monkeypatch)
    disk.keep_all()
    archive = Archive.open(root)
    archive.files.write_file("never synced", b"x" * 5000)
    durable(archive, "synced", b"y" * 5000)
    abandon(archive)
    disk.cut()
    with Archive.open(root) as again:
        assert again.files.read_file("synced") == b"y" * 5000
        assert again.files.read_file("never synced") in (b"", b"x" * 5000)
        assert again.fsck() == []
        with pytest.raises(TierwiseError):
            again.files.read_file("never there")
