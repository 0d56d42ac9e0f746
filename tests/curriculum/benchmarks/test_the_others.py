"""MM-Vet, OCRBench, HallusionBench, MMStar: their layouts and metrics by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.curriculum.benchmarks.small_files import (
    base64_png,
    hallusion_row,
    only,
    png,
    put_picture,
    read,
    write_hallusion,
    write_json,
    write_parquet,
    write_tsv,
)
from tierwise.core.errors import DataError
from tierwise.curriculum.benchmarks import hallusionbench, mmstar, mmvet
from tierwise.curriculum.benchmarks.items import Item, Mark, UnreadableReplyError
from tierwise.curriculum.benchmarks.measures import cluster_interval, measures
from tierwise.curriculum.difficulty.passrate import wilson_interval


def scored(item: Item, text: str) -> float:
    assert item.rule is not None
    return item.rule(text).score


def ocr_row(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "dataset_name": "IIIT5K", "id": number, "image_path": f"IIIT5K/test/{number}.png",
        "question": "what is written in the image?", "answers": "CENTRE",
        "type": "Regular Text Recognition",
    }  # fmt: skip
    return {**row, **changes}


def formula_row(number: int) -> dict[str, Any]:
    return ocr_row(
        number, dataset_name="HME100k", answers=["y _ { 2 } = - A\n", "y_2 = - A\n"],
        type="Handwritten Mathematical Expression Recognition",
    )  # fmt: skip


def write_ocr(folder: Path, *rows: dict[str, Any]) -> Path:
    for number, row in enumerate(rows):
        put_picture(folder / "OCRBench_Images" / row["image_path"], number)
    return write_json(folder / "OCRBench" / "OCRBench.json", list(rows))


def test_ocrbench_holds_a_gold_answer_by_type(tmp_path: Path) -> None:
    several = ocr_row(2, answers=["12.30", "$12.30"], type="Key Information Extraction")
    path = write_ocr(tmp_path, ocr_row(1), several, formula_row(3))
    for data in (path, tmp_path):
        plain, list_of, formula = read(data).items
    assert plain.groups == ("part:Text Recognition", "type:Regular Text Recognition")
    assert list_of.groups == ("type:Key Information Extraction",)
    assert formula.groups == ("type:Handwritten Mathematical Expression Recognition",)
    assert [scored(plain, t) for t in ("It says centre.", "CEN\nTRE", "cent re")] == [1, 0, 0]
    assert [scored(list_of, t) for t in ("Total: 12.30", "12,30")] == [1, 0]
    # a formula: case counts, blanks do not
    texts = ("y_{2}=-A", "y_2=-A", "so y _ 2 = - A", "y_2=-a")
    assert [scored(formula, t) for t in texts] == [1, 1, 1, 0]


def test_a_gold_text_in_brackets_is_one_answer_in_json(tmp_path: Path) -> None:
    found = only(read(write_ocr(tmp_path, ocr_row(1, answers="['a'"))))
    assert scored(found, "it says ['a'") == 1.0


def test_ocrbench_tsv(tmp_path: Path) -> None:
    row = {
        "index": "1", "image": base64_png(), "question": "what is written?",
        "answer": "['CENTRE', 'CENTER']", "category": "Regular Text Recognition",
    }  # fmt: skip
    formula = {**row, "index": "2", "answer": "['x ^ A']", "category": formula_row(1)["type"]}
    first, second = read(write_tsv(tmp_path / "OCRBench.tsv", [row, formula])).items
    assert [scored(first, t) for t in ("center", "cantor")] == [1, 0]
    assert [scored(second, t) for t in ("x^A", "x^a")] == [1, 0]


def test_an_empty_gold_text_would_be_in_every_answer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"OCRBench.json: row 2: an empty answer"):
        read(write_ocr(tmp_path, ocr_row(1), ocr_row(2, answers=["", "x"])))


def test_mmvet_is_read_with_capabilities(tmp_path: Path) -> None:
    put_picture(tmp_path / "images" / "v1_0.png")
    row = {
        "imagename": "v1_0.png", "question": "What is x?", "answer": "-1<AND>-5",
        "imagesource": "ours", "capability": ["ocr", "math"],
    }  # fmt: skip
    write_json(tmp_path / "mm-vet.json", {"v1_0": row})
    found = only(read(tmp_path))
    assert found.sample.id == "v1_0"
    assert found.groups == ("capability:math", "capability:ocr", "integration:math+ocr")
    assert found.rule is None
    assert found.judging is not None
    prompt = found.judging.ask("x = -1")
    assert prompt is not None
    assert "-1 <AND> -5" in prompt
    tsv = {"index": "7", "image": base64_png(), "question": "What?", "answer": "no"}
    only_row = only(read(write_tsv(tmp_path / "MMVet.tsv", [{**tsv, "category": "rec,know"}])))
    assert only_row.groups[-1] == "integration:know+rec"


@pytest.mark.parametrize(("reply", "score"), [("0.7", 0.7), ("1.0", 1.0), ("0", 0.0), ("1.", 1.0)])
def test_mmvet_grades(reply: str, score: float) -> None:
    assert mmvet.read_reply("", reply).score == score
    assert mmvet.read_reply("", f"<think>0.1</think>{reply}").score == score


@pytest.mark.parametrize("reply", ["", "right", "1.5", "7/10", "-0.5", "10"])
def test_an_unreadable_grade_is_no_zero(reply: str) -> None:
    with pytest.raises(UnreadableReplyError):
        mmvet.read_reply("", reply)


def hallusion_folder(folder: Path) -> Path:
    """Two sets: VD with figures 0, 1; VS with no figure and figure 1; two questions each."""
    places = [
        "VD_illusion_1_0_0_0", "VD_illusion_1_0_0_1", "VD_illusion_2_0_1_0", "VD_illusion_2_0_1_1",
        "VS_chart_0_0_0_0", "VS_chart_0_0_0_1", "VS_chart_1_0_1_0", "VS_chart_1_0_1_1",
    ]  # fmt: skip
    write_hallusion(folder, [hallusion_row(place) for place in places])
    return folder


def test_hallusionbench_accuracies_by_hand(tmp_path: Path) -> None:
    items = read(hallusion_folder(tmp_path)).items
    assert [len(item.sample.images) for item in items] == [1, 1, 1, 1, 0, 0, 1, 1]
    texts = ["Yes.", "Yes", "yes", "No", "Hard to say", "No", "Yes", "Yes"]
    marks = {
        item.sample.id: Mark(score=scored(item, text))
        for item, text in zip(items, texts, strict=True)
    }
    # right: VD 1 1 | 1 0, VS (unclear counts as right without a picture) 1 0 | 1 1
    found = {(m.metric, m.group): m for m in measures(items, marks, metric="aAcc", seed=0)}
    assert found["aAcc", "all"].value == 6 / 8
    # figures: VD 0 right, VD 1 wrong, VS 1 right; without a picture there is no figure
    assert (found["fAcc", "all"].num_units, found["fAcc", "all"].value) == (3, 2 / 3)
    # pairs: VD question 0 right, 1 wrong; VS question 0 right, 1 wrong
    assert (found["qAcc", "all"].num_units, found["qAcc", "all"].value) == (4, 2 / 4)
    assert found["qAcc", "category:VD"].value == 1 / 2
    # easy: visual_input 0 or 1, by pair: VD both right; VS 0 right (in both), 1 wrong
    assert (found["aAcc easy", "all"].num_units, found["aAcc easy", "all"].value) == (4, 3 / 4)
    assert (found["aAcc hard", "all"].num_units, found["aAcc hard", "all"].value) == (2, 1 / 2)
    assert found["aAcc", "subcategory:VD illusion"].value == 3 / 4
    assert ("fAcc", "subcategory:VD illusion") not in found


def test_a_question_without_a_mark_leaves_its_pair_open_unless_it_is_wrong(tmp_path: Path) -> None:
    items = read(hallusion_folder(tmp_path)).items
    marks = {item.sample.id: Mark(score=1.0) for item in items}
    del marks["VD_illusion_0_0_0"]
    marks["VD_illusion_0_0_1"] = Mark(score=0.0)
    found = {(m.metric, m.group): m for m in measures(items, marks, metric="aAcc", seed=0)}
    assert (found["aAcc", "all"].num_units, found["aAcc", "all"].num_unmarked) == (7, 1)
    assert (found["fAcc", "all"].num_units, found["fAcc", "all"].num_unmarked) == (3, 0)
    assert (found["qAcc", "all"].num_units, found["qAcc", "all"].num_unmarked) == (3, 1)


@pytest.mark.parametrize(
    ("reply", "seen", "blank"),
    [("correct", 1, 1), ("Incorrect.", 0, 0), ("unclear", 0, 1)],
)
def test_hallusionbench_judged(reply: str, seen: int, blank: int) -> None:
    assert hallusionbench.read_reply("", reply, blank=False).score == seen
    assert hallusionbench.read_reply("", reply, blank=True).score == blank


@pytest.mark.parametrize("reply", ["", "yes", "correct or incorrect"])
def test_an_unreadable_word_is_no_zero(reply: str) -> None:
    with pytest.raises(UnreadableReplyError):
        hallusionbench.read_reply("", reply, blank=True)


def test_hallusionbench_tsv(tmp_path: Path) -> None:
    row = {
        "index": "VD_illusion_1_0_0_0", "category": "VD", "l2-category": "illusion",
        "image": base64_png(), "question": "Is it longer?", "answer": "No",
    }  # fmt: skip
    blank = {**row, "index": "VS_chart_0_0_0_0", "image": "", "category": "VS"}
    seen, unseen = read(write_tsv(tmp_path / "HallusionBench.tsv", [row, blank])).items
    assert seen.sample.id == "VD_illusion_0_0_0"
    assert [scored(seen, t) for t in ("No, it is not.", "Yes", "Perhaps")] == [1, 0, 0]
    assert unseen.sample.images == ()
    assert scored(unseen, "Perhaps") == 1


def star_row(**changes: Any) -> dict[str, Any]:
    row = {
        "index": 0, "question": "Which?\nOptions: A: dog, B: cat", "image": png(), "answer": "B",
        "category": "math", "l2_category": "geometry",
        "meta_info": {"source": "ours", "split": "val", "image_path": "images/0.jpg"},
    }  # fmt: skip
    return {**row, **changes}


def test_mmstar(tmp_path: Path) -> None:
    for image in (png(), {"bytes": png(), "path": None}):
        write_parquet(tmp_path / "mmstar.parquet", [star_row(image=image)])
        found = only(read(tmp_path))
        assert found.groups == ("category:math", "axis:math / geometry")
        assert found.sample.images[0].read_bytes() == png()
    tsv = {
        "index": "3", "question": "Which?", "A": "dog", "B": "cat", "answer": "A",
        "category": "math", "l2_category": "geometry", "image": base64_png(),
    }  # fmt: skip
    from_tsv = only(read(write_tsv(tmp_path / "MMStar.tsv", [tsv])))
    assert "(A) dog\n(B) cat" in from_tsv.sample.question


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("B", 1), ("b: cat", 1), ("(B) cat", 1), ("Option B", 1), ("The answer is B.", 1),
        ("A", 0), ("So it is B", 0), ("", 0), ("**B**", 0),
        ("Both", 1),  # a letter that comes first counts, whatever the word: the published rule
        ("<think>A?</think>\nB", 1),
    ],
)  # fmt: skip
def test_mmstar_looks_at_what_comes_first(text: str, score: int) -> None:
    assert mmstar.mark("B", text).score == score


def test_means_have_intervals_by_kind() -> None:
    from tierwise.curriculum.samples import Sample

    items = [
        Item(sample=Sample(id=str(n), question="?", answer="1"), groups=(f"category:{n % 2}",))
        for n in range(10)
    ]
    binary = {str(n): Mark(score=float(n < 4)) for n in range(10)}
    first, *rest = measures(items, binary, metric="accuracy", seed=0)
    assert (first.value, first.interval) == (0.4, "wilson")
    assert (first.low, first.high) == wilson_interval(4, 10)
    assert [one.group for one in rest] == ["category:0", "category:1"]
    graded = {**binary, "9": Mark(score=0.3)}
    del graded["0"]
    (first, *_) = measures(items, graded, metric="score", seed=0)
    assert (first.interval, first.num_units, first.num_unmarked) == ("bootstrap", 9, 1)
    assert first.value == pytest.approx(3.3 / 9)
    assert first.low < first.value < first.high


def test_an_interval_counts_clusters_not_copies() -> None:
    import numpy as np

    rng = np.random.default_rng(1)
    value_N = (rng.random(60) < 0.4).astype(float)
    names = [str(n) for n in range(60)]
    copied = cluster_interval(np.repeat(value_N, 5), [name for name in names for _ in range(5)])
    assert copied == pytest.approx(cluster_interval(value_N, names))
    assert copied == pytest.approx(wilson_interval(float(value_N.mean()) * 59, 59))
    assert cluster_interval(np.zeros(20), ["a"] * 10 + ["b"] * 10) == wilson_interval(0, 2)


def test_the_interval_of_clusters_covers_about_as_often_as_it_says() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    covered = plain = 0
    for _ in range(300):
        value_N, names = [], []
        for cluster, rate in enumerate(rng.beta(2, 3, 40)):
            size = int(rng.integers(2, 9))
            value_N += list((rng.random(size) < rate).astype(float))
            names += [str(cluster)] * size
        low, high = cluster_interval(np.array(value_N), names)
        covered += low <= 0.4 <= high
        low, high = wilson_interval(sum(value_N), len(value_N))
        plain += low <= 0.4 <= high
    assert covered >= 270
    assert plain < 270  # what ignoring the clusters would claim
