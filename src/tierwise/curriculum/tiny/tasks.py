"""Questions about small pictures, each a pure function of (seed, index, split).

Three families of 48x48 RGB scenes: shapes to count, two handwritten digits, a bar chart.
A scene may be asked several questions; ``draw_sample`` asks one. One question in ten starts
with a note that gives the answer away (task ``hint``), so that samples which can be answered
without looking exist and a blind probe has something to find.

Held out means held out: training digits are the scikit-learn digits 0-1399 and held-out ones
1400-1796; one bar chart in eight is kept for the held-out split and never trained on;
counting scenes come from separate random streams (about 10**14 scenes, so a repeat is not
expected).

Left out: other resolutions, natural photographs, free-text answers. Every answer is a whole
number from 0 to 18.

    rng(seed, split, index) -> Scene (pixels, facts) -> ask -> Sample -> images/*.png, samples.jsonl

Source: the digits are E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits",
UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49 (its test part, as
shipped with scikit-learn). The other scenes are our own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image

from tierwise.core.errors import UsageError
from tierwise.core.records import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.random import Generator
    from numpy.typing import NDArray

    Pixels = NDArray[np.uint8]

Split = Literal["train", "held_out"]

IMAGE_SIDE = 48
MAX_ANSWER = 18
HINT_SHARE = 0.10
NUM_TRAIN_DIGITS = 1400
SOURCE = "tierwise.curriculum.tiny"

_SPLIT_STREAM: dict[str, int] = {"train": 1, "held_out": 2}
_FAMILY_SHARE = (("shapes", 0.34), ("digits", 0.33), ("bars", 0.33))

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
}
SHAPES = ("circle", "square")
_CELL = 12
_SHAPE_SIDES = (7, 8, 9)

DIGIT_SIDE = 22
DIGIT_LEFT_X = (1, 25)

BAR_NAMES = ("a", "b", "c", "d")
BAR_COLOURS = ((200, 80, 40), (60, 120, 200), (80, 160, 80), (150, 90, 180))
BAR_FOOT_Y = 46
BAR_STEP = 4.8
_BAR_WIDTH = 8
_GRID_GREY = 215


class Task(StrEnum):
    """What a question asks for."""

    COUNT = "count"
    DIGIT = "digit"
    LARGER = "larger"
    SUM = "sum"
    BAR = "bar"
    MINUS = "minus"
    HINT = "hint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its answer.

    Attributes:
        text: Lower-case words separated by single blanks.
        answer: The final answer, a whole number in decimal digits.
        target: The text to learn, which may show the steps: ``"3 + 5 = 8"``.
        task: What is asked for.
    """

    text: str
    answer: str
    target: str
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedShape:
    """One shape of a counting scene; ``x``, ``y`` are its upper left pixel, ``side`` its extent."""

    colour: str
    shape: str
    x: int
    y: int
    side: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A picture and the facts it shows; exactly one of the three facts is not empty.

    Attributes:
        pixels: (48, 48, 3) uint8.
        shapes: The shapes of a counting scene.
        digits: The left and the right digit's value.
        digit_indices: Where the two digits stand in scikit-learn's data set.
        bars: The four bars' values, 1-9.
    """

    pixels: Pixels
    shapes: tuple[PlacedShape, ...] = ()
    digits: tuple[int, ...] = ()
    digit_indices: tuple[int, ...] = ()
    bars: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One image with one question.

    Attributes:
        id: ``<split>-<seed>-<index>``.
        image: 48x48 RGB.
        question: See ``Question.text``.
        answer: See ``Question.answer``.
        target: See ``Question.target``.
        task: See ``Question.task``.
    """

    id: str
    image: Image.Image
    question: str
    answer: str
    target: str
    task: Task


def draw_sample(seed: int, index: int, split: Split = "train") -> Sample:
    """Return sample ``index`` of the endless stream named by ``seed`` and ``split``.

    The result depends on the three arguments alone, so any subset can be drawn in any order.
    """
    rng = sample_rng(seed, index, split)
    scene = draw_scene(rng, split)
    question = ask(scene, rng)
    return Sample(
        id=f"{split}-{seed}-{index:06d}",
        image=Image.fromarray(scene.pixels),
        question=question.text,
        answer=question.answer,
        target=question.target,
        task=question.task,
    )


def draw_samples(num_samples: int, *, seed: int, split: Split, start: int = 0) -> Iterator[Sample]:
    """Yield samples ``start`` to ``start + num_samples - 1``."""
    for index in range(start, start + num_samples):
        yield draw_sample(seed, index, split)


def sample_rng(seed: int, index: int, split: Split) -> Generator:
    """Return the random generator of one sample."""
    return np.random.default_rng((seed, _SPLIT_STREAM[split], index))


