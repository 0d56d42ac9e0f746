"""Whether an answer is right: one comparison a kind, and *error* kept apart from *wrong*.

A judgement that could not be made (a checker that hangs, a gold answer that cannot be read) is an
error with its class, never a wrong answer. `score` in [0, 1] is the reward: 0 or 1, except for
boxes and OCR, which are graded. Left out: judge models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from tierwise.curriculum import answers
from tierwise.curriculum.answers import AnswerKind, Box, Number

OCR_MIN_SIMILARITY = 0.9
"""Share of characters that must be right for OCR to count as right; our choice."""

_MAX_NESTING = 50
"""Deepest brackets in which mathematics is looked for: its parser takes seconds beyond; ours."""

BOX_MIN_IOU = 0.5
"""Source: M. Everingham et al., "The PASCAL VOC challenge", IJCV 2010, section 4.2."""


class Verdict(StrEnum):
    """What is known about an answer."""

    RIGHT = "right"
    WRONG = "wrong"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict and what it was made on.

    Attributes:
        verdict: Right, wrong, or error.
        score: The reward in [0, 1]; 0 when wrong or error.
        extracted: The answer that was compared, as text; "" when there was none.
        kind: How it was compared.
        error: Class of the error, or "".
    """

    verdict: Verdict
    score: float
    extracted: str
    kind: AnswerKind
    error: str = ""


@lru_cache(maxsize=1 << 16)  # a short answer is judged again and again
def judge(
    gold: str, completion: str, *, task: str = "", kind: AnswerKind | None = None
) -> Judgement:
    """Return whether a completion answers as the gold answer does.

    Args:
        gold: The right answer; may be boxed.
        completion: All the model wrote.
        task: The sample's task, which may name the kind ("ocr", "detection", "counting").
        kind: How to compare; inferred from `task` and `gold` by default.

    >>> judge("8", "3 + 5 = 8").verdict.value, judge("8", "<think>8</think> 7").verdict.value
    ('right', 'wrong')
    """
    target = answers.unboxed(gold)
    chosen = kind or answers.infer_kind(target, task)
    part = answers.answer_part(completion)
    final = answers.final_text(part)
    marked = part != completion.strip() or answers.last_boxed(part) is not None
    match chosen:
        case AnswerKind.NUMBER:
            return _judge_number(target, final, free=not marked)
        case AnswerKind.LETTER:
            found = answers.letters_of(final)
            return _exact(answers.letters_of(target), found, "".join(sorted(found or ())), chosen)
        case AnswerKind.YES_NO:
            said = _yes_or_no(final)
            return _exact(_yes_or_no(target), said, said or "", chosen)
        case AnswerKind.BOX:
            inside = answers.last_boxed(part) or part
            return _judge_boxes(answers.boxes_of(target), answers.boxes_of(inside))
        case AnswerKind.OCR:
            return _judge_ocr(target, final)
        case AnswerKind.MATH:
            return _judge_math(target, final)
        case AnswerKind.TEXT:
            said = answers.normal_text(final)
            return _exact(answers.normal_text(target) or None, said or None, said, chosen)


def reward(gold: str, completion: str, *, task: str = "") -> float:
    """Return the judgement's score: what a trainer maximises.

    It is NaN where there is no verdict (a right answer that cannot be read, a checker that hangs):
    that is not a wrong answer.
    """
    found = judge(gold, completion, task=task)
    return math.nan if found.verdict is Verdict.ERROR else found.score


def _exact(target: object, found: object, extracted: str, kind: AnswerKind) -> Judgement:
    if target is None:
        return _error("gold_unreadable", extracted, kind)
    return _graded(1.0 if found == target else 0.0, found == target, extracted, kind)


def _graded(score: float, right: bool, extracted: str, kind: AnswerKind) -> Judgement:
    verdict = Verdict.RIGHT if right else Verdict.WRONG
    return Judgement(verdict=verdict, score=score, extracted=extracted, kind=kind)


def _error(name: str, extracted: str, kind: AnswerKind) -> Judgement:
    return Judgement(verdict=Verdict.ERROR, score=0.0, extracted=extracted, kind=kind, error=name)


def _yes_or_no(text: str) -> str | None:
    words = answers.normal_text(text).replace(",", " ").replace(".", " ").split()
    said = {"true": "yes", "false": "no"}.get(words[0], words[0]) if words else ""
    opposite = {"yes": {"no", "false"}, "no": {"yes", "true"}}.get(said)
    return None if opposite is None or opposite & set(words) else said


