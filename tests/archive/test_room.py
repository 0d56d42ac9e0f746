"""A limited buffer: who waits, for how long, who gets ENOSPC, and what is left afterwards."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from tierwise.archive.fs import wait_for_room
from tierwise.archive.fuse import can_mount, mounted_process
from tierwise.archive.operations import SetAttributes
from tierwise.archive.room import MAX_WAIT_S, SLOW_FROM, SLOWEST_BYTES_S
from tierwise.archive.vault import Archive, mountable

Make = Callable[..., Archive]
LIMIT = 4 << 20
CHUNK = 64 << 10


class Pauses:
    """A virtual clock of waits: (bytes acknowledged before it, seconds)."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self.seen: list[tuple[int, float]] = []

    def __call__(self, interrupted: Event, seconds: float) -> None:
        self.seen.append((self.acknowledged, seconds))

    def between(self, low: float, high: float) -> float:
        return sum(s for at, s in self.seen if low <= at / LIMIT < high)


def fill(archive: Archive, pauses: Pauses, *, one_file: bool) -> dict[str, bytes]:
    """Write until ENOSPC; return what was acknowledged."""
    source, kept = random.Random(3), {"f": b""} if one_file else {}
    fs, caller = archive.fs, archive.files.caller
    archive.pause = pauses
    if one_file:
        made, opened = fs.create(1, b"f", 0o600, os.O_WRONLY, caller)
    try:
        for number in range(LIMIT // CHUNK + 10):
            data = source.randbytes(CHUNK)
            if one_file:
                view, at = memoryview(data), number * CHUNK
                archive.files.wait(
                    lambda view=view, at=at: fs.write(made.inode, opened.handle, at, view, caller)  # type: ignore[misc]
                )
                kept["f"] += data
            else:
                archive.files.write_file(f"d/{number}", data)
                kept[f"d/{number}"] = data
            pauses.acknowledged += CHUNK
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        if one_file:
            fs.release(made.inode, opened.handle)
    return kept


@pytest.mark.parametrize("one_file", [False, True])
def test_writers_are_slowed_then_refused_and_nothing_is_lost(
    make_archive: Make, one_file: bool
) -> None:
    archive, pauses = make_archive(buffer_size_bytes=LIMIT), Pauses()
    kept = fill(archive, pauses, one_file=one_file)
    written = sum(len(data) for data in kept.values())
    assert LIMIT - CHUNK <= written <= LIMIT
    assert pauses.between(0, SLOW_FROM) == 0
    thirds = [pauses.between(a, a + 0.0834) for a in (0.75, 0.8333, 0.9167)]
    assert thirds == sorted(thirds)
    assert thirds[0] < thirds[2] / 2
    assert max(seconds for _, seconds in pauses.seen) <= MAX_WAIT_S
    # the mean over the last quarter is half of the slowest rate's wait
    whole = LIMIT * (1 - SLOW_FROM) / SLOWEST_BYTES_S
    assert whole * 0.3 < sum(s for _, s in pauses.seen) < whole * 0.7
    assert {path: archive.files.read_file(path) for path in kept} == kept
    assert archive.fsck() == []


def test_what_discs_hold_slows_nobody(make_archive: Make) -> None:
    archive, pauses = make_archive(buffer_size_bytes=LIMIT), Pauses()
    archive.pause = pauses
    archive.files.write_file("old", b"o" * (LIMIT // 3))
    archive.seal(partial=True)
    archive.burn(partial=True)
    assert archive.status()["buffer_bytes"] > LIMIT * SLOW_FROM  # the file, its image, parity
    archive.files.write_file("new", b"n" * (LIMIT // 2))
    assert pauses.seen == []
    assert archive.files.read_file("new") == b"n" * (LIMIT // 2)


def test_a_file_does_not_grow_beyond_the_limit_by_truncate(make_archive: Make) -> None:
    archive = make_archive(buffer_size_bytes=LIMIT)
    archive.files.write_file("f", b"x")
    fs, caller, ino = archive.fs, archive.files.caller, archive.files.stat("f").inode
    with pytest.raises(OSError, match="No space left"):
        fs.setattr(ino, SetAttributes(size=2 * LIMIT), caller)
    assert archive.files.read_file("f") == b"x"


def test_a_signal_ends_a_wait(make_archive: Make) -> None:
    interrupted = Event()
    interrupted.set()
    start = time.monotonic()
    wait_for_room(interrupted, 60)
    assert time.monotonic() - start < 30


@pytest.mark.fuse
@pytest.mark.skipif(can_mount() is not None, reason="no FUSE here")
def test_a_growing_file_meets_the_limit_under_a_mount(fast_path: Path) -> None:
    root, mountpoint = fast_path / "small", fast_path / "mnt"
    mountpoint.mkdir()
    Archive.init(
        root, archive_id="0123456789abcdef" * 2, disc_size_bytes=2 << 20, data_discs=2,
        parity_discs=1, library_slots=60, buffer_size_bytes=1 << 20,
    ).close()  # fmt: skip
    with mounted_process(partial(mountable, root), mountpoint) as mount:
        path = mount.path / "f"
        with path.open("wb", buffering=0) as stream:
            for _ in range((1 << 20) // CHUNK):
                assert stream.write(b"z" * CHUNK) == CHUNK
            with pytest.raises(OSError, match="No space"):
                stream.write(b"z" * CHUNK)
        assert os.statvfs(mount.path).f_bavail == 0
        assert path.read_bytes() == b"z" * (1 << 20)
        path.unlink()
        deadline = time.monotonic() + 20  # the kernel forgets an inode in its own time
        while os.statvfs(mount.path).f_bavail == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        path.write_bytes(b"again")
