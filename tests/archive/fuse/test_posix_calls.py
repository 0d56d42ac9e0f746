"""POSIX, call by call, on a real mount; each test runs on every way of input and output."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tierwise.archive.fuse import system
from tierwise.archive.operations import RenameFlags

AWKWARD_NAMES = [
    b"n" * 255,
    b"\xff\xfe not utf-8 \x80",
    b"new\nline",
    b"-rf",
    b" ",
    "größe".encode(),
    b"Case",
    b"case",
    b"back\\slash",
    b"\x01\x7f",
]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def errno_of(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


def rename_with(folder: Path, old: str, new: str, flags: RenameFlags) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        system.rename(descriptor, old.encode(), descriptor, new.encode(), flags)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_a_name_may_be_any_bytes(folder: Path, name: bytes) -> None:
    path = folder / os.fsdecode(name)
    path.write_bytes(name)
    assert [os.fsencode(found) for found in names(folder)] == [name]
    assert path.read_bytes() == name
    path.unlink()
    assert names(folder) == []


def test_case_makes_two_names(folder: Path) -> None:
    (folder / "A").write_text("upper")
    (folder / "a").write_text("lower")
    assert (folder / "A").read_text() == "upper"
    assert names(folder) == ["A", "a"]


def test_a_name_of_256_bytes_is_too_long(folder: Path) -> None:
    too_long = folder / ("n" * 256)
    assert errno_of(too_long.mkdir) == errno.ENAMETOOLONG
    assert errno_of(lambda: (folder / "link").symlink_to("x" * 5000)) == errno.ENAMETOOLONG


def test_a_long_symlink_target_comes_back(folder: Path) -> None:
    target = "/".join(["t" * 200] * 20)
    (folder / "link").symlink_to(target)
    assert str((folder / "link").readlink()) == target
    assert (folder / "link").lstat().st_size == len(target)
    assert not (folder / "link").exists()


def test_hard_links_share_one_inode(folder: Path) -> None:
    (folder / "first").write_text("one")
    (folder / "second").hardlink_to(folder / "first")
    assert (folder / "first").stat().st_ino == (folder / "second").stat().st_ino
    assert (folder / "first").stat().st_nlink == 2
    with (folder / "second").open("a") as stream:
        stream.write(" two")
    assert (folder / "first").read_text() == "one two"
    (folder / "first").unlink()
    assert (folder / "second").stat().st_nlink == 1
    assert (folder / "second").read_text() == "one two"


def test_directories_count_their_subdirectories(folder: Path) -> None:
    assert folder.stat().st_nlink == 2
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    assert folder.stat().st_nlink == 4
    (folder / "a").rename(folder / "b" / "a")
    assert folder.stat().st_nlink == 3
    assert (folder / "b").stat().st_nlink == 3


def test_an_unlinked_file_lives_while_open(folder: Path) -> None:
    path = folder / "gone"
    with path.open("w+b") as stream:
        stream.write(b"still here")
        stream.flush()
        path.unlink()
        assert names(folder) == []
        assert os.fstat(stream.fileno()).st_nlink == 0
        stream.write(b", and growing")
        stream.seek(0)
        assert stream.read() == b"still here, and growing"
    assert not path.exists()


def test_a_replaced_file_lives_while_open(folder: Path) -> None:
    (folder / "old").write_text("old")
    (folder / "new").write_text("new")
    with (folder / "old").open() as stream:
        (folder / "new").rename(folder / "old")
        assert stream.read() == "old"
    assert (folder / "old").read_text() == "new"


def test_rename_flags(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "d").mkdir()
    (folder / "d" / "inside").write_text("i")
    refused = errno_of(lambda: rename_with(folder, "a", "d", RenameFlags.NO_REPLACE))
    assert refused == errno.EEXIST
    rename_with(folder, "a", "d", RenameFlags.EXCHANGE)
    assert (folder / "a" / "inside").read_text() == "i"
    assert (folder / "d").read_text() == "a"
    absent = errno_of(lambda: rename_with(folder, "a", "none", RenameFlags.EXCHANGE))
    assert absent == errno.ENOENT
    rename_with(folder, "d", "e", RenameFlags.NO_REPLACE)
    assert names(folder) == ["a", "e"]


def test_rename_errors(folder: Path) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "x").write_text("")
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    assert errno_of(lambda: (folder / "empty").rename(folder / "full")) == errno.ENOTEMPTY
    assert errno_of(lambda: (folder / "file").rename(folder / "full")) == errno.EISDIR
    assert errno_of(lambda: (folder / "full").rename(folder / "file")) == errno.ENOTDIR
    assert errno_of(lambda: (folder / "full").rename(folder / "full" / "y")) == errno.EINVAL
    assert errno_of(lambda: (folder / "none").rename(folder / "z")) == errno.ENOENT
    (folder / "full").rename(folder / "empty")
    assert names(folder) == ["empty", "file"]


def test_the_usual_refusals(folder: Path) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "x").write_text("")
    assert errno_of((folder / "d").rmdir) == errno.ENOTEMPTY
    assert errno_of((folder / "d").mkdir) == errno.EEXIST
    assert errno_of((folder / "d" / "x").rmdir) == errno.ENOTDIR
    assert errno_of((folder / "d").unlink) == errno.EISDIR
    assert errno_of((folder / "d" / "x" / "y").stat) == errno.ENOTDIR
    assert errno_of((folder / "none").stat) == errno.ENOENT
    assert errno_of(lambda: os.open(folder / "d", os.O_WRONLY)) == errno.EISDIR
    assert errno_of(lambda: (folder / "d2").hardlink_to(folder / "d")) == errno.EPERM
    exclusive = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    assert errno_of(lambda: os.open(folder / "d" / "x", exclusive)) == errno.EEXIST


def test_an_absent_name_can_be_made_and_made_again(folder: Path) -> None:
    for round_ in range(3):
        assert not (folder / "x").exists()
        (folder / "x").write_text(str(round_))
        assert (folder / "x").read_text() == str(round_)
        (folder / "x").unlink()


def test_append_writes_at_the_end_whoever_wrote_before(folder: Path) -> None:
    path = folder / "log"
    first = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    second = os.open(path, os.O_WRONLY | os.O_APPEND)
    for number in range(20):
        os.write(first, b"a%d " % number)
        os.write(second, b"b%d " % number)
    os.close(first)
    os.close(second)
    assert path.read_bytes() == b"".join(b"a%d b%d " % (n, n) for n in range(20))


def test_truncation_both_ways(folder: Path) -> None:
    path = folder / "t"
    path.write_bytes(b"0123456789")
    os.truncate(path, 4)
    assert path.read_bytes() == b"0123"
    os.truncate(path, 8)
    assert path.read_bytes() == b"0123\0\0\0\0"
    with path.open("r+b") as stream:
        os.ftruncate(stream.fileno(), 2)
        assert os.fstat(stream.fileno()).st_size == 2
        assert stream.read() == b"01"
    path.open("w").close()
    assert path.stat().st_size == 0


def test_size_and_times_are_right_while_a_file_is_written(folder: Path) -> None:
    path = folder / "grows"
    with path.open("wb", buffering=0) as stream:
        for number in range(1, 6):
            stream.write(b"x" * 1000)
            assert path.stat().st_size == 1000 * number
    before = path.stat().st_mtime_ns
    with path.open("r+b", buffering=0) as stream:
        stream.write(b"y")
    assert path.stat().st_mtime_ns >= before


def test_a_write_through_a_memory_map_shows_in_mtime(folder: Path) -> None:
    path = folder / "mapped"
    path.write_bytes(bytes(10_000))
    os.utime(path, ns=(1, 1))
    assert path.stat().st_mtime_ns == 1
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as view:
        view[5000] = 1
        view.flush()
    assert path.stat().st_mtime_ns > 1
    assert path.read_bytes()[5000] == 1


def test_utime_to_the_nanosecond_also_before_1970(folder: Path) -> None:
    path = folder / "t"
    path.write_text("")
    for times in [(1_500_000_000_123_456_789, 1_600_000_000_987_654_321), (-5_000_000_001, -1)]:
        os.utime(path, ns=times)
        assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == times
    (folder / "l").symlink_to("t")
    os.utime(folder / "l", ns=(1, 2), follow_symlinks=False)
    assert (folder / "l").lstat().st_mtime_ns == 2
    assert path.stat().st_mtime_ns == -1


def test_extended_attributes(folder: Path) -> None:
    path = folder / "x"
    path.write_text("")
    os.setxattr(path, "user.one", b"1")
    os.setxattr(path, "user.empty", b"")
    os.setxattr(path, "user.big", b"b" * 2000)
    assert sorted(os.listxattr(path)) == ["user.big", "user.empty", "user.one"]
    assert os.getxattr(path, "user.big") == b"b" * 2000
    assert os.getxattr(path, "user.empty") == b""
    exists = errno_of(lambda: os.setxattr(path, "user.one", b"2", os.XATTR_CREATE))
    assert exists == errno.EEXIST
    absent = errno_of(lambda: os.setxattr(path, "user.two", b"2", os.XATTR_REPLACE))
    assert absent == errno.ENODATA
    os.setxattr(path, "user.one", b"longer", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.one") == b"longer"
    os.removexattr(path, "user.one")
    assert errno_of(lambda: os.getxattr(path, "user.one")) == errno.ENODATA
    assert errno_of(lambda: os.removexattr(path, "user.one")) == errno.ENODATA


def test_a_sparse_file_stays_sparse_and_whole(folder: Path) -> None:
    path = folder / "sparse"
    with path.open("wb") as stream:
        stream.seek(8 << 20)
        stream.write(b"data")
        stream.truncate(16 << 20)
    descriptor = os.open(path, os.O_RDONLY)
    start = os.lseek(descriptor, 0, os.SEEK_DATA)
    assert 0 < start <= 8 << 20
    assert os.pread(descriptor, 4, 8 << 20) == b"data"
    assert os.lseek(descriptor, start, os.SEEK_HOLE) > 8 << 20
    past_data = errno_of(lambda: os.lseek(descriptor, 15 << 20, os.SEEK_DATA))
    assert past_data == errno.ENXIO
    assert os.pread(descriptor, 100, 1 << 20) == bytes(100)
    os.close(descriptor)
    assert path.stat().st_size == 16 << 20


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
def test_tar_sparse_archives_every_byte(folder: Path, tmp_path: Path) -> None:
    path = folder / "sparse"
    with path.open("wb") as stream:
        stream.seek(3 << 20)
        stream.write(os.urandom(100_000))
        stream.truncate(5 << 20)
    subprocess.run(
        ["tar", "--sparse", "-cf", tmp_path / "a.tar", "-C", folder, "sparse"], check=True
    )
    with tarfile.open(tmp_path / "a.tar") as tar:
        member = tar.extractfile("sparse")
        assert member is not None
        assert member.read() == path.read_bytes()


def test_fallocate_extends_punches_and_keeps_size(folder: Path) -> None:
    descriptor = os.open(folder / "f", os.O_CREAT | os.O_RDWR, 0o644)
    os.posix_fallocate(descriptor, 0, 100_000)
    assert os.fstat(descriptor).st_size == 100_000
    os.pwrite(descriptor, b"z" * 100_000, 0)
    keep_size, punch = 1, 2
    system.fallocate(descriptor, keep_size | punch, 4096, 8192)
    assert os.pread(descriptor, 100_000, 0) == b"z" * 4096 + bytes(8192) + b"z" * 87_712
    system.fallocate(descriptor, keep_size, 0, 1 << 20)
    assert os.fstat(descriptor).st_size == 100_000
    os.close(descriptor)


def test_copy_file_range(folder: Path) -> None:
    data = os.urandom(3_000_000)
    (folder / "source").write_bytes(data)
    source = os.open(folder / "source", os.O_RDONLY)
    target = os.open(folder / "target", os.O_CREAT | os.O_RDWR, 0o644)
    os.pwrite(target, b"head", 0)
    assert os.pread(target, 10, 0) == b"head"
    copied = 0
    while copied < len(data):
        step = os.copy_file_range(source, target, len(data) - copied, copied, 4 + copied)
        assert step > 0
        copied += step
    assert os.fstat(target).st_size == len(data) + 4
    assert os.pread(target, len(data) + 10, 0) == b"head" + data
    os.close(source)
    os.close(target)
    assert (folder / "target").read_bytes() == b"head" + data


def test_a_temporary_file_has_no_name_until_it_is_linked(folder: Path) -> None:
    descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o640)
    os.write(descriptor, b"nameless")
    assert names(folder) == []
    assert os.fstat(descriptor).st_nlink == 0
    directory = os.open(folder, os.O_RDONLY)
    os.link(f"/proc/self/fd/{descriptor}", "named", dst_dir_fd=directory, follow_symlinks=True)
    os.close(directory)
    os.close(descriptor)
    assert (folder / "named").read_bytes() == b"nameless"
    assert stat.S_IMODE((folder / "named").stat().st_mode) == 0o640


def test_fifos_and_sockets(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    assert stat.S_ISFIFO((folder / "fifo").stat().st_mode)
    reader = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(folder / "fifo", os.O_WRONLY)
    os.write(writer, b"through")
    assert os.read(reader, 10) == b"through"
    os.close(reader)
    os.close(writer)
    with socket.socket(socket.AF_UNIX) as listener:
        directory = os.open(folder, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{directory}/s")
        os.close(directory)
    assert stat.S_ISSOCK((folder / "s").stat().st_mode)


LOCKER = """
import fcntl, sys
stream = open(sys.argv[1], "r+")
lock = fcntl.flock if sys.argv[2] == "flock" else fcntl.lockf
try:
    lock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_locks_hold_between_processes(folder: Path, kind: str) -> None:
    path = folder / "locked"
    path.write_text("")
    lock = fcntl.flock if kind == "flock" else fcntl.lockf
    with path.open("r+") as stream:
        lock(stream, fcntl.LOCK_EX)
        other = subprocess.run([sys.executable, "-c", LOCKER, path, kind], check=False)
        assert other.returncode == 7
        lock(stream, fcntl.LOCK_UN)
        other = subprocess.run([sys.executable, "-c", LOCKER, path, kind], check=False)
        assert other.returncode == 0


