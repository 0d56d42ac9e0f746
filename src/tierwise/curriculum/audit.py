"""Audit of a reward: completions whose right verdict is known, put to it, and what it gets wrong.

Rewards score right answers wrong and wrong ones right in a handful of ways (a count compared as
text, the gold found in the thinking, missing boxes for free, ...). `audit_reward` builds probes of
each class from gold answers, in both directions, and reports by class where the reward fails. A
reward is any callable (gold, completion, task) -> number in [0, 1]; TRL's list-shaped rewards are
wrapped by `from_trl`.

Left out: whether the reward agrees with people on real completions, which needs labels.

Source: classes observed in the released code of Qi et al. (https://arxiv.org/abs/2511.06722,
repository qijianyu277/DifficultySampling) and in TRL's accuracy_reward.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tierwise.core.errors import UsageError
from tierwise.curriculum.answers import (
    AnswerKind,
    Box,
    boxes_of,
    infer_kind,
    letters_of,
    normal_text,
    unboxed,
    whole_number,
)
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.verdicts import reward as verdict_reward

NO_SCORE = "None"
"""The error of a reward that gave None, NaN or infinity instead of a number."""

Reward = Callable[[str, str, str], float]
"""(gold answer, completion, task) -> score in [0, 1]."""


class Fault(StrEnum):
    """A class of mistakes."""

    COUNT_AS_TEXT = "count_as_text"
    TEXT_DUMP = "text_dump"
    MISSING_BOX = "missing_box"
    EXTRA_BOX = "extra_box"
    TAG_AGAINST_BOXED = "tag_against_boxed"
    BOXED_IN_TAG = "boxed_in_tag"
    GOLD_IN_THINKING = "gold_in_thinking"
    UNFINISHED_THINKING = "unfinished_thinking"
    HEDGE = "hedge"
    UNIT = "unit"
    FRACTION = "fraction"
    LETTER_STYLE = "letter_style"
    WORD_STYLE = "word_style"
    NEAR_MISS = "near_miss"
    PART_OF_TEXT = "part_of_text"
    MALFORMED = "malformed"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardProbe:
    """A completion with its right verdict.

    Attributes:
        fault: The class it looks for.
        gold: The right answer.
        completion: What a model might write.
        task: The task, or "".
        low: Least score that is right for it.
        high: Largest score that is right for it.
    """

    fault: Fault
    gold: str
    completion: str
    task: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A probe on which the reward is wrong; `error` names an exception it raised."""

    probe: RewardProbe
    score: float | None
    error: str = ""

    @property
    def kind(self) -> str:
        """Return which way it is wrong."""
        if self.error:
            return "raises" if self.error != NO_SCORE else "gives no score"
        too_low = self.score is not None and self.score < self.probe.low
        return "right scored wrong" if too_low else "wrong scored right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was put to a reward, and what it got wrong."""

    num_probes: dict[Fault, int]
    findings: tuple[Finding, ...]

    def num_wrong(self, fault: Fault) -> int:
        """Return how many probes of a class the reward got wrong."""
        return sum(finding.probe.fault is fault for finding in self.findings)

    def examples(self) -> tuple[Finding, ...]:
        """Return the first finding of each class and each way of being wrong."""
        first: dict[tuple[Fault, str], Finding] = {}
        for finding in self.findings:
            first.setdefault((finding.probe.fault, finding.kind), finding)
        return tuple(first.values())

    def text(self) -> str:
        """Return a line a class, and an example of each fault."""
        lines = [f"{'class':<20} {'probes':>6} {'wrong':>6}"]
        lines += [
            f"{fault.value:<20} {count:>6} {self.num_wrong(fault):>6}"
            for fault, count in self.num_probes.items()
        ]
        for one in self.examples():
            completion = one.probe.completion
            short = completion if len(completion) <= 60 else completion[:57] + "..."
            lines.append(
                f"{one.probe.fault.value}: {one.kind}: gold {one.probe.gold!r}, "
                f"completion {short!r}, score {one.error or one.score}"
            )
        return "\n".join(lines)

    def faults(self) -> tuple[Fault, ...]:
        """Return the classes in which the reward is wrong at least once."""
        return tuple(fault for fault in self.num_probes if self.num_wrong(fault))


def audit_reward(reward: Reward, samples: Sequence[Sample], *, seed: int) -> Audit:
    """Return what a reward gets wrong on probes made from samples' answers and from our own.

    Args:
        reward: What is audited.
        samples: A data set; its gold answers are probed, at most 200 of them.
        seed: Of the choice among them, and of near misses.
    """
    rng = random.Random(seed)
    chosen = list(samples) if len(samples) <= 200 else rng.sample(list(samples), 200)
    golds = [(sample.answer, sample.task) for sample in chosen] + list(BUILT_IN)
    probes = [probe for gold, task in golds for probe in probes_of(gold, task, rng)]
    counts: dict[Fault, int] = {}
    findings = []
    for probe in probes:
        counts[probe.fault] = counts.get(probe.fault, 0) + 1
        finding = _try(reward, probe)
        if finding is not None:
            findings.append(finding)
    return Audit(num_probes=counts, findings=tuple(findings))


