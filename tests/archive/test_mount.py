"""The archive under a real mount: what the kernel asks, the archive answers."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tierwise.archive.fuse import can_mount, mounted_process
from tierwise.archive.vault import Archive, mountable

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(can_mount() is not None, reason="no FUSE here"),
]


@pytest.fixture
def root(fast_path: Path) -> Path:
    folder = fast_path / "vault"
    Archive.init(
        folder, archive_id="0123456789abcdef" * 2, disc_size_bytes=2 << 20, data_discs=2,
        parity_discs=1, forepart_bytes=4096, library_slots=60,
    ).close()  # fmt: skip
    return folder


@pytest.fixture
def mountpoint(fast_path: Path) -> Iterator[Path]:
    folder = fast_path / "mnt"
    folder.mkdir()
    yield folder
    assert not folder.is_mount()


def put_away(root: Path) -> None:
    """Seal, burn and evict beside whatever is mounted."""
    with Archive.open(root, write=False) as archive:
        archive.seal(partial=True)
        archive.burn(partial=True)
        archive.evict()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_tree_goes_in_to_disc_and_comes_back(root: Path, mountpoint: Path) -> None:
    source = random.Random(1)
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        written = {}
        for number in range(20):
            path = mount.path / f"d{number % 3}" / f"f{number}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(source.randbytes(source.randrange(60_000)))
            written[path] = digest(path)
        assert os.getxattr(path, "user.tierwise.state") == b"resident"
        put_away(root)
        assert os.getxattr(path, "user.tierwise.state") == b"offline"
        assert b"TW_01234567_A0000" in os.getxattr(path, "user.tierwise.discs")
        assert {p: digest(p) for p in written} == written
        assert os.getxattr(path, "user.tierwise.state") == b"burned"
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        assert {p: digest(p) for p in written} == written


def test_inode_numbers_outlive_a_remount(root: Path, mountpoint: Path) -> None:
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        (mount.path / "a").mkdir()
        (mount.path / "a" / "b").write_text("x")
        before = [(mount.path / name).stat().st_ino for name in ("a", "a/b")]
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        assert [(mount.path / name).stat().st_ino for name in ("a", "a/b")] == before


def test_an_open_reader_sees_what_a_writer_changes_in_a_sealed_file(
    root: Path, mountpoint: Path
) -> None:
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        path = mount.path / "f"
        path.write_bytes(b"one two three")
        put_away(root)
        with path.open("rb", buffering=0) as reader:
            assert reader.read(3) == b"one"
            with path.open("r+b", buffering=0) as writer:
                writer.seek(4)
                writer.write(b"TWO")
            reader.seek(0)
            assert reader.read() == b"one TWO three"
        assert path.read_bytes() == b"one TWO three"
        assert os.getxattr(path, "user.tierwise.version") == b"2"


def test_an_unlinked_open_file_lives_until_it_is_closed(root: Path, mountpoint: Path) -> None:
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        path = mount.path / "f"
        path.write_bytes(b"still here")
        with path.open("r+b", buffering=0) as stream:
            path.unlink()
            put_away(root)
            assert stream.read() == b"still here"
            stream.write(b"!")
            assert os.fstat(stream.fileno()).st_nlink == 0
        assert list(mount.path.iterdir()) == []
    with Archive.open(root) as archive:
        assert archive.fsck() == []
        assert archive.catalogue.value("SELECT COUNT(*) FROM versions") == 0


def test_refused_recalls_give_the_head_and_no_more(root: Path, mountpoint: Path) -> None:
    with mounted_process(partial(mountable, root, wait_for_discs=False), mountpoint) as mount:
        path = mount.path / "f"
        path.write_bytes(b"x" * 100_000)
        put_away(root)
        with path.open("rb", buffering=0) as stream:
            assert stream.read(1000) == b"x" * 1000
            with pytest.raises(OSError, match=os.strerror(errno.EACCES)):
                os.pread(stream.fileno(), 10, 50_000)
        assert os.getxattr(path, "user.tierwise.state") == b"offline"


@pytest.mark.parametrize("refuse_offline", [False, True])
def test_policy_refuses_openings_that_would_need_a_disc(
    root: Path, mountpoint: Path, refuse_offline: bool
) -> None:
    factory = partial(mountable, root, wait_for_discs=False, refuse_offline=refuse_offline)
    with mounted_process(factory, mountpoint) as mount:
        path, empty = mount.path / "f", mount.path / "empty"
        path.write_bytes(b"x" * 100_000)
        empty.touch()
        put_away(root)
        with pytest.raises(PermissionError):
            path.open("r+b")
        if refuse_offline:
            with pytest.raises(PermissionError):
                path.open("rb")
        else:
            with path.open("rb", buffering=0) as stream:
                assert stream.read(1000) == b"x" * 1000
        assert path.stat().st_size == 100_000
        assert os.getxattr(path, "user.tierwise.state") == b"offline"
        assert empty.read_bytes() == b""
        path.write_bytes(b"new")  # all of the old bytes go: no disc is needed
        assert path.read_bytes() == b"new"


def mechanics(root: Path) -> tuple[str, str]:
    """Return all that the library's robot and drives have done, and its clock."""
    folder = root / "library"
    return (folder / "events.jsonl").read_text(), (folder / "state.json").read_text()


