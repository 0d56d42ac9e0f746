"""Folders read as data; the `datasets` ones are written by the real library."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from PIL import Image
from pyarrow import parquet

from tierwise.cli.curriculum import group
from tierwise.core.errors import DataError, MissingFileError, UsageError
from tierwise.curriculum.layouts import Layout, read_any, write_any
from tierwise.curriculum.samples import BadImageError, ImageFault, image_digest, load_image
from tierwise.curriculum.stored import StoredImage, file_of


def picture(path: Path, red: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), (red, 20, 30)).save(path)
    return path


def red_of(image: Any) -> int:
    return int(np.asarray(load_image(image))[0, 0, 0])


def save(rows: Sequence[dict[str, Any]], features: dict[str, Any], folder: Path) -> Path:
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(list(rows), features=datasets.Features(features))
    table.save_to_disk(str(folder))
    return folder


TEXTS = {"question": datasets.Value("string"), "answer": datasets.Value("string")}


def test_pictures_in_folders_named_by_label(tmp_path: Path) -> None:
    for number, label in enumerate(("cat", "dog", "dog")):
        picture(tmp_path / "pets" / label / f"{number}.PNG", number)
    (tmp_path / "pets" / "dog" / "notes.txt").write_text("no picture")
    found = read_any(tmp_path / "pets", question="what is it ?").samples
    assert [(one.answer, one.question, red_of(one.images[0])) for one in found] == [
        ("cat", "what is it ?", 0),
        ("dog", "what is it ?", 1),
        ("dog", "what is it ?", 2),
    ]
    (tmp_path / "pets").rename(tmp_path / "moved")
    again = read_any(tmp_path / "moved", question="what is it ?").samples
    assert [one.id for one in again] == [one.id for one in found]  # by content
    with pytest.raises(UsageError, match="no question is given"):
        read_any(tmp_path / "moved")


def test_a_circle_of_links_is_one_bad_picture(tmp_path: Path) -> None:
    picture(tmp_path / "pets" / "cat" / "1.png", 1)
    (tmp_path / "pets" / "cat" / "2.png").symlink_to("2.png")
    good, bad = read_any(tmp_path / "pets", question="what is it ?").samples
    assert red_of(good.images[0]) == 1
    with pytest.raises(BadImageError) as caught:
        load_image(bad.images[0])
    assert caught.value.fault is ImageFault.MISSING


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_metadata_beside_pictures(tmp_path: Path, kind: str) -> None:
    for number in range(3):
        picture(tmp_path / "d" / "train" / f"{number}.png", number)
    rows = [
        {"file_name": f"{number}.png", "question": f"q{number}", "answer": str(number)}
        for number in range(3)
    ]
    write_metadata(rows, tmp_path / "d" / "train" / f"metadata.{kind}")
    found = read_any(tmp_path / "d").samples
    assert [(one.question, one.answer, red_of(one.images[0])) for one in found] == [
        ("q0", "0", 0),
        ("q1", "1", 1),
        ("q2", "2", 2),
    ]


def write_metadata(rows: Sequence[dict[str, Any]], path: Path) -> None:
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".csv":
            with path.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case _:
            datasets.Dataset.from_list(list(rows)).to_parquet(str(path))


def test_several_pictures_a_row_and_the_layout_of_another_trainer(tmp_path: Path) -> None:
    for number in range(2):
        picture(tmp_path / f"{number}.png", number)
    row = {
        "file_names": ["1.png", "0.png"],
        "messages": [{"role": "user", "content": "<image><image>which ?"}],
        "solution": "A",
    }
    write_metadata([row], tmp_path / "metadata.jsonl")
    (found,) = read_any(tmp_path).samples
    assert [red_of(image) for image in found.images] == [1, 0]
    assert (found.question, found.answer) == ("which ?", "A")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"question": "q", "answer": "1"}', "no file_name"),
        ('{"file_name": "a.png", "question": "q"}', "no answer"),
        ('{"file_name": "a.png", "question": " ", "answer": "1"}', "question is empty"),
        ('{"file_name": 3, "question": "q", "answer": "1"}', "no file name"),
        ('{"file_name": "../out.png", "question": "q", "answer": "1"}', "leads out of"),
        ('{"file_name": "/out.png", "question": "q", "answer": "1"}', "leads out of"),
        ('{"file_name": "link.png", "question": "q", "answer": "1"}', "leads out of"),
        ('{"file_names": ["a.png", "../out.png"], "question": "q", "answer": "1"}', "leads out"),
    ],
)
def test_a_malformed_row_names_file_and_line_or_is_counted(
    tmp_path: Path, line: str, reason: str
) -> None:
    picture(tmp_path / "d" / "a.png", 1)
    picture(tmp_path / "out.png", 2)
    (tmp_path / "d" / "link.png").symlink_to(tmp_path / "out.png")
    good = '{"file_name": "a.png", "question": "q", "answer": "1"}'
    metadata = tmp_path / "d" / "metadata.jsonl"
    metadata.write_text(f"{good}\n{line}\n")
    with pytest.raises(DataError, match=rf"metadata\.jsonl:2: .*{reason}"):
        read_any(tmp_path / "d")
    found = read_any(tmp_path / "d", skip_bad=True)
    assert len(found.samples) == 1
    assert [row.place for row in found.skipped] == [f"{metadata}:2"]


def test_csv_rows_that_do_not_fit(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 1)
    (tmp_path / "metadata.csv").write_bytes(
        b'file_name,question,answer\na.png,"two\nlines",1\na.png,q,1,2\na.png,q\na.png,\xff,1\n'
    )
    found = read_any(tmp_path, skip_bad=True)
    assert [one.question for one in found.samples] == ["two\nlines"]
    assert [(row.place.rpartition(":")[2], row.reason) for row in found.skipped] == [
        ("4", "the row has more cells than the header"),
        ("5", "no answer"),
        ("6", "not UTF-8 text"),
    ]


def test_a_picture_that_is_not_there_is_the_row_s_error_when_it_is_read(tmp_path: Path) -> None:
    row = {"file_name": "gone.png", "question": "q", "answer": "1"}
    write_metadata([row], tmp_path / "metadata.jsonl")
    (found,) = read_any(tmp_path).samples
    with pytest.raises(BadImageError) as caught:
        load_image(found.images[0])
    assert caught.value.fault is ImageFault.MISSING


def test_a_folder_with_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no metadata file and no pictures"):
        read_any(tmp_path, question="q")
    with pytest.raises(MissingFileError):
        read_any(tmp_path / "none")


def test_a_datasets_folder_keeps_its_pictures_lazy(tmp_path: Path) -> None:
    files = [picture(tmp_path / f"{number}.png", number) for number in range(3)]
    rows = [
        {"question": f"q{number}", "answer": str(number), "image": str(file)}
        for number, file in enumerate(files)
    ]
    folder = save(rows, {**TEXTS, "image": datasets.Image()}, tmp_path / "saved")
    found = read_any(folder).samples
    assert [red_of(one.images[0]) for one in found] == [0, 1, 2]
    assert all(isinstance(one.images[0], StoredImage) for one in found)
    assert [image_digest(one.images[0]) for one in found] == [image_digest(one) for one in files]

    plain = tmp_path / "plain.jsonl"
    plain.write_text(
        "".join(json.dumps({**row, "image": Path(row["image"]).name}) + "\n" for row in rows)
    )
    assert [one.id for one in found] == [one.id for one in read_any(plain).samples]

    (folder / "data-00000-of-00001.arrow").rename(tmp_path / "away")
    os.utime(folder / "state.json", ns=(1, 1))
    with pytest.raises(BadImageError) as caught:
        load_image(found[0].images[0])
    assert caught.value.fault is ImageFault.MISSING


def test_many_shards_lists_of_pictures_labels_and_a_column_nobody_needs(tmp_path: Path) -> None:
    rows = [
        {
            "images": [Image.new("RGB", (3, 3), (number, 0, 0))] * 2,
            "label": number % 2,
            "other": {"deep": [number]},
        }
        for number in range(7)
    ]
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "label": datasets.ClassLabel(names=["even", "odd"]),
            "other": {"deep": datasets.List(datasets.Value("int64"))},
        }
    )
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(rows, features=features)
    table.select(range(6, -1, -1)).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    found = read_any(tmp_path / "saved", question="even or odd ?").samples
    assert [one.answer for one in found] == ["even", "odd"] * 3 + ["even"]
    assert [[red_of(image) for image in one.images] for one in found] == [
        [number] * 2 for number in range(6, -1, -1)
    ]


def test_a_folder_of_splits_must_be_narrowed_to_one(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"question": "q", "answer": "1"}])
    datasets.disable_progress_bars()
    both = datasets.DatasetDict({"train": table, "test": table})
    both.save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match="splits train, test"):
        read_any(tmp_path / "both")
    assert len(read_any(tmp_path / "both" / "train").samples) == 1
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "one"))
    assert len(read_any(tmp_path / "one").samples) == 1


def test_malformed_rows_of_a_datasets_folder(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "q", "answer": "1", "image": {"bytes": b"no picture", "path": None}},
        {"question": "", "answer": "2", "image": None},
        {"question": "q", "answer": "3", "image": {"bytes": None, "path": "../x.png"}},
        {"question": "q", "answer": "4", "image": None},
    ]
    plain = datasets.Features(
        {
            **TEXTS,
            "image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
        }
    )
    folder = save(rows, plain, tmp_path / "saved")
    with pytest.raises(DataError, match=r"saved:row 2: question is empty"):
        read_any(folder)
    found = read_any(folder, skip_bad=True)
    assert [one.answer for one in found.samples] == ["1", "4"]
    assert [row.reason.split(" /")[0] for row in found.skipped] == [
        "question is empty",
        "../x.png leads out of",
    ]
    with pytest.raises(BadImageError) as caught:
        load_image(found.samples[0].images[0])
    assert caught.value.fault is ImageFault.UNREADABLE


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("state.json", b"{", "not JSON"),
        ("state.json", b"[]", "not a JSON object"),
        ("state.json", b"{}", "does not name Arrow files"),
        (
            "state.json",
            b'{"_data_files": [{"filename": "../data-00000-of-00001.arrow"}]}',
            "does not name Arrow files of its folder",
        ),
        ("state.json", b'{"_data_files": [{"filename": "none.arrow"}]}', "lacks its file"),
        ("data-00000-of-00001.arrow", b"ARROW", "not an Arrow stream"),
    ],
)
def test_a_damaged_datasets_folder_is_refused(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    folder = save([{"question": "q", "answer": "1"}], TEXTS, tmp_path / "saved")
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read_any(folder, skip_bad=True)


def test_a_damaged_parquet_file_is_refused_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    raw = pa.array([b"ab", b"\xff\xfe"], pa.binary())
    text = pa.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])  # nobody checks it
    parquet.write_table(pa.table({"question": text, "answer": ["1", "2"]}), path)
    with pytest.raises(DataError, match=r"rows\.parquet: rows 1 to 2 hold text that is not UTF-8"):
        read_any(path)
    table = pa.table({"question": ["how many ?" * 100], "answer": ["1"]})
    parquet.write_table(table, path, compression="snappy")
    data = bytearray(path.read_bytes())
    data[20:120] = b"\x5a" * 100
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"rows\.parquet is damaged"):
        read_any(path)


def test_pictures_in_lists_of_one_length(tmp_path: Path) -> None:
    pair = [{"bytes": picture(tmp_path / f"{red}.png", red).read_bytes()} for red in (7, 9)]
    kind = pa.list_(pa.struct([("bytes", pa.binary())]), 2)
    columns = {"question": ["q ?"], "answer": ["1"], "images": pa.array([pair], kind)}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    (sample,) = read_any(tmp_path / "rows.parquet").samples
    assert [red_of(image) for image in sample.images] == [7, 9]


@pytest.mark.parametrize(
    "name", ["x.p\0ng", "x." + "y" * 300, "../../x.png", "/x/y", "x.\udcff", "x. ", ""]
)
def test_a_stored_picture_s_file_is_named_by_us_whatever_it_was_called(
    tmp_path: Path, name: str
) -> None:
    data = picture(tmp_path / "good.png", 3).read_bytes()
    column = pa.array([{"bytes": data}], pa.struct([("bytes", pa.binary())]))
    parquet.write_table(pa.table({"image": column}), tmp_path / "rows.parquet")
    stored = StoredImage(table=tmp_path / "rows.parquet", row=0, column="image", name=name)
    file = file_of(stored, tmp_path / "out" / "arm.jsonl")
    assert file.parent == tmp_path / "out" / "arm_images"
    assert (file.suffix, red_of(file)) == (".png", 3)


def test_a_table_that_changed_is_said_when_its_pictures_are_written(tmp_path: Path) -> None:
    stored = StoredImage(table=tmp_path / "gone.parquet", row=0, column="image", name="a.png")
    with pytest.raises(DataError, match=r"gone\.parquet:row 1, image cannot be read"):
        file_of(stored, tmp_path / "arm.jsonl")


def test_parquet_with_pictures_as_bytes_over_several_row_groups(tmp_path: Path) -> None:
    """As EasyR1's and verl's own data sets have them."""
    rows = [
        {
            "problem": "<image>how many ?",
            "answer": str(number),
            "images": [Image.new("RGB", (3, 3), (number, 0, 0))],
        }
        for number in range(5)
    ]
    features = datasets.Features(
        {
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
        }
    )
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(str(tmp_path / "rows.parquet"), batch_size=2)
    found = read_any(tmp_path / "rows.parquet").samples
    assert [red_of(one.images[0]) for one in found] == [0, 1, 2, 3, 4]
    assert [one.answer for one in found] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("layout", list(Layout))
def test_stored_pictures_are_written_out_for_other_trainers(tmp_path: Path, layout: Layout) -> None:
    file = picture(tmp_path / "a.png", 7)
    rows = [{"question": "q", "answer": "1", "image": str(file)}]
    folder = save(rows, {**TEXTS, "image": datasets.Image()}, tmp_path / "saved")
    samples = read_any(folder).samples
    out = tmp_path / ("out.parquet" if layout is Layout.VERL else "out.jsonl")
    write_any(samples, out, layout)
    (again,) = read_any(out).samples
    assert again.id == samples[0].id
    assert again.images[0] == tmp_path / "out_images" / f"{image_digest(file)[:16]}.png"
    assert red_of(again.images[0]) == 7


def test_the_command_line_scores_and_selects_a_folder(tmp_path: Path) -> None:
    for number, label in enumerate("0101"):
        picture(tmp_path / "pool" / label / f"{number}.png", number)
    pool = str(tmp_path / "pool")
    asked = ["--question", "what is the left digit ?"]
    settings = ["--set", "num_attempts=1", "--set", "permilles=[0]", "--set", "blind=false",
                "--set", "sampling.max_new_tokens=4"]  # fmt: skip
    score = ["score", pool, "--model", "tiny", "--out", str(tmp_path / "s"), *asked, *settings]
    result = CliRunner().invoke(group, [*score, "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["samples"] == 4
    select = ["select", pool, "--scores", str(tmp_path / "s"), *asked, "--arm", "all",
              "--out", str(tmp_path / "arm.jsonl")]  # fmt: skip
    assert CliRunner().invoke(group, select, catch_exceptions=False).exit_code == 0
    assert len(read_any(tmp_path / "arm.jsonl").samples) == 4
