"""MathVista: mathematical questions about pictures, by choice or with a number or list.

An answer is taken out of the text, brought to the form of the gold answer (a choice, a whole
number, a number rounded to the row's `precision`), and must then equal it. The published metric
has a language model take the answer out, unless the text is nothing but an answer; then what is
nearest in edit distance among the choices counts. Without a judge a rule of ours takes it out, and
finding none is wrong, not the nearest choice.

Layouts: `testmini.json` (an object by `pid`) beside `images/`, with the published prompts in
`query.json` beside it; Parquet as on the hub (`decoded_image`, `query`); `MathVista_MINI.tsv`.

Sources: P. Lu et al., "MathVista", ICLR 2024, https://arxiv.org/abs/2310.02255;
github.com/lupantech/MathVista, evaluation/extract_answer.py and calculate_score.py (rules restated,
prompts ours).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tierwise.core.errors import DataError
from tierwise.curriculum.answers import answer_part, final_text, letters_of, number_of
from tierwise.curriculum.benchmarks.items import (
    Item,
    Judging,
    Mark,
    gold_of,
    lettered,
    make_item_sample,
    text_of,
    texts_of,
    with_choices,
)
from tierwise.curriculum.benchmarks.rows import KEY, Pictures
from tierwise.curriculum.verdicts import edit_distance

_GROUPS = (
    "question_type", "answer_type", "language", "source", "category", "task", "context", "grade",
)  # fmt: skip
_NO_ANSWER = "none"
_PRECISION_UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What decides how an answer is compared.

    Attributes:
        question: As it was put.
        gold: The right answer; for a choice, its text.
        choices: In order; () for a free answer.
        answer_type: `text`, `integer`, `float` or `list`.
        precision: Decimals of a float; -1 where the file does not say.
    """

    question: str
    gold: str
    choices: tuple[str, ...]
    answer_type: str
    precision: int


def item_of(row: Mapping[str, Any], pictures: Pictures, *, queries: Mapping[str, str]) -> Item:
    """Return the item of one row; `queries` is published prompt by pid, where there is one."""
    identity = row.get("pid", row.get(KEY, row.get("index")))
    asked = _asked({"query": queries[str(identity)], **row} if str(identity) in queries else row)
    metadata = row.get("metadata")
    facts = {**row, **metadata} if isinstance(metadata, Mapping) else dict(row)
    groups = [f"{name}:{facts[name]}" for name in _GROUPS if isinstance(facts.get(name), str)]
    groups += [f"skill:{skill}" for skill in texts_of(facts.get("skills"), "skills")]
    embedded = row.get("decoded_image")
    images = pictures.of_cell(row) or (
        () if embedded is None and "image" not in row else (pictures.of(embedded or row["image"]),)
    )
    if not images:
        raise DataError("no image")
    return Item(
        sample=make_item_sample(
            given_id=identity,
            question=asked.question,
            answer=asked.gold,
            images=images,
            task=str(facts.get("task") or ""),
        ),
        groups=tuple(groups),
        rule=partial(mark_by_rule, asked),
        judging=Judging(ask=partial(prompt, asked), read=partial(read_reply, asked)),
    )


def _asked(row: Mapping[str, Any]) -> Asked:
    kind = text_of(row, "question_type")
    answer_type = text_of(row, "answer_type")
    choices = texts_of(row.get("choices"), "choices")
    precision = row.get("precision", "")
    gold = gold_of(row, "answer")
    if kind not in ("multi_choice", "free_form"):
        raise DataError(f"question_type {kind!r} is neither multi_choice nor free_form")
    if answer_type not in ("text", "integer", "float", "list"):
        raise DataError(f"answer_type {answer_type!r} is not known")
    if kind == "multi_choice":
        letters = lettered(choices)
        gold = letters.get(gold, gold) if gold not in choices else gold
        if gold not in choices:
            raise DataError("the answer is none of the choices")
    try:
        decimals = int(float(precision)) if precision != "" else _PRECISION_UNKNOWN
    except (TypeError, ValueError) as error:
        raise DataError("precision is not a number") from error
    return Asked(
        question=_question(row, choices if kind == "multi_choice" else (), answer_type, decimals),
        gold=gold,
        choices=choices if kind == "multi_choice" else (),
        answer_type=answer_type,
        precision=decimals,
    )


def _question(
    row: Mapping[str, Any], choices: Sequence[str], answer_type: str, precision: int
) -> str:
    """Return the published prompt where the data hold it, else ours."""
    if "query" in row:
        return text_of(row, "query")
    question = text_of(row, "question")
    if "index" in row and "pid" not in row:
        return question  # the TSV's question is the published prompt
    if unit := text_of(row, "unit", default=""):
        question += f" (in {unit})"
    forms = {
        "text": "Answer with the letter of the right choice.",
        "integer": "Answer with a whole number.",
        "float": f"Answer with a number of {max(precision, 0)} decimals.",
        "list": "Answer with a list of numbers in square brackets.",
    }
    return with_choices(question, lettered(choices), forms[answer_type])


