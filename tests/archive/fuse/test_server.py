"""What the server owes whoever mounts: it never dies of a handler, and never waits for one.

These mounts are served by a thread, so that the test can look into the file system while the
kernel talks to it.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierwise.archive.fuse import Fault, MountOptions, device, files, mounted, server
from tierwise.archive.fuse.mirror import InputOutput, Mirror
from tierwise.archive.fuse.names import Handler
from tierwise.archive.fuse.session import Request, Session
from tierwise.archive.fuse.wire import Opcode
from tierwise.archive.operations import (
    RETRY,
    Attributes,
    Caller,
    DirectoryEntry,
    Later,
    Notifier,
    Opened,
    Operations,
    SetAttributes,
)
from tierwise.core.errors import AccessError


class Scripted(Mirror):
    """A mirror some of whose answers a test decides."""

    def __init__(self, source: Path, io: InputOutput = InputOutput.DIRECT) -> None:
        super().__init__(source, io)
        self.on_read: Callable[[], bytes | None] = lambda: None
        self.on_getattr: Callable[[int], None] = lambda inode: None
        self.calls: Counter[str] = Counter()
        self.notifier: Notifier | None = None
        self.destroyed = False

    def mounted(self, notifier: Notifier) -> None:
        self.notifier = notifier

    def destroy(self) -> None:
        super().destroy()
        self.destroyed = True

    def getattr(self, inode: int) -> Attributes:
        self.calls["getattr"] += 1
        self.on_getattr(inode)
        return super().getattr(inode)

    def forget(self, inode: int) -> None:
        self.calls["forget"] += 1
        super().forget(inode)

    def read(self, inode: int, handle: int, offset: int, size: int, caller: Caller) -> bytes:
        self.calls["read"] += 1
        answer = self.on_read()
        return super().read(inode, handle, offset, size, caller) if answer is None else answer

    def setattr(self, inode: int, changes: SetAttributes, caller: Caller) -> Attributes:
        self.calls["setattr"] += 1
        return super().setattr(inode, changes, caller)


class Bench:
    """A scripted mirror, where it is mounted, and the faults it had."""

    def __init__(self, base: Path) -> None:
        self.source, self.path = base / "source", base / "mount"
        self.source.mkdir()
        self.path.mkdir()
        (self.source / "file").write_bytes(b"content")
        self.fs = Scripted(self.source)
        self.faults: list[Fault] = []

    @property
    def file(self) -> Path:
        return self.path / "file"


@contextmanager
def mounted_bench(base: Path, options: MountOptions | None = None) -> Iterator[Bench]:
    bench = Bench(base)
    with mounted(bench.fs, bench.path, options=options, on_fault=bench.faults.append):
        yield bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with mounted_bench(tmp_path) as made:
        yield made


def raise_(error: Exception) -> None:
    raise error


def errno_of(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a defect"),
        KeyError(7),
        OSError("without a number"),
        OSError(99_999, "not a number of the kernel's"),
        ZeroDivisionError(),
        AssertionError(),
    ],
    ids=repr,
)
def test_any_exception_becomes_eio_and_a_fault_and_the_mount_lives(
    bench: Bench, error: Exception
) -> None:
    bench.fs.on_read = lambda: raise_(error)
    assert errno_of(bench.file.read_bytes) == errno.EIO
    assert [fault.error for fault in bench.faults] == [error]
    assert bench.faults[0].request.startswith("READ of inode")
    assert "on_read" in bench.faults[0].traceback
    bench.fs.on_read = lambda: None
    assert bench.file.read_bytes() == b"content"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EAGAIN, errno.ESTALE, errno.EDQUOT])
def test_an_errno_reaches_the_caller_and_is_no_fault(bench: Bench, code: int) -> None:
    bench.fs.on_read = lambda: raise_(OSError(code, "said so"))
    descriptor = os.open(bench.file, os.O_RDONLY)  # Python's files take EAGAIN for "no bytes"
    assert errno_of(lambda: os.pread(descriptor, 10, 0)) == code
    os.close(descriptor)
    assert bench.faults == []


def test_an_answer_of_the_wrong_kind_is_a_fault(bench: Bench) -> None:
    bench.fs.on_read = lambda: 17  # type: ignore[assignment, return-value]
    assert errno_of(bench.file.read_bytes) == errno.EIO
    assert len(bench.faults) == 1


def test_a_reply_that_is_no_bytes_is_a_fault(bench: Bench) -> None:
    (bench.path / "link").symlink_to("target")
    bench.fs.readlink = lambda inode: "a string"  # type: ignore[method-assign, assignment, return-value]
    assert errno_of((bench.path / "link").readlink) == errno.EIO
    assert [type(fault.error) for fault in bench.faults] == [TypeError]
    assert bench.file.read_bytes() == b"content"


def test_an_error_in_the_middle_of_a_listing_is_reported(bench: Bench) -> None:
    for number in range(20):
        (bench.path / f"f{number}").write_text("")
    original = bench.fs.readdir

    def failing(inode: int, handle: int, cookie: int, *, plus: bool) -> Iterator[DirectoryEntry]:
        for entry in original(inode, handle, cookie, plus=plus):
            if entry.cookie > 10:
                raise OSError(errno.EUCLEAN, "a bad block")
            yield entry

    bench.fs.readdir = failing  # type: ignore[method-assign]
    assert errno_of(lambda: list(bench.path.iterdir())) == errno.EUCLEAN
    bench.fs.readdir = original  # type: ignore[method-assign]
    assert len(list(bench.path.iterdir())) == 21


def test_a_fault_handler_may_fail_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path)
    with mounted(bench.fs, bench.path, on_fault=lambda fault: raise_(RuntimeError("worse"))):
        bench.fs.on_read = lambda: raise_(ValueError("a defect"))
        assert errno_of(bench.file.read_bytes) == errno.EIO
        bench.fs.on_read = lambda: None
        assert bench.file.read_bytes() == b"content"
    assert "on_fault failed for READ" in caplog.text


def test_faults_are_logged_unless_told_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    bench.fs.on_read = lambda: raise_(ValueError("a defect"))
    with mounted(bench.fs, bench.path):
        assert errno_of(bench.file.read_bytes) == errno.EIO
    assert "READ of inode" in caplog.text
    assert "ValueError" in caplog.text


class Shy(Mirror):
    """A mirror that will not be mounted."""

    def mounted(self, notifier: Notifier) -> None:
        raise RuntimeError("not today")


def test_a_file_system_may_refuse_to_be_mounted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    faults: list[Fault] = []
    with (
        pytest.raises(AccessError, match="not today"),
        mounted(Shy(bench.source), bench.path, on_fault=faults.append),
    ):
        pass
    assert len(faults) == 1
    assert not [line for line in mounts() if str(bench.path) in line]


def mounts() -> list[str]:
    return Path("/proc/mounts").read_text().splitlines()


def test_an_answer_longer_than_asked_is_cut(bench: Bench) -> None:
    bench.fs.on_read = lambda: b"x" * 100_000
    descriptor = os.open(bench.file, os.O_RDONLY)
    assert os.pread(descriptor, 10, 0) == b"x" * 10
    os.close(descriptor)


def test_impossible_attributes_are_refused_and_the_mount_lives(bench: Bench) -> None:
    original = bench.fs.lookup
    bench.fs.lookup = lambda parent, name: Attributes(  # type: ignore[method-assign]
        inode=-5, mode=stat.S_IFREG, size=-1
    )
    assert errno_of((bench.path / "other").stat) == errno.EIO
    bench.fs.lookup = original  # type: ignore[method-assign]
    assert bench.file.read_bytes() == b"content"


def test_a_waiting_read_holds_up_nobody_else(bench: Bench) -> None:
    come = threading.Event()
    arrived = threading.Event()

    def wait(_: threading.Event) -> object:
        arrived.set()
        assert come.wait(20)
        bench.fs.on_read = lambda: None
        return RETRY

    bench.fs.on_read = lambda: raise_(Later(wait))
    reader = subprocess.Popen(["cat", bench.file], stdout=subprocess.PIPE)
    assert arrived.wait(20)
    for number in range(20):
        (bench.path / f"other-{number}").write_text("quick")
    assert len(list(bench.path.iterdir())) == 21
    assert reader.poll() is None
    come.set()
    assert reader.communicate(timeout=20)[0] == b"content"


def test_a_slow_fsync_holds_up_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    come, arrived = threading.Event(), threading.Event()

    def slow(descriptor: int, *, data_only: bool) -> object:
        arrived.set()
        assert come.wait(20)
        os.fsync(descriptor)
        return RETRY

    monkeypatch.setattr(files, "_synchronise", slow)
    bench = Bench(tmp_path)
    with mounted(Mirror(bench.source), bench.path):
        syncing = subprocess.Popen(["sync", bench.file])
        assert arrived.wait(20)
        (bench.path / "other").write_text("quick")
        assert syncing.poll() is None
        come.set()
        assert syncing.wait(20) == 0


def test_an_fsync_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int, *, data_only: bool) -> object:
        raise OSError(errno.EIO, "a bad block")

    monkeypatch.setattr(files, "_synchronise", failing)
    bench = Bench(tmp_path)
    with mounted(Mirror(bench.source), bench.path), bench.file.open("r+b") as stream:
        assert errno_of(lambda: os.fsync(stream.fileno())) == errno.EIO


def test_work_may_bring_the_answer_itself(bench: Bench) -> None:
    bench.fs.on_read = lambda: raise_(Later(lambda _: b"from work"))
    descriptor = os.open(bench.file, os.O_RDONLY)
    assert os.pread(descriptor, 100, 0) == b"from work"
    os.close(descriptor)


def test_work_may_fail_either_way(bench: Bench) -> None:
    bench.fs.on_read = lambda: raise_(Later(lambda _: raise_(OSError(errno.ENODATA, "gone"))))
    assert errno_of(bench.file.read_bytes) == errno.ENODATA
    bench.fs.on_read = lambda: raise_(Later(lambda _: raise_(RuntimeError("defect"))))
    assert errno_of(bench.file.read_bytes) == errno.EIO
    assert len(bench.faults) == 1


def test_many_readers_may_wait_at_once(bench: Bench) -> None:
    come = threading.Event()
    waiting = threading.Semaphore(0)

    def wait(_: threading.Event) -> object:
        waiting.release()
        assert come.wait(20)
        bench.fs.on_read = lambda: None
        return RETRY

    bench.fs.on_read = lambda: raise_(Later(wait))
    readers = [subprocess.Popen(["cat", bench.file], stdout=subprocess.PIPE) for _ in range(30)]
    for _ in readers:
        assert waiting.acquire(timeout=20)
    come.set()
    assert [reader.communicate(timeout=20)[0] for reader in readers] == [b"content"] * 30


def test_a_waiting_read_can_be_interrupted(bench: Bench) -> None:
    arrived = threading.Event()
    noticed = threading.Event()

    def wait(interrupted: threading.Event) -> object:
        arrived.set()
        if interrupted.wait(20):
            noticed.set()
        raise OSError(errno.EINTR, "interrupted")

    bench.fs.on_read = lambda: raise_(Later(wait))
    reader = subprocess.Popen(["cat", bench.file], stderr=subprocess.PIPE)
    assert arrived.wait(20)
    started = time.monotonic()
    reader.send_signal(signal.SIGINT)
    assert reader.wait(10) == -signal.SIGINT
    assert noticed.is_set()
    assert time.monotonic() - started < 5
    assert reader.stderr is not None
    reader.stderr.close()
    bench.fs.on_read = lambda: None
    assert bench.file.read_bytes() == b"content"
    assert bench.faults == []


def test_unmounting_interrupts_what_waits(tmp_path: Path) -> None:
    arrived = threading.Event()
    outcome: list[bool] = []

    def wait(interrupted: threading.Event) -> object:
        arrived.set()
        outcome.append(interrupted.wait(20))
        raise OSError(errno.EINTR, "interrupted")

    with mounted_bench(tmp_path) as bench:
        bench.fs.on_read = lambda: raise_(Later(wait))
        reader = subprocess.Popen(["cat", bench.file], stderr=subprocess.DEVNULL)
        assert arrived.wait(20)
        reader.kill()
        reader.wait(10)
    assert outcome == [True]
    assert bench.fs.destroyed


def test_forgotten_inodes_are_forgotten_once(bench: Bench) -> None:
    for number in range(50):
        (bench.path / f"f{number}").write_text("")
        (bench.path / f"f{number}").stat()
    for number in range(50):
        (bench.path / f"f{number}").unlink()
    deadline = time.monotonic() + 10
    while bench.fs.calls["forget"] < 50 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bench.fs.calls["forget"] == 50


def test_attributes_are_cached_until_the_file_system_says_otherwise(bench: Bench) -> None:
    bench.file.stat()
    before = bench.fs.calls["getattr"]
    for _ in range(10):
        bench.file.stat()
    assert bench.fs.calls["getattr"] == before
    (bench.source / "file").write_bytes(b"changed behind the kernel's back")
    inode = bench.file.stat().st_ino
    assert bench.file.stat().st_size == len(b"content")
    assert bench.fs.notifier is not None
    bench.fs.notifier.inode_changed(inode)
    wait_for(lambda: bench.file.stat().st_size == 32)


def test_absence_is_cached_until_the_file_system_says_otherwise(bench: Bench) -> None:
    late = bench.path / "late"
    assert not late.exists()
    (bench.source / "late").write_text("here")
    assert not late.exists()
    assert bench.fs.notifier is not None
    bench.fs.notifier.entry_changed(1, b"late")
    wait_for(late.exists)
    (bench.source / "late").unlink()
    bench.fs.notifier.entry_changed(1, b"late")
    wait_for(lambda: not late.exists())


def test_cached_pages_go_when_the_file_system_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.fs = Scripted(bench.source, InputOutput.CACHED)
    with mounted(bench.fs, bench.path):
        assert bench.file.read_bytes() == b"content"
        inode = bench.file.stat().st_ino
        (bench.source / "file").write_bytes(b"CONTENT")
        assert bench.file.read_bytes() == b"content"
        assert bench.fs.notifier is not None
        bench.fs.notifier.inode_changed(inode)
        wait_for(lambda: bench.file.read_bytes() == b"CONTENT")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def test_without_timeouts_every_stat_asks(tmp_path: Path) -> None:
    options = MountOptions(entry_timeout_s=0, attribute_timeout_s=0)
    with mounted_bench(tmp_path, options) as bench:
        bench.file.stat()
        (bench.source / "file").write_bytes(b"longer than before")
        assert bench.file.stat().st_size == 18
        assert not (bench.path / "late").exists()
        (bench.source / "late").write_text("")
        assert (bench.path / "late").exists()


def test_read_only_means_read_only(tmp_path: Path) -> None:
    with mounted_bench(tmp_path, MountOptions(read_only=True)) as bench:
        assert errno_of(lambda: (bench.path / "new").write_text("")) == errno.EROFS
        assert bench.file.read_bytes() == b"content"


class Moving(Mirror):
    """A mirror that gives another backing file at each opening: what `Opened` forbids."""

    def __init__(self, source: Path) -> None:
        super().__init__(source)
        self._source = source
        self.num_opened = 0
        self.num_released = 0

    def release(self, inode: int, handle: int) -> None:
        self.num_released += 1
        super().release(inode, handle)

    def open(self, inode: int, flags: int, caller: Caller) -> Opened:
        self.num_opened += 1
        path = self._source / f"other-{self.num_opened}"
        path.write_text(f"opened {self.num_opened}")
        descriptor = os.open(path, os.O_RDWR)
        return Opened(handle=descriptor, backing=descriptor)


def test_a_backing_file_that_moves_while_open_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    faults: list[Fault] = []
    moving = Moving(bench.source)
    with mounted(moving, bench.path, on_fault=faults.append):
        first = os.open(bench.file, os.O_RDONLY)
        assert errno_of(lambda: os.close(os.open(bench.file, os.O_RDONLY))) == errno.EIO
        assert os.pread(first, 100, 0) == b"opened 1"
        os.close(first)
        wait_for(lambda: bench.file.read_bytes().startswith(b"opened"))
    assert moving.num_released == moving.num_opened
    assert "changed its backing file" in str(faults[0].error)


def test_a_file_changes_its_way_only_between_openings(tmp_path: Path) -> None:
    """Cached pages of an earlier opening must not outlive writes by passthrough."""
    bench = Bench(tmp_path)
    bench.fs = Scripted(bench.source, InputOutput.CACHED)
    with mounted(bench.fs, bench.path):
        assert bench.file.read_bytes() == b"content"
        bench.fs._io = InputOutput.BACKING
        with bench.file.open("r+b", buffering=0) as stream:
            stream.write(b"CONTENT")
        wait_for(lambda: bench.file.read_bytes() == b"CONTENT")
        bench.fs._io = InputOutput.CACHED
        wait_for(lambda: bench.file.read_bytes() == b"CONTENT")


def test_the_server_reads_ahead_as_told(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: sysfs")
    with mounted_bench(tmp_path, MountOptions(read_ahead_kib=512)) as bench:
        number = bench.path.stat().st_dev
        entry = Path(f"/sys/class/bdi/{os.major(number)}:{os.minor(number)}/read_ahead_kb")
        assert entry.read_text().strip() == "512"


@pytest.mark.parametrize("wanted", [True, False])
def test_passthrough_keeps_reads_and_writes_in_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    if not device.is_privileged() or kernel_version() < (6, 9):
        pytest.skip("passthrough needs root and Linux 6.9")
    seen: Counter[int] = Counter()
    for opcode in (Opcode.READ, Opcode.WRITE):
        handler = server._HANDLERS[opcode]

        def counting(
            session: Session, operations: Operations, request: Request, handler: Handler = handler
        ) -> bytes | None:
            seen[request.opcode] += 1
            return handler(session, operations, request)

        monkeypatch.setitem(server._HANDLERS, opcode, counting)
    bench = Bench(tmp_path)
    with mounted(Mirror(bench.source), bench.path, options=MountOptions(passthrough=wanted)):
        bench.file.write_bytes(b"x" * 3_000_000)
        assert bench.file.stat().st_size == 3_000_000
        assert bench.file.read_bytes() == b"x" * 3_000_000
    assert (bench.source / "file").read_bytes() == b"x" * 3_000_000
    assert bool(seen[Opcode.WRITE]) is not wanted
    assert seen[Opcode.WRITE] < 10, "writes come a megabyte at a time"


def kernel_version() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split(".")[:2])


def test_nothing_is_left_open(tmp_path: Path) -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    bench = Bench(tmp_path)
    before = num_open()
    with mounted(Mirror(bench.source), bench.path):
        bench.file.read_bytes()
        during = num_open()
        for number in range(100):
            (bench.path / "again").write_text(str(number))
            (bench.path / "again").unlink()
        wait_for(lambda: num_open() <= during + 1)
    assert num_open() == before
