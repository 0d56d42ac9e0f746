"""Pictures stored as bytes inside tables: where each is, and its bytes when they are asked for.

A table is a Parquet file, or a folder that the `datasets` library wrote with `save_to_disk`: Arrow
streams named in `state.json`, read here with pyarrow alone. Rows come out as plain values, with a
`StoredImage` in place of each picture's bytes, so that reading a data set holds no pictures.

Left out: writing tables, `datasets` folders with an index over their rows (which `save_to_disk`
never leaves), and other features that are files (audio, video).

Sources: Hugging Face datasets, `Dataset.save_to_disk` and `features.Image` (a struct of `bytes` and
`path`); Apache Arrow columnar format, IPC streaming format.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tierwise.core.errors import DataError, MissingFileError
from tierwise.core.records import write_whole

STATE_NAME = "state.json"
INFO_NAME = "dataset_info.json"
SPLITS_NAME = "dataset_dict.json"
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """A picture inside a table.

    Attributes:
        table: The Parquet file or `datasets` folder.
        row: From 0.
        column: The column's name.
        place: Which of the row's pictures, from 0; None where the column holds one a row.
        name: The file's name it was stored with, or "".
    """

    table: Path
    row: int
    column: str
    place: int | None = None
    name: str = ""

    def __str__(self) -> str:
        """Return where it is, for messages."""
        which = "" if self.place is None else f"[{self.place}]"
        return f"{self.table}:row {self.row + 1}, {self.column}{which}"

    def read_bytes(self) -> bytes:
        """Return the picture's file as it was stored.

        Raises:
            OSError: The table is gone, damaged or no longer has such a cell.
        """
        import pyarrow as pa

        try:
            cell = _cell(self.table, self.row, self.column)
            value = cell if self.place is None else cell[self.place]
            data = value["bytes"]
        except (pa.ArrowException, DataError, LookupError, TypeError) as error:
            raise OSError(f"{self} cannot be read") from error
        if not isinstance(data, bytes):
            raise OSError(f"{self} holds no bytes")
        return data


def file_of(picture: Path | StoredImage, path: Path) -> Path:
    """Return a picture's file; for a stored one it is written, by its hash, beside `path`.

    Raises:
        DataError: A stored picture is no longer where it was.
    """
    if isinstance(picture, Path):
        return picture
    try:
        data = picture.read_bytes()
    except OSError as error:
        raise DataError(f"{picture} cannot be read", hint="the data has changed") from error
    suffix = Path(picture.name).suffix
    if not re.fullmatch(r"\.[A-Za-z0-9]{1,8}", suffix):  # a stored name may be anything
        suffix = _suffix_of(data)
    name = f"{hashlib.sha256(data).hexdigest()[:16]}{suffix}"
    file = path.with_name(f"{path.stem}_images") / name
    if not file.exists():
        write_whole(file, data)
    return file


def _suffix_of(data: bytes) -> str:
    """Return the usual suffix of a picture by its first bytes, or ""."""
    starts = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp", b"GIF8": ".gif"}
    return next((suffix for start, suffix in starts.items() if data.startswith(start)), "")


def rows_of_table(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, row) of a Parquet file or `datasets` folder; empty cells are left out.

    Class labels become their names.

    Raises:
        MissingFileError: No such file.
        DataError: Not a table.
    """
    labels = _label_names(path) if path.is_dir() else {}
    start = 0
    for batch in _batches(path):
        names = [field.name for field in batch.schema if _kind(field.type) is None]
        try:
            plain = batch.select(names).to_pylist()
        except UnicodeDecodeError as error:  # no writer's library lets that pass
            where = f"rows {start + 1} to {start + batch.num_rows}"
            raise DataError(f"{path}: {where} hold text that is not UTF-8") from error
        pictures = [field.name for field in batch.schema if _kind(field.type) is not None]
        for place in range(batch.num_rows):
            row = {key: value for key, value in plain[place].items() if value is not None}
            for name, words in labels.items():
                if name in row and 0 <= row[name] < len(words):
                    row[name] = words[row[name]]
            for name in pictures:
                value = _pictures(batch.column(name)[place], path, start + place, name)
                if value is not None:
                    row[name] = value
            yield f"{path}:row {start + place + 1}", row
        start += batch.num_rows


