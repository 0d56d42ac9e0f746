"""A life of an archive that dies at a named point; run by test_crash.py in a process of its own.

Usage: crash_child.py ROOT POINT COUNT. Acknowledged writes are printed as `PATH SHA256` once
fsync has returned; the process kills itself at the COUNT-th pass of POINT ("" never).
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from pathlib import Path

from tierwise.archive.vault import Archive


def dying_at(point: str, count: int) -> object:
    passes = 0

    def crash_point(name: str) -> None:
        nonlocal passes
        passes += name == point
        if name == point and passes == count:
            os.kill(os.getpid(), signal.SIGKILL)

    return crash_point


def write_durably(archive: Archive, path: str, data: bytes) -> None:
    archive.files.write_file(path, data)
    ino = archive.files.stat(path).inode
    fs, caller = archive.fs, archive.files.caller
    handle = archive.files.wait(lambda: fs.open(ino, os.O_RDWR, caller)).handle
    fs.fsync(ino, handle, data_only=False)
    sys.stdout.write(f"{path} {hashlib.sha256(data).hexdigest()}\n")
    sys.stdout.flush()
    fs.release(ino, handle)


def live(root: Path, point: str, count: int) -> None:
    crash_point = dying_at(point, count)
    source = random.Random(1)
    if (root / "archive.toml").exists():
        archive = Archive.open(root, crash_point=crash_point)  # type: ignore[arg-type]
    else:
        archive = Archive.init(
            root,
            archive_id="0123456789abcdef" * 2,
            disc_size_bytes=2 << 20,
            data_discs=2,
            parity_discs=1,
            forepart_bytes=64,
            library_slots=60,
            crash_point=crash_point,  # type: ignore[arg-type]
        )
    for number in range(6):
        write_durably(archive, f"d/f{number}", source.randbytes(source.randrange(1, 90_000)))
    write_durably(archive, "large", source.randbytes(1_300_000))
    archive.seal(partial=True)
    archive.burn(partial=True)
    archive.evict()
    old = archive.files.read_file("d/f1")
    new = b"changed" + old[7:]
    archive.files.write_at("d/f1", b"changed", 0)
    write_durably(archive, "d/f1", new)
    victim = archive.catalogue.value("SELECT MIN(slot) FROM discs WHERE state = 'good'")
    archive.shelf.destroy(victim)
    archive.scrub()
    archive.repair()
    archive.close()


if __name__ == "__main__":
    live(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
