from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.curriculum.benchmarks.small_files import (
    base64_png,
    only,
    png,
    read,
    write_parquet,
    write_tsv,
)
from tierwise.core.errors import DataError
from tierwise.curriculum.benchmarks import mmmu

OPTIONS = {"A": "a red dog", "B": "a cat", "C": "Tampa"}


def row(identity: str = "validation_Art_Theory_1", **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": identity, "question": "Which is <image 1>?", "options": "['a red dog', \"a 'cat'\"]",
        "explanation": "", "img_type": "['Paintings']", "answer": "B",
        "topic_difficulty": "Easy", "question_type": "multiple-choice", "subfield": "Ours",
    }  # fmt: skip
    made |= {f"image_{number}": None for number in range(1, 8)}
    made["image_1"] = {"bytes": png(1), "path": "a.png"}
    return {**made, **changes}


def open_row(identity: str, answer: str) -> dict[str, Any]:
    return row(identity, question_type="open", options="[]", answer=answer)


def write(folder: Path, subject: str, *rows: dict[str, Any]) -> Path:
    return write_parquet(folder / subject / "validation-00000-of-00001.parquet", rows)


def test_folders_by_subject(tmp_path: Path) -> None:
    write(tmp_path, "Art_Theory", row(), row("validation_Art_Theory_2"))
    write(tmp_path, "Math", open_row("validation_Math_15", "['24/7', '3.429']"))
    write_parquet(tmp_path / "Math" / "dev-00000-of-00001.parquet", [row("dev_Math_1")])
    found = read(tmp_path)
    assert [one.sample.id for one in found.items] == [
        "validation_Art_Theory_1", "validation_Art_Theory_2", "validation_Math_15",
    ]  # fmt: skip
    assert found.items[0].groups == (
        "discipline:Art and Design", "subject:Art_Theory", "form:multiple-choice",
    )  # fmt: skip
    assert found.items[2].groups[:2] == ("discipline:Science", "subject:Math")
    assert "(B) a 'cat'" in found.items[0].sample.question
    rule = found.items[2].rule
    assert rule is not None
    assert [rule(text).score for text in ("It is 24/7", "3.43", "3.5")] == [1.0, 1.0, 0.0]


def test_all_thirty_subjects_have_a_discipline() -> None:
    table = mmmu.disciplines()
    assert len(table) == 30
    assert len(set(table.values())) == 6


def test_pictures_stand_where_they_are_named(tmp_path: Path) -> None:
    changes = {
        "question": "Compare <image 2> with <image 1> and <image 2>.",
        "options": "['<image 3>', 'none']",
        "image_2": {"bytes": png(2), "path": None},
        "image_3": {"bytes": png(3), "path": None},
        "image_4": {"bytes": png(4), "path": None},
    }
    found = only(read(write(tmp_path, "Art", row("validation_Art_1", **changes))))
    shown = [picture.read_bytes() for picture in found.sample.images]
    assert shown == [png(4), png(2), png(1), png(2), png(3)]  # the one that nobody names is first
    assert found.sample.question.count("<image>") == 5
    assert "(A) <image>" in found.sample.question


def test_tsv_counts_its_validation_split(tmp_path: Path) -> None:
    common = {
        "index": "1", "question": "Which is <image 1>, <image 2>?", "answer": "B",
        "A": "a dog", "B": "a cat", "category": "Science", "l2-category": "Math",
        "split": "validation", "image": f"['{base64_png(1)}', '{base64_png(2)}']",
    }  # fmt: skip
    rows = [
        common,
        {**common, "index": "2", "image": "1"},  # the pictures of row 1
        {**common, "index": "3", "split": "dev"},
        {**common, "index": "4", "A": "", "B": "", "answer": "42"},
    ]
    found = read(write_tsv(tmp_path / "MMMU_DEV_VAL.tsv", rows))
    assert [one.sample.id for one in found.items] == ["1", "2", "4"]
    assert found.items[1].sample.images == found.items[0].sample.images
    assert [path.read_bytes() for path in found.items[0].sample.images] == [png(1), png(2)]
    assert found.items[2].groups == ("discipline:Science", "subject:Math", "form:open")


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"), ("(B)", "B"), ("B.", "B"), ("Not (A) but (C).", "C"), ("A or B", "B"),
        ("(A) is wrong, so C", "A"),  # brackets come before bare letters
        ("The thing there is surely a cat", "B"),
        ("I see a cat and then a red dog here", "A"),  # the last one named
        ("a cat", None),  # five words or fewer are not searched for options
        ("", None),
    ],
)  # fmt: skip
def test_choices_by_the_published_rule(response: str, letter: str | None) -> None:
    assert mmmu.chosen(OPTIONS, response) == letter


def test_a_drawn_choice_is_marked_as_drawn_and_is_a_function_of_the_key() -> None:
    drawn = [mmmu.mark_choice(OPTIONS, "B", "?", key=key) for key in range(300)]
    assert all(mark.guessed for mark in drawn)
    assert sum(mark.score for mark in drawn) == 100
    assert drawn[7] == mmmu.mark_choice(OPTIONS, "B", "?", key=7)
    assert not mmmu.mark_choice(OPTIONS, "B", "B", key=0).guessed


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        (["251"], "The total is 251.", 1.0),
        (["251"], "250.999", 1.0),  # both numbers at two decimals
        (["251"], "250.99", 0.0),
        (["7243000"], "So the value is 7,243,000 dollars", 1.0),
        (["-120"], "The answer is -120 volts", 1.0),
        (["-120"], "120", 0.0),
        (["2000000"], "the result is 2e6", 1.0),
        (["0.286"], "= 0.29", 1.0),
        (["62.6"], "x = 60 + 2.6 = 62.6", 1.0),
        (["20"], "20\nThe final result is 21", 0.0),  # only what follows a sign counts
        (["Tampa", "Florida"], "It is in florida, I think", 1.0),
        (["C"], "Cork", 0.0),  # a single letter stands alone
        (["C"], "vitamin C", 1.0),
        (["Transformation"], "transform", 0.0),
    ],
)
def test_open_answers_by_the_published_rule(gold: list[str], response: str, score: float) -> None:
    assert mmmu.mark_open(gold, response).score == score


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"options": "open('/etc/passwd')"}, "not the letter of an option"),
        ({"options": "[open('/etc/passwd')]"}, "options is not a list of literals"),
        ({"options": "['a', {}]"}, "options holds something that is not text"),
        ({"options": "['" + "a" * 200_000 + "']"}, "characters, 100000 are read"),
        ({"options": "[]"}, "multiple-choice question with 0 options"),
        ({"answer": "?"}, "not the letter of an option"),
        ({"image_1": None}, "<image 1> has no picture"),
        ({"image_1": {"bytes": None, "path": "/etc/hostname"}}, "leads out of"),
        ({"id": "validation_Alchemy_1"}, "none of MMMU's subjects"),
        ({"id": None}, "no id"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    good = row("validation_Art_1")
    path = write_parquet(
        tmp_path / "validation-0.parquet", [good, {**row("validation_Art_2"), **changes}]
    )
    with pytest.raises(DataError, match=sentence) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}:row 2: ")
    found = read(path, skip_bad=True)
    assert (len(found.items), len(found.skipped)) == (1, 1)