BUILT_IN: tuple[tuple[str, str], ...] = (
    ("12", "counting"),
    ("3", "count"),
    (r"\boxed{12}", ""),
    ("7", ""),
    ("1/2", ""),
    (r"\boxed{\frac{3}{4}}", ""),
    ("B", ""),
    (r"\boxed{D}", ""),
    ("yes", ""),
    (r"\boxed{no}", ""),
    ("a red car", ""),
    ("STOP AHEAD", "ocr"),
    ("[[0, 0, 10, 10], [20, 20, 40, 40], [50, 50, 60, 60]]", "detection"),
)
"""Gold answers of every kind, so that an audit of any data set covers every class."""


_MALFORMED = (
    "<answer>",
    "</answer><answer>",
    r"<answer>\boxed{</answer>",
    r"\boxed{}",
    "<think></think>",
    "[[,",
    "(" * 500,
    "\x00",
)
"""Completions without any answer that a parser may stumble over."""


def _try(reward: Reward, probe: RewardProbe) -> Finding | None:
    try:
        given = reward(probe.gold, probe.completion, probe.task)
        score = None if given is None else float(given)
    except Exception as error:  # whatever a user's reward raises is a finding
        return Finding(probe=probe, score=None, error=type(error).__name__)
    if score is None or not math.isfinite(score):
        return Finding(probe=probe, score=None, error=NO_SCORE)
    if not probe.low - 1e-9 <= score <= probe.high + 1e-9:
        return Finding(probe=probe, score=score)
    return None


def probes_of(gold: str, task: str, rng: random.Random) -> list[RewardProbe]:
    """Return the probes that one gold answer gives."""
    kind = infer_kind(gold, task)
    plain = unboxed(gold)
    made = [
        _right(Fault.TAG_AGAINST_BOXED, gold, f"<think>let me see</think><answer>{plain}</answer>"),
        _right(Fault.BOXED_IN_TAG, gold, rf"<answer>\boxed{{{plain}}}</answer>"),
        _wrong(Fault.EMPTY, gold, ""),
        _wrong(Fault.EMPTY, gold, "<answer></answer>"),
        _wrong(Fault.UNFINISHED_THINKING, gold, f"<think>it might be {plain}"),
        *(_wrong(Fault.MALFORMED, gold, completion) for completion in _MALFORMED),
    ]
    other = _other(plain, kind, rng)
    if other is not None:
        made += [
            _wrong(Fault.NEAR_MISS, gold, f"<answer>{other}</answer>"),
            _wrong(
                Fault.GOLD_IN_THINKING,
                gold,
                f"<think>so it is = {plain}, \\boxed{{{plain}}}</think><answer>{other}</answer>",
            ),
        ]
        if kind is AnswerKind.LETTER:
            letters = ", ".join(sorted(letters_of(plain) or ()))
            made += [
                _wrong(Fault.HEDGE, gold, f"<answer>{letters} or {other}</answer>"),
                _wrong(Fault.HEDGE, gold, f"<answer>({letters}) or {other}</answer>"),
            ]
        elif kind is not AnswerKind.BOX:
            made.append(_wrong(Fault.HEDGE, gold, f"<answer>{plain} or {other}</answer>"))
    made += _typed(gold, plain, kind, rng)
    return [
        RewardProbe(
            fault=probe.fault,
            gold=gold,
            completion=probe.completion,
            task=task,
            low=probe.low,
            high=probe.high,
        )
        for probe in made
    ]


def _right(fault: Fault, gold: str, completion: str) -> RewardProbe:
    return RewardProbe(fault=fault, gold=gold, completion=completion, task="", low=0.99, high=1.0)


def _wrong(fault: Fault, gold: str, completion: str, high: float = 0.0) -> RewardProbe:
    return RewardProbe(fault=fault, gold=gold, completion=completion, task="", low=0.0, high=high)


def _typed(gold: str, plain: str, kind: AnswerKind, rng: random.Random) -> list[RewardProbe]:
    match kind:
        case AnswerKind.NUMBER:
            return _number_probes(gold, plain, rng)
        case AnswerKind.LETTER:
            return _letter_probes(gold, sorted(letters_of(plain) or ()))
        case AnswerKind.YES_NO:
            return [
                _right(Fault.WORD_STYLE, gold, f"<answer>{plain.capitalize()}.</answer>"),
                _right(Fault.WORD_STYLE, gold, f"<answer>{plain}, clearly</answer>"),
            ]
        case AnswerKind.TEXT:
            style = _right(Fault.WORD_STYLE, gold, f"<answer>{plain.capitalize()}.</answer>")
            return [style, *_text_probes(gold, plain, high=0.0)]
        case AnswerKind.OCR:
            dump = "".join(rng.choice("ABCDEFGH ") for _ in range(240))
            return [
                _wrong(Fault.TEXT_DUMP, gold, f"{dump[:120]} {plain} {dump[120:]}", 0.49),
                *_text_probes(gold, plain, high=0.89),
            ]
        case AnswerKind.BOX:
            return _box_probes(gold, boxes_of(plain))
        case _:
            return []


