"""The training section says what the intervals say, and its CSVs hold what is drawn."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from tierwise.core.report import Figure, Report, Text, render_html
from tierwise.curriculum.training.evaluate import (
    SampleScore,
    accuracies,
    differences,
)
from tierwise.curriculum.training.training_figures import accuracy_table, sentence, training_section


def scores(right: int) -> list[SampleScore]:
    return [
        SampleScore(id=str(n), task="bar", stratum="", greedy=float(n < right), sampled=(0.0, 1.0))
        for n in range(100)
    ]


def metrics() -> list[dict[str, Any]]:
    return [
        {"step": n, "reward": n / 10, "zero_advantage_share": 0.5, "grad_norm": 2.0,
         "completion_tokens": 3.0}
        for n in range(1, 8)
    ]  # fmt: skip


def test_the_sentence_claims_no_more_than_the_interval() -> None:
    said = sentence(differences(scores(40), scores(60), seed=0))
    assert "greedy accuracy went from 40.0 to 60.0 %" in said
    assert "points: higher)" in said
    assert "sampled accuracy went from 50.0 to 50.0 %" in said
    assert "no difference seen" in said
    assert sentence(()) == "Nothing was evaluated."


def test_the_section_renders_and_its_csvs_hold_the_numbers() -> None:
    section = training_section(metrics(), differences(scores(40), scores(60), seed=0))
    page = render_html(Report(title="t", summary=(), sections=(section,)))
    assert "no difference seen" in page
    assert isinstance(section.blocks[0], Text)
    tables = {b.name: list(csv.reader(io.StringIO(b.csv))) for b in section.blocks
              if isinstance(b, Figure)}  # fmt: skip
    assert tables["learning"][3] == ["3", "0.3", "0.5", "2.0", "3.0"]
    first = dict(zip(*tables["accuracy-change"][:2], strict=True))
    assert first["group"] == "all"
    assert float(first["difference"]) == pytest.approx(0.2)
    assert first["verdict"] == "higher"


def test_a_single_step_can_be_drawn() -> None:
    training_section(metrics()[:1], differences(scores(40), scores(60), seed=0))


def test_a_stage_without_evaluation_or_steps_can_be_shown() -> None:
    assert len(training_section(metrics(), ()).blocks) == 2
    assert len(training_section((), ()).blocks) == 1


def test_accuracies_as_a_table() -> None:
    table = accuracy_table(accuracies(scores(40), seed=0))
    assert table.rows[0][:5] == ("all", "greedy", "100", "0", "40.0")
    assert "wilson" in table.rows[0][5]