def published_prompts(path: Path) -> dict[str, str]:
    """Return pid -> published prompt from a `query.json` beside the data, {} without one."""
    beside = path.parent / "query.json"
    if path.suffix != ".json" or not beside.is_file():
        return {}
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{beside} is not JSON") from error
    if not isinstance(found, dict):
        raise DataError(f"{beside} is not an object of pid and prompt")
    return {str(key): str(value) for key, value in found.items()}


def mark_by_rule(asked: Asked, text: str) -> Mark:
    """Return the mark of an answer taken out by rule."""
    part = answer_part(text)
    extraction = quick_extraction(asked, part)
    if extraction is None:
        stated = re.findall(r"(?:answer|choice|option) is:?\s*(.+)", part, re.IGNORECASE)
        places = [final_text(part), *reversed([text.strip(" *") for text in stated])]
        extraction = next((found for one in places if (found := _found(asked, one))), "")
    return _mark(asked, extraction)


def quick_extraction(asked: Asked, response: str) -> str | None:
    """Return the answer where the response is nothing but one; the published rule."""
    if not response:
        return ""
    if response in asked.choices:
        return response
    try:
        if asked.answer_type == "integer":
            return str(int(response))
        if asked.answer_type == "float":
            return str(float(response))
    except ValueError:
        pass
    stated = re.search(r'The answer is "(.*)"\.', response)
    return str(stated[1]) if stated else None


def _found(asked: Asked, final: str) -> str:
    """Return the answer in a final text, or ""; ours."""
    if asked.choices:
        bracketed: list[str] = re.findall(r"\(([A-Z])\)", final)
        letters = letters_of(final) or frozenset(bracketed)
        if len(letters) == 1:
            return next(iter(letters))
        named = {
            choice
            for choice in asked.choices
            if re.search(rf"(?<!\w){re.escape(choice)}(?!\w)", final, re.IGNORECASE)
        }
        return next(iter(named)) if len(named) == 1 else ""
    if asked.answer_type == "list":
        lists = re.findall(r"\[[^\[\]]*\]", final)
        return lists[-1] if lists else ""
    number = number_of(final, free=True)
    try:
        return "" if number is None else str(float(number.value))
    except OverflowError:
        return ""


def normalise(asked: Asked, extraction: str) -> str | None:
    """Return an extraction in the form of the gold answer, or None; the published rule."""
    if asked.choices:
        extraction = extraction.strip()
        if bracketed := re.search(r"\(([a-zA-Z])\)", extraction):
            extraction = bracketed[1].upper()
        letters = lettered(asked.choices)
        if extraction in letters:
            return letters[extraction]
        return min(asked.choices, key=lambda choice: edit_distance(extraction, choice))
    try:
        if asked.answer_type == "integer":
            return str(int(float(extraction)))
        if asked.answer_type == "float" and asked.precision != _PRECISION_UNKNOWN:
            return str(round(float(extraction), asked.precision))
    except (ValueError, OverflowError):
        return None
    return extraction


def _mark(asked: Asked, extraction: str) -> Mark:
    if not extraction or extraction.casefold() == _NO_ANSWER:
        return Mark(score=0.0)
    found = normalise(asked, extraction)
    right = found == asked.gold or _same_float(asked, found) or _same_list(asked, found)
    return Mark(score=float(right), extracted=found or "")


def _same_float(asked: Asked, found: str | None) -> bool:
    """Return whether two floats are equal; only where the file states no precision."""
    if asked.answer_type != "float" or asked.precision != _PRECISION_UNKNOWN or found is None:
        return False
    try:
        return float(found) == float(asked.gold)
    except ValueError:
        return False


def _same_list(asked: Asked, found: str | None) -> bool:
    """Return whether two lists hold the same; blanks between their items do not matter."""
    if asked.answer_type != "list" or found is None:
        return False
    try:
        return texts_of(found, "list") == texts_of(asked.gold, "list")
    except DataError:
        return False


def prompt(asked: Asked, text: str) -> str | None:
    """Return what a judge is asked, or None where the response is nothing but an answer."""
    part = answer_part(text)
    if quick_extraction(asked, part) is not None:
        return None
    forms = {
        "text": "the letter of the choice",
        "integer": "a whole number",
        "float": "a decimal number",
        "list": "a list in square brackets",
    }
    return (
        "A question about a picture was answered. State the final answer that the response gives, "
        f"as {forms[asked.answer_type]} and nothing else. Do not solve the question and do not "
        f"correct the response. If the response gives no answer, write {_NO_ANSWER}.\n\n"
        f"[question]\n{asked.question}\n[response]\n{part}\n[end]\n"
    )


def read_reply(asked: Asked, text: str, reply: str) -> Mark:
    """Return the mark of the answer that a judge took out."""
    return _mark(asked, answer_part(reply).strip("`'\"").strip())
