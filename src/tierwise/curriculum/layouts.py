"""Other trainers' layouts: read as samples, and written so that those trainers load them.

| layout   | question                       | answer                      | pictures             |
|----------|--------------------------------|-----------------------------|----------------------|
| plain    | `question`                     | `answer`                    | `images`: paths      |
| ms-swift | `messages`, first user content | `solution`, else last reply | `images`: paths      |
| sharegpt | `conversations`, first human   | `solution`, else last reply | `images`: paths      |
| trl      | `prompt`: messages with parts  | `solution`                  | `images`: paths      |
| easyr1   | `problem`                      | `answer`                    | `images`: paths      |
| verl     | Parquet, `prompt`: messages    | `reward_model.ground_truth` | `images`: {"image"}  |

Any layout may come as Parquet, with pictures as paths or as bytes (`stored`), or from a folder
(`folders`). A picture that was stored as bytes is written as a file of its own beside what is
written. Left out: pictures as text inside JSON Lines, which are refused.

Sources: the layouts' own documentation: ms-swift "Custom dataset", LLaMA-Factory data/README.md,
TRL "Dataset formats and types", hiyouga/EasyR1 README, verl "Prepare data for post-training".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from tierwise.core.errors import DataError, UsageError
from tierwise.core.records import whole_file, write_whole
from tierwise.curriculum.folders import read_folder
from tierwise.curriculum.samples import (
    IMAGE_TAG,
    Sample,
    SampleSet,
    collect_samples,
    image_paths,
    make_sample,
    read_samples,
    sample_of_plain_row,
)
from tierwise.curriculum.stored import StoredImage, file_of, rows_of_table

_QUESTIONS = ("question", "prompt", "problem", "messages", "conversations")


class Layout(StrEnum):
    """Whose layout a file has."""

    PLAIN = "plain"
    MS_SWIFT = "ms-swift"
    SHAREGPT = "sharegpt"
    TRL = "trl"
    EASYR1 = "easyr1"
    VERL = "verl"


def read_any(path: Path, *, skip_bad: bool = False, question: str = "") -> SampleSet:
    """Return the samples of a JSON Lines or Parquet file or a folder, in any of the layouts.

    Args:
        path: The file or folder; see `folders` for what a folder may hold.
        skip_bad: Leave malformed rows out and count them, instead of stopping at the first.
        question: What is asked in rows that hold no question of their own.

    Raises:
        MissingFileError: No such file.
        UsageError: A folder of labelled pictures, and no question.
        DataError: A malformed row and not `skip_bad`, or no usable row at all.
    """
    convert = partial(_sample_with_question, question) if question else sample_of_row
    if path.is_dir():
        return read_folder(path, convert=convert, question=question, skip_bad=skip_bad)
    if path.suffix == ".parquet":
        rows = ((place, partial(convert, row, path.parent)) for place, row in rows_of_table(path))
        return collect_samples(path, rows, skip_bad=skip_bad)
    return read_samples(path, skip_bad=skip_bad, convert=convert)


def _sample_with_question(question: str, row: Mapping[str, Any], folder: Path) -> Sample:
    """Return the sample of a row; one without a question gets it, and its label as the answer."""
    if not any(key in row for key in _QUESTIONS):
        row = {**row, "question": question}
        if "label" in row:
            row.setdefault("answer", row["label"])
    return sample_of_row(row, folder)


def sample_of_row(row: Mapping[str, Any], folder: Path) -> Sample:
    """Return the sample of one row, whatever its layout; picture paths are joined to `folder`."""
    match layout_of(row):
        case Layout.MS_SWIFT | Layout.TRL | Layout.VERL as layout:
            turns = row["messages"] if layout is Layout.MS_SWIFT else row["prompt"]
            return _conversation(row, folder, turns, role="role", text="content")
        case Layout.SHAREGPT:
            return _conversation(row, folder, row["conversations"], role="from", text="value")
        case _:
            return sample_of_plain_row(row, folder)


def layout_of(row: Mapping[str, Any]) -> Layout:
    """Return whose layout a row has, by its keys."""
    if "conversations" in row:
        return Layout.SHAREGPT
    if "messages" in row:
        return Layout.MS_SWIFT
    if "prompt" in row and not isinstance(row["prompt"], str):
        return Layout.VERL if "reward_model" in row else Layout.TRL
    return Layout.EASYR1 if "problem" in row else Layout.PLAIN


def _conversation(
    row: Mapping[str, Any], folder: Path, turns: Any, *, role: str, text: str
) -> Sample:
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError("the messages are not a list of objects")
    asked = [turn for turn in turns if turn.get(role) in ("user", "human")]
    if not asked:
        raise DataError("no message of the user")
    question = _text_of(asked[0].get(text))
    images = image_paths(_pictures(row), folder)
    lead = IMAGE_TAG * len(images)
    if lead and question.startswith(lead) and question.count(IMAGE_TAG) == len(images):
        question = question.removeprefix(lead).lstrip("\n")  # pictures come first anyway
    elif images and IMAGE_TAG not in question:
        raise DataError(f"no {IMAGE_TAG} tag for {len(images)} images")
    return make_sample(
        question=question,
        answer=_answer(row, turns, role=role, text=text),
        images=images,
        given_id=row.get("id"),
        task=str(row.get("task") or row.get("ability") or ""),
        source=str(row.get("source") or row.get("data_source") or ""),
    )


def _pictures(row: Mapping[str, Any]) -> Any:
    value = row.get("images", row.get("image"))
    if value is None:
        return None
    items = value if isinstance(value, list | tuple) else [value]
    paths: list[Any] = []
    for item in items:
        if isinstance(item, Path | StoredImage):
            paths.append(item)
            continue
        if isinstance(item, Mapping):
            if item.get("bytes") is not None:
                raise DataError(
                    "a picture is stored as bytes", hint="save it as a file and name its path"
                )
            item = item.get("image") or item.get("path")  # noqa: PLW2901 - the same picture
        paths.append(str(item).removeprefix("file://") if isinstance(item, str) else item)
    return paths


def _text_of(content: Any) -> str:
    """Return a message's text; picture parts become tags."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError("a message has no text")
    pieces = []
    for part in content:
        if not isinstance(part, Mapping):
            raise DataError("a message's part is not an object")
        pieces.append(IMAGE_TAG if part.get("type") == "image" else str(part.get("text") or ""))
    return "".join(pieces)


