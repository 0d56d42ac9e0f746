"""The archive on a mount while other processes seal, burn and evict it: nobody notices."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tierwise.archive.fuse import mounted_process
from tierwise.archive.vault import Archive, mountable
from tierwise.core.errors import StateError

MIB = 1 << 20


class Vault:
    """A small archive, its mount, and the verbs another process would run."""

    def __init__(self, base: Path) -> None:
        self.root, self.path = base / "vault", base / "mount"
        self.path.mkdir()
        self.pid = 0
        Archive.init(
            self.root,
            archive_id="a" * 32,
            disc_size_bytes=2 * MIB,
            data_discs=2,
            parity_discs=1,
            forepart_bytes=4096,
            library_slots=60,
        ).close()

    def seal(self) -> None:
        with Archive.open(self.root, write=False) as archive:
            archive.seal(partial=True)

    def put_away(self) -> int:
        """Seal, burn and evict everything; return how many files lost their buffer copy."""
        with Archive.open(self.root, write=False) as archive:
            archive.seal(partial=True)
            archive.burn(partial=True)
            return archive.evict().files

    def destroy_a_data_disc(self) -> None:
        with Archive.open(self.root, write=False) as archive:
            found = archive.catalogue.all(
                "SELECT slot FROM discs JOIN images USING (image) WHERE kind = 'data'"
                " AND slot IS NOT NULL ORDER BY slot"
            )
            archive.shelf.destroy(found[0][0])

    def fill(self, num_files: int, seed: int = 1) -> dict[str, str]:
        """Write files through the mount and return their hashes."""
        source = random.Random(seed)
        hashes = {}
        for number in range(num_files):
            path = self.path / f"d{number % 3}" / f"f{number:03d}"
            path.parent.mkdir(exist_ok=True)
            data = source.randbytes(source.randrange(1, 200_000))
            path.write_bytes(data)
            hashes[str(path.relative_to(self.path))] = hashlib.sha256(data).hexdigest()
        return hashes

    def hashes(self, names: list[str]) -> dict[str, str]:
        return {name: hashlib.sha256((self.path / name).read_bytes()).hexdigest() for name in names}


@pytest.fixture
def vault() -> Iterator[Vault]:
    base = Path(tempfile.mkdtemp(prefix="tierwise-vault-"))
    made = Vault(base)
    with mounted_process(partial(mountable, made.root), made.path) as mount:
        made.pid = mount.pid
        yield made
    shutil.rmtree(base)


def test_every_byte_comes_back_from_disc_through_the_mount(vault: Vault) -> None:
    hashes = vault.fill(25)
    assert vault.put_away() == 25
    assert os.getxattr(vault.path / "d0/f000", "user.tierwise.state") == b"offline"
    assert (vault.path / "d0/f000").stat().st_blocks > 0, "tar --sparse would archive zeros"
    assert vault.hashes(list(hashes)) == hashes


def test_a_lost_disc_is_not_noticed(vault: Vault) -> None:
    hashes = vault.fill(25)
    vault.put_away()
    vault.destroy_a_data_disc()
    assert vault.hashes(list(hashes)) == hashes


def test_the_head_of_an_offline_file_needs_no_disc(vault: Vault) -> None:
    data = random.Random(3).randbytes(300_000)
    (vault.path / "film").write_bytes(data)
    vault.put_away()
    descriptor = os.open(vault.path / "film", os.O_RDONLY)
    assert os.pread(descriptor, 4096, 0) == data[:4096]
    assert os.getxattr(vault.path / "film", "user.tierwise.state") == b"offline"
    assert os.pread(descriptor, 4096, 200_000) == data[200_000:204_096]
    os.close(descriptor)
    assert os.getxattr(vault.path / "film", "user.tierwise.state") == b"burned"


@pytest.mark.parametrize("away", ["seal", "put_away"])
def test_a_file_may_be_written_while_somebody_reads_what_was_put_away(
    vault: Vault, away: str
) -> None:
    path = vault.path / "file"
    path.write_bytes(b"first " * 20_000)
    getattr(vault, away)()
    with path.open("rb", buffering=0) as reader:
        assert reader.read(6) == b"first "
        with path.open("r+b", buffering=0) as writer:
            writer.write(b"SECOND")
            assert os.pread(reader.fileno(), 12, 0) == b"SECONDfirst "
            assert os.fstat(reader.fileno()).st_size == 120_000
        assert os.pread(reader.fileno(), 6, 0) == b"SECOND"
    assert path.read_bytes() == b"SECOND" + b"first " * 19_999


def test_sealing_under_an_open_reader_keeps_the_file_writable(vault: Vault) -> None:
    path = vault.path / "file"
    path.write_bytes(b"first " * 20_000)
    with path.open("rb", buffering=0) as reader:
        assert reader.read(6) == b"first "
        vault.seal()
        with path.open("r+b", buffering=0) as writer:
            writer.write(b"SECOND")
        assert os.pread(reader.fileno(), 12, 0) == b"SECONDfirst "
    assert path.read_bytes() == b"SECOND" + b"first " * 19_999


def test_a_reader_older_than_two_versions_holds_up_nobody(vault: Vault) -> None:
    path = vault.path / "file"
    path.write_bytes(b"first " * 20_000)
    vault.put_away()
    with path.open("rb", buffering=0) as oldest:
        assert oldest.read(6) == b"first "
        with path.open("r+b", buffering=0) as writer:
            writer.write(b"SECOND")
        vault.put_away()
        with path.open("rb", buffering=0) as reader:
            assert reader.read(12) == b"SECONDfirst "
        with path.open("r+b", buffering=0) as writer:
            writer.write(b"third ")
            assert os.pread(oldest.fileno(), 12, 0) == b"third first "
        vault.put_away()
        assert path.read_bytes() == b"third " + b"first " * 19_999
    vault.put_away()
    assert path.read_bytes() == b"third " + b"first " * 19_999


def test_putting_away_under_an_open_writer_loses_nothing(vault: Vault) -> None:
    path = vault.path / "file"
    with path.open("wb", buffering=0) as writer:
        writer.write(b"before ")
        vault.put_away()
        writer.write(b"after")
        assert path.read_bytes() == b"before after"
    vault.put_away()
    assert path.read_bytes() == b"before after"


def test_an_open_reader_keeps_its_bytes_when_all_is_put_away(vault: Vault) -> None:
    data = random.Random(4).randbytes(500_000)
    (vault.path / "file").write_bytes(data)
    with (vault.path / "file").open("rb") as reader:
        vault.put_away()
        assert reader.read() == data
    assert (vault.path / "file").read_bytes() == data


def test_names_and_attributes_of_offline_files_change_without_a_disc(vault: Vault) -> None:
    hashes = vault.fill(6)
    vault.put_away()
    (vault.path / "d0").rename(vault.path / "renamed")
    path = vault.path / "renamed" / "f000"
    path.chmod(0o600)
    (vault.path / "second name").hardlink_to(path)
    os.setxattr(path, "user.note", b"n")
    assert os.getxattr(path, "user.tierwise.state") == b"offline"
    path.unlink()
    found = hashlib.sha256((vault.path / "second name").read_bytes()).hexdigest()
    assert found == hashes["d0/f000"]
    assert (vault.path / "second name").stat().st_mode & 0o777 == 0o600


def test_truncating_an_offline_file_needs_no_disc(vault: Vault) -> None:
    (vault.path / "file").write_bytes(b"x" * 300_000)
    vault.put_away()
    (vault.path / "file").write_bytes(b"new")
    assert (vault.path / "file").read_bytes() == b"new"


def test_inode_numbers_and_all_else_survive_a_remount(vault: Vault) -> None:
    hashes = vault.fill(10)
    before = {name: (vault.path / name).stat() for name in hashes}
    vault.put_away()
    base = vault.root.parent
    (base / "again").mkdir()
    with pytest.raises(StateError), mounted_process(partial(mountable, vault.root), base / "again"):
        pytest.fail("an archive was mounted twice")
    subprocess.run(["umount", vault.path], check=True)
    time.sleep(0.5)
    with mounted_process(partial(mountable, vault.root), base / "again") as mount:
        for name, old in before.items():
            new = (mount.path / name).stat()
            assert (new.st_ino, new.st_size, new.st_mtime_ns, new.st_mode) == (
                old.st_ino,
                old.st_size,
                old.st_mtime_ns,
                old.st_mode,
            )


def test_a_killed_mount_keeps_what_was_synced(vault: Vault) -> None:
    descriptor = os.open(vault.path / "synced", os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(descriptor, b"acknowledged")
    os.fsync(descriptor)
    os.kill(vault.pid, signal.SIGKILL)
    time.sleep(0.2)
    with contextlib.suppress(OSError):
        os.close(descriptor)
    with mounted_process(partial(mountable, vault.root), vault.path):
        assert (vault.path / "synced").read_bytes() == b"acknowledged"
