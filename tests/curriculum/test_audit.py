"""Each class of fault is planted into a reward and must be found; ours must have none."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable

import pytest

from tierwise.curriculum.answers import answer_part, boxes_of, last_boxed
from tierwise.curriculum.audit import (
    Audit,
    Fault,
    Reward,
    audit_reward,
    from_trl,
    load_reward,
    probes_of,
)
from tierwise.curriculum.samples import Sample, SampleSet
from tierwise.curriculum.verdicts import iou, reward


def ours(gold: str, completion: str, task: str) -> float:
    return reward(gold, completion, task=task)


def audited(planted: Reward) -> Audit:
    return audit_reward(planted, [], seed=0)


def test_ours_has_no_fault(held_out: SampleSet) -> None:
    found = audit_reward(ours, held_out.samples, seed=0)
    assert [(one.probe, one.score) for one in found.findings] == []
    assert set(found.num_probes) == set(Fault)
    assert sum(found.num_probes.values()) > 400


def count_as_text(gold: str, completion: str, task: str) -> float:
    """Take a count for text, where a substring either way is right."""
    if "count" not in task:
        return ours(gold, completion, task)
    said = answer_part(completion)
    return float(bool(said) and (said in gold or gold in said))


def dump_is_right(gold: str, completion: str, task: str) -> float:
    if task != "ocr":
        return ours(gold, completion, task)
    close = difflib.SequenceMatcher(None, gold, completion).ratio() >= 0.5
    return float(gold in completion or close)


def missing_boxes_are_free(gold: str, completion: str, task: str) -> float:
    found, wanted = boxes_of(answer_part(completion)), boxes_of(gold)
    if not wanted or not found:
        return ours(gold, completion, task)
    best = [max(iou(one, other) for other in wanted) for one in found]
    return sum(best) / len(best)


def extra_boxes_are_free(gold: str, completion: str, task: str) -> float:
    found, wanted = boxes_of(answer_part(completion)), boxes_of(gold)
    if not wanted or not found:
        return ours(gold, completion, task)
    return sum(max(iou(one, other) for other in found) for one in wanted) / len(wanted)


def tag_is_not_boxed(gold: str, completion: str, task: str) -> float:
    if last_boxed(gold) is not None and last_boxed(completion) is None:
        return 0.0
    return ours(gold, completion, task)


def thinking_counts(gold: str, completion: str, task: str) -> float:
    inside = last_boxed(gold) or gold
    return max(ours(gold, completion, task), float(inside in completion))


def units_are_wrong(gold: str, completion: str, task: str) -> float:
    return 0.0 if re.search(r"\d cm", completion) else ours(gold, completion, task)


def decimals_are_wrong(gold: str, completion: str, task: str) -> float:
    return 0.0 if re.search(r"\d\.\d", completion) else ours(gold, completion, task)


def hedges_are_right(gold: str, completion: str, task: str) -> float:
    parts = answer_part(completion).split(" or ")
    return max(ours(gold, part, task) for part in parts)


def letters_must_be_bare(gold: str, completion: str, task: str) -> float:
    if re.fullmatch(r"[A-D]", gold) and answer_part(completion) != gold:
        return 0.0
    return ours(gold, completion, task)


def case_matters(gold: str, completion: str, task: str) -> float:
    inside = last_boxed(gold) or gold
    if inside in ("yes", "no", "a red car") and inside not in completion:
        return 0.0
    return ours(gold, completion, task)


def near_is_right(gold: str, completion: str, task: str) -> float:
    match = re.fullmatch(r"<answer>(\d+)</answer>", completion)
    if gold.isdigit() and match and abs(int(match[1]) - int(gold)) <= 10:
        return 1.0
    return ours(gold, completion, task)


def nothing_is_right(gold: str, completion: str, task: str) -> float:
    return ours(gold, completion, task) if answer_part(completion) else 1.0


def a_part_is_enough(gold: str, completion: str, task: str) -> float:
    """Take a substring either way for right, as the released perception reward does for text."""
    said = answer_part(completion)
    return float(bool(said) and (said in gold or gold in said))


def an_open_tag_is_an_answer(gold: str, completion: str, task: str) -> float:
    return (
        1.0
        if completion.count("<answer>") > completion.count("</answer>")
        else ours(gold, completion, task)
    )


PLANTED: list[tuple[Fault, Callable[[str, str, str], float]]] = [
    (Fault.COUNT_AS_TEXT, count_as_text),
    (Fault.TEXT_DUMP, dump_is_right),
    (Fault.MISSING_BOX, missing_boxes_are_free),
    (Fault.EXTRA_BOX, extra_boxes_are_free),
    (Fault.TAG_AGAINST_BOXED, tag_is_not_boxed),
    (Fault.GOLD_IN_THINKING, thinking_counts),
    (Fault.UNFINISHED_THINKING, thinking_counts),
    (Fault.UNIT, units_are_wrong),
    (Fault.FRACTION, decimals_are_wrong),
    (Fault.HEDGE, hedges_are_right),
    (Fault.LETTER_STYLE, letters_must_be_bare),
    (Fault.WORD_STYLE, case_matters),
    (Fault.NEAR_MISS, near_is_right),
    (Fault.EMPTY, nothing_is_right),
    (Fault.PART_OF_TEXT, a_part_is_enough),
    (Fault.MALFORMED, an_open_tag_is_an_answer),
]


@pytest.mark.parametrize(("fault", "planted"), PLANTED)
def test_a_planted_fault_is_found(fault: Fault, planted: Reward) -> None:
    found = audited(planted)
    assert fault in found.faults()
    assert {one.kind for one in found.findings if one.probe.fault is fault} <= {
        "right scored wrong",
        "wrong scored right",
    }


def test_boxed_inside_the_tag_is_probed() -> None:
    def no_box_in_tag(gold: str, completion: str, task: str) -> float:
        return 0.0 if r"<answer>\boxed" in completion else ours(gold, completion, task)

    assert audited(no_box_in_tag).faults() == (Fault.BOXED_IN_TAG,)


def test_a_reward_that_raises_or_says_nothing_is_a_finding() -> None:
    def broken(gold: str, completion: str, task: str) -> float:
        if not completion:
            raise KeyError("no answer")
        return ours(gold, completion, task)

    (kind,) = {one.kind for one in audited(broken).findings}
    assert kind == "raises"

    def silent(gold: str, completion: str, task: str) -> float:
        return None if len(gold) == 1 else ours(gold, completion, task)  # type: ignore[return-value]

    found = audited(silent)
    assert {one.error for one in found.findings} == {"None"}
    assert {one.kind for one in found.findings} == {"gives no score"}


GOLDS = [
    "50%",
    "100%",
    "3.14",
    "-4",
    "x^2+1",
    "True",
    "A,C",
    "A,B,C,D",
    "A,B,C,D,E,F,G,H,I,J",
    "(B)",
    "a",
    "C)",
    "\\pi",
    "1/3",
    "12°",
    "10^3",
    "\\sqrt{2}",
    "y=2x",
    "\\frac{22}{7}",
    "[[0,0,1,1]]",
    "<answer>3</answer>",
    "\\boxed{\\text{cat}}",
    "an_apple",
    "猫",
]


@pytest.mark.parametrize("gold", [*GOLDS, "something else entirely", "B. the tall one", "5 apples"])
def test_ours_has_no_fault_on_answers_of_any_form(gold: str) -> None:
    samples = [Sample(id=task, question="q", answer=gold, task=task) for task in ("", "ocr")]
    found = audit_reward(ours, samples, seed=0)
    assert [(one.probe.completion, one.score, one.kind) for one in found.findings] == []


def test_a_right_answer_that_cannot_be_read_gets_no_score() -> None:
    sample = Sample(id="a", question="q", answer="many", task="count")
    found = audit_reward(ours, [sample], seed=0)
    assert {one.kind for one in found.findings} == {"gives no score"}
    assert {one.score for one in found.findings} == {None}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "much", [1.0]])
def test_what_is_no_finite_number_is_no_score(value: object) -> None:
    found = audited(lambda gold, completion, task: value)  # type: ignore[arg-type, return-value]
    assert len(found.findings) == sum(found.num_probes.values())
    assert {one.kind for one in found.findings} <= {"gives no score", "raises"}


def test_a_trl_reward_is_audited_through_its_lists() -> None:
    def trl(
        completions: list[list[dict[str, str]]], solution: list[str], **_: object
    ) -> list[float]:
        return [
            ours(gold, message[0]["content"], "")
            for gold, message in zip(solution, completions, strict=True)
        ]

    found = audited(from_trl(trl))
    assert {one.probe.task for one in found.findings} <= {"ocr"}  # it does not read the task


def test_probes_keep_their_gold_and_task() -> None:
    for probe in probes_of(r"\boxed{12}", "counting", random.Random(0)):
        assert (probe.gold, probe.task) == (r"\boxed{12}", "counting")


def test_trl_s_own_accuracy_reward_has_the_faults_that_are_known_of_it() -> None:
    theirs = load_reward("trl.rewards:accuracy_reward")
    found = audited(from_trl(theirs))
    wrong = {(one.probe.fault, one.probe.gold, one.kind) for one in found.findings}
    assert (Fault.TAG_AGAINST_BOXED, "12", "right scored wrong") in wrong
    assert (Fault.GOLD_IN_THINKING, "12", "wrong scored right") in wrong
    assert (Fault.UNIT, "12", "right scored wrong") in wrong
    assert (Fault.FRACTION, "1/2", "right scored wrong") in wrong
    assert (Fault.LETTER_STYLE, "B", "gives no score") in wrong


def test_every_class_of_fault_is_planted() -> None:
    assert {fault for fault, _ in PLANTED} | {Fault.BOXED_IN_TAG} == set(Fault)
