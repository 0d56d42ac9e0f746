"""MMStar: 1,500 questions by choice that need their picture, in six abilities of three axes each.

An answer is right if its letter comes first, alone or after "(", "option " or "the answer is ";
nothing further down the text counts, and no judge is asked.

Layouts: `mmstar.parquet` (`image` as bytes, the options in the question); `MMStar.tsv`, where
options may stand in columns A to D.

Source: L. Chen et al., "Are We on the Right Way for Evaluating Large Vision-Language Models?",
NeurIPS 2024, https://arxiv.org/abs/2403.20330; github.com/MMStar-Benchmark/MMStar,
eval/vlmeval/evaluate/mmstar.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tierwise.core.errors import DataError
from tierwise.curriculum.answers import answer_part
from tierwise.curriculum.benchmarks.items import (
    Item,
    Mark,
    gold_of,
    make_item_sample,
    text_of,
    with_choices,
)
from tierwise.curriculum.benchmarks.rows import Pictures

_LEADS = ("", "(", "option ", "the answer is ")


def item_of(row: Mapping[str, Any], pictures: Pictures) -> Item:
    """Return the item of one row."""
    gold = gold_of(row, "answer").strip().upper()
    if len(gold) != 1 or not gold.isalpha():
        raise DataError(f"answer {gold!r} is not a letter")
    options = {letter: text_of(row, letter) for letter in "ABCD" if letter in row}
    category = text_of(row, "category")
    axis = text_of(row, "l2_category", "l2-category")
    images = pictures.of_cell(row) or ((pictures.of(row["image"]),) if "image" in row else ())
    if not images:
        raise DataError("no image")
    return Item(
        sample=make_item_sample(
            given_id=row.get("index"),
            question=with_choices(
                text_of(row, "question"), options, "Answer with the letter of the right option."
            ),
            answer=gold,
            images=images,
            task=category,
        ),
        groups=(f"category:{category}", f"axis:{category} / {axis}"),
        rule=partial(mark, gold),
    )


def mark(gold: str, text: str) -> Mark:
    """Return the mark of an answer; the published rule.

    >>> [mark("B", said).score for said in ("B", "(b) a cat", "The answer is B", "It is B")]
    [1.0, 1.0, 1.0, 0.0]
    """
    said = answer_part(text).lower().strip().replace("\n", " ")
    right = any(said.startswith(lead + gold.lower()) for lead in _LEADS)
    return Mark(score=float(right), extracted=said[:20])
