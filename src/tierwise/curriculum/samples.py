"""Data in: a `Sample` is a question about pictures with its right answer; rows come from JSONL.

A malformed row is a `DataError` that names file and line, or, with `skip_bad`, a counted
`BadRow`. Pictures stay on disk until `load_image`; what can be wrong with one has a class of its
own (`ImageFault`), because a picture that cannot be read must never count as a wrong answer.

The plain layout has one object a line: `question` and `answer` (or `solution`), `images` (a path,
or a list of paths, relative to the file), and optionally `id`, `task`, `source`. Other trainers'
layouts are read by `layouts`, folders by `folders`; pictures inside tables are `stored`. Left out:
remote URLs, video, audio.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierwise.core.errors import DataError, MissingFileError
from tierwise.core.records import hash_file
from tierwise.curriculum.stored import StoredImage

if TYPE_CHECKING:
    from PIL import Image

IMAGE_TAG = "<image>"
MAX_SIDE = 20_000
"""Largest side of a picture, in pixels; beyond it a row is refused before it is decoded."""

Picture = Path | StoredImage
"""Where a picture is: a file, or a cell of a table. Both have `name` and `read_bytes`."""

_ORIENTATION = 0x0112  # Source: Exif 2.32 (CIPA DC-008), tag 274
_DEEP_MODES = frozenset({"I", "F", "I;16", "I;16B", "I;16L", "I;16N"})


class ImageFault(StrEnum):
    """What is wrong with a picture."""

    MISSING = "image_missing"
    EMPTY = "image_empty"
    TRUNCATED = "image_truncated"
    UNREADABLE = "image_unreadable"
    ANIMATED = "image_animated"
    DEEP = "image_16_bit"
    CMYK = "image_cmyk"
    ROTATED = "image_exif_rotated"
    HUGE = "image_too_large"


class BadImageError(DataError):
    """Raised for a picture that cannot be used as it is; the row is left out, the run goes on."""

    def __init__(self, message: str, *, fault: ImageFault, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.fault = fault

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the fault when an error crosses a process boundary."""
        return (_rebuild, (self.message, self.fault, self.hint))


