"""Files in: JSON, Parquet and tab-separated rows, and the pictures in or beside them.

A picture is a file beside the data, a cell of a Parquet file, or base64 in a TSV cell. Cells of a
TSV, and bare bytes of a Parquet file, are copied as they are, row by row, into a folder of their
own, named by their hash; nothing is decoded before it is shown to a model. A name in a data file,
or a link behind it, cannot lead out of the folder that it is relative to.

Left out: ZIP archives, remote addresses.

Source of the TSV layout: open-compass/VLMEvalKit, docs/en/Development.md and
vlmeval/dataset/image_base.py (a short `image` cell names the row that holds the picture).
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierwise.core.errors import DataError, MissingFileError
from tierwise.core.records import write_whole
from tierwise.curriculum.folders import inside
from tierwise.curriculum.samples import Picture
from tierwise.curriculum.stored import StoredImage, open_parquet, rows_of_table

KEY = "(key)"
"""Where a row of a JSON object of objects has its key."""

_MAX_CELL = 1 << 30
_MAX_REFERENCE = 64  # Source: VLMEvalKit, image_base.py: up to 64 characters name another row

Row = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Pictures:
    """Where pictures are found and put.

    Attributes:
        folder: Where embedded pictures are copied to.
        roots: Where named pictures are looked for, in order.
    """

    folder: Path
    roots: tuple[Path, ...]
    _by_index: dict[str, tuple[Path, ...] | str] = field(default_factory=dict)

    def put(self, data: bytes) -> Path:
        """Return the file of an embedded picture, written unless it is there already."""
        if not data:
            raise DataError("a picture has no bytes")
        path = self.folder / f"{hashlib.sha256(data).hexdigest()[:32]}.img"
        if not path.is_file():
            write_whole(path, data)
        return path

    def named(self, name: Any) -> Path:
        """Return the file that a data file names.

        Raises:
            DataError: It leads out of its folder, or is in none of the roots.
        """
        for root in self.roots:
            if (path := inside(root, root, name)).is_file():
                return path
        looked = " or ".join(str(root) for root in self.roots)
        raise DataError(f"no picture {name} in {looked}", hint="docs/benchmarks.md has the layout")

    def of(self, value: Any) -> Picture:
        """Return a picture given as a cell of a table, as bytes, as `{"path": ...}`, or by name."""
        if isinstance(value, StoredImage):
            return value
        if isinstance(value, bytes):
            return self.put(value)
        return self.named(value.get("path") if isinstance(value, Mapping) else value)

    def of_cell(self, row: Mapping[str, Any]) -> tuple[Path, ...]:
        """Return the pictures of a TSV row: of its own, or of the row that it names; () if none.

        Raises:
            DataError: Base64 that is none, or a row that is not there or has no picture.
        """
        index = str(row.get("index"))
        found = self._by_index.get(index, ())
        if isinstance(found, str) and found in self._by_index:
            found = self._by_index[found]
        if isinstance(found, str):
            raise DataError("image is neither base64 nor the index of a row that has one")
        return found

    def keep_cell(self, index: str, cell: str) -> None:
        """Copy the pictures of a TSV cell, or note the row that it names."""
        pieces = re.findall(r"[A-Za-z0-9+/=]+", cell) if cell.startswith("[") else [cell.strip()]
        if not cell.strip():
            return
        if len(pieces) == 1 and len(pieces[0]) <= _MAX_REFERENCE:
            self._by_index[index] = pieces[0]
            return
        try:
            data = [base64.b64decode(piece, validate=True) for piece in pieces]
        except binascii.Error:
            self._by_index[index] = "not base64"
            return
        self._by_index[index] = tuple(self.put(one) for one in data)


def rows_of(path: Path, pictures: Pictures) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) for each row of a `.json`, `.parquet` or `.tsv` file; nulls are left out.

    Raises:
        MissingFileError: No such file.
        DataError: It cannot be read as what it is called.
    """
    if not path.is_file():
        raise MissingFileError(f"no file {path}")
    match path.suffix.lower():
        case ".json":
            yield from _json_rows(path)
        case ".parquet":
            yield from ((place, dict(row)) for place, row in rows_of_table(path))
        case ".tsv":
            yield from _tsv_rows(path, pictures)
        case suffix:
            raise DataError(f"{path}: {suffix or 'a file without a suffix'} is no benchmark file")


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if isinstance(content, dict):
        pairs = [(f"{path}: key {key!r}", value, {KEY: key}) for key, value in content.items()]
    elif isinstance(content, list):
        pairs = [(f"{path}: row {n}", value, {}) for n, value in enumerate(content, start=1)]
    else:
        raise DataError(f"{path} is neither an object nor a list")
    for place, value, extra in pairs:
        if not isinstance(value, dict):
            raise DataError(f"{place}: not a JSON object")
        yield place, {**_known(value), **extra}


def _known(row: Mapping[str, Any]) -> Row:
    return {key: value for key, value in row.items() if value is not None}


def _tsv_rows(path: Path, pictures: Pictures) -> Iterator[tuple[str, Row]]:
    """Yield rows without `image`: `Pictures.of_cell` has it, once every row has been seen."""
    rows: list[tuple[str, Row]] = []
    limit = csv.field_size_limit(_MAX_CELL)  # a process-wide setting, put back below
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream, delimiter="\t")
            for cells in reader:
                place = f"{path}:{reader.line_num}"
                if None in cells or None in cells.values():
                    raise DataError(f"{place}: not as many cells as the header has")
                row = {name: cell for name, cell in cells.items() if cell != ""}
                pictures.keep_cell(str(row.get("index")), str(row.pop("image", "")))
                rows.append((place, row))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text") from error
    except csv.Error as error:
        raise DataError(f"{path}: not tab-separated text: {error}") from error
    finally:
        csv.field_size_limit(limit)
    yield from rows


def header_of(path: Path) -> frozenset[str]:
    """Return the names of a JSON, Parquet or TSV file's fields, by its first row or schema.

    Raises:
        DataError: It cannot be read.
    """
    match path.suffix.lower():
        case ".parquet":
            with open_parquet(path) as file:
                return frozenset(file.schema_arrow.names)
        case ".json":
            first = next(_json_rows(path), None)
            return frozenset(first[1]) if first else frozenset()
        case _:
            with path.open(encoding="utf-8", errors="replace") as stream:
                return frozenset(stream.readline(1 << 16).rstrip("\r\n").split("\t"))


def first_of(folder: Path, patterns: Sequence[str]) -> tuple[Path, ...]:
    """Return the files of the first pattern that any file of a folder has, sorted."""
    for pattern in patterns:
        if found := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return tuple(found)
    return ()
