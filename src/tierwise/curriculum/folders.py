"""Folders as data: pictures with metadata, pictures by label, and what `datasets` saved to disk.

- **datasets**: a folder with `state.json` (one split), or with `dataset_dict.json` and one split;
  a folder of several splits is refused, since which one is meant decides everything.
- **metadata**: `metadata.jsonl`, `.csv` or `.parquet` anywhere below; `file_name` (or
  `image_file_name`), or a list in `file_names`, names pictures relative to the metadata's folder.
  The other columns are those of any layout that `layouts` reads.
- **labels**: `LABEL/*.png`: the folder's name is the answer to the question given by option.

Pictures are found only inside the folder: a path or a link that leads out is a malformed row.
Left out: archives, audio, video, remote files.

Source: Hugging Face datasets documentation, "Create an image dataset" (ImageFolder).
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tierwise.core.errors import DataError, UsageError
from tierwise.curriculum.samples import (
    Sample,
    SampleSet,
    collect_samples,
    lines_of,
    make_sample,
    object_of_line,
)
from tierwise.curriculum.stored import (
    SPLITS_NAME,
    STATE_NAME,
    StoredImage,
    rows_of_table,
)

Convert = Callable[[Mapping[str, Any], Path], Sample]
Rows = Iterator[tuple[str, Callable[[], Sample]]]

_PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_NAMES = ("file_name", "image_file_name", "file_names", "image_file_names", "images_file_names")


def read_folder(path: Path, *, convert: Convert, question: str, skip_bad: bool) -> SampleSet:
    """Return the samples of a folder of pictures or of a `datasets` folder.

    Args:
        path: The folder.
        convert: Makes a sample of (row, folder), raising `DataError`.
        question: What is asked about pictures in folders named by label.
        skip_bad: Leave malformed rows out and count them, instead of stopping at the first.

    Raises:
        UsageError: Pictures by label and no question.
        DataError: A malformed row and not `skip_bad`, several splits, or nothing usable.
    """
    if (path / SPLITS_NAME).exists() or (path / STATE_NAME).exists():
        rows = _dataset_rows(_one_split(path), convert)
    else:
        rows = _metadata_rows(path, convert) or _label_rows(path, question)
    return collect_samples(path, rows, skip_bad=skip_bad)


def _one_split(path: Path) -> Path:
    if not (path / SPLITS_NAME).exists():
        return path
    try:
        splits = json.loads((path / SPLITS_NAME).read_text(encoding="utf-8"))["splits"]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path / SPLITS_NAME} names no splits") from error
    if not isinstance(splits, list) or len(splits) != 1:
        named = ", ".join(map(str, splits)) if isinstance(splits, list) else "none"
        raise DataError(f"{path} has the splits {named}", hint="name one split's own folder")
    return inside(path, path, splits[0])


def _dataset_rows(path: Path, convert: Convert) -> Rows:
    for place, row in rows_of_table(path):
        yield place, partial(_sample, row, path, path, convert)


def _metadata_rows(root: Path, convert: Convert) -> Rows | None:
    files = sorted(file for name in _METADATA for file in root.rglob(name))
    if not files:
        return None
    return (
        (place, partial(_sample_of_raw, raw, root, file.parent, convert))
        for file in files
        for place, raw in _raw_rows(file)
    )


def _raw_rows(file: Path) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    match file.suffix:
        case ".jsonl":
            yield from lines_of(file)
        case ".csv":
            yield from _csv_rows(file)
        case _:
            yield from rows_of_table(file)


def _csv_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.DictReader(stream, restkey="")
        for row in reader:
            yield f"{file}:{reader.line_num}", row


def _sample_of_raw(
    raw: str | Mapping[str, Any], root: Path, folder: Path, convert: Convert
) -> Sample:
    row = object_of_line(raw) if isinstance(raw, str) else raw
    if "" in row:
        raise DataError("the row has more cells than the header")
    row = {key: value for key, value in row.items() if value not in (None, "")}
    for value in row.values():
        _refuse_other_text(value)
    names = [name for name in _NAMES if name in row]
    if not names and not any(isinstance(row.get(key), Sequence) for key in ("image", "images")):
        raise DataError("no file_name")
    if names:
        value = row[names[0]]
        row["images"] = value if isinstance(value, list) else [value]
    return _sample(row, root, folder, convert)


def _refuse_other_text(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError("not UTF-8 text") from error


def _sample(row: Mapping[str, Any], root: Path, folder: Path, convert: Convert) -> Sample:
    """Return the sample of a row whose pictures must lie inside `root`."""
    value = row.get("images", row.get("image"))
    items = () if value is None else value if isinstance(value, list) else (value,)
    pictures = []
    for item in items:
        name = item.get("path") if isinstance(item, Mapping) else item
        pictures.append(name if isinstance(name, StoredImage) else inside(root, folder, name))
    return convert({**row, "images": pictures}, folder)


def inside(root: Path, folder: Path, name: object) -> Path:
    """Return the path of a picture named relative to `folder`.

    Raises:
        DataError: It is no name, or leads out of `root`.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise DataError("a picture has no file name")
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise DataError(f"{name} leads out of {root}", hint="copy the picture into the folder")
    return path


def _label_rows(root: Path, question: str) -> Rows:
    files = sorted(
        file
        for file in root.glob("*/*")
        if file.suffix.casefold() in _PICTURES and not file.name.startswith(".")
    )
    if not files:
        raise DataError(
            f"{root} holds no metadata file and no pictures in folders named by label",
            hint="see docs/formats/samples.md for the folders that can be read",
        )
    if not question.strip():
        raise UsageError(
            f"the pictures of {root} lie in folders named by label, and no question is given",
            hint="add --question 'What is shown?'",
        )
    return ((str(file), partial(_sample_of_file, file, root, question)) for file in files)


def _sample_of_file(file: Path, root: Path, question: str) -> Sample:
    return make_sample(
        question=question,
        answer=file.parent.name,
        images=(inside(root, root, str(file.relative_to(root))),),
        source=root.name,
    )
