"""MMMU: college questions of 30 subjects in 6 disciplines, by choice or open, with 1 to 7 pictures.

A choice is the letter in brackets, else alone, that stands last in the answer; else, in an answer
of more than five words, the option quoted last; else the published rule draws one at random. Here
the draw is a pure function of seed and question, and the number of draws is reported. An open
answer is right if a gold text is in one of the answer's key phrases, or a gold number, at two
decimals, is one of its numbers.

Layouts: Parquet by subject (`Accounting/validation-*.parquet`: `options` is a Python list written
as text, pictures stand at `<image 1>` ... in question and options); `MMMU_DEV_VAL.tsv`, of which
the validation split counts.

Source: X. Yue et al., "MMMU", CVPR 2024, https://arxiv.org/abs/2311.16502;
github.com/MMMU-Benchmark/MMMU, mmmu/utils/eval_utils.py and data_utils.py (subjects.csv restates
its disciplines).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from tierwise.core.errors import DataError
from tierwise.curriculum.answers import answer_part
from tierwise.curriculum.benchmarks.items import (
    Item,
    Mark,
    gold_of,
    lettered,
    make_item_sample,
    text_of,
    texts_of,
    with_choices,
)
from tierwise.curriculum.benchmarks.rows import Pictures
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.samples import IMAGE_TAG, Picture

_TAG = re.compile(r"<image (\d+)>")
_NUM_PICTURES = 7
_SIGNS = (
    "could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ",
)  # fmt: skip
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


def item_of(row: Mapping[str, Any], pictures: Pictures, *, seed: int) -> Item:
    """Return the item of one row; `seed` draws where the published rule draws."""
    options = _options(row)
    answer = gold_of(row, "answer")
    gold = texts_of(answer, "answer")
    identity = text_of(row, "id", "index")
    subject, discipline = _field(row)
    multiple = bool(options)
    if multiple and answer not in options:
        raise DataError(f"answer {answer!r} is not the letter of an option")
    if not gold or not all(one.strip() for one in gold):
        raise DataError("an empty answer would be in every text")
    instruction = (
        "Answer with the letter of the right option."
        if multiple
        else "Answer with one word, number or short phrase."
    )
    question, images = place_pictures(
        with_choices(text_of(row, "question"), options, instruction),
        _shown(row, pictures),
    )
    return Item(
        sample=make_item_sample(
            given_id=identity,
            question=question,
            answer=answer if multiple else gold[0],
            images=images,
            task=subject,
        ),
        groups=(
            f"discipline:{discipline}",
            f"subject:{subject}",
            f"form:{'multiple-choice' if multiple else 'open'}",
        ),
        rule=partial(mark_choice, options, answer, key=key_seed("mmmu", seed, identity))
        if multiple
        else partial(mark_open, gold),
    )


def is_validation(row: Mapping[str, Any]) -> bool:
    """Return whether a row counts: all do but the few-shot examples of a TSV."""
    return str(row.get("split", "validation")) == "validation"


def _options(row: Mapping[str, Any]) -> dict[str, str]:
    if "options" in row:
        options = texts_of(row["options"], "options")
        kind = text_of(row, "question_type")
        if (kind == "multiple-choice") != bool(options):
            raise DataError(f"a {kind} question with {len(options)} options")
        return lettered(options)
    return {
        letter: text_of(row, letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter in row
    }


def _field(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return subject and discipline: of the id `validation_SUBJECT_1`, or of the TSV's columns."""
    if "id" in row:
        subject = "_".join(text_of(row, "id").split("_")[1:-1])
        discipline = disciplines().get(subject)
        if discipline is None:
            raise DataError(f"id {row['id']!r} names none of MMMU's subjects")
        return subject, discipline
    subject = text_of(row, "l2-category", "category")
    return subject, disciplines().get(subject.replace(" ", "_"), text_of(row, "category"))


@cache
def disciplines() -> dict[str, str]:
    """Return subject -> discipline."""
    path = resources.files("tierwise.curriculum.benchmarks").joinpath("subjects.csv")
    with Path(str(path)).open(encoding="utf-8", newline="") as stream:
        return {row["subject"]: row["discipline"] for row in csv.DictReader(stream)}