def test_an_unknown_ioctl_is_no_terminal(folder: Path) -> None:
    with (folder / "f").open("w") as stream:
        assert errno_of(lambda: fcntl.ioctl(stream, 0x12345678, b"")) == errno.ENOTTY
        assert not stream.isatty()


def test_statfs_tells_the_truth(folder: Path) -> None:
    found = os.statvfs(folder)
    assert found.f_namemax == 255
    assert 0 < found.f_bavail <= found.f_bfree < found.f_blocks
    free = shutil.disk_usage(folder.parent.parent).free
    assert abs(found.f_bavail * found.f_frsize - free) < 1 << 30


def test_fsync_of_files_and_directories(folder: Path) -> None:
    with (folder / "f").open("wb") as stream:
        stream.write(b"x" * 100_000)
        stream.flush()
        os.fsync(stream.fileno())
        os.fdatasync(stream.fileno())
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def test_a_listing_survives_changes_while_it_is_read(folder: Path) -> None:
    lasting = {f"lasting-{number}" for number in range(150)}
    for name in lasting | {f"doomed-{number}" for number in range(150)}:
        (folder / name).write_text("")
    seen: list[str] = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            if number < 150:
                (folder / f"doomed-{number}").unlink()
                (folder / f"fresh-{number}").write_text("")
    assert lasting <= set(seen)
    assert len(seen) == len(set(seen))
    assert set(names(folder)) == lasting | {f"fresh-{number}" for number in range(150)}


