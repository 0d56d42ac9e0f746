"""Which benchmark a file or folder holds, and its items.

A benchmark is named, or recognised: a TSV by its file name, JSON and Parquet by their fields, a
folder by the published file names in it. Left out: guessing among several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from tierwise.core.errors import DataError, MissingFileError, UsageError
from tierwise.curriculum.benchmarks import (
    hallusionbench,
    mathvista,
    mmmu,
    mmstar,
    mmvet,
    ocrbench,
)
from tierwise.curriculum.benchmarks.items import Item, ItemSet
from tierwise.curriculum.benchmarks.rows import Pictures, first_of, header_of, rows_of
from tierwise.curriculum.samples import BadRow, Sample, collect_samples


class JudgeUse(StrEnum):
    """Whether a benchmark's published metric asks a judge model."""

    NONE = "none"
    OPTIONAL = "optional"
    NEEDED = "needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """How a benchmark is found, read and scored.

    Attributes:
        name: As on the command line.
        title: As its authors write it.
        metric: Name of the mean over its items.
        judge: Whether its published metric asks a judge.
        files: Published file names within a folder, as patterns; the first that matches counts.
        fields: Fields of a JSON or Parquet row that no other benchmark has together.
        tsv: How the name of its TSV begins, in lower case.
        full_size: Number of questions whose count of right answers is the published score, or 0.
    """

    name: str
    title: str
    metric: str
    judge: JudgeUse
    files: tuple[str, ...]
    fields: frozenset[str]
    tsv: str
    full_size: int = 0


BENCHMARKS: Mapping[str, Benchmark] = {
    one.name: one
    for one in (
        Benchmark(
            name="mathvista", title="MathVista", metric="accuracy", judge=JudgeUse.OPTIONAL,
            files=(
                "testmini.json", "data/testmini.json", "testmini-*.parquet",
                "data/testmini-*.parquet", "MathVista_MINI.tsv",
            ),
            fields=frozenset({"question_type", "answer_type"}), tsv="mathvista",
        ),
        Benchmark(
            name="mmvet", title="MM-Vet", metric="score", judge=JudgeUse.NEEDED,
            files=("mm-vet.json", "mm-vet/mm-vet.json", "MMVet.tsv"),
            fields=frozenset({"imagename", "capability"}), tsv="mmvet",
        ),
        Benchmark(
            name="ocrbench", title="OCRBench", metric="accuracy", judge=JudgeUse.NONE,
            files=("OCRBench.json", "OCRBench/OCRBench.json", "OCRBench.tsv"),
            fields=frozenset({"dataset_name", "image_path", "answers"}), tsv="ocrbench",
            full_size=1000,
        ),
        Benchmark(
            name="hallusionbench", title="HallusionBench", metric="aAcc", judge=JudgeUse.OPTIONAL,
            files=("HallusionBench.json", "HallusionBench.tsv"),
            fields=frozenset({"visual_input", "gt_answer"}), tsv="hallusionbench",
        ),
        Benchmark(
            name="mmmu", title="MMMU", metric="accuracy", judge=JudgeUse.NONE,
            files=("*/validation-*.parquet", "validation-*.parquet", "MMMU_DEV_VAL.tsv"),
            fields=frozenset({"options", "image_1"}), tsv="mmmu",
        ),
        Benchmark(
            name="mmstar", title="MMStar", metric="accuracy", judge=JudgeUse.NONE,
            files=("mmstar.parquet", "val-*.parquet", "val/*.parquet", "MMStar.tsv"),
            fields=frozenset({"l2_category", "image"}), tsv="mmstar",
        ),
    )
}  # fmt: skip

_NAMES = ", ".join(one.title for one in BENCHMARKS.values())
_WHERE = "docs/benchmarks.md says which files each is published in"


def holds_benchmark(path: Path) -> bool:
    """Return whether a path is read as a benchmark when none is named.

    JSON and TSV are; a folder or a Parquet file is if one of the six is recognised in it.
    """
    if path.is_dir():
        return any(first_of(path, one.files) for one in BENCHMARKS.values())
    if path.is_file() and path.suffix.lower() == ".parquet":
        header = header_of(path)
        return any(one.fields <= header for one in BENCHMARKS.values())
    return path.suffix.lower() in (".json", ".tsv")


def benchmark_named(name: str) -> Benchmark:
    """Return a benchmark by its name, its title, or either without signs.

    >>> benchmark_named("MM-Vet").name
    'mmvet'

    Raises:
        UsageError: No such benchmark; the sentence lists the six.
    """
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    if plain not in BENCHMARKS:
        raise UsageError(f"no benchmark {name!r}: there are {_NAMES}")
    return BENCHMARKS[plain]


def find_benchmark(path: Path, name: str | None = None) -> tuple[Benchmark, tuple[Path, ...]]:
    """Return which benchmark a file or folder holds, and its files.

    Args:
        path: A published file, or the folder that it was downloaded into.
        name: Which benchmark; recognised by default.

    Raises:
        MissingFileError: No such file or folder.
        DataError: It holds none of the six, or not the one named.
        UsageError: No such benchmark, or a folder with several and no name.
    """
    named = None if name is None else benchmark_named(name)
    if not path.exists():
        raise MissingFileError(f"no file or folder {path}")
    if path.is_file():
        return named or _recognised(path), (path,)
    held = {
        one.name: files
        for one in ((named,) if named else BENCHMARKS.values())
        if (files := first_of(path, one.files))
    }
    if not held:
        wanted = named.title if named else f"any of {_NAMES}"
        raise DataError(f"{path} does not hold {wanted}", hint=_WHERE)
    if len(held) > 1:
        titles = ", ".join(BENCHMARKS[one].title for one in held)
        raise UsageError(f"{path} holds {titles}", hint="choose one with --benchmark")
    ((found, files),) = held.items()
    return BENCHMARKS[found], files


def _recognised(path: Path) -> Benchmark:
    if path.suffix.lower() == ".tsv":
        matches = [one for one in BENCHMARKS.values() if path.name.lower().startswith(one.tsv)]
    else:
        header = header_of(path)
        matches = [one for one in BENCHMARKS.values() if one.fields <= header]
    if len(matches) != 1:
        raise DataError(
            f"{path} is not recognised as any of {_NAMES}",
            hint="name it with --benchmark; " + _WHERE,
        )
    return matches[0]


def read_items(
    benchmark: Benchmark,
    path: Path,
    files: tuple[Path, ...],
    *,
    pictures_folder: Path,
    seed: int = 0,
    skip_bad: bool = False,
) -> ItemSet:
    """Return the items of a benchmark's files; pictures inside them are copied out, not decoded.

    Args:
        benchmark: Which.
        path: What the user named: pictures are looked for in and beside it.
        files: From `find_benchmark`.
        pictures_folder: Where pictures from inside the files are put.
        seed: Of MMMU's random draws.
        skip_bad: Leave malformed rows out and count them, instead of stopping at the first.

    Raises:
        DataError: A malformed row and not `skip_bad`; the sentence names file and row.
    """
    items: dict[str, Item] = {}
    skipped: list[BadRow] = []
    for file in files:
        pictures = Pictures(folder=pictures_folder, roots=_roots(path, file))
        convert = _converter(benchmark, file, seed=seed)
        rows = (
            (place, partial(_kept, items, pictures, convert, row))
            for place, row in rows_of(file, pictures)
            if benchmark.name != "mmmu" or mmmu.is_validation(row)
        )
        skipped += collect_samples(file, rows, skip_bad=skip_bad).skipped
    return ItemSet(items=tuple(items.values()), skipped=tuple(skipped))


def _kept(
    items: dict[str, Item],
    pictures: Pictures,
    convert: Callable[[Mapping[str, Any], Pictures], Item],
    row: Mapping[str, Any],
) -> Sample:
    """Return the sample of a row; its item is kept unless its id was used before."""
    item = convert(row, pictures)
    if item.sample.id in items:
        raise DataError(f"id {item.sample.id!r} was used before")
    items[item.sample.id] = item
    return item.sample


def _roots(path: Path, file: Path) -> tuple[Path, ...]:
    """Return where the published archives put pictures, relative to the data or above it."""
    inner = ("", "images", "hallusion_bench", "OCRBench_Images")
    folders = (path, file.parent) if path.is_dir() else (file.parent,)
    roots = [folder / name for folder in folders for name in inner]
    return tuple(dict.fromkeys([*roots, file.parent.parent / "OCRBench_Images"]))


def _converter(
    benchmark: Benchmark, file: Path, *, seed: int
) -> Callable[[Mapping[str, Any], Pictures], Item]:
    match benchmark.name:
        case "mathvista":
            queries = mathvista.published_prompts(file)
            return partial(mathvista.item_of, queries=queries)
        case "mmmu":
            return partial(mmmu.item_of, seed=seed)
        case "mmvet":
            return mmvet.item_of
        case "ocrbench":
            return ocrbench.item_of
        case "hallusionbench":
            return hallusionbench.item_of
        case _:
            return mmstar.item_of