def _pictures(cell: Any, path: Path, row: int, column: str) -> Any:
    """Return a cell's pictures without their bytes: stored ones, or `{"path": ...}`."""

    def one(value: Any, place: int | None) -> Any:
        names = [field.name for field in value.type]
        name = value["path"].as_py() if "path" in names else None
        if value["bytes"].is_valid:
            return StoredImage(table=path, row=row, column=column, place=place, name=name or "")
        return {"path": name}

    if not cell.is_valid:
        return None
    if _kind(cell.type) == "one":
        return one(cell, None)
    return [one(value, place) for place, value in enumerate(cell.values)]


def _kind(kind: Any) -> str | None:
    """Return "one" or "many" for a type that holds pictures as bytes, else None."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "many" if _kind(kind.value_type) == "one" else None
    if not types.is_struct(kind):
        return None
    bytes_of = [field.type for field in kind if field.name == "bytes"]
    return "one" if bytes_of and _is_binary(bytes_of[0]) else None


def _is_binary(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    if path.is_dir():
        yield from open_dataset(path).to_batches(max_chunksize=_ROWS_AT_ONCE)
        return
    batches = open_parquet(path).iter_batches(batch_size=_ROWS_AT_ONCE)
    try:
        yield from batches
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def open_parquet(path: Path) -> Any:
    """Return a Parquet file, opened.

    Raises:
        MissingFileError: No such file.
        DataError: It is not a Parquet file.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except FileNotFoundError as error:
        raise MissingFileError(f"no file {path}") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file") from error


def open_dataset(folder: Path) -> Any:
    """Return the table of a `datasets` folder, mapped into memory rather than read.

    Raises:
        DataError: The folder is not one, is damaged, or names files outside itself.
    """
    import pyarrow as pa

    state = _json_of(folder / STATE_NAME)
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} has an index over its rows", hint="save it again with datasets 2.0 or later"
        )
    tables = []
    for entry in _entries(folder, state):
        try:
            with pa.memory_map(str(entry)) as source:
                tables.append(pa.ipc.open_stream(source).read_all())
        except FileNotFoundError as error:
            raise DataError(f"{folder} lacks its file {entry.name}") from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{entry} is not an Arrow stream") from error
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise DataError(f"the files of {folder} differ in their columns") from error


def _entries(folder: Path, state: Mapping[str, Any]) -> Sequence[Path]:
    files = state.get("_data_files")
    names = [one.get("filename") for one in files] if isinstance(files, list) else []
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise DataError(f"{folder / STATE_NAME} does not name Arrow files of its folder")
    return [folder / name for name in names]


def _label_names(folder: Path) -> dict[str, list[str]]:
    """Return column -> names, for the columns that hold class labels."""
    features = _json_of(folder / INFO_NAME).get("features")
    return {
        name: [str(label) for label in feature.get("names") or ()]
        for name, feature in (features or {}).items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }


def _json_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path.parent} is not a datasets folder: no {path.name}") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object")
    return found


def _cell(table: Path, row: int, column: str) -> Any:
    """Return one cell as plain values; what was opened last stays open."""
    stamp = (table / STATE_NAME if table.is_dir() else table).stat().st_mtime_ns
    if table.is_dir():
        return _opened_dataset(table, stamp).column(column)[row].as_py()
    group, place = _group_of(table, stamp, row)
    return _opened_group(table, stamp, group, column)[place].as_py()


@lru_cache(maxsize=4)
def _opened_dataset(folder: Path, stamp: int) -> Any:
    return open_dataset(folder)


@lru_cache(maxsize=2)
def _opened_group(path: Path, stamp: int, group: int, column: str) -> Any:
    return open_parquet(path).read_row_group(group, columns=[column]).column(column)


def _group_of(path: Path, stamp: int, row: int) -> tuple[int, int]:
    """Return the row group that holds a row, and the row's place in it."""
    for group, size in enumerate(_group_sizes(path, stamp)):
        if row < size:
            return group, row
        row -= size
    raise IndexError(row)


@lru_cache(maxsize=4)
def _group_sizes(path: Path, stamp: int) -> tuple[int, ...]:
    metadata = open_parquet(path).metadata
    return tuple(metadata.row_group(place).num_rows for place in range(metadata.num_row_groups))
