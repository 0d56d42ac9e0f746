"""OCRBench: 1,000 questions about text in pictures; an answer is right if it contains a gold one.

Case and line breaks are ignored; for formulas (HME100k) case counts and blanks do not. The
published number is the count of right answers of 1,000, here printed beside the share.

Layouts: `OCRBench.json` (a list) with `OCRBench_Images/` in its folder or the one above;
`OCRBench.tsv`, where the kind of question stands for the data set.

Source: Y. Liu et al., "OCRBench", Science China Information Sciences 67, 2024,
https://arxiv.org/abs/2305.07895; github.com/Yuliang-Liu/MultimodalOCR, OCRBench/example.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tierwise.core.errors import DataError
from tierwise.curriculum.answers import answer_part
from tierwise.curriculum.benchmarks.items import Item, Mark, make_item_sample, text_of, texts_of
from tierwise.curriculum.benchmarks.rows import Pictures

_FORMULAS = "Handwritten Mathematical Expression Recognition"
_FORMULA_SET = "HME100k"
_RECOGNITION = "Recognition"


def item_of(row: Mapping[str, Any], pictures: Pictures) -> Item:
    """Return the item of one row."""
    kind = text_of(row, "type", "category")
    gold = _answers(row)
    data_set = text_of(row, "dataset_name", default="")
    formula = data_set == _FORMULA_SET if data_set else kind == _FORMULAS
    groups = [f"type:{kind}"]
    if kind.endswith(_RECOGNITION) and kind != _FORMULAS:
        groups.insert(0, "part:Text Recognition")
    identity = f"{data_set}_{text_of(row, 'id')}" if data_set else row.get("index")
    images = pictures.of_cell(row) or (pictures.named(text_of(row, "image_path")),)
    return Item(
        sample=make_item_sample(
            given_id=identity,
            question=text_of(row, "question"),
            answer=gold[0],
            images=images,
            task=kind,
        ),
        groups=tuple(groups),
        rule=partial(mark, gold, formula=formula),
    )


def _answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = "answers" if "answers" in row else "answer"
    value = row.get(name)
    # a text in the JSON is one answer, whatever it looks like; in the TSV it is a written list
    gold = (value,) if isinstance(value, str) and name == "answers" else texts_of(value, name)
    if not gold or not all(one.strip() for one in gold):
        raise DataError("an empty answer would be in every text")
    return gold


def mark(gold: Sequence[str], text: str, *, formula: bool) -> Mark:
    """Return the mark of an answer: whether a gold answer is in it; the published rule."""

    def plain(said: str) -> str:
        said = said.strip().replace("\n", " ")
        return said.replace(" ", "") if formula else said.lower()

    said = plain(answer_part(text))
    return Mark(score=float(any(plain(one) in said for one in gold)), extracted=said)
