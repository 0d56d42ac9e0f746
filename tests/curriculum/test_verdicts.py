from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierwise.curriculum.answers import AnswerKind, Box, boxes_of, last_boxed
from tierwise.curriculum.mathcheck import MathChecker, MathOutcome
from tierwise.curriculum.verdicts import (
    Judgement,
    Verdict,
    edit_distance,
    iou,
    judge,
    match_boxes,
    reward,
)

RIGHT = [
    ("8", "3 + 5 = 8"),
    ("5", "3 : 5 = 5"),
    ("12", "<think>it is 99</think><answer>12</answer>"),
    (r"\boxed{12}", "<answer>12</answer>"),
    (r"\boxed{B}", "<answer>B</answer>"),
    (r"\boxed{yes}", "<answer>yes</answer>"),
    (r"\boxed{B}", r"<answer>\boxed{B}</answer>"),
    ("12", "12 cm"),
    ("12", r"so the area is \boxed{12\,\text{cm}^2}"),
    ("12", "I count twelve."),
    ("12", "The answer is 12."),
    ("12", "**12**"),
    ("1,234", "1234"),
    ("1/2", "0.5"),
    ("0.5", r"\frac{1}{2}"),
    (r"\frac{1}{3}", "0.33"),
    ("1 1/2", "1.5"),
    ("50%", "0.5"),
    ("50", "50 %"),
    ("-5", "\u22125"),
    ("5 cm", "5"),
    ("B", "(B)"),
    ("B", "B. a red car"),
    ("B", "The answer is (B)."),
    ("A,C", "A and C"),
    ("A,C", "(A) and (C)"),
    ("A,C", "(C), (A)."),
    ("<answer> 3 </answer>", "I see 3"),
    ("<think>6 / 2</think><answer>3</answer>", "<answer>3</answer>"),
    (r"<think>so</think>\boxed{B}", "(B)"),
    ("yes", "Yes, there is a dog."),
    ("true", "<answer>yes</answer>"),
    ("a red car", "<answer>A red car.</answer>"),
    (r"\frac{\sqrt{2}}{2}", r"<answer>\boxed{\frac{1}{\sqrt{2}}}</answer>"),
    ("x^2+2x+1", "<answer>(x+1)^2</answer>"),
]

WRONG = [
    ("12", "1"),
    ("12", "2"),
    ("12", "112"),
    ("12", ""),
    ("12", "<answer></answer>"),
    ("12", "<think>6 * 2 = 12</think><answer>99</answer>"),
    ("12", "<think>it must be 12"),
    ("12", "<answer>12 or 13</answer>"),
    ("12", r"\boxed{11, 12}"),
    ("12", "<answer>12</answer> no: <answer>13</answer>"),
    ("5 cm", "5 m"),
    ("1/3", "0.3"),
    ("3", "area in cm^3"),
    ("B", "A"),
    ("A", "A cat"),
    ("B", "<answer>A or B</answer>"),
    ("B", "(A) or (B)"),
    ("B", "(B) or A"),
    ("B", "B) or A"),
    ("B", "(B), A"),
    ("B", "(B) and A."),
    ("<think>3</think><answer>4</answer>", "3"),
    ("x^2+1", "(" * 500),
    ("x^2+1", "{" * 500 + "x^2+1"),
    ("A,C", "A"),
    ("yes", "no"),
    ("yes", "yes and no"),
    ("a red car", "<answer>a car</answer>"),
    ("x^2+2x+1", "<answer>(x+2)^2</answer>"),
]


@pytest.mark.parametrize(("gold", "completion"), RIGHT)
def test_right_answers_are_right(gold: str, completion: str) -> None:
    assert judge(gold, completion).verdict is Verdict.RIGHT


@pytest.mark.parametrize(("gold", "completion"), WRONG)
def test_wrong_answers_are_wrong(gold: str, completion: str) -> None:
    assert judge(gold, completion).verdict is Verdict.WRONG


