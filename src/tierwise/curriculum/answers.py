r"""What the answer is: the answer part of a completion, and a typed value taken out of it.

```
completion -> answer_part (after the thinking, inside the answer tag) -> final_text (boxed, "=",
"answer is", last line) -> number | letters | boxes | text
```

The answer is looked for in the answer part only: a right number in the thinking does not count.
Several different values where one is asked for (`12 or 13`) are no answer. Left out: unit
conversion (5 cm is not 50 mm), languages other than English for number words.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeGuard


class AnswerKind(StrEnum):
    """What an answer is, which decides how two of them are compared."""

    NUMBER = "number"
    LETTER = "letter"
    YES_NO = "yes_no"
    MATH = "math"
    BOX = "box"
    OCR = "ocr"
    TEXT = "text"


_KIND_OF_TASK = {
    "ocr": AnswerKind.OCR,
    "detection": AnswerKind.BOX,
    "cv_detection": AnswerKind.BOX,
    "grounding": AnswerKind.BOX,
    "cv_grounding": AnswerKind.BOX,
    "count": AnswerKind.NUMBER,
    "counting": AnswerKind.NUMBER,
}

_TO_TWENTY = """zero one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen twenty"""
_NUMBER_WORDS = {word: value for value, word in enumerate(_TO_TWENTY.split())}

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(
    rf"""(?<![\w.^])(?P<sign>[-+]?)\s*
    (?:(?P<whole>\d+)\s+(?P<top>\d+)\s*/\s*(?P<bottom>\d+)
      |(?P<over>{_PLAIN})\s*/\s*(?P<under>{_PLAIN})
      |(?P<plain>{_PLAIN}))
    (?P<percent>\s*%)?(?![\d])""",
    re.VERBOSE,
)
_MAX_LENGTH, _MAX_EXPONENT = 100, 200
"""Longest number that is read, in characters, and largest power of ten; a model may write on."""

_UNIT = re.compile(r"\s*([^\W\d_]+(?:\^?\{?-?\d\}?|[²³])?(?:\s*/\s*[^\W\d_]+)?|°\s*[CF]?)?")
_ANSWER_IS = re.compile(r"(?:final\s+answer|answer)\s*(?:is|:|=)+\s*(.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number as written: its exact value, and what stood around it.

    Attributes:
        value: Exact.
        percent: Whether a percent sign followed.
        unit: The word after it, lower case, or "".
        num_decimals: Digits after the decimal point, or None for a fraction.
    """

    value: Fraction
    percent: bool = False
    unit: str = ""
    num_decimals: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle in the answer's own pixels, and its label or ""."""

    left: float
    top: float
    right: float
    bottom: float
    label: str = ""


def infer_kind(gold: str, task: str = "") -> AnswerKind:
    r"""Return what kind of answer a gold answer is; a known task name decides first.

    >>> [infer_kind(gold).value for gold in ("12", "B", "yes", r"\frac{a}{2}", "a red car")]
    ['number', 'letter', 'yes_no', 'math', 'text']
    """
    if (kind := _KIND_OF_TASK.get(task.lower())) is not None:
        return kind
    text = clean_latex(unboxed(gold))
    if text.casefold().rstrip(".") in {"yes", "no", "true", "false"}:
        return AnswerKind.YES_NO
    if letters_of(text) is not None:
        return AnswerKind.LETTER
    if whole_number(text) is not None:
        return AnswerKind.NUMBER
    if boxes_of(text):
        return AnswerKind.BOX
    if re.search(r"\\[a-zA-Z]+|[\^_=√π]|\d\s*[a-z]\b", text):
        return AnswerKind.MATH
    return AnswerKind.TEXT


def answer_part(text: str) -> str:
    """Return the part of a completion that is the answer.

    It is the inside of the last answer tag; without one, what follows the thinking; with neither,
    everything. A thinking block that never ends has no answer after it.

    >>> answer_part("<think>6*2=12</think><answer>99</answer>"), answer_part("<think>12")
    ('99', '')
    """
    tags = list(re.finditer(r"<answer>(.*?)(?:</answer>|(?=<answer>)|\Z)", text, re.DOTALL | re.I))
    if tags:
        return str(tags[-1][1]).strip()
    _, closed, after = text.rpartition("</think>")
    if closed:
        return after.strip()
    return "" if re.search(r"<think>", text, re.IGNORECASE) else text.strip()


