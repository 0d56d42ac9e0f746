from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tierwise.core.report import Gallery, Table, Text
from tierwise.curriculum.audit import Fault, audit_reward
from tierwise.curriculum.difficulty.evidence import audit_blocks, audit_section, looking_section
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.difficulty.scores import Score
from tierwise.curriculum.duplicates import Duplicates, find_duplicates
from tierwise.curriculum.samples import Sample, SampleSet

NONE = Duplicates(exact=(), near=())


def scored(sample: Sample, *, grey: float | None = 0.0, blind: float | None = 0.0) -> Score:
    return Score(
        id=sample.id, task="", pass_rate=1.0, pass_low=0.7, pass_high=1.0, num_judged=10,
        grey_rate=grey, blind_rate=blind, blind_answerable=max(grey or 0, blind or 0) > 0.5,
        lambda_star=None, lambda_low=1.0, lambda_high=1.0, pism_stratum=Stratum.EASY,
        pism_stratum_text=Stratum.EASY, pism_stratum_table=Stratum.EASY, lambda_monotone=None,
        lambda_corrected=None, pism_stratum_corrected=Stratum.EASY, stratum_confidence=1.0,
        curve_rates=(1.0,), curve_permilles=(0,), greedy_right=True, cmab_sum=1.0, cmab_mean=1.0,
        cmab_sink_masked=1.0, cmab_question_only=1.0, cmab_stratum=Stratum.EASY,
        cmab_quantile_stratum=Stratum.EASY, num_attempts=10, num_errors=0, error="",
    )  # fmt: skip


def test_samples_answered_blind_are_shown_with_their_rates(held_out: SampleSet) -> None:
    samples = held_out.samples[:10]
    rows = [scored(one, grey=0.9 if place < 8 else 0.0) for place, one in enumerate(samples)]
    rows[3] = scored(samples[3], grey=0.0, blind=1.0)
    section = looking_section(rows, samples, NONE)
    assert "8 of 10 samples are answered without looking" in getattr(section.blocks[0], "text", "")
    (shown,) = (one for one in section.blocks if isinstance(one, Gallery))
    assert len(shown.pictures) == 6
    assert shown.pictures[0][0].startswith(b"\x89PNG")
    assert shown.pictures[0][1] == (
        f"grey 0.00, no picture 1.00: {samples[3].question} -> {samples[3].answer}"
    )
    unasked = [replace(row, grey_rate=None, blind_rate=None) for row in rows]
    text = looking_section(unasked, samples, NONE).blocks[0]
    assert "was not measured" in getattr(text, "text", "")


def test_duplicates_are_shown_side_by_side(held_out: SampleSet, tmp_path: Path) -> None:
    first, second = held_out.samples[:2]
    samples = [first, second, replace(first, id="again")]
    section = looking_section([], samples, find_duplicates(samples))
    (shown,) = (one for one in section.blocks if isinstance(one, Gallery))
    assert [note for _, note in shown.pictures] == [
        f"group 1, exact: {first.id}",
        "group 1, exact: again",
    ]
    assert shown.pictures[0][0] == shown.pictures[1][0]
    missing = [replace(one, images=(tmp_path / "none.png",)) for one in samples]
    assert not any(
        isinstance(block, Gallery)
        for block in looking_section([], missing, find_duplicates(missing)).blocks
    )


def test_no_fault_is_shown_as_a_number_of_probes_tried(held_out: SampleSet) -> None:
    text, table = audit_section(held_out.samples, seed=0).blocks
    assert isinstance(text, Text)
    assert isinstance(table, Table)
    counts = {name: (int(tried.replace(",", "")), wrong) for name, tried, wrong in table.rows}
    assert set(counts) == {fault.value.replace("_", " ") for fault in Fault}
    assert all(tried > 0 and wrong == "0" for tried, wrong in counts.values())
    found = re.match(r"Of ([\d,]+) completions .* judged 0 wrongly\.", text.text)
    assert found is not None
    assert int(found[1].replace(",", "")) == sum(tried for tried, _ in counts.values())


def test_a_bad_reward_s_faults_are_shown_with_examples(held_out: SampleSet) -> None:
    found = audit_reward(lambda gold, completion, task: 1.0, held_out.samples, seed=0)
    blocks = audit_blocks(found)
    examples = blocks[-1]
    assert isinstance(examples, Table)
    assert {row[0] for row in examples.rows} >= {"near miss", "empty", "gold in thinking"}
    assert all(row[1] == "wrong scored right" and row[4] == "1.0" for row in examples.rows)
    assert all(len(row[3]) <= 80 for row in examples.rows)
