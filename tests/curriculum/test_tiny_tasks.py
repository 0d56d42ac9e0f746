"""The tiny tasks: answers recounted from pixels, a clean split, pure functions of the seed."""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.ndimage import label
from sklearn.datasets import load_digits

from tierwise.core.errors import UsageError
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training.sft import read_targets

SPLITS: tuple[tasks.Split, ...] = ("train", "held_out")
seeds = st.integers(0, 2**31)
indices = st.integers(0, 10**6)
splits = st.sampled_from(SPLITS)


def recount(pixels: np.ndarray, question: str) -> int:
    """Count connected blobs of each asked colour; a square fills its box, a circle does not."""
    words = question.split()
    wanted = [name for name in tasks.COLOURS if name in words] or list(tasks.COLOURS)
    count = 0
    for name in wanted:
        blobs, num_blobs = label((pixels == tasks.COLOURS[name]).all(axis=2))
        for number in range(1, num_blobs + 1):
            ys, xs = np.nonzero(blobs == number)
            box = (np.ptp(ys) + 1) * (np.ptp(xs) + 1)
            shape = "squares" if len(ys) == box else "circles"
            count += "shapes" in words or shape in words
    return count


def separate(scene: tasks.Scene) -> bool:
    """Whether no two shapes of one colour touch, so that blobs can be counted."""
    boxes = [(one.colour, one.x, one.y, one.side) for one in scene.shapes]
    return not any(
        a[0] == b[0] and abs(a[1] - b[1]) <= max(a[3], b[3]) and abs(a[2] - b[2]) <= max(a[3], b[3])
        for place, a in enumerate(boxes)
        for b in boxes[:place]
    )


def test_counts_agree_with_a_recount_of_the_pixels() -> None:
    checked = 0
    answers: Counter[str] = Counter()
    for index in range(400):
        rng = tasks.sample_rng(3, index, "train")
        scene = tasks.draw_shapes(rng)
        question = tasks.ask(scene, rng)
        if question.task is tasks.Task.COUNT and separate(scene):
            assert recount(scene.pixels, question.text) == int(question.answer)
            answers[question.answer] += 1
            checked += 1
    assert checked > 100
    assert len(answers) >= 6


