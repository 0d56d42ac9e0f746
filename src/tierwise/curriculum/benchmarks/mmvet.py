"""MM-Vet: open questions that need several capabilities at once, graded 0 to 1 by a judge.

The gold answer may hold `<AND>` (all parts are needed for the full grade) and `<OR>` (one is
enough). There is no rule for it, so without a judge there is no number. The published judge is
GPT-4 with a few-shot prompt; ours is asked in our own words, and an unreadable grade is an error
instead of a zero.

Layouts: `mm-vet.json` (an object by id) beside `images/`; `MMVet.tsv`.

Source: W. Yu et al., "MM-Vet", ICML 2024, https://arxiv.org/abs/2308.02490; github.com/yuweihao/
MM-Vet, mm-vet_evaluator.py.
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
from tierwise.curriculum.benchmarks.rows import KEY, Pictures


def item_of(row: Mapping[str, Any], pictures: Pictures) -> Item:
    """Return the item of one row."""
    question, gold = text_of(row, "question"), gold_of(row, "answer")
    capabilities = _capabilities(row)
    images = pictures.of_cell(row) or (pictures.named(text_of(row, "imagename")),)
    return Item(
        sample=make_item_sample(
            given_id=row.get(KEY, row.get("index")),
            question=question,
            answer=gold,
            images=images,
            task="+".join(capabilities),
        ),
        groups=(
            *(f"capability:{name}" for name in capabilities),
            f"integration:{'+'.join(capabilities)}",
        ),
        judging=Judging(ask=partial(prompt, question, gold), read=read_reply),
    )


def _capabilities(row: Mapping[str, Any]) -> tuple[str, ...]:
    found = row.get("capability", row.get("category"))
    names = found.split(",") if isinstance(found, str) else found
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise DataError("capability is not a list of names")
    return tuple(sorted({name.strip() for name in names}))


def prompt(question: str, gold: str, text: str) -> str:
    """Return what a judge is asked about an answer."""
    spaced = gold.replace("<AND>", " <AND> ").replace("<OR>", " <OR> ")
    return (
        "Grade an answer to a question about a picture against the reference answer, from 0.0 "
        "(all wrong) to 1.0 (all right) in steps of 0.1. In the reference, <AND> joins parts that "
        "must all be there for 1.0, each counting its share; <OR> joins answers of which one is "
        "enough. Write the grade as one number and nothing else.\n\n"
        f"[question]\n{question}\n[reference]\n{spaced}\n[answer]\n{answer_part(text)}\n[end]\n"
    )


def read_reply(text: str, reply: str) -> Mark:
    """Return the mark of a judge's reply: the first word, which must be a number from 0 to 1.

    >>> read_reply("", "0.7").score
    0.7
    """
    match = re.match(r"(?:\d+(?:\.\d+)?|\.\d+)(?![\d.]*[\d/])", answer_part(reply))
    if match is None or not 0.0 <= float(match[0]) <= 1.0:
        raise UnreadableReplyError(reply)
    return Mark(score=float(match[0]), extracted=match[0])