def test_the_dots_are_listed_with_their_inodes(folder: Path) -> None:
    (folder / "d").mkdir()
    listed = subprocess.run(
        ["ls", "-ai1", folder / "d"], check=True, capture_output=True, text=True
    ).stdout.split()
    found = dict(zip(listed[1::2], map(int, listed[::2]), strict=True))
    assert found["."] == (folder / "d").stat().st_ino
    assert found[".."] == folder.stat().st_ino


def test_a_tree_can_be_copied_walked_and_removed(folder: Path, tmp_path: Path) -> None:
    for directory in range(10):
        (tmp_path / "tree" / f"d{directory}" / "deep").mkdir(parents=True)
        for number in range(20):
            path = tmp_path / "tree" / f"d{directory}" / "deep" / f"f{number}"
            path.write_bytes(os.urandom(number * 500))
    shutil.copytree(tmp_path / "tree", folder / "tree", symlinks=True)
    subprocess.run(["diff", "-r", tmp_path / "tree", folder / "tree"], check=True)
    shutil.rmtree(folder / "tree")
    assert names(folder) == []


def test_a_program_on_the_mount_runs(folder: Path) -> None:
    shutil.copy("/bin/echo", folder / "say")
    said = subprocess.run([folder / "say", "hello"], cwd=folder, capture_output=True, check=True)
    assert said.stdout == b"hello\n"


def test_direct_io_by_the_caller(folder: Path) -> None:
    descriptor = os.open(folder / "f", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o644)
    libc = ctypes.CDLL(None, use_errno=True)
    raw = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(raw), 4096, 8192) == 0
    ctypes.memset(raw, 65, 8192)
    libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
    assert libc.pwrite(descriptor, raw, 8192, 4096) == 8192
    os.close(descriptor)
    assert (folder / "f").read_bytes() == bytes(4096) + b"A" * 8192
