from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tierwise.core.errors import DataError, MissingFileError, UsageError
from tierwise.curriculum.layouts import Layout, layout_of, read_any, write_any
from tierwise.curriculum.samples import Sample, SampleSet
from tierwise.curriculum.stored import file_of


def name_for(layout: Layout) -> str:
    return "out.parquet" if layout is Layout.VERL else "out.jsonl"


@pytest.mark.parametrize("layout", list(Layout))
def test_what_is_written_in_a_layout_is_read_back(
    held_out: SampleSet, tmp_path: Path, layout: Layout
) -> None:
    first, second = held_out.samples[:2]
    samples = [
        first,
        replace(second, question="left <image> and right <image> ?", images=second.images * 2),
        replace(first, id="both", images=first.images * 2),
        Sample(id="text", question="what is 2 + 2 ?", answer="4"),
    ]
    path = tmp_path / name_for(layout)
    write_any(samples, path, layout)
    again = read_any(path).samples
    assert len(again) == len(samples)
    for one, other in zip(samples, again, strict=True):
        bare = other.question.replace("<image>", "", 2) if one.id == "both" else other.question
        assert (other.id, other.answer, other.task) == (one.id, one.answer, one.task)
        assert bare.removeprefix("<image>") == one.question.removeprefix("<image>")
        assert [file_of(image, path).resolve() for image in other.images] == [
            file_of(image, path).resolve() for image in one.images
        ]


@pytest.mark.parametrize("layout", list(Layout))
def test_a_row_whose_picture_is_a_circle_of_links_is_written_like_any(
    plain_sample: Sample, tmp_path: Path, layout: Layout
) -> None:
    """`Path.resolve` raises RuntimeError there; the row erred when it was scored, no more."""
    (tmp_path / "circle.png").symlink_to("circle.png")
    bad = replace(plain_sample, id="bad", images=(tmp_path / "circle.png",))
    path = tmp_path / name_for(layout)
    write_any([plain_sample, bad], path, layout)
    assert [one.id for one in read_any(path).samples] == ["white", "bad"]


def written(sample: Sample, layout: Layout, folder: Path) -> dict[str, Any]:
    path = folder / name_for(layout)
    write_any([sample], path, layout)
    if layout is Layout.VERL:
        row: dict[str, Any] = parquet.read_table(path).to_pylist()[0]
    else:
        row = json.loads(path.read_text())
    return row


def test_each_layout_is_the_documented_one(plain_sample: Sample, tmp_path: Path) -> None:
    """Against the trainers' documented schemas; their packages are not installed here."""
    image = str(plain_sample.images[0])
    swift = written(plain_sample, Layout.MS_SWIFT, tmp_path)
    assert swift["messages"] == [{"role": "user", "content": "<image>is it white ?"}]
    assert (swift["images"], swift["solution"]) == ([image], "1")
    gpt = written(plain_sample, Layout.SHAREGPT, tmp_path)
    assert [turn["from"] for turn in gpt["conversations"]] == ["human", "gpt"]
    trl = written(plain_sample, Layout.TRL, tmp_path)
    assert trl["prompt"][0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "is it white ?"},
    ]
    easy = written(plain_sample, Layout.EASYR1, tmp_path)
    assert (easy["problem"], easy["answer"]) == ("<image>is it white ?", "1")
    verl = written(plain_sample, Layout.VERL, tmp_path)
    assert verl["prompt"] == [{"role": "user", "content": "<image>is it white ?"}]
    assert verl["reward_model"] == {"style": "rule", "ground_truth": "1"}
    assert verl["images"] == [{"image": f"file://{image}"}]
    for row, layout in ((swift, Layout.MS_SWIFT), (gpt, Layout.SHAREGPT), (trl, Layout.TRL)):
        assert layout_of(row) is layout


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "no message of the user"),
        ({"messages": "q"}, "not a list of objects"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no answer"),
        ({"messages": [{"role": "user", "content": 3}], "solution": "1"}, "no text"),
        (
            {"messages": [{"role": "user", "content": "q"}], "solution": "1", "images": ["a.png"]},
            "no <image> tag for 1 images",
        ),
        (
            {
                "messages": [{"role": "user", "content": "<image><image>q"}],
                "solution": "1",
                "images": ["a.png"],
            },
            "2 <image> tags for 1 images",
        ),
        (
            {
                "messages": [{"role": "user", "content": "<image>q"}],
                "solution": "1",
                "images": [{"bytes": "x"}],
            },
            "stored as bytes",
        ),
        ({"conversations": [{"from": "gpt", "value": "1"}]}, "no message of the user"),
    ],
)
def test_malformed_rows_of_other_layouts(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=reason):
        read_any(path)


def test_parquet_that_is_none_and_rows_that_are_bad(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="not a Parquet file"):
        read_any(tmp_path / "text.parquet")
    with pytest.raises(MissingFileError):
        read_any(tmp_path / "none.parquet")
    rows = [{"question": "q", "answer": "1"}, {"question": "", "answer": "1"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = read_any(tmp_path / "rows.parquet", skip_bad=True)
    assert (len(found.samples), [row.reason for row in found.skipped]) == (1, ["question is empty"])


def test_names_must_fit_and_nothing_is_not_written(plain_sample: Sample, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not fit verl"):
        write_any([plain_sample], tmp_path / "x.jsonl", Layout.VERL)
    with pytest.raises(UsageError, match="no sample"):
        write_any([], tmp_path / "x.jsonl", Layout.TRL)
    assert not (tmp_path / "x.jsonl").exists()