def _answer(row: Mapping[str, Any], turns: Sequence[Any], *, role: str, text: str) -> str:
    stated = row.get("solution", row.get("answer", row.get("ground_truth")))
    if stated is None and isinstance(row.get("reward_model"), Mapping):
        stated = row["reward_model"].get("ground_truth")
    if stated is None:
        replies = [turn for turn in turns if turn.get(role) in ("assistant", "gpt")]
        stated = _text_of(replies[-1].get(text)) if replies else None
    if stated is None or isinstance(stated, bool | list | dict) or not str(stated).strip():
        raise DataError("no answer")
    return str(stated)


def write_any(samples: Sequence[Sample], path: Path, layout: Layout) -> None:
    """Write samples in a trainer's layout, whole or not at all; picture paths become absolute.

    Args:
        samples: What to write.
        path: The file; `.parquet` for verl, JSON Lines for the others.
        layout: Whose.

    Raises:
        UsageError: Nothing to write, or a name that does not fit the layout.
    """
    if not samples:
        raise UsageError("there is no sample to write")
    if (path.suffix == ".parquet") != (layout is Layout.VERL):
        raise UsageError(f"{path.name} does not fit {layout.value}, which is Parquet only for verl")
    rows = [
        _row(
            sample,
            [os.path.realpath(file_of(image, path)) for image in sample.images],
            number,
            layout,
        )
        for number, sample in enumerate(samples)
    ]
    if layout is Layout.VERL:
        import pyarrow as pa
        from pyarrow import parquet

        with whole_file(path) as temporary:
            parquet.write_table(pa.Table.from_pylist(rows), temporary)
    else:
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _row(sample: Sample, images: Sequence[str], number: int, layout: Layout) -> dict[str, Any]:
    tagged = sample.question
    if IMAGE_TAG not in tagged:
        tagged = IMAGE_TAG * len(images) + tagged
    common = {"id": sample.id, "task": sample.task, "source": sample.source}
    match layout:
        case Layout.PLAIN:
            row: dict[str, Any] = {"question": sample.question, "answer": sample.answer}
            return {**row, "images": images, **common}
        case Layout.MS_SWIFT:
            messages = [{"role": "user", "content": tagged}]
            return {"messages": messages, "images": images, "solution": sample.answer, **common}
        case Layout.SHAREGPT:
            turns = [
                {"from": "human", "value": tagged},
                {"from": "gpt", "value": sample.answer},
            ]
            return {"conversations": turns, "images": images, **common}
        case Layout.TRL:
            prompt = [{"role": "user", "content": _parts(tagged)}]
            return {"prompt": prompt, "images": images, "solution": sample.answer, **common}
        case Layout.EASYR1:
            return {"problem": tagged, "answer": sample.answer, "images": images, **common}
        case Layout.VERL:
            return {
                "data_source": sample.source or "tierwise",
                "prompt": [{"role": "user", "content": tagged}],
                "images": [{"image": f"file://{image}"} for image in images],
                "ability": sample.task,
                "reward_model": {"style": "rule", "ground_truth": sample.answer},
                "extra_info": {"index": number, "id": sample.id},
                "id": sample.id,
            }


def _parts(tagged: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(tagged.split(IMAGE_TAG)):
        if number:
            parts.append({"type": "image"})
        if piece.strip():
            parts.append({"type": "text", "text": piece})
    return parts
