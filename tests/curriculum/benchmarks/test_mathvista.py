from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.curriculum.benchmarks.small_files import (
    base64_png,
    mathvista_row,
    only,
    png,
    read,
    write_json,
    write_mathvista,
    write_parquet,
    write_tsv,
)
from tierwise.core.errors import DataError
from tierwise.curriculum.benchmarks.items import Item


def free(answer: str, answer_type: str, precision: int | None = None) -> dict[str, Any]:
    return mathvista_row(
        "9", choices=None, question_type="free_form", answer_type=answer_type, answer=answer,
        precision=precision,
    )  # fmt: skip


def item(folder: Path, row: dict[str, Any]) -> Item:
    return only(read(write_mathvista(folder, row)))


def by_rule(folder: Path, row: dict[str, Any], text: str) -> float:
    found = item(folder, row)
    assert found.rule is not None
    return found.rule(text).score


def by_judge(folder: Path, row: dict[str, Any], reply: str) -> float:
    found = item(folder, row)
    assert found.judging is not None
    return found.judging.read("Some text that ends in nothing.", reply).score


def test_json_is_read_with_its_groups(tmp_path: Path) -> None:
    rows = [mathvista_row("1"), free("1.2", "float", 1)]
    found = read(write_mathvista(tmp_path, *rows))
    assert [one.sample.id for one in found.items] == ["1", "9"]
    first = found.items[0]
    assert first.sample.images == (tmp_path / "images/1.jpg",)
    assert {"task:figure question answering", "skill:geometry reasoning"} <= set(first.groups)
    assert "skill:arithmetic reasoning" in first.groups
    assert first.sample.question.splitlines()[1:4] == ["(A) 3", "(B) 5", "(C) 7"]
    assert "1 decimals" in found.items[1].sample.question


def test_published_prompts_are_used_where_the_data_hold_them(tmp_path: Path) -> None:
    write_json(tmp_path / "query.json", {"1": "Published words?"})
    found = read(write_mathvista(tmp_path, mathvista_row("1"), mathvista_row("2")))
    assert found.items[0].sample.question == "Published words?"
    assert found.items[1].sample.question.startswith("How many sides")


def test_parquet_as_on_the_hub(tmp_path: Path) -> None:
    row = mathvista_row("1", decoded_image={"bytes": png(), "path": "1.jpg"}, query="Asked so?")
    path = write_parquet(tmp_path / "data" / "testmini-00000-of-00001-ab.parquet", [row])
    for data in (path, tmp_path):
        found = only(read(data))
        assert found.sample.question == "Asked so?"
        assert found.sample.images[0].read_bytes() == png()
        assert "skill:geometry reasoning" in found.groups


def test_tsv(tmp_path: Path) -> None:
    row = {
        "index": "1", "question": "Hint: a letter.\nHow many?", "image": base64_png(),
        "question_type": "multi_choice", "answer_type": "text", "answer": "5",
        "answer_option": "B", "choices": "['3', '5', '7']", "task": "figure question answering",
        "skills": "['geometry reasoning', 'arithmetic reasoning']",
    }  # fmt: skip
    number = {**row, "index": "2", "question_type": "free_form", "answer_type": "float"}
    number |= {"answer": "1.20", "choices": ""}
    found = read(write_tsv(tmp_path / "MathVista_MINI.tsv", [row, number]))
    assert found.items[0].sample.question == "Hint: a letter.\nHow many?"
    assert "skill:arithmetic reasoning" in found.items[0].groups
    rules = [one.rule for one in found.items]
    assert rules[0] is not None
    assert rules[1] is not None
    assert rules[0]("B").score == 1.0
    assert rules[1]("1.2").score == 1.0  # without a precision floats are compared as they are
    assert rules[1]("1.25").score == 0.0