def _shown(row: Mapping[str, Any], pictures: Pictures) -> dict[int, Picture]:
    """Return the pictures of a row by their number, from 1."""
    if cells := pictures.of_cell(row):
        return dict(enumerate(cells, start=1))
    return {
        number: pictures.of(row[f"image_{number}"])
        for number in range(1, _NUM_PICTURES + 1)
        if f"image_{number}" in row
    }


def place_pictures(text: str, shown: Mapping[int, Picture]) -> tuple[str, tuple[Picture, ...]]:
    """Return the text with a plain tag for each `<image N>`, and the pictures in that order.

    A picture named twice is shown twice; pictures that no tag names come first.

    Raises:
        DataError: A tag without a picture, or no picture at all.
    """
    named = [int(number) for number in _TAG.findall(text)]
    if missing := sorted(set(named) - set(shown)):
        raise DataError(f"<image {missing[0]}> has no picture")
    if not shown:
        raise DataError("no image_1")
    first = [number for number in sorted(shown) if number not in named] if named else []
    plain = IMAGE_TAG * len(first) + _TAG.sub(IMAGE_TAG, text)
    return plain, tuple(shown[number] for number in (first + named or sorted(shown)))


def mark_choice(options: Mapping[str, str], gold: str, text: str, *, key: int) -> Mark:
    """Return the mark of an answer by choice; the published rule, its draw decided by `key`."""
    letter = chosen(options, answer_part(text))
    guessed = letter is None
    if letter is None:
        letter = list(options)[key % len(options)]
    return Mark(score=float(letter == gold), extracted=letter, guessed=guessed)


def chosen(options: Mapping[str, str], response: str) -> str | None:
    """Return the letter that a response chooses, or None.

    >>> chosen({"A": "a dog", "B": "a cat"}, "Not (A) but (B)."), chosen({"A": "x", "B": "y"}, "?")
    ('B', None)
    """
    for sign in ",.!?;:'":
        response = response.strip(sign)
    padded = f" {response} "
    for form in ("({})", " {} "):
        places = {letter: padded.rfind(form.format(letter)) for letter in options}
        if max(places.values()) >= 0:
            return max(places, key=lambda letter: places[letter])
    if len(response.split()) > 5:
        places = {letter: padded.lower().rfind(said.lower()) for letter, said in options.items()}
        if max(places.values()) >= 0:
            return max(places, key=lambda letter: places[letter])
    return None


def mark_open(gold: Sequence[str], text: str) -> Mark:
    """Return the mark of an open answer; the published rule."""
    phrases = key_phrases(answer_part(text))
    found = [*phrases, *(number for phrase in phrases for number in numbers_in(phrase))]
    said = {form for one in found for form in forms_of(one)}
    wanted = {form for one in gold for form in forms_of(one)}
    texts = [one for one in said if isinstance(one, str)]
    right = any(
        any(form in one for one in texts) if isinstance(form, str) else form in said
        for form in wanted
    )
    return Mark(score=float(right), extracted=phrases[-1])


def key_phrases(response: str) -> list[str]:
    """Return what follows a word such as "is" or "so", the shortest a line; else all of it.

    The published rule means to part sentences too, but looks for capitals after it has lowered the
    text; lines alone are parted.
    """
    response = response.strip().strip(".").lower()
    lines = response.split("\n")
    phrases = []
    for number, line in enumerate(lines, start=1):
        signs = (*_SIGNS, "=") if number == len(lines) else _SIGNS
        tails = [line.rpartition(sign)[2].strip() for sign in signs if sign in line]
        # the published rule replaces an empty phrase by whatever sign comes next
        shortest = ""
        for tail in tails:
            if not shortest or len(tail) < len(shortest):
                shortest = tail
        if shortest and shortest not in (":", ",", ".", "!", "?", ";", "'"):
            phrases.append(shortest)
    return phrases or [response]


def numbers_in(text: str) -> list[str]:
    """Return the numbers written in a text: with commas, scientific, plain."""
    return [number for pattern in _NUMBERS for number in pattern.findall(text)]


def forms_of(text: str) -> list[str | float]:
    """Return how a text is compared: a number at two decimals, else in lower case.

    A single letter is compared with a blank before or after it, so that it is not found in words.

    >>> forms_of("1,234.567"), forms_of("B"), forms_of("Tampa")
    ([1234.57], [' b', 'b '], ['tampa'])
    """
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]