def put_discs_back(root: Path) -> None:
    """Let every tray stand in its roller, so that any byte from disc costs a move."""
    path = root / "library" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trays": {}}))


def test_a_forepart_is_read_at_once_and_moves_nothing(fast_path: Path, mountpoint: Path) -> None:
    """256 KiB of a file on disc, in reads of any size: the library's clock stands still."""
    root, data = fast_path / "v", random.Random(2).randbytes(700_000)
    Archive.init(
        root, archive_id="0123456789abcdef" * 2, disc_size_bytes=4 << 20, data_discs=2,
        parity_discs=1, library_slots=60,
    ).close()  # fmt: skip
    head = 256 << 10
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        path = mount.path / "film"
        path.write_bytes(data)
        put_away(root)
        put_discs_back(root)
        before = mechanics(root)
        for size in (head, 65_536, 4096, 1000):
            with path.open("rb", buffering=0) as stream:
                found = b"".join(
                    os.pread(stream.fileno(), min(size, head - at), at)
                    for at in range(0, head, size)
                )
            assert found == data[:head], size
        assert path.stat().st_size == len(data)
        assert mechanics(root) == before
        assert os.getxattr(path, "user.tierwise.state") == b"offline"
        with path.open("rb", buffering=0) as stream:
            assert os.pread(stream.fileno(), 10, head) == data[head : head + 10]
        assert '"separate discs"' in mechanics(root)[0].removeprefix(before[0])
        assert path.read_bytes() == data


def read_as(uid: int, path: Path, offset: int, length: int) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["dd", f"if={path}", "bs=4096", "iflag=skip_bytes,count_bytes", f"skip={offset}",
         f"count={length}", "status=none"],
        capture_output=True, check=False, user=uid, group=uid, extra_groups=[],
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
    )  # fmt: skip


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("refuse_offline", [False, True])
def test_one_user_is_refused_and_another_waits(
    fast_path: Path, root: Path, mountpoint: Path, refuse_offline: bool
) -> None:
    """`--refuse-uid`, alone (the head may be read) and with `--recall refuse` (nothing may)."""
    fast_path.chmod(0o755)
    factory = partial(mountable, root, refuse_uids=(3001,), refuse_offline=refuse_offline)
    with mounted_process(factory, mountpoint) as mount:
        path = mount.path / "f"
        path.write_bytes(b"x" * 100_000)
        path.chmod(0o644)
        put_away(root)
        put_discs_back(root)
        before = mechanics(root)
        head = read_as(3001, path, 0, 4096)
        assert (head.returncode, head.stdout) == ((1, b"") if refuse_offline else (0, b"x" * 4096))
        beyond = read_as(3001, path, 50_000, 10)
        assert (beyond.returncode, beyond.stdout) == (1, b"")
        assert b"Permission denied" in beyond.stderr
        assert mechanics(root) == before
        assert os.getxattr(path, "user.tierwise.state") == b"offline"
        waited = read_as(3002, path, 50_000, 10)
        assert (waited.returncode, waited.stdout) == (0, b"x" * 10)
        assert mechanics(root) != before
        again = read_as(3001, path, 50_000, 10)  # it is in the buffer now: nothing to wait for
        assert (again.returncode, again.stdout) == (0, b"x" * 10)