def _rebuild(message: str, fault: ImageFault, hint: str | None) -> BadImageError:
    return BadImageError(message, fault=fault, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question with its answer.

    Attributes:
        id: Unique in its data set; the content's hash when the file gives none.
        question: What is asked; may hold one `<image>` tag a picture to say where each stands.
        images: Where the pictures are, in order; may be empty.
        answer: The right answer as text.
        task: A word for the kind of question, or "".
        source: Where the sample comes from, or "".
    """

    id: str
    question: str
    answer: str
    images: tuple[Picture, ...] = ()
    task: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that was left out: where it stands and why."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """The samples of a file in its order, and the rows left out."""

    samples: tuple[Sample, ...]
    skipped: tuple[BadRow, ...] = ()


def read_samples(
    path: Path,
    *,
    skip_bad: bool = False,
    convert: Callable[[Mapping[str, Any], Path], Sample] | None = None,
) -> SampleSet:
    """Return the samples of a JSON Lines file, in the plain layout unless `convert` says else.

    Args:
        path: The file; picture paths in it are relative to its folder.
        skip_bad: Leave malformed rows out and count them, instead of stopping at the first.
        convert: Makes a sample of (row, folder), raising `DataError`.

    Raises:
        MissingFileError: No such file.
        DataError: A malformed row and not `skip_bad`, or no usable row at all.
    """
    make = convert or sample_of_plain_row
    rows = (
        (place, partial(_sample_of_line, line, make, path.parent)) for place, line in lines_of(path)
    )
    return collect_samples(path, rows, skip_bad=skip_bad)


def _sample_of_line(
    line: str, convert: Callable[[Mapping[str, Any], Path], Sample], folder: Path
) -> Sample:
    return convert(object_of_line(line), folder)


def collect_samples(
    path: Path, rows: Iterable[tuple[str, Callable[[], Sample]]], *, skip_bad: bool
) -> SampleSet:
    """Return the samples of rows; a repeated id is a bad row.

    Args:
        path: The file or folder, for messages.
        rows: Where each row stands, and what makes its sample or raises `DataError`.
        skip_bad: Leave malformed rows out and count them, instead of stopping at the first.

    Raises:
        DataError: A malformed row and not `skip_bad`, or no usable row at all.
    """
    samples: list[Sample] = []
    skipped: list[BadRow] = []
    seen: dict[str, str] = {}
    for place, make in rows:
        try:
            sample = make()
            _refuse_repeated(sample.id, seen)
        except DataError as error:
            if not skip_bad:
                raise DataError(f"{place}: {error.message}", hint=error.hint) from error
            skipped.append(BadRow(place=place, reason=error.message))
            continue
        seen[sample.id] = place
        samples.append(sample)
    if not samples:
        raise DataError(f"{path} holds no usable sample", hint=f"{len(skipped)} rows were skipped")
    return SampleSet(samples=tuple(samples), skipped=tuple(skipped))


def _refuse_repeated(identity: str, seen: Mapping[str, str]) -> None:
    if identity in seen:
        raise DataError(f"id {identity!r} was used before, at {seen[identity]}")


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, line) of the lines that are not blank; bytes that are not UTF-8 are kept."""
    if not path.is_file():
        raise MissingFileError(f"no file {path}")
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"{path}:{number}", line


def object_of_line(line: str) -> Mapping[str, Any]:
    """Return the JSON object of a line.

    Raises:
        DataError: It holds none, or is not UTF-8.
    """
    try:
        line.encode("utf-8")
        row = json.loads(line)
    except UnicodeEncodeError as error:
        raise DataError("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg}") from error
    except ValueError as error:
        raise DataError("not JSON that can be read: a number is too long") from error
    except RecursionError as error:
        raise DataError("not JSON: nested too deep") from error
    if not isinstance(row, dict):
        raise DataError("not a JSON object")
    return row


def sample_of_plain_row(row: Mapping[str, Any], folder: Path) -> Sample:
    """Return the sample of one row of the plain layout; picture paths are joined to `folder`."""
    question = text_field(row, "question", "prompt", "problem")
    answer = text_field(row, "answer", "solution", "ground_truth")
    return make_sample(
        question=question,
        answer=answer,
        images=image_paths(row.get("images", row.get("image")), folder),
        given_id=row.get("id"),
        task=str(row.get("task") or ""),
        source=str(row.get("source") or ""),
    )


def text_field(row: Mapping[str, Any], *names: str) -> str:
    """Return the first field present among `names` as text that is not empty."""
    for name in names:
        if name in row and row[name] is not None:
            value = row[name]
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise DataError(f"{name} is not text")
            if isinstance(value, float) and not math.isfinite(value):  # a table's empty cell
                raise DataError(f"{name} is not text")
            if not str(value).strip():
                raise DataError(f"{name} is empty")
            return str(value)
    raise DataError(f"no {names[0]}")


def image_paths(value: Any, folder: Path) -> tuple[Picture, ...]:
    """Return pictures given as one path or a list of paths (or `{"path": ...}` objects).

    What is a `Picture` already stays as it is.
    """
    if value is None:
        return ()
    items: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    paths: list[Picture] = []
    for item in items:
        if isinstance(item, Path | StoredImage):
            paths.append(item)
            continue
        name = item.get("path") if isinstance(item, Mapping) else item
        if not isinstance(name, str) or not name:
            raise DataError("images is not a list of paths")
        if "\0" in name:
            raise DataError("a picture has no file name")
        paths.append(folder / name)
    return tuple(paths)


def make_sample(
    *,
    question: str,
    answer: str,
    images: tuple[Picture, ...],
    given_id: object = None,
    task: str = "",
    source: str = "",
) -> Sample:
    """Return a checked sample; without a given id it is the hash of all the sample holds.

    Raises:
        DataError: The number of `<image>` tags is neither 0 nor the number of pictures, the id is
            not text or a number, or some text or name is not UTF-8.
    """
    num_tags = question.count(IMAGE_TAG)
    if num_tags not in (0, len(images)):
        raise DataError(f"{num_tags} {IMAGE_TAG} tags for {len(images)} images")
    if not question.replace(IMAGE_TAG, "").strip():
        raise DataError("question is empty")
    if given_id is not None and (isinstance(given_id, bool) or not isinstance(given_id, str | int)):
        raise DataError("id is neither text nor a whole number")
    identity = str(given_id) if given_id not in (None, "") else ""
    _refuse_other_text(question, answer, identity, task, source, *map(str, images))
    return Sample(
        id=identity or content_hash(question, answer, images),
        question=question,
        answer=answer,
        images=images,
        task=task,
        source=source,
    )


def _refuse_other_text(*texts: str) -> None:
    """Refuse half of a surrogate pair, which JSON can hold and no file, log or table can."""
    try:
        for text in texts:
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError("not UTF-8 text") from error


def content_hash(question: str, answer: str, images: Sequence[Picture]) -> str:
    """Return 16 hex digits that depend on the texts and on the pictures' bytes, not their names.

    A picture that cannot be read counts as its name, so that the row still has an id to err under.
    """
    parts = [question, answer, *(image_digest(path) for path in images)]
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def image_digest(path: Picture) -> str:
    """Return the SHA-256 of a picture's bytes, or `unreadable:NAME` where none can be read."""
    try:
        if isinstance(path, StoredImage):
            return hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file():  # a pipe would make the reader wait
            return hash_file(path)
    except OSError:
        pass
    return f"unreadable:{path.name}"


def load_image(path: Picture) -> Image.Image:
    """Return a picture as RGB, decoded in full.

    Raises:
        BadImageError: It is missing, empty, truncated, unreadable, animated, 16 bit, CMYK,
            rotated by an EXIF tag, or has a side above 20,000 pixels.
    """
    import warnings

    from PIL import Image, UnidentifiedImageError

    source = _source(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's size warning; MAX_SIDE is our limit
            picture = Image.open(source)
    except FileNotFoundError as error:
        raise BadImageError(f"no image {path}", fault=ImageFault.MISSING) from error
    except Image.DecompressionBombError as error:
        raise BadImageError(f"{path}: {error}", fault=ImageFault.HUGE) from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise BadImageError(f"{path} is not an image", fault=ImageFault.UNREADABLE) from error
    with picture:
        try:
            _refuse_unusual(picture, path)  # which may decode it already
            picture.load()
        except BadImageError:
            raise
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise BadImageError(
                f"{path} is cut short or damaged", fault=ImageFault.TRUNCATED
            ) from error
        return picture.convert("RGB")


def _source(path: Picture) -> Path | io.BytesIO:
    """Return what Pillow is to open."""
    if isinstance(path, Path):
        try:
            found = path.stat()
        except OSError as error:
            raise BadImageError(f"no image {path}", fault=ImageFault.MISSING) from error
        if not stat.S_ISREG(found.st_mode):
            raise BadImageError(f"{path} is no file", fault=ImageFault.UNREADABLE)
        if found.st_size == 0:
            raise BadImageError(f"{path} has no bytes", fault=ImageFault.EMPTY)
        return path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadImageError(f"no image {path}", fault=ImageFault.MISSING) from error
    if not data:
        raise BadImageError(f"{path} has no bytes", fault=ImageFault.EMPTY)
    return io.BytesIO(data)


def _refuse_unusual(picture: Image.Image, path: Picture) -> None:
    if max(picture.size) > MAX_SIDE:
        width, height = picture.size
        raise BadImageError(f"{path} is {width} x {height} pixels", fault=ImageFault.HUGE)
    if getattr(picture, "n_frames", 1) > 1:
        raise BadImageError(f"{path} is animated", fault=ImageFault.ANIMATED)
    if picture.mode in _DEEP_MODES or ";16" in str(getattr(picture, "tile", "")):
        raise BadImageError(
            f"{path} has more than 8 bits a channel",
            fault=ImageFault.DEEP,
            hint="how to scale it is a decision: convert it to 8 bits yourself",
        )
    if picture.mode == "CMYK":
        raise BadImageError(
            f"{path} is CMYK", fault=ImageFault.CMYK, hint="convert it to RGB with its profile"
        )
    if picture.getexif().get(_ORIENTATION, 1) != 1:
        raise BadImageError(
            f"{path} is to be rotated by its EXIF tag",
            fault=ImageFault.ROTATED,
            hint="models disagree on whether to: apply the rotation and save it",
        )
