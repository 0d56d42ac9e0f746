from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from tierwise.core.errors import DataError, UsageError
from tierwise.core.report import Figure, Gallery, Report, Table, write_report
from tierwise.curriculum.difficulty.figures import report_section
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.difficulty.probes import Masking, Sampling
from tierwise.curriculum.difficulty.scores import Scores
from tierwise.curriculum.difficulty.scoring import ScoreConfig, score
from tierwise.curriculum.difficulty.select import PAPER_PAIRINGS, Arm, select, write_selection
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import SampleSet, read_samples


@pytest.fixture(scope="module")
def scored(
    tiny: LocalModel, held_out: SampleSet, tmp_path_factory: pytest.TempPathFactory
) -> Scores:
    config = ScoreConfig(
        num_attempts=2,
        permilles=(0, 300, 600, 900),
        sampling=Sampling(batch_size=64, max_new_tokens=8),
    )
    return score(held_out, tiny, config=config, folder=tmp_path_factory.mktemp("s"), seed=1)


def ids(found: object) -> list[str]:
    return [sample.id for sample in found.samples]  # type: ignore[attr-defined]


def test_arms_are_what_they_say(held_out: SampleSet, scored: Scores) -> None:
    chosen = {arm: select(held_out.samples, scored, arm, seed=0) for arm in Arm}
    strata = {row.id: row.pism_stratum for row in scored.rows}
    assert len(chosen[Arm.ALL].samples) == 40
    assert {strata[name] for name in ids(chosen[Arm.MID_HARD])} <= {Stratum.MEDIUM, Stratum.HARD}
    assert sorted(ids(chosen[Arm.MID_HARD])) == sorted(
        ids(chosen[Arm.MEDIUM]) + ids(chosen[Arm.HARD])
    )
    for row in chosen[Arm.BAND].scores:
        assert row.pass_rate is not None
        assert 0.2 <= row.pass_rate <= 0.8
    order = [sample.id for sample in held_out.samples]
    for found in chosen.values():
        assert ids(found) == sorted(ids(found), key=order.index)


def test_random_arms_are_as_large_as_what_they_control_for(
    held_out: SampleSet, scored: Scores
) -> None:
    for arm, control in (
        (Arm.MID_HARD, Arm.RANDOM),
        (Arm.MEDIUM, Arm.RANDOM_MEDIUM),
        (Arm.HARD, Arm.RANDOM_HARD),
    ):
        sizes = {
            len(select(held_out.samples, scored, one, seed=3).samples) for one in (arm, control)
        }
        assert len(sizes) == 1
    drawn = [ids(select(held_out.samples, scored, Arm.RANDOM, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_paper_s_eight_pairings() -> None:
    names = [f"{first.value}->{second.value}" for first, second in PAPER_PAIRINGS]
    assert names == [
        "medium->hard",
        "medium->random-hard",
        "random-medium->hard",
        "random-medium->random-hard",
        "hard->medium",
        "hard->random-medium",
        "random-hard->medium",
        "random-hard->random-medium",
    ]


def test_an_arm_is_written_as_data_that_is_read_again(
    held_out: SampleSet, scored: Scores, tmp_path: Path
) -> None:
    chosen = select(held_out.samples, scored, Arm.HARD, seed=0)
    write_selection(chosen, tmp_path / "arms" / "hard.jsonl")
    again = read_samples(tmp_path / "arms" / "hard.jsonl").samples
    assert [(one.id, one.question, one.answer) for one in again] == [
        (one.id, one.question, one.answer) for one in chosen.samples
    ]
    assert all(Path(str(one.images[0])).is_file() for one in again)
    nothing = replace(chosen, samples=(), scores=())
    with pytest.raises(UsageError, match="is empty"):
        write_selection(nothing, tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


def test_scores_of_other_data_are_refused(held_out: SampleSet, scored: Scores) -> None:
    stranger = replace(held_out.samples[0], id="stranger")
    with pytest.raises(DataError, match="1 samples have no score"):
        select([*held_out.samples, stranger], scored, Arm.ALL, seed=0)


def test_the_report_shows_what_was_scored(
    held_out: SampleSet, scored: Scores, tmp_path: Path
) -> None:
    section = report_section(scored, held_out.samples, masking=Masking(), seed=1)
    figures = [block for block in section.blocks if isinstance(block, Figure)]
    assert [figure.name for figure in figures] == ["strata", "pass_rate_against_mask"]
    for figure in figures:
        ET.fromstring(figure.svg)
    counts = [line.split(",") for line in figures[0].csv.splitlines()[1:]]
    assert sum(int(row[2]) for row in counts if row[0] == "PISM") == 40
    tables = [block for block in section.blocks if isinstance(block, Table)]
    assert sum(int(row[1]) for row in tables[0].rows) == 40
    (shown,) = (block for block in section.blocks if isinstance(block, Gallery))
    assert shown.pictures
    again = report_section(scored, held_out.samples, masking=Masking(), seed=1)
    assert section == again
    page = write_report(Report(title="t", summary=(), sections=(section,)), tmp_path)
    assert "http" not in page.read_text().replace("http://www.w3.org", "")


def test_a_report_without_blind_probes_or_pictures_still_stands(scored: Scores) -> None:
    rows = tuple(replace(row, blind_rate=None, grey_rate=None) for row in scored.rows)
    section = report_section(replace(scored, rows=rows, spent={}), [], masking=Masking(), seed=1)
    assert any("not measured" in getattr(block, "text", "") for block in section.blocks)