def test_offline_files_are_not_mistaken_for_holes(root: Path, mountpoint: Path) -> None:
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        path = mount.path / "f"
        path.write_bytes(b"x" * 100_000)
        put_away(root)
        info = path.stat()
        assert info.st_blocks == -(-info.st_size // 512)
        with path.open("rb") as stream:
            assert os.lseek(stream.fileno(), 0, os.SEEK_HOLE) == 100_000


def test_mmap_random_writes_and_truncates_match_a_plain_file(
    root: Path, mountpoint: Path, tmp_path: Path
) -> None:
    source = random.Random(4)
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        pair = (tmp_path / "plain", mount.path / "ours")
        for path in pair:
            path.write_bytes(b"\0" * 20_000)
        for step in range(120):
            if step % 30 == 29:
                put_away(root)
            offset, length = source.randrange(30_000), source.randrange(1, 3000)
            data, what = source.randbytes(length), source.randrange(4)
            for path in pair:
                with path.open("r+b", buffering=0) as stream:
                    size = path.stat().st_size
                    if what == 0:
                        os.truncate(path, offset)
                    elif what == 1 and size > 0:
                        with mmap.mmap(stream.fileno(), size) as view:
                            at = offset % size
                            view[at : at + length] = data[: len(view[at : at + length])]
                    else:
                        os.pwrite(stream.fileno(), data, offset)
            assert pair[0].read_bytes() == pair[1].read_bytes(), step


def test_names_nobody_expects(root: Path, mountpoint: Path) -> None:
    names = [b"x" * 255, b"\xff\xfe", b"new\nline", b"-rf", b"Case", b"case", "é".encode(), b"%41"]
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        base = os.fsencode(mount.path)
        for name in names:
            Path(os.fsdecode(base + b"/" + name)).write_bytes(name)
        with pytest.raises(OSError, match=os.strerror(errno.ENAMETOOLONG)):
            (mount.path / ("y" * 256)).write_bytes(b"")
        put_away(root)
        assert sorted(os.listdir(base)) == sorted(names)  # noqa: PTH208 - bytes
        for name in names:
            assert Path(os.fsdecode(base + b"/" + name)).read_bytes() == name
    shutil.rmtree(root / "metadata")
    Archive.rebuild(root)
    with Archive.open(root) as archive:
        assert sorted(path for path, _ in archive.files.walk()) == sorted(names)
        assert all(archive.files.read_file(name) == name for name in names)


def test_the_room_there_is_is_told_truly(root: Path, mountpoint: Path) -> None:
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        info = os.statvfs(mount.path)
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        assert abs(info.f_bavail * info.f_frsize - free) < free / 10
        assert info.f_namemax == 255


def test_one_program_is_refused_and_another_waits(root: Path, mountpoint: Path) -> None:
    factory = partial(mountable, root, refuse_programs=("tail",))
    with mounted_process(factory, mountpoint) as mount:
        (mount.path / "f").write_bytes(b"x" * 100_000)
        put_away(root)
        refused = subprocess.run(
            ["tail", "-c", "5", mount.path / "f"], capture_output=True, check=False
        )
        assert refused.returncode != 0
        assert (mount.path / "f").read_bytes() == b"x" * 100_000
        allowed = subprocess.run(
            ["tail", "-c", "5", mount.path / "f"], capture_output=True, check=True
        )
        assert allowed.stdout == b"xxxxx"


def test_a_limited_buffer_says_no_space_under_a_mount(fast_path: Path, mountpoint: Path) -> None:
    root = fast_path / "small"
    Archive.init(
        root, archive_id="0123456789abcdef" * 2, disc_size_bytes=2 << 20, data_discs=2,
        parity_discs=1, library_slots=60, buffer_size_bytes=400_000,
    ).close()  # fmt: skip
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        (mount.path / "kept").write_bytes(b"k" * 300_000)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (mount.path / "too much").write_bytes(b"t" * 300_000)
        assert (mount.path / "kept").read_bytes() == b"k" * 300_000
        (mount.path / "too much").unlink()
        put_away(root)
        (mount.path / "more").write_bytes(b"m" * 300_000)
        assert (mount.path / "kept").stat().st_size == 300_000
