"""What passes through: an `Item` is a question with its way of being marked.

A `Mark` is what one answer is worth. An item carries up to two ways to it: `rule`, which needs the
answer alone, and `judging`, which asks a judge model and reads what it says. Left out: how items
are read (one module a benchmark) and summed up (`measures`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierwise.core.errors import DataError
from tierwise.curriculum.samples import BadRow, Picture, Sample, make_sample

_MAX_LITERAL = 100_000
"""Longest Python list written as text that is parsed, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What an answer is worth.

    Attributes:
        score: 0 to 1.
        extracted: The answer taken out of the text, "" when none was found.
        guessed: The published rule drew an option at random because it found none.
    """

    score: float
    extracted: str = ""
    guessed: bool = False


class UnreadableReplyError(Exception):
    """Raised for a judge's reply that says nothing the metric knows; an error, never a zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """How a judge marks an answer.

    Attributes:
        ask: The prompt about an answer, or None where the rule decides without the judge.
        read: The mark in (answer, the judge's reply); raises `UnreadableReplyError`.
    """

    ask: Callable[[str], str | None]
    read: Callable[[str, str], Mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question of a benchmark.

    Attributes:
        sample: Question, pictures, gold answer.
        groups: What it is counted under, as `kind:value`.
        rule: The mark of an answer, without a judge; None where none is defined.
        judging: How a judge marks it; None where the metric has no judge.
        units: (measure, unit) pairs: a unit counts as right when all its items are.
        cluster: Items of one cluster are resampled together; "" is a cluster of its own.
    """

    sample: Sample
    groups: tuple[str, ...] = ()
    rule: Callable[[str], Mark] | None = None
    judging: Judging | None = None
    units: tuple[tuple[str, str], ...] = ()
    cluster: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSet:
    """The items of a benchmark in the order of its files, and the rows left out."""

    items: tuple[Item, ...]
    skipped: tuple[BadRow, ...] = ()


def make_item_sample(
    *, given_id: object, question: str, answer: str, images: Sequence[Picture], task: str
) -> Sample:
    """Return the sample of an item.

    Raises:
        DataError: No id, or what `make_sample` refuses.
    """
    if given_id in (None, ""):
        raise DataError("no id")
    return make_sample(
        question=question, answer=answer, images=tuple(images), given_id=given_id, task=task
    )


def text_of(row: Mapping[str, Any], *names: str, default: str | None = None) -> str:
    """Return the first of the named fields that is there, as text.

    Raises:
        DataError: None is there and there is no default, or it is not text or a number.
    """
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(f"{name} is not text")
        return str(value)
    if default is None:
        raise DataError(f"no {names[0]}")
    return default


def gold_of(row: Mapping[str, Any], *names: str) -> str:
    """Return the gold answer, the first of the named fields that is there.

    Raises:
        DataError: There is none, as in splits whose answers are withheld.
    """
    gold = text_of(row, *names, default="")
    if not gold.strip():
        raise DataError(
            "no answer", hint="splits whose answers are withheld can only be scored by their owners"
        )
    return gold


def texts_of(value: Any, name: str) -> tuple[str, ...]:
    """Return a list of texts: a list, or a Python list written as text; one text is a list of one.

    Nothing is evaluated: only literals are read.

    >>> texts_of("['1/2', '0.5']", "answer"), texts_of("yes", "answer"), texts_of(None, "choices")
    (('1/2', '0.5'), ('yes',), ())
    """
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        text = value.strip()
        if not (text.startswith("[") and text.endswith("]")):
            return (value,)
        value = _literal(text, name)
    if not isinstance(value, list | tuple):
        raise DataError(f"{name} is not a list")
    if not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in value):
        raise DataError(f"{name} holds something that is not text")
    return tuple(str(one) for one in value)


def _literal(text: str, name: str) -> Any:
    if len(text) > _MAX_LITERAL:
        raise DataError(f"{name} has {len(text)} characters, {_MAX_LITERAL} are read")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise DataError(f"{name} is not a list of literals") from error


def lettered(choices: Sequence[str]) -> dict[str, str]:
    """Return letter -> choice, from A.

    Raises:
        DataError: More choices than letters.
    """
    if len(choices) > 26:
        raise DataError(f"{len(choices)} choices, letters end at 26")
    return {chr(ord("A") + place): choice for place, choice in enumerate(choices)}


def with_choices(question: str, choices: Mapping[str, str], instruction: str) -> str:
    """Return a question, its choices one a line, and how to answer; ours, in no harness's words."""
    lines = [question, *(f"({letter}) {choice}" for letter, choice in choices.items()), instruction]
    return "\n".join(line for line in lines if line)