@given(seeds, indices)
@settings(max_examples=60, deadline=None)
def test_shapes_stay_in_cells_of_their_own(seed: int, index: int) -> None:
    scene = tasks.draw_shapes(tasks.sample_rng(seed, index, "train"))
    cells = {(one.x // 12, one.y // 12) for one in scene.shapes}
    assert 1 <= len(cells) == len(scene.shapes) <= 9
    for one in scene.shapes:
        assert one.x % 12 + one.side <= 12
        assert one.y % 12 + one.side <= 12
        middle = scene.pixels[one.y + one.side // 2, one.x + one.side // 2]
        assert tuple(middle) == tasks.COLOURS[one.colour]


@lru_cache
def original_digits() -> Any:
    return load_digits(return_X_y=True)


@given(seeds, indices, splits)
@settings(max_examples=60, deadline=None)
def test_digits_are_the_labelled_ones_of_their_split(
    seed: int, index: int, split: tasks.Split
) -> None:
    images, labels = original_digits()
    scene = tasks.draw_digits(tasks.sample_rng(seed, index, split), split)
    allowed = range(1400) if split == "train" else range(1400, 1797)
    for place, (digit, where) in enumerate(zip(scene.digits, scene.digit_indices, strict=True)):
        assert where in allowed
        assert labels[where] == digit == tasks.digit_label(where)
        half = scene.pixels[:, 24 * place : 24 * place + 24, 0].astype(float)
        rows = np.nonzero(half.any(axis=1))[0]
        small = images[where].reshape(8, 8)
        assert 22 * 6 / 8 <= rows[-1] - rows[0] + 1 <= 22
        # bilinear enlargement keeps the mean brightness: (22 / 8)**2 as many pixels
        assert half.sum() == pytest.approx(small.sum() * 15.9 * (22 / 8) ** 2, rel=0.1)


def test_digit_questions_follow_from_the_labels() -> None:
    seen: Counter[str] = Counter()
    for index in range(300):
        rng = tasks.sample_rng(5, index, "train")
        scene = tasks.draw_digits(rng, "train")
        question = tasks.ask(scene, rng)
        left, right = scene.digits
        expected = {
            "left": (left, f"{left}"),
            "right": (right, f"{right}"),
            "larger": (max(left, right), f"{left} : {right} = {max(left, right)}"),
            "sum": (left + right, f"{left} + {right} = {left + right}"),
        }
        word = next(word for word in expected if word in question.text)
        answer, target = expected[word]
        assert question.answer == str(answer)
        if question.task is not tasks.Task.HINT:
            assert question.target == target
        seen[word] += 1
    assert set(seen) == {"left", "right", "larger", "sum"}


def bars_from_pixels(pixels: np.ndarray) -> list[int]:
    heights = [
        int((pixels[:, 4 + 11 * place + 3] == colour).all(axis=1).sum())
        for place, colour in enumerate(tasks.BAR_COLOURS)
    ]
    return [round(height / tasks.BAR_STEP) for height in heights]


def test_bar_answers_agree_with_heights_in_pixels() -> None:
    seen: Counter[str] = Counter()
    for index in range(300):
        rng = tasks.sample_rng(7, index, "held_out")
        scene = tasks.draw_bars(rng, "held_out")
        question = tasks.ask(scene, rng)
        bars = bars_from_pixels(scene.pixels)
        assert bars == list(scene.bars)
        words = question.text.split()
        named = [
            tasks.BAR_NAMES.index(after)
            for word, after in pairwise(words)
            if word == "bar" and after in tasks.BAR_NAMES
        ]
        if "highest" in words:
            expected = max(bars)
        elif "minus" in words:
            expected = bars[named[0]] - bars[named[1]]
        else:
            expected = bars[named[0]]
        assert question.answer == str(expected)
        assert expected >= 0
        seen[question.task] += 1
    assert {tasks.Task.BAR, tasks.Task.MINUS, tasks.Task.HINT} == set(seen)


def test_no_held_out_chart_is_ever_trained_on() -> None:
    charts = {
        split: {
            tasks.draw_bars(tasks.sample_rng(1, index, split), split).bars for index in range(500)
        }
        for split in SPLITS
    }
    assert charts["train"].isdisjoint(charts["held_out"])
    assert all(tasks.chart_is_held_out(bars) for bars in charts["held_out"])


def test_no_held_out_picture_occurs_in_training() -> None:
    pictures = {
        split: {tasks.draw_sample(1, index, split).image.tobytes() for index in range(1500)}
        for split in SPLITS
    }
    assert len(pictures["train"]) > 1300
    assert pictures["train"].isdisjoint(pictures["held_out"])


@given(seeds, indices, splits)
@settings(max_examples=40, deadline=None)
def test_a_sample_depends_on_seed_index_and_split_alone(
    seed: int, index: int, split: tasks.Split
) -> None:
    first = tasks.draw_sample(seed, index, split)
    tasks.draw_sample(seed + 1, index, split)
    again = tasks.draw_sample(seed, index, split)
    assert first.image.tobytes() == again.image.tobytes()
    assert (first.id, first.question, first.target) == (again.id, again.question, again.target)


def test_any_subset_can_be_drawn() -> None:
    whole = [sample.question for sample in tasks.draw_samples(30, seed=4, split="held_out")]
    part = [
        sample.question for sample in tasks.draw_samples(10, seed=4, split="held_out", start=15)
    ]
    assert whole[15:25] == part


def test_hints_give_the_answer_away_and_all_tasks_occur() -> None:
    samples = list(tasks.draw_samples(800, seed=0, split="held_out"))
    kinds = Counter(sample.task for sample in samples)
    assert set(kinds) == set(tasks.Task)
    assert 0.06 < kinds[tasks.Task.HINT] / len(samples) < 0.14
    for sample in samples:
        assert sample.question.startswith("note says") == (sample.task is tasks.Task.HINT)
        if sample.task is tasks.Task.HINT:
            assert sample.question.split()[2] == sample.answer == sample.target
    commonest = Counter(sample.answer for sample in samples).most_common(1)[0][1]
    assert commonest / len(samples) < 0.2


def test_every_word_is_in_the_vocabulary_and_ends_in_the_answer() -> None:
    known = set(build.vocabulary())
    for split in SPLITS:
        for sample in tasks.draw_samples(500, seed=9, split=split):
            assert set(sample.question.split()) <= known
            assert set(sample.target.split()) <= known
            assert tasks.final_answer(sample.target) == sample.answer
            assert 0 <= int(sample.answer) <= tasks.MAX_ANSWER


def test_a_data_set_on_disk_holds_the_same_samples(tmp_path: Path) -> None:
    listing = tasks.write_dataset(tmp_path / "data", 20, 6, "held_out")
    rows = [json.loads(line) for line in listing.read_text().splitlines()]
    assert listing == tmp_path / "data" / "samples.jsonl"
    assert len(list((tmp_path / "data" / "images").iterdir())) == len(rows) == 20
    for row, sample in zip(rows, tasks.draw_samples(20, seed=6, split="held_out"), strict=True):
        assert set(row) == {"id", "question", "answer", "target", "task", "images", "source"}
        assert row["target"] == sample.target
        assert (row["id"], row["question"], row["answer"], row["task"]) == (
            sample.id,
            sample.question,
            sample.answer,
            sample.task,
        )
        with Image.open(tmp_path / "data" / row["images"][0]) as image:
            assert image.mode == "RGB"
            assert image.tobytes() == sample.image.tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    targets = read_targets(listing)
    assert targets == {row["id"]: row["target"] for row in rows}
    assert targets != read_targets(listing, "answer")  # worked answers show their steps


def test_a_used_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UsageError, match="not empty"):
        tasks.write_dataset(tmp_path, 3, 0, "train")
    with pytest.raises(UsageError, match="below 0"):
        tasks.write_dataset(tmp_path / "new", -1, 0, "train")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
