"""Random input and output on one file, against bytes in memory.

What fsx does (https://github.com/kdave/xfstests/blob/master/ltp/fsx.c), written for this: reads,
writes, memory maps, truncation, holes, zeroing, copies, appends and reopening, each followed by a
look at the whole file from another descriptor every so often.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tierwise.archive.fuse import system

LIMIT = 300_000
KEEP_SIZE, PUNCH, ZERO = 1, 2, 16


class RandomFile:
    """A file, and what it should hold."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.expected = bytearray()
        self.descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)

    def close(self) -> None:
        os.close(self.descriptor)

    def _range(self, end: int = LIMIT, longest: int = 70_000) -> tuple[int, int]:
        offset = self.random.randrange(end)
        return offset, self.random.randrange(1, min(longest, end - offset) + 1)

    def _put(self, offset: int, data: bytes) -> None:
        if offset > len(self.expected):
            self.expected.extend(bytes(offset - len(self.expected)))
        self.expected[offset : offset + len(data)] = data

    def write(self) -> None:
        offset, length = self._range()
        data = self.random.randbytes(length)
        assert os.pwrite(self.descriptor, data, offset) == length
        self._put(offset, data)

    def append(self) -> None:
        data = self.random.randbytes(self.random.randrange(1, 3000))
        if len(self.expected) + len(data) > LIMIT:
            return
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, data)
        os.close(descriptor)
        self.expected += data

    def read(self) -> None:
        offset, length = self._range()
        found = os.pread(self.descriptor, length, offset)
        assert found == self.expected[offset : offset + length]

    def truncate(self) -> None:
        size = self.random.randrange(LIMIT)
        os.ftruncate(self.descriptor, size)
        self.expected[size:] = b""
        self.expected.extend(bytes(size - len(self.expected)))

    def punch(self) -> None:
        if not self.expected:
            return
        offset, length = self._range(len(self.expected))
        system.fallocate(self.descriptor, KEEP_SIZE | PUNCH, offset, length)
        self.expected[offset : offset + length] = bytes(length)

    def zero(self) -> None:
        offset, length = self._range()
        system.fallocate(self.descriptor, ZERO, offset, length)
        self._put(offset, bytes(length))

    def map_and_read(self) -> None:
        if self.expected:
            with mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ) as view:
                offset, length = self._range(len(self.expected))
                assert view[offset : offset + length] == self.expected[offset : offset + length]

    def map_and_write(self) -> None:
        if self.expected:
            with mmap.mmap(self.descriptor, 0) as view:
                offset, length = self._range(len(self.expected))
                data = self.random.randbytes(length)
                view[offset : offset + length] = data
                if self.random.random() < 0.5:
                    view.flush()
            self._put(offset, data)

    def copy(self) -> None:
        if len(self.expected) < 2:
            return
        half = len(self.expected) // 2
        length = self.random.randrange(1, half + 1)
        done = 0
        while done < length:
            step = os.copy_file_range(
                self.descriptor, self.descriptor, length - done, done, half + done
            )
            assert step > 0
            done += step
        self._put(half, bytes(self.expected[:length]))

    def reopen(self) -> None:
        os.close(self.descriptor)
        self.descriptor = os.open(self.path, os.O_RDWR)

    def sync(self) -> None:
        os.fsync(self.descriptor)

    def check(self) -> None:
        assert os.fstat(self.descriptor).st_size == len(self.expected)
        assert self.path.stat().st_size == len(self.expected)
        assert self.path.read_bytes() == self.expected

    def steps(self) -> list[Callable[[], None]]:
        often = [self.write, self.write, self.read, self.read, self.map_and_read]
        changing = [self.map_and_write, self.truncate, self.punch, self.zero, self.copy]
        return often + changing + [self.append, self.reopen, self.sync, self.check]


def run(path: Path, seed: int, num_steps: int) -> None:
    subject = RandomFile(path, seed)
    try:
        for _ in range(num_steps):
            subject.random.choice(subject.steps())()
        subject.check()
        subject.reopen()
        subject.check()
    finally:
        subject.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_on_a_file(folder: Path, seed: int) -> None:
    run(folder / "file", seed, 400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_random_steps_on_a_file(folder: Path, seed: int) -> None:
    run(folder / "file", seed, 5000)
