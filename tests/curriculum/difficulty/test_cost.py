from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tierwise.core.report import Table, Text
from tierwise.curriculum.difficulty.adaptive import Adaptive
from tierwise.curriculum.difficulty.attempts import Attempt, AttemptKey, AttemptLog, Probe
from tierwise.curriculum.difficulty.cost import ProbeCost, cost_section, costs_of
from tierwise.curriculum.difficulty.rscore import Tree
from tierwise.curriculum.difficulty.scoring import ScoreConfig
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.verdicts import Verdict

CONFIG = ScoreConfig(num_attempts=2, permilles=(0, 500))
SAMPLES = [
    Sample(id="a", question="q", answer="1", images=(Path("a.png"),)),
    Sample(id="b", question="q", answer="1", images=(Path("b.png"),)),
    Sample(id="text", question="q", answer="1"),
]


def row(sample: str, probe: str, permille: int = 0, k: int = 0, prompt: str = "p") -> Attempt:
    key = AttemptKey(
        sample_id=sample, probe=probe, mask_permille=permille, k=k,
        seed=0 if probe == "greedy" else 5, model_hash="m", prompt_hash=prompt,
    )  # fmt: skip
    return Attempt(key=key, text="", extracted="", verdict=Verdict.WRONG, score=0.0, seconds=2.0)


def costs(tmp_path: Path, rows: list[Attempt], config: ScoreConfig = CONFIG, scored: str = "") -> \
        dict[Probe, ProbeCost]:  # fmt: skip
    with AttemptLog(tmp_path / "log.sqlite") as log:
        log.add(rows)
        found = costs_of(log, SAMPLES, config, model_hash="m", seed=5, scored=set(scored.split()))
    return {cost.probe: cost for cost in found}


def test_a_grid_s_cost_is_counted_exactly(tmp_path: Path) -> None:
    rows = [row("a", "greedy")]
    rows += [row("a", "masked", permille, k) for permille in (0, 500) for k in (0, 1)]
    rows += [row("b", "masked", 0, 0), row("b", "masked", 0, 0, prompt="changed")]
    rows += [row("b", "masked", 300, 0), row("b", "masked", 0, 7)]  # of other settings
    found = costs(tmp_path, rows)
    assert set(found) == {Probe.GREEDY, Probe.MASKED, Probe.GREY, Probe.BLIND}
    assert (found[Probe.GREEDY].made, found[Probe.GREEDY].to_make) == (1, 2)
    masked = found[Probe.MASKED]
    # a has all 4, b has 1 of 4 that counts, the text 0 of 2; all eight rows were paid for
    assert (masked.made, masked.unfinished, masked.to_make) == (8, 2, 5)
    assert masked.seconds == 16.0
    assert masked.seconds_to_spend == 10.0
    assert not masked.projected
    grey = found[Probe.GREY]
    assert (grey.made, grey.unfinished, grey.to_make) == (0, 2, 4)  # the text has no picture
    assert grey.seconds_to_spend is None


def test_other_models_and_seeds_are_not_counted(tmp_path: Path) -> None:
    rows = [row("a", "greedy"), row("a", "masked")]
    others = [replace(one, key=replace(one.key, model_hash="n")) for one in rows]
    others += [replace(one, key=replace(one.key, seed=6)) for one in rows]
    found = costs(tmp_path, others)
    assert found[Probe.MASKED].made == 0
    assert found[Probe.GREEDY].made == 1  # a greedy answer has no seed


def test_trees_and_adaptive_answers_are_projected_from_finished_samples(tmp_path: Path) -> None:
    config = replace(
        CONFIG, mode="adaptive", rscore=True, tree=Tree(branches=2, depth=2, interval=4),
        adaptive=Adaptive(num_attempts=25), blind=False,
    )  # fmt: skip
    found = costs(tmp_path, [], config)
    assert (found[Probe.TREE].to_make, found[Probe.TREE].projected) == (12.0, True)
    assert found[Probe.MASKED].to_make == 50 + 50 + 2
    rows = [row("a", "tree", k=k) for k in (0, 2, 3)]
    rows += [row("a", "masked", 700, k) for k in range(10)] + [row("b", "masked", 0, 0)]
    found = costs(tmp_path, rows, config, scored="a")
    assert (found[Probe.TREE].unfinished, found[Probe.TREE].to_make) == (2, 6.0)
    masked = found[Probe.MASKED]
    assert (masked.unfinished, masked.to_make) == (2, 9 + 2)  # b as a was; the text is exact
    assert masked.projected


def test_the_section_says_whether_it_is_finished(tmp_path: Path) -> None:
    section = cost_section(tuple(costs(tmp_path, []).values()), num_samples=3)
    text, table = section.blocks
    assert isinstance(text, Text)
    assert "3 of 3 samples are unfinished" in text.text
    assert isinstance(table, Table)
    assert table.rows[-1] == ("all", "0", "0.0", "3", "21", "unknown")

    done = [row(one.id, "greedy") for one in SAMPLES]
    done += [row(one, "masked", permille, k) for one in "ab" for permille in (0, 500)
             for k in (0, 1)]  # fmt: skip
    done += [row("text", "masked", 0, k) for k in (0, 1)]
    done += [row(one, probe, 0, k) for one in "ab" for probe in ("grey", "blind") for k in (0, 1)]
    section = cost_section(tuple(costs(tmp_path, done).values()), num_samples=3)
    assert getattr(section.blocks[0], "text", "") == "All 3 samples are finished."
    (total,) = [line for line in getattr(section.blocks[1], "rows", ()) if line[0] == "all"]
    assert total == ("all", "21", "42.0", "0", "0", "0.0")
    assert pytest.approx(42.0) == sum(cost.seconds for cost in costs(tmp_path, []).values())