@settings(deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_whole_numbers_agree_exactly_when_equal(gold: int, said: int) -> None:
    for text in (f"{said}", f"<answer>{said}</answer>", rf"thus \boxed{{{said}}}", f"{said:,}"):
        assert (judge(str(gold), text).verdict is Verdict.RIGHT) == (gold == said)


@settings(deadline=None)  # the first call imports
@given(st.text(max_size=60))
def test_any_completion_gets_a_verdict(completion: str) -> None:
    for gold in ("12", "B", "yes", "[1, 2, 3, 4]", "a red car"):
        assert judge(gold, completion).verdict in (Verdict.RIGHT, Verdict.WRONG)


@pytest.mark.parametrize("completion", ["9" * 5000, "1e9999999", "1/" + "9" * 5000, "1e-9999999"])
def test_a_model_that_goes_on_writing_digits_is_wrong(completion: str) -> None:
    assert judge("5", completion).verdict is Verdict.WRONG
    assert judge("5", f"<answer>{completion}</answer>").verdict is Verdict.WRONG


@pytest.mark.parametrize("gold", [r"\boxed{}", "<answer></answer>", "<think>it may be 3"])
@pytest.mark.parametrize("task", ["", "count", "ocr", "detection"])
def test_a_right_answer_that_holds_none_is_an_error_of_its_row(gold: str, task: str) -> None:
    for completion in ("3", "", gold):
        found = judge(gold, completion, task=task)
        assert (found.verdict, found.error) == (Verdict.ERROR, "gold_unreadable")


def test_a_nested_fraction_in_a_box_is_not_cut_at_the_first_brace() -> None:
    """As the released script's expression does, which makes its fine-tuning targets."""
    assert last_boxed(r"so \boxed{\frac{3}{4}} it is") == r"\frac{3}{4}"
    assert judge(r"\boxed{\frac{3}{4}}", r"<answer>\boxed{\frac{3}{4}}</answer>").verdict is (
        Verdict.RIGHT
    )


def test_ocr_is_the_share_of_right_characters() -> None:
    def ocr(said: str) -> Judgement:
        return judge("STOP AHEAD", said, task="ocr")

    assert ocr("stop  ahead").score == 1.0
    assert ocr("STOP AHEAP") == Judgement(
        verdict=Verdict.RIGHT, score=0.9, extracted="STOP AHEAP", kind=AnswerKind.OCR
    )
    assert ocr("STOP").verdict is Verdict.WRONG
    assert ocr("x" * 120 + "STOP AHEAD" + "y" * 120).score == 0.0


@given(st.text("ab", max_size=8), st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_edit_distance_is_a_metric(first: str, second: str, third: str) -> None:
    assert edit_distance(first, second) == edit_distance(second, first)
    assert (edit_distance(first, second) == 0) == (first == second)
    assert edit_distance(first, third) <= edit_distance(first, second) + edit_distance(
        second, third
    )


def test_missed_and_extra_boxes_count() -> None:
    gold = "[[0, 0, 10, 10], [20, 20, 30, 30], [40, 40, 50, 50]]"
    assert judge(gold, gold).score == 1.0
    one = judge(gold, "[[0, 0, 10, 10]]")
    assert one.verdict is Verdict.WRONG
    assert one.score == pytest.approx(1 / 3)
    extra = judge(gold, gold[:-1] + ", [60, 60, 70, 70]]")
    assert extra.verdict is Verdict.WRONG
    assert extra.score == pytest.approx(3 / 4)
    assert judge(gold, "[[40, 40, 50, 50], [0, 0, 10, 10], [20, 20, 30, 30]]").score == 1.0


def test_boxes_are_matched_for_the_largest_sum_not_greedily() -> None:
    def box(left: float, right: float) -> Box:
        return Box(left=left, top=0, right=right, bottom=1)

    gold, found = [box(0, 10), box(4, 14)], [box(3, 13), box(-4, 6)]
    assert iou(gold[0], found[0]) == pytest.approx(7 / 13)
    assert iou(gold[1], found[0]) == pytest.approx(9 / 11)
    assert sum(match_boxes(gold, found)) == pytest.approx(9 / 11 + 6 / 14)


def test_boxes_are_read_as_json_and_labels_must_agree() -> None:
    text = '```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]\n```'
    (box,) = boxes_of(text)
    assert (box.left, box.bottom, box.label) == (1.0, 4.0, "cat")
    gold = '[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]'
    assert judge(gold, text).verdict is Verdict.RIGHT
    assert judge(gold, text.replace("cat", "dog")).score == 0.0
    assert judge(gold, "[3, 4, 1, 2]").score == 0.0


def test_mathematics_is_checked_in_a_thread_as_in_the_main_one() -> None:
    found: list[Judgement] = []
    thread = threading.Thread(target=lambda: found.append(judge("x^2-1", r"\boxed{(x-1)(x+1)}")))
    thread.start()
    thread.join()
    assert found[0].verdict is Verdict.RIGHT


def test_a_checker_that_is_out_of_time_is_an_error_and_is_replaced() -> None:
    impatient = MathChecker(timeout_s=0.0)
    assert impatient.check("2x", "x+x") is MathOutcome.TIMEOUT
    assert impatient.check("2x", "x+x") is MathOutcome.TIMEOUT
    impatient.close()
    patient = MathChecker(timeout_s=60.0)
    assert patient.check("2x", "x+x") is MathOutcome.EQUAL
    assert patient.check("2x", "x+y") is MathOutcome.DIFFERENT
    patient.close()
    assert patient.check("2x", "x+x") is MathOutcome.EQUAL
    patient.close()


def test_a_judge_out_of_time_is_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = MathChecker(timeout_s=0.0)
    monkeypatch.setattr(MathChecker, "shared", staticmethod(lambda: impatient))
    found = judge("z^2+4z+4", "(z+2)^2")
    assert (found.verdict, found.error) == (Verdict.ERROR, "judge_timeout")
    judge.cache_clear()
    impatient.close()


def test_a_gold_answer_that_cannot_be_read_is_an_error_not_a_wrong_answer() -> None:
    found = judge("many", "12", kind=AnswerKind.NUMBER)
    assert (found.verdict, found.error) == (Verdict.ERROR, "gold_unreadable")
    assert judge("no box", "[1, 2, 3, 4]", task="detection").error == "gold_unreadable"


def test_what_has_no_verdict_is_no_reward() -> None:
    assert math.isnan(reward("no box", "[1, 2, 3, 4]", task="detection"))
    assert (reward("12", "12"), reward("12", "13")) == (1.0, 0.0)
