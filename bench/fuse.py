"""How much of a directory's speed is left when it is mounted, by way of input and output.

Each round does the same work in the directory itself and on mounts of it (and of an archive), kind
by kind, taking turns; rows are ratios to the directory of the same round: 1 is as fast, 0.5 half.
Everything lies on tmpfs where there is one, so that no disc's noise hides the front end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from harness import Row, ratio_row, row_of, write_results
from tierwise.archive.fuse import can_mount, mounted_process
from tierwise.archive.fuse.mirror import InputOutput, Mirror
from tierwise.archive.operations import Operations
from tierwise.archive.vault import Archive, mountable

_Item = TypeVar("_Item")
MIB = 1 << 20
FILE_BYTES = 256 * MIB
NUM_FILES = 1000
NUM_ROUNDS = 7
PAUSE_S = 0.1
UNTOLD = "remove a large file"


def steps(folder: Path) -> dict[str, Callable[[], None]]:
    """Return the kinds of work on a folder, in their order; the last leaves it empty."""
    block = os.urandom(MIB)
    page = block[:4096]
    big, medium = folder / "big", folder / "medium"
    paths = [folder / f"small-{number}" for number in range(NUM_FILES)]
    return {
        "write, 1 MiB at a time": lambda: _write(big, block, FILE_BYTES // MIB),
        "read, 1 MiB at a time": lambda: _read(big, MIB),
        UNTOLD: big.unlink,
        "write, 4 KiB at a time": lambda: _write(medium, page, 5000),
        "create, write 4 KiB, close": lambda: each(paths, lambda path: path.write_bytes(page)),
        "stat": lambda: each(paths, Path.stat),
        "stat again": lambda: each(paths, Path.stat),
        "list with stat": lambda: each(os.scandir(folder), os.DirEntry.stat),
        "open, read, close": lambda: each(paths, Path.read_bytes),
        "unlink": lambda: each([medium, *paths], Path.unlink),
    }


def one_round(folders: dict[str, Path], first: int) -> dict[str, dict[str, float]]:
    """Return the seconds of each kind of work in each folder, the folders taking turns.

    A pause before each lets what the one before left behind (pages to free) be done with.
    """
    names = [*folders][first:] + [*folders][:first]
    work = {name: steps(folder) for name, folder in folders.items()}
    seconds: dict[str, dict[str, float]] = {name: {} for name in folders}
    for kind in work["directory"]:
        for name in names:
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            work[name][kind]()
            seconds[name][kind] = time.perf_counter() - start
    return seconds


def each(items: Iterable[_Item], call: Callable[[_Item], object]) -> None:
    """Call something with every item."""
    for item in items:
        call(item)


def _write(path: Path, block: bytes, num_blocks: int) -> None:
    with path.open("wb", buffering=0) as stream:
        for _ in range(num_blocks):
            stream.write(block)


def _read(path: Path, size: int) -> None:
    with path.open("rb", buffering=0) as stream:
        while stream.read(size):
            pass


def make_subjects(base: Path) -> dict[str, Callable[[], Operations]]:
    """Return what to mount, by name."""
    subjects: dict[str, Callable[[], Operations]] = {}
    for io in InputOutput:
        (base / io).mkdir()
        subjects[f"mirror, {io}"] = partial(Mirror, base / io, io)
    with Archive.init(base / "vault", archive_id="f" * 32, disc_size_bytes=8 << 30):
        subjects["archive"] = partial(mountable, base / "vault")
    return subjects


def main() -> None:
    """Run all rounds and write the results."""
    reason = can_mount()
    if reason is not None:
        print(f"nothing measured: {reason}")
        return
    memory = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="tierwise-bench-", dir=memory if memory.is_dir() else None))
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    try:
        with contextlib.ExitStack() as stack:
            folders = {"directory": base / "plain"}
            folders["directory"].mkdir()
            for name, factory in make_subjects(base).items():
                (base / "mounts" / name).mkdir(parents=True)
                mount = stack.enter_context(mounted_process(factory, base / "mounts" / name))
                folders[name] = mount.path
            for number in range(1 + NUM_ROUNDS):
                for name, seconds in one_round(folders, number % len(folders)).items():
                    if number:
                        rounds[name].append(seconds)
    finally:
        shutil.rmtree(base)
    config = {"file_bytes": FILE_BYTES, "num_files": NUM_FILES, "kernel": os.uname().release}
    print(write_results("fuse", rows_of(rounds), config=config, packages=[]))


def rows_of(rounds: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Return the directory's own figures, then every mount's ratio to it."""
    plain = rounds.pop("directory")
    rows: list[Row] = []
    for kind in (kind for kind in plain[0] if kind != UNTOLD):
        own = [seconds[kind] for seconds in plain]
        rows.append(row_of(f"{kind}: directory", own, unit="s"))
        for name, measured in rounds.items():
            theirs = [seconds[kind] for seconds in measured]
            rows.append(ratio_row(f"{kind}: {name}", own, theirs, "speed, of the directory's"))
    return rows


if __name__ == "__main__":
    main()