def draw_scene(rng: Generator, split: Split) -> Scene:
    """Return a scene: shapes (.34), digits (.33) or bars (.33)."""
    mark = rng.random()
    if mark < _FAMILY_SHARE[0][1]:
        return draw_shapes(rng)
    if mark < _FAMILY_SHARE[0][1] + _FAMILY_SHARE[1][1]:
        return draw_digits(rng, split)
    return draw_bars(rng, split)


def ask(scene: Scene, rng: Generator) -> Question:
    """Return one question about the scene; one in ten is given away by a note."""
    if scene.shapes:
        question = _ask_shapes(scene.shapes, rng)
    elif scene.digits:
        question = _ask_digits(scene.digits, rng)
    else:
        question = _ask_bars(scene.bars, rng)
    if rng.random() >= HINT_SHARE:
        return question
    return Question(
        text=f"note says {question.answer} : {question.text}",
        answer=question.answer,
        target=question.answer,
        task=Task.HINT,
    )


def draw_shapes(rng: Generator) -> Scene:
    """Return 1-9 circles and squares on distinct cells of a 4x4 grid, on light grey."""
    pixels = np.full((IMAGE_SIDE, IMAGE_SIDE, 3), rng.integers(225, 256), dtype=np.uint8)
    num_shapes = int(rng.integers(1, 10))
    cells = rng.permutation(16)[:num_shapes]
    draws = rng.integers(0, (3, 2, 3, 4, 4), size=(num_shapes, 5))
    placed = []
    for cell, (colour, shape, side, dx, dy) in zip(cells.tolist(), draws.tolist(), strict=True):
        extent = _SHAPE_SIDES[side]
        one = PlacedShape(
            colour=tuple(COLOURS)[colour],
            shape=SHAPES[shape],
            x=_CELL * (cell % 4) + min(dx, _CELL - extent),
            y=_CELL * (cell // 4) + min(dy, _CELL - extent),
            side=extent,
        )
        window = pixels[one.y : one.y + extent, one.x : one.x + extent]
        window[_shape_mask(one.shape, extent)] = COLOURS[one.colour]
        placed.append(one)
    return Scene(pixels=pixels, shapes=tuple(placed))


@lru_cache
def _shape_mask(shape: str, side: int) -> NDArray[np.bool_]:
    """Return which pixels of a (side, side) window the shape fills."""
    if shape == "square":
        return np.ones((side, side), dtype=np.bool_)
    offset = np.arange(side) - (side - 1) / 2
    filled: NDArray[np.bool_] = offset[:, None] ** 2 + offset[None, :] ** 2 <= (side / 2) ** 2
    return filled


def _ask_shapes(shapes: tuple[PlacedShape, ...], rng: Generator) -> Question:
    by_colour, by_shape = ((False, False), (True, False), (False, True), (True, True))[
        int(rng.integers(4))
    ]
    colour = tuple(COLOURS)[int(rng.integers(3))] if by_colour else None
    shape = SHAPES[int(rng.integers(2))] if by_shape else None
    count = sum(
        (colour is None or one.colour == colour) and (shape is None or one.shape == shape)
        for one in shapes
    )
    words = " ".join(filter(None, (colour, f"{shape or 'shape'}s")))
    return Question(
        text=f"how many {words} are there ?",
        answer=str(count),
        target=str(count),
        task=Task.COUNT,
    )


@lru_cache(maxsize=1)
def _digit_bank() -> tuple[Pixels, tuple[int, ...]]:
    """Return scikit-learn's digits as (1797, 22, 22) uint8, bilinear, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    small = (images.reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    big = [
        np.asarray(Image.fromarray(one).resize((DIGIT_SIDE, DIGIT_SIDE), Image.Resampling.BILINEAR))
        for one in small
    ]
    return np.stack(big), tuple(labels.tolist())


def digit_label(index: int) -> int:
    """Return the label (0-9) of digit ``index`` (0-1796) of scikit-learn's data set."""
    return _digit_bank()[1][index]


def draw_digits(rng: Generator, split: Split) -> Scene:
    """Return two real digits on black, side by side, each at its own height."""
    bank, labels = _digit_bank()
    low, high = (0, NUM_TRAIN_DIGITS) if split == "train" else (NUM_TRAIN_DIGITS, len(labels))
    pixels = np.zeros((IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8)
    indices = tuple(rng.integers(low, high, size=2).tolist())
    for x, y, index in zip(
        DIGIT_LEFT_X, rng.integers(2, 23, size=2).tolist(), indices, strict=True
    ):
        pixels[y : y + DIGIT_SIDE, x : x + DIGIT_SIDE] = bank[index][:, :, None]
    return Scene(
        pixels=pixels,
        digits=tuple(labels[index] for index in indices),
        digit_indices=indices,
    )


def _ask_digits(digits: tuple[int, ...], rng: Generator) -> Question:
    left, right = digits
    kind = int(rng.integers(4))
    if kind < len(digits):
        side, answer = ("left", "right")[kind], digits[kind]
        return Question(
            text=f"what is the {side} digit ?",
            answer=str(answer),
            target=str(answer),
            task=Task.DIGIT,
        )
    if kind == len(digits):
        larger = max(digits)
        return Question(
            text="what is the larger digit ?",
            answer=str(larger),
            target=f"{left} : {right} = {larger}",
            task=Task.LARGER,
        )
    return Question(
        text="what is the sum of the digits ?",
        answer=str(left + right),
        target=f"{left} + {right} = {left + right}",
        task=Task.SUM,
    )


def chart_is_held_out(bars: tuple[int, ...]) -> bool:
    """Return whether a chart belongs to the held-out eighth of the 6,561 charts.

    >>> chart_is_held_out((1, 1, 1, 1)), chart_is_held_out((7, 1, 1, 1))
    (False, True)
    """
    return sum(place * value for place, value in enumerate(bars, start=1)) % 8 == 0


def draw_bars(rng: Generator, split: Split) -> Scene:
    """Return four bars of value 1-9 on white with a grid line at each whole value."""
    bars = tuple(rng.integers(1, 10, size=4).tolist())
    while chart_is_held_out(bars) != (split == "held_out"):
        bars = tuple(rng.integers(1, 10, size=4).tolist())
    pixels = np.full((IMAGE_SIDE, IMAGE_SIDE, 3), 255, dtype=np.uint8)
    for value in range(10):
        pixels[bar_top(value)] = _GRID_GREY
    for place, value in enumerate(bars):
        left = bar_left(place)
        pixels[bar_top(value) : BAR_FOOT_Y, left : left + _BAR_WIDTH] = BAR_COLOURS[place]
    return Scene(pixels=pixels, bars=bars)


def bar_top(value: int) -> int:
    """Return the pixel row at which a bar of this value begins."""
    return BAR_FOOT_Y - round(BAR_STEP * value)


def bar_left(place: int) -> int:
    """Return the first pixel column of bar ``place`` (0-3)."""
    return 4 + 11 * place


def _ask_bars(bars: tuple[int, ...], rng: Generator) -> Question:
    kind = int(rng.integers(4))
    first, second = (int(place) for place in rng.permutation(4)[:2])
    if kind <= 1:
        return Question(
            text=f"what is the value of bar {BAR_NAMES[first]} ?",
            answer=str(bars[first]),
            target=str(bars[first]),
            task=Task.BAR,
        )
    if kind == 2:
        return Question(
            text="what is the value of the highest bar ?",
            answer=str(max(bars)),
            target=str(max(bars)),
            task=Task.BAR,
        )
    if bars[first] < bars[second]:
        first, second = second, first
    difference = bars[first] - bars[second]
    return Question(
        text=f"what is bar {BAR_NAMES[first]} minus bar {BAR_NAMES[second]} ?",
        answer=str(difference),
        target=f"{bars[first]} - {bars[second]} = {difference}",
        task=Task.MINUS,
    )


def final_answer(text: str) -> str:
    """Return the last word of a model's answer, or an empty string.

    >>> final_answer("3 + 5 = 8"), final_answer(" 4 "), final_answer("")
    ('8', '4', '')
    """
    words = text.split()
    return words[-1] if words else ""


def write_dataset(folder: Path, num_samples: int, seed: int, split: Split) -> Path:
    """Write the first samples of a stream as pictures and JSON Lines; return the JSONL's path.

    ``samples.jsonl`` has one object a line with ``id``, ``question``, ``answer``, ``target``
    (the text to learn, which may show the steps), ``task``, ``images`` (paths relative to the
    folder) and ``source``. The folder appears whole or not at all.

    Args:
        folder: A folder that does not exist yet, or an empty one.
        num_samples: How many.
        seed: Names the stream, at least 0.
        split: ``train`` or ``held_out``.

    Raises:
        UsageError: The folder is not empty, or a number is negative.
    """
    if num_samples < 0 or seed < 0:
        raise UsageError(f"a number below 0: {num_samples} samples, seed {seed}")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", hint="name a new folder or empty this one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        part = Path(name) / "whole"
        (part / "images").mkdir(parents=True)
        lines = []
        for sample in draw_samples(num_samples, seed=seed, split=split):
            image = f"images/{sample.id}.png"
            sample.image.save(part / image)
            lines.append(json.dumps(_plain_row(sample, image, f"{SOURCE}/{split}/{seed}")))
        write_whole(part / "samples.jsonl", "".join(f"{line}\n" for line in lines))
        part.replace(folder)
    return folder / "samples.jsonl"


def _plain_row(sample: Sample, image: str, source: str) -> dict[str, object]:
    return {
        "id": sample.id,
        "question": sample.question,
        "answer": sample.answer,
        "target": sample.target,
        "task": str(sample.task),
        "images": [image],
        "source": source,
    }