def final_text(part: str) -> str:
    r"""Return the shortest text that states the answer: boxed, after "answer is", or last line.

    >>> final_text("so 3 + 5 = 8"), final_text(r"thus \boxed{\frac{1}{2}} holds")
    ('so 3 + 5 = 8', '\\frac{1}{2}')
    """
    boxed = last_boxed(part)
    if boxed is not None:
        return boxed.strip()
    lines = [line.strip() for line in part.splitlines() if line.strip()]
    if not lines:
        return ""
    stated = list(_ANSWER_IS.finditer(lines[-1]))
    last = str(stated[-1][1]) if stated else lines[-1]
    return last.strip().strip("*`").strip()


def last_boxed(text: str) -> str | None:
    r"""Return the inside of the last `\boxed{...}`, braces matched, or None.

    >>> last_boxed(r"\boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for place in range(begin, len(text)):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                return text[begin:place]
        start = text.rfind("\\boxed{", 0, start)
    return None


def unboxed(gold: str) -> str:
    r"""Return a gold answer without what data sets put around it: thinking, answer tag, box.

    >>> unboxed("<think>6 / 2</think><answer> 3 </answer>"), unboxed(r"so \boxed{B} it is")
    ('3', 'B')
    """
    part = answer_part(gold)
    inner = last_boxed(part)
    return (part if inner is None else inner).strip()


def clean_latex(text: str) -> str:
    r"""Return text with the LaTeX that only dresses a number or a word taken off.

    >>> clean_latex(r"$\dfrac{1}{2}$"), clean_latex(r"12\,\text{cm}")
    ('1/2', '12 cm')
    """
    text = text.replace("\u2212", "-").replace("\u2013", "-").replace("$", " ").replace("\\$", " ")
    text = re.sub(r"\\[dt]?frac\s*\{\s*([^{}]+?)\s*\}\s*\{\s*([^{}]+?)\s*\}", _plain_fraction, text)
    text = re.sub(r"\\[dt]?frac(\d)(\d)", r"\1/\2", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|operatorname)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[,;:! ]|\\quad|~", " ", text)
    text = re.sub(r"\^\s*\{?\\circ\}?|\\degree", "°", text)
    text = text.replace("\\%", "%").replace("\\(", " ").replace("\\)", " ").replace("{,}", ",")
    return " ".join(text.split())


def _plain_fraction(match: re.Match[str]) -> str:
    top, bottom = match[1], match[2]
    simple = re.fullmatch(r"-?[\d.]+", top) and re.fullmatch(r"[\d.]+", bottom)
    return f"{top}/{bottom}" if simple else match[0]


def whole_number(text: str) -> Number | None:
    """Return the number a text is, its unit included, or None when it is more than that.

    >>> whole_number("1,200 cm").value, whole_number("12 or 13")
    (Fraction(1200, 1), None)
    """
    text = clean_latex(text).strip().strip(".").strip()
    word = text.casefold()
    if word in _NUMBER_WORDS:
        return Number(value=Fraction(_NUMBER_WORDS[word]))
    match = _NUMBER.match(text)
    if match is None:
        return None
    number = _number_of(match)
    unit = _UNIT.fullmatch(text, match.end())
    if number is None or unit is None:
        return None
    return Number(
        value=number.value,
        percent=number.percent,
        unit=(unit[1] or "").replace(" ", "").casefold(),
        num_decimals=number.num_decimals,
    )


def number_of(text: str, *, free: bool) -> Number | None:
    """Return the number a final text states, or None.

    Args:
        text: From `final_text`.
        free: True for running text, where the last number counts; False for a tagged or boxed
            answer, where two different numbers are no answer.
    """
    text = clean_latex(text).rpartition("=")[2].strip()
    if (number := whole_number(text)) is not None:
        return number
    found = [number for match in _NUMBER.finditer(text) if (number := _number_of(match))]
    found += [
        Number(value=Fraction(_NUMBER_WORDS[word]))
        for word in re.findall(r"[a-z]+", text.casefold())
        if word in _NUMBER_WORDS and not found and word != "one"
    ]
    if not found or (not free and len({number.value for number in found}) > 1):
        return None
    return found[-1]


def _number_of(match: re.Match[str]) -> Number | None:
    def value_of(text: str) -> Fraction:
        return Fraction(text.replace(",", ""))

    exponents = re.findall(r"[eE][+-]?(\d+)", match[0])
    if len(match[0]) > _MAX_LENGTH or any(int(power) > _MAX_EXPONENT for power in exponents):
        return None
    decimals: int | None = None
    if match["whole"]:
        if int(match["bottom"]) == 0:
            return None
        value = int(match["whole"]) + Fraction(int(match["top"]), int(match["bottom"]))
    elif match["over"]:
        if value_of(match["under"]) == 0:
            return None
        value = value_of(match["over"]) / value_of(match["under"])
    elif match["plain"]:
        value = value_of(match["plain"])
        mantissa = re.split("[eE]", match["plain"])[0]
        decimals = len(mantissa.partition(".")[2])
    else:
        return None
    if match["sign"] == "-":
        value = -value
    return Number(value=value, percent=bool(match["percent"]), num_decimals=decimals)


def letters_of(text: str) -> frozenset[str] | None:
    """Return the option letters a text states, or None.

    >>> sorted(letters_of("(B) 12 cm")), sorted(letters_of("A, C")), letters_of("A cat")
    (['B'], ['A', 'C'], None)
    """
    text = clean_latex(text).strip().strip("*`'\"").strip().rstrip(".")
    text = re.sub(r"^(?:the\s+)?(?:option|choice|answer)s?\s*:?\s+", "", text, flags=re.IGNORECASE)
    one = r"\(?[A-J]\)?"
    if re.fullmatch(rf"{one}(?:(?:\s*[,&]\s*|\s+and\s+){one})*", text):
        return frozenset(re.findall(r"[A-J]", text))
    if lower := re.fullmatch(r"\(?([a-j])\)?", text):
        return frozenset(lower[1].upper())
    if explained := re.match(r"\(([A-J])\)(?![\w(])|([A-J])[).:](?=\s|$)", text):
        rest = text[explained.end() :]
        if not re.search(rf"\([A-J]\)|\b[B-J]\b[).:]|^\s*(?:or\b|/)\s*{one}$", rest):
            return frozenset(explained[1] or explained[2])
    return None


def boxes_of(text: str) -> tuple[Box, ...]:
    """Return every box in a text, written as four numbers in brackets or as JSON objects.

    >>> [(box.left, box.bottom) for box in boxes_of("[[1, 2, 3, 4], [5, 6, 7, 8]]")]
    [(1.0, 4.0), (5.0, 8.0)]
    """
    inner = re.sub(r"^```(?:json)?|```$", "", text.strip()).strip()
    try:
        found = list(_boxes_in(json.loads(inner)))
    except (json.JSONDecodeError, RecursionError):
        number = r"\s*(-?\d+(?:\.\d+)?)\s*"
        pattern = re.compile(rf"[\[(]{number},{number},{number},{number}[\])]")
        found = [_box([float(part) for part in match.groups()]) for match in pattern.finditer(text)]
    return tuple(found)


def _boxes_in(value: Any) -> Any:
    if isinstance(value, dict):
        for name in ("bbox_2d", "bbox", "box"):
            corners = value.get(name)
            if _is_corners(corners):
                yield _box(corners, str(value.get("label") or ""))
                return
        for child in value.values():
            yield from _boxes_in(child)
    elif _is_corners(value):
        yield _box(value)
    elif isinstance(value, list):
        for child in value:
            yield from _boxes_in(child)


def _is_corners(value: Any) -> TypeGuard[list[float]]:
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(isinstance(part, int | float) and not isinstance(part, bool) for part in value)
    )


def _box(corners: list[float], label: str = "") -> Box:
    left, top, right, bottom = (float(part) for part in corners)
    return Box(left=left, top=top, right=right, bottom=bottom, label=label.strip().casefold())


def normal_text(text: str) -> str:
    """Return text for exact comparison: case, blanks, outer punctuation and articles ignored.

    >>> normal_text(' The  Red car. ')
    'red car'
    """
    text = " ".join(clean_latex(text).casefold().split()).strip(" .,;:!?\"'`*")
    return re.sub(r"^(?:the|an?)\s+", "", text)
