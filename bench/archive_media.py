"""Parity and images against their peers: libisal, zfec, genisoimage, xorriso.

Parity is computed over blocks in memory, in data bytes a second; a peer that is not installed is
left out (zfec: `pip install zfec`; others: Debian's libisal2, genisoimage, xorriso). Sealing is
timed from a folder of files to a finished image; ours also hashes every file, writes a manifest
and a catalogue slice, and reads the image back, which is timed apart. Seconds are of processor
time, user and system, children included: all alternatives use one core, and the figures hold on a
machine that does other things meanwhile.
"""

from __future__ import annotations

import importlib.util
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness import Row, ratio_row, row_of, write_results
from tierwise.archive.discs import check_disc
from tierwise.archive.erasure import (
    Bytes,
    Codec,
    NumpyCodec,
    isal_codec,
    parity_matrix,
    recovery_matrix,
)
from tierwise.archive.image import ImageIdentity, NodeKind, SealEntry, seal_image

BLOCK_BYTES = 4 << 20
DATA_COUNT = 10
NUM_REPEATS = 5
NUM_FILES = 2000
NUM_FOLDERS = 40


def seconds_in_turn(
    alternatives: Mapping[str, Callable[[], object]], *, num_runs: int
) -> dict[str, list[float]]:
    """Return each alternative's processor seconds, measured in turn after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for run in range(1 + num_runs):
        for name, function in alternatives.items():
            before = _processor_seconds()
            function()
            if run:
                seconds[name].append(_processor_seconds() - before)
    return seconds


def _processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def parity_rows() -> list[Row]:
    """Return speeds of encoding and decoding, and ratios to libisal where it is installed."""
    generator = np.random.default_rng(1)
    blocks = [generator.integers(0, 256, BLOCK_BYTES, dtype=np.uint8) for _ in range(DATA_COUNT)]
    rows: list[Row] = []
    for parity_count in (1, 2, 4):
        out = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(parity_count)]
        matrix = parity_matrix(DATA_COUNT, parity_count)
        runs: dict[str, Callable[[], object]] = {
            codec.name: partial(codec.multiply, matrix, blocks, out) for codec in _codecs()
        }
        if importlib.util.find_spec("zfec") is not None:
            runs["zfec"] = _zfec(blocks, parity_count)
        rows += _speeds(f"encode {DATA_COUNT}+{parity_count}", runs)
    survivors = (*range(2, DATA_COUNT), DATA_COUNT, DATA_COUNT + 1)
    matrix = recovery_matrix(DATA_COUNT, 2, survivors, (0, 1))
    out = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(2)]
    runs = {codec.name: partial(codec.multiply, matrix, blocks, out) for codec in _codecs()}
    rows += _speeds(f"recover 2 lost of {DATA_COUNT}+2", runs)
    return rows


def _codecs() -> list[Codec]:
    isal = isal_codec()
    return [NumpyCodec()] if isal is None else [NumpyCodec(), isal]


def _zfec(blocks: Sequence[Bytes], parity_count: int) -> Callable[[], object]:
    import zfec  # type: ignore[import-not-found]

    encoder: Any = zfec.Encoder(len(blocks), len(blocks) + parity_count)
    bodies = [block.tobytes() for block in blocks]
    wanted = list(range(len(blocks), len(blocks) + parity_count))
    return partial(encoder.encode, bodies, wanted)


def _repeat(run: Callable[[], object]) -> None:
    """Run often enough to be measured well."""
    for _ in range(NUM_REPEATS):
        run()


def _speeds(what: str, runs: Mapping[str, Callable[[], object]]) -> list[Row]:
    repeated = {name: partial(_repeat, run) for name, run in runs.items()}
    seconds = seconds_in_turn(repeated, num_runs=9)
    data_gb = NUM_REPEATS * DATA_COUNT * BLOCK_BYTES / 1e9
    rows = [
        row_of(f"{what}: {name}", [data_gb / s for s in taken], unit="GB/s")
        for name, taken in seconds.items()
    ]
    for name in ("isal", "zfec"):
        if name in seconds:
            rows.append(
                ratio_row(f"{what}: numpy over {name}", seconds[name], seconds["numpy"], "speed")
            )
    if {"isal", "zfec"} <= seconds.keys():
        rows.append(ratio_row(f"{what}: isal over zfec", seconds["zfec"], seconds["isal"], "speed"))
    return rows


def image_rows(base: Path) -> list[Row]:
    """Return seconds of sealing a folder and of checking the image, and ratios to the peers."""
    entries = _make_tree(base / "tree")
    identity = ImageIdentity(archive_id="a" * 32, image_id="b" * 32, label="BENCH", sequence=1)
    image = base / "ours.iso"

    def ours() -> None:
        seal_image(entries, image, disc_capacity=10**12, identity=identity, created_ns=0)

    def peer(*command: str) -> Callable[[], object]:
        return partial(subprocess.run, command, check=True, capture_output=True)

    tree, out = str(base / "tree"), str(base / "peer.iso")
    runs: dict[str, Callable[[], object]] = {"seal_image": ours}
    if shutil.which("genisoimage"):
        runs["genisoimage -R -udf"] = peer(
            "genisoimage", "-quiet", "-R", "-udf", "-allow-limited-size", "-o", out, tree
        )
    if shutil.which("xorriso"):
        runs["xorriso -as mkisofs -R"] = peer(
            "xorriso", "-as", "mkisofs", "-quiet", "-R", "-o", out, tree
        )
    seconds = seconds_in_turn(runs, num_runs=5)
    rows = [row_of(f"seal: {name}", taken, unit="s") for name, taken in seconds.items()]
    rows += [
        ratio_row(f"seal: seal_image's time over {name}", seconds["seal_image"], taken, "time")
        for name, taken in seconds.items()
        if name != "seal_image"
    ]
    checks = seconds_in_turn({"check_disc": lambda: check_disc(image)}, num_runs=5)
    rows.append(row_of("check an image: check_disc", checks["check_disc"], unit="s"))
    rows.append(row_of("image size", [float(image.stat().st_size)], unit="B", note="of ours"))
    return rows


def _make_tree(root: Path) -> list[SealEntry]:
    """Return entries of files with accents and spaces, sizes from 0 to 100 kB."""
    generator = random.Random(1)
    entries = []
    for number in range(NUM_FILES):
        folder = root / f"dossier é {number % NUM_FOLDERS}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"file {number}.bin"
        path.write_bytes(generator.randbytes(generator.randrange(100_000)))
        entries.append(
            SealEntry(
                paths=(os.fsencode(path.relative_to(root)),), kind=NodeKind.FILE, inode=number + 2,
                mode=0o644, size=path.stat().st_size, source=path,
            )
        )  # fmt: skip
    return entries


def main() -> None:
    """Run all measurements and write the results."""
    memory = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="tierwise-bench-", dir=memory if memory.is_dir() else None))
    try:
        rows = parity_rows() + image_rows(base)
    finally:
        shutil.rmtree(base)
    packages = ["numpy", "pycdlib"]
    if importlib.util.find_spec("zfec") is not None:
        packages.append("zfec")
    config = {
        "block_bytes": BLOCK_BYTES, "data_count": DATA_COUNT, "num_files": NUM_FILES,
        "num_folders": NUM_FOLDERS,
    }  # fmt: skip
    print(write_results("archive_media", rows, config=config, packages=packages))


if __name__ == "__main__":
    main()