@pytest.mark.parametrize(
    ("answer", "precision", "text", "score"),
    [
        ("1.2", 1, "1.2", 1.0),
        ("1.2", 1, "1.24", 1.0),  # rounded to the row's precision
        ("1.2", 1, "1.26", 0.0),
        ("51.04", 2, "51.0449", 1.0),
        ("51.04", 2, "51.0", 0.0),
        ("0.8", 2, "0.80", 1.0),  # str(round(0.80, 2)) is 0.8
        ("0.80", 2, "0.8", 0.0),  # and so never the text 0.80: the published rule
    ],
)
def test_floats_are_rounded_to_the_precision(
    tmp_path: Path, answer: str, precision: int, text: str, score: float
) -> None:
    row = free(answer, "float", precision)
    assert by_rule(tmp_path, row, text) == score
    assert by_judge(tmp_path, row, text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("5", 1.0), ("B", 1.0), ("(B)", 1.0), ("The answer is (B) 5.", 1.0),
        ("It has 5 sides", 1.0), ("C", 0.0), ("3 or 5", 0.0), ("", 0.0), ("no idea", 0.0),
        ("The answer is B.\n\nI hope that this helps!", 1.0),
        ("<think>It has 7.</think><answer>B</answer>", 1.0),
    ],
)  # fmt: skip
def test_choices_by_rule(tmp_path: Path, text: str, score: float) -> None:
    assert by_rule(tmp_path, mathvista_row("1"), text) == score


def test_an_extracted_choice_that_is_none_counts_as_the_nearest(tmp_path: Path) -> None:
    row = mathvista_row("1", choices=["odd", "even"], answer="even")
    assert by_judge(tmp_path, row, "evne") == 1.0
    assert by_judge(tmp_path, row, "od") == 0.0
    assert by_judge(tmp_path, row, "(b) yes") == 1.0
    assert by_judge(tmp_path, row, "none") == 0.0  # the judge found no answer


def test_whole_numbers_and_lists(tmp_path: Path) -> None:
    assert by_rule(tmp_path, free("14", "integer"), "So there are 14 of them.") == 1.0
    assert by_judge(tmp_path, free("14", "integer"), "14.9") == 1.0  # int(float()): published
    assert by_judge(tmp_path, free("14", "integer"), "fourteen") == 0.0
    assert by_rule(tmp_path, free("[2014, 2016]", "list"), "From [2014,2016]") == 1.0
    assert by_rule(tmp_path, free("[2014, 2016]", "list"), "[2016, 2014]") == 0.0


@pytest.mark.parametrize("text", ["9" * 5000, "1e999", "nan", "1e200/1e-200", "\0", "(" * 5000])
def test_any_text_has_a_mark(tmp_path: Path, text: str) -> None:
    for row in (free("14", "integer"), free("1.2", "float", 1), free("[1]", "list")):
        assert by_rule(tmp_path, row, text) == 0.0
        assert by_judge(tmp_path, row, text) == 0.0


def test_a_judge_is_asked_only_about_more_than_an_answer(tmp_path: Path) -> None:
    judging = item(tmp_path, mathvista_row("1")).judging
    assert judging is not None
    assert judging.ask("5") is None
    prompt = judging.ask("I count five sides.")
    assert prompt is not None
    assert "I count five sides." in prompt
    assert "(B) 5" in prompt
    number = item(tmp_path, free("14", "integer")).judging
    assert number is not None
    assert number.ask("14") is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"answer": ""}, "no answer"),
        ({"answer": "4"}, "none of the choices"),
        ({"question_type": "essay"}, "neither multi_choice nor free_form"),
        ({"answer_type": "words"}, "answer_type 'words'"),
        ({"precision": "two"}, "precision is not a number"),
        ({"choices": "__import__('os').abort()"}, "none of the choices"),
        ({"choices": "[__import__('os').abort()]"}, "choices is not a list of literals"),
        ({"choices": "[" * 300 + "]" * 300}, "choices is not a list of literals"),
        ({"choices": [str(n) for n in range(27)]}, "letters end at 26"),
        ({"image": "images/../../secret.jpg"}, "leads out of"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    good = mathvista_row("1")
    folder = write_mathvista(tmp_path, good)
    write_json(folder / "testmini.json", {"1": good, "2": {**good, "pid": "2", **changes}})
    with pytest.raises(DataError, match=sentence) as caught:
        read(folder)
    assert f"{folder / 'testmini.json'}: key '2': " in caught.value.message
    assert len(read(folder, skip_bad=True).skipped) == 1