def _judge_number(gold: str, final: str, *, free: bool) -> Judgement:
    target = answers.whole_number(gold) or answers.number_of(gold, free=False)
    if target is None:
        return _error("gold_unreadable", "", AnswerKind.NUMBER)
    found = answers.number_of(final, free=free)
    extracted = "" if found is None else _show(found)
    right = found is not None and numbers_agree(target, found)
    return _graded(float(right), right, extracted, AnswerKind.NUMBER)


def _show(number: Number) -> str:
    value = number.value
    text = str(value) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
    return text + ("%" if number.percent else "")


def numbers_agree(gold: Number, found: Number) -> bool:
    """Return whether two numbers say the same.

    A unit may be left out, but not exchanged; a percent sign may be left out or resolved; a
    fraction may be rounded to two or more decimals.
    """
    if gold.unit and found.unit and gold.unit != found.unit:
        return False
    golds, founds = {gold.value}, {found.value}
    if gold.percent != found.percent:
        golds |= {gold.value / 100} if gold.percent else set()
        founds |= {found.value / 100} if found.percent else set()
    if golds & founds:
        return True
    decimals = found.num_decimals
    if gold.num_decimals is None and decimals is not None and decimals >= 2:
        return abs(gold.value - found.value) <= Fraction(1, 2 * 10**decimals)
    return False


def _judge_math(gold: str, final: str) -> Judgement:
    from tierwise.curriculum.mathcheck import MathChecker, MathOutcome

    kind = AnswerKind.MATH
    if not final or nesting(final) > _MAX_NESTING:
        return _graded(0.0, False, "", kind)
    if answers.normal_text(gold) == answers.normal_text(final):
        return _graded(1.0, True, final, kind)
    outcome = MathChecker.shared().check(gold, final)
    if outcome in (MathOutcome.EQUAL, MathOutcome.DIFFERENT):
        right = outcome is MathOutcome.EQUAL
        return _graded(float(right), right, final, kind)
    return _error(outcome.value, final, kind)


def nesting(text: str) -> int:
    """Return how many brackets are open at once at most.

    >>> nesting("((x)+1)/2"), nesting("[" * 7)
    (2, 7)
    """
    depth = most = 0
    for letter in text:
        depth = max(0, depth + (letter in "([{") - (letter in ")]}"))
        most = max(most, depth)
    return most


def _judge_ocr(gold: str, final: str) -> Judgement:
    said, target = (" ".join(text.casefold().split()) for text in (final, gold))
    if not target:
        return _error("gold_unreadable", final, AnswerKind.OCR)
    similarity = 1.0 - edit_distance(said, target) / max(len(said), len(target), 1)
    right = similarity >= OCR_MIN_SIMILARITY
    return _graded(similarity if similarity >= 0.5 else 0.0, right, final, AnswerKind.OCR)


def edit_distance(first: str, second: str) -> int:
    """Return how many characters must be inserted, deleted or exchanged.

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(second) + 1))
    for number, left in enumerate(first, start=1):
        above, row[0] = row[0], number
        for place, right in enumerate(second, start=1):
            diagonal = above + (left != right)
            above = row[place]
            row[place] = min(diagonal, above + 1, row[place - 1] + 1)
    return row[-1]


def _judge_boxes(gold: Sequence[Box], found: Sequence[Box]) -> Judgement:
    kind = AnswerKind.BOX
    shown = str([[box.left, box.top, box.right, box.bottom] for box in found]) if found else ""
    if not gold:
        return _error("gold_unreadable", shown, kind)
    ious = match_boxes(gold, found)
    total = max(len(gold), len(found))
    num_hits = sum(iou >= BOX_MIN_IOU for iou in ious)
    return _graded(sum(ious) / total, num_hits == total, shown, kind)


def match_boxes(gold: Sequence[Box], found: Sequence[Box]) -> list[float]:
    """Return the IoU of each matched pair under the matching with the largest sum.

    Source: H. W. Kuhn, "The Hungarian method for the assignment problem", 1955.
    """
    if not gold or not found:
        return []
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    ious = np.array([[iou(left, right) for right in found] for left in gold])
    rows, columns = linear_sum_assignment(-ious)
    return [float(value) for value in ious[rows, columns]]


def iou(first: Box, second: Box) -> float:
    """Return intersection over union; 0 for a box without area or for labels that differ."""
    if first.label and second.label and first.label != second.label:
        return 0.0
    width = min(first.right, second.right) - max(first.left, second.left)
    height = min(first.bottom, second.bottom) - max(first.top, second.top)
    areas = [(box.right - box.left) * (box.bottom - box.top) for box in (first, second)]
    degenerate = any(box.right <= box.left or box.bottom <= box.top for box in (first, second))
    if degenerate or width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / (sum(areas) - shared)