def _letter_probes(gold: str, letters: Sequence[str]) -> list[RewardProbe]:
    together = ", ".join(letters)
    made = [
        _right(Fault.LETTER_STYLE, gold, f"<answer>({together})</answer>"),
        _right(Fault.LETTER_STYLE, gold, f"The answer is {together}."),
    ]
    if len(letters) == 1:
        explained = f"<answer>{together}. the tall one</answer>"
        made.append(_right(Fault.LETTER_STYLE, gold, explained))
    return made


def _text_probes(gold: str, plain: str, *, high: float) -> list[RewardProbe]:
    """Return probes with a part of a text, and with much more than it."""
    words = plain.split()
    more = f"{plain} and then quite a lot more that is not there"
    made = [_wrong(Fault.PART_OF_TEXT, gold, f"<answer>{more}</answer>", high)]
    if len(words) > 1:
        made.append(_wrong(Fault.PART_OF_TEXT, gold, f"<answer>{words[0]}</answer>", high))
    return made


def _number_probes(gold: str, plain: str, rng: random.Random) -> list[RewardProbe]:
    number = whole_number(plain)
    if number is None:
        return []
    made = []
    if not number.unit and not number.percent:
        made.append(_right(Fault.UNIT, gold, f"<answer>{plain} cm</answer>"))
    value = number.value
    if number.percent:
        return made  # 1 is 100 %, and 0.5 is 50 %
    if value.denominator == 1:
        for other in {1, 2, rng.randint(3, 99), int(f"1{abs(int(value))}")} - {int(value)}:
            made.append(_wrong(Fault.COUNT_AS_TEXT, gold, f"<answer>{other}</answer>"))
            made.append(_wrong(Fault.COUNT_AS_TEXT, gold, str(other)))
    elif value.denominator in (2, 4, 5, 8, 10):
        made.append(_right(Fault.FRACTION, gold, f"<answer>{float(value)}</answer>"))
        both = rf"<answer>\frac{{{value.numerator}}}{{{value.denominator}}}</answer>"
        made.append(_right(Fault.FRACTION, gold, both))
    return made


def _box_probes(gold: str, boxes: Sequence[Box]) -> list[RewardProbe]:
    rows = [[box.left, box.top, box.right, box.bottom] for box in boxes]
    far = [[9e5 + 20 * place, 9e5, 9e5 + 20 * place + 10, 9e5 + 10] for place in range(len(rows))]
    made = [_wrong(Fault.EXTRA_BOX, gold, f"<answer>{rows + far}</answer>", 0.51)]
    if len(rows) > 1:
        made.append(_wrong(Fault.MISSING_BOX, gold, f"<answer>{rows[:1]}</answer>", 1 / len(rows)))
    return made


def _other(plain: str, kind: AnswerKind, rng: random.Random) -> str | None:
    """Return an answer of the same kind that is not the gold one, or None."""
    match kind:
        case AnswerKind.NUMBER:
            number = whole_number(plain)
            return None if number is None else str(number.value + rng.choice((1, 2, 10)))
        case AnswerKind.LETTER:
            used = letters_of(plain) or frozenset()
            return next((letter for letter in "ABCD" if letter not in used), None)
        case AnswerKind.YES_NO:
            opposites = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
            return opposites.get(plain.casefold().rstrip("."))
        case AnswerKind.BOX:
            return "[[900000, 900000, 900010, 900010]]"
        case AnswerKind.TEXT | AnswerKind.OCR:
            other = "something else entirely"
            return None if normal_text(plain) == other else other
        case _:
            return None


def load_reward(name: str) -> Callable[..., Any]:
    """Return the callable `module:name`, or tierwise's own for "ours".

    Raises:
        UsageError: There is no such callable, or its module cannot be imported.
    """
    if name == "ours":
        return lambda gold, completion, task: verdict_reward(gold, completion, task=task)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's module raises
        reason = f": {error}" if module and attribute else ""
        raise UsageError(f"no callable {name!r}{reason}", hint="write it as module:name") from error
    if not callable(found):
        raise UsageError(f"{name} is not callable")
    return found  # type: ignore[no-any-return]


def from_trl(function: Callable[..., Sequence[float | None]]) -> Reward:
    """Return a TRL reward function, which takes and returns lists, as a `Reward`."""

    def reward(gold: str, completion: str, task: str) -> Any:
        message = [[{"role": "assistant", "content": completion}]]
        (score,) = function(completions=message, solution=[gold], task=[task])
        return score

    return reward
