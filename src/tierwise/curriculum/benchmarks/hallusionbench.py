"""HallusionBench: yes-or-no questions put to a picture, to an edited one, or to none.

aAcc counts questions, fAcc figures all of whose questions are right, qAcc pairs: one question over
all its pictures, all right; aAcc easy and hard are pairs too, of unedited and edited pictures. An
answer is right, wrong or unclear; unclear is right only where no
picture was shown (VS, figure 0), where nothing can be known. The published metric has GPT-4 compare
the answer with the reference; without a judge the words yes and no decide, and a text with both or
neither is unclear. Intervals resample whole sets of questions, since those share their pictures.

Layouts: `HallusionBench.json` (a list) with the pictures' folder `hallusion_bench/`;
`HallusionBench.tsv`, whose index holds set, figure and question.

Source: T. Guan et al., "HallusionBench", CVPR 2024, https://arxiv.org/abs/2310.14566;
github.com/tianyi-lab/HallusionBench, utils.py. The index and the words of the rule:
open-compass/VLMEvalKit, vlmeval/dataset/utils/yorn.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from tierwise.core.errors import DataError
from tierwise.curriculum.answers import answer_part
from tierwise.curriculum.benchmarks.items import (
    Item,
    Judging,
    Mark,
    UnreadableReplyError,
    gold_of,
    make_item_sample,
    text_of,
)
from tierwise.curriculum.benchmarks.rows import Pictures

_GOLD = {"0": "no", "1": "yes", "no": "no", "yes": "yes"}


def item_of(row: Mapping[str, Any], pictures: Pictures) -> Item:
    """Return the item of one row."""
    category, subcategory, visual, set_id, figure, number = _place(row)
    gold = _GOLD.get(gold_of(row, "gt_answer", "answer").strip().lower())
    if gold is None:
        raise DataError("gt_answer is neither 0 nor 1")
    question = text_of(row, "question")
    reference = text_of(row, "gt_answer_details", default=gold)
    shown = visual != "0"
    images = pictures.of_cell(row)
    if shown and not images:
        images = (pictures.named(text_of(row, "filename")),)
    family = f"{category}_{subcategory}_{set_id}"
    pair = f"{family}_{number}"
    units = [("qAcc", pair), ("aAcc hard" if visual == "2" else "aAcc easy", pair)]
    blank = category == "VS" and figure == "0"
    if not blank:
        units.append(("fAcc", f"{family}_{figure}"))
    return Item(
        sample=make_item_sample(
            given_id=f"{family}_{figure}_{number}",
            question=question,
            answer=gold,
            images=images if shown else (),
            task=f"{category} {subcategory}",
        ),
        groups=(f"category:{category}", f"subcategory:{category} {subcategory}"),
        rule=partial(mark_by_rule, gold, blank=blank),
        judging=Judging(
            ask=partial(prompt, question, reference), read=partial(read_reply, blank=blank)
        ),
        units=tuple(units),
        cluster=family,
    )


def _place(row: Mapping[str, Any]) -> tuple[str, str, str, str, str, str]:
    """Return category, subcategory, visual input, set, figure and question of a row."""
    if "index" in row:
        parts = text_of(row, "index").split("_")
        if len(parts) != 6:
            raise DataError(
                f"index {row['index']!r} is not CATEGORY_SUB_VISUAL_SET_FIGURE_QUESTION"
            )
        category, subcategory, visual, set_id, figure, number = parts
    else:
        category, subcategory, visual, set_id, figure, number = (
            text_of(row, name)
            for name in (
                "category", "subcategory", "visual_input", "set_id", "figure_id", "question_id",
            )
        )  # fmt: skip
    if category not in ("VD", "VS"):
        raise DataError(f"category {category!r} is neither VD nor VS")
    if visual not in ("0", "1", "2"):
        raise DataError(f"visual_input {visual!r} is not 0, 1 or 2")
    return category, subcategory, visual, set_id, figure, number


def mark_by_rule(gold: str, text: str, *, blank: bool) -> Mark:
    """Return the mark of an answer by the words yes and no.

    >>> mark_by_rule("yes", "Yes, it is.", blank=False).score, mark_by_rule("yes", "?", blank=True)
    (1.0, Mark(score=1.0, extracted='unclear', guessed=False))
    """
    words = set(re.findall(r"[a-z]+", answer_part(text).lower()))
    said = words & {"yes", "no"}
    if len(said) != 1:
        return Mark(score=float(blank), extracted="unclear")
    (word,) = said
    return Mark(score=float(word == gold), extracted=word)


def prompt(question: str, reference: str, text: str) -> str:
    """Return what a judge is asked about an answer."""
    return (
        "Compare an answer to a question about a picture with the reference answer. Write "
        "'correct' if they do not contradict each other, 'incorrect' if they do, and 'unclear' if "
        "the answer does not commit itself. Write that one word and nothing else.\n\n"
        f"[question]\n{question}\n[reference]\n{reference}\n[answer]\n{answer_part(text)}\n[end]\n"
    )


def read_reply(text: str, reply: str, *, blank: bool) -> Mark:
    """Return the mark of a judge's word."""
    words = re.findall(r"incorrect|correct|unclear", answer_part(reply).lower())
    if len(set(words)) != 1:
        raise UnreadableReplyError(reply)
    right = words[0] == "correct" or (words[0] == "unclear" and blank)
    return Mark(score=float(right), extracted=words[0])
