from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tierwise.core.errors import ConfigError, UsageError
from tierwise.curriculum.answerers import Request
from tierwise.curriculum.difficulty.attempts import LOG_NAME, AttemptLog
from tierwise.curriculum.difficulty.figures import report_section
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.difficulty.probes import Masking, Sampling
from tierwise.curriculum.difficulty.rscore import Tree, r_score
from tierwise.curriculum.difficulty.scores import SCORES_NAME, read_scores
from tierwise.curriculum.difficulty.scoring import ScoreConfig, score
from tierwise.curriculum.difficulty.select import Arm, select
from tierwise.curriculum.difficulty.trees import grow, leaves_of, path_of, place_of
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, SampleSet, load_image
from tierwise.curriculum.server import ServerPool

SHAPE = Tree(branches=2, depth=3, interval=2, edits=2)
CONFIG = ScoreConfig(
    num_attempts=1,
    permilles=(0,),
    blind=False,
    cmab=False,
    rscore=True,
    tree=SHAPE,
    sampling=Sampling(batch_size=24, max_new_tokens=8, temperature=1.0),
)


def requests_for(samples: SampleSet, count: int) -> list[Request]:
    return [
        Request(sample=one, images=(load_image(one.images[0]),), seed=number)
        for number, one in enumerate(samples.samples[:count])
    ]


def test_branches_share_their_beginning_and_differ_after_it(
    tiny: LocalModel, held_out: SampleSet
) -> None:
    warm = replace(CONFIG.sampling, temperature=3.0)  # so that branches part
    found = grow(tiny, requests_for(held_out, 6), SHAPE, warm)
    assert len(found) == 6
    for leaves in found:
        assert 2 <= len(leaves) <= 8
        for path, reply in leaves.items():
            levels = -(-reply.num_tokens // SHAPE.interval)
            assert len(path) == min(levels, 3)
            assert reply.finished or len(path) == 3
            assert path_of(place_of(path, SHAPE), reply.num_tokens, SHAPE) == path
            assert not any(other[: len(path)] == path for other in leaves if other != path)
        below: dict[tuple[int, ...], set[str]] = {}
        for path, reply in leaves.items():
            if len(path) == 3:
                below.setdefault(path[:2], set()).add(" ".join(reply.text.split()[:3]))
        for starts in below.values():  # four tokens in common; some may be special
            assert len({start.split(" ")[0] for start in starts}) == 1
    assert any(len({reply.text for reply in leaves.values()}) > 2 for leaves in found)


def test_a_tree_does_not_depend_on_its_neighbours_nor_on_the_batch(
    tiny: LocalModel, held_out: SampleSet
) -> None:
    requests = requests_for(held_out, 4)
    together = grow(tiny, requests, SHAPE, CONFIG.sampling)
    few = replace(CONFIG.sampling, batch_size=3)
    alone = [grow(tiny, [one], SHAPE, few)[0] for one in requests]
    assert together == alone


def test_one_branch_of_one_level_is_a_plain_answer(tiny: LocalModel, held_out: SampleSet) -> None:
    """Greedy, so that a tree's every leaf must be the greedy answer, however it is cut up."""
    requests = requests_for(held_out, 8)
    greedy = replace(CONFIG.sampling, temperature=0.0)
    prompts = tiny.encode([one.sample for one in requests], [one.images or () for one in requests])
    whole = tiny.generate(prompts, seeds=[0] * 8, temperature=0.0, max_new_tokens=8)
    for leaves, text in zip(grow(tiny, requests, SHAPE, greedy), whole.texts, strict=True):
        assert {reply.text for reply in leaves.values()} == {text}


def test_trees_of_the_tiny_model_are_scored_and_resumed(
    tiny: LocalModel, held_out: SampleSet, tmp_path: Path
) -> None:
    samples = held_out.samples[:12]
    found = score(samples, tiny, config=CONFIG, folder=tmp_path / "whole", seed=3)
    for row in found.rows:
        assert 2 <= row.tree_leaves <= 8
        assert row.r_score is not None
        assert row.tree_rate is not None
        assert 0 <= row.r_score <= 1
        if row.tree_rate in (0, 1):
            assert row.r_score == 0
    assert any(row.r_score for row in found.rows)
    assert read_scores(tmp_path / "whole" / SCORES_NAME).rows == found.rows

    score(samples[:5], tiny, config=CONFIG, folder=tmp_path / "parts", seed=3)  # 3 batches of 3
    with AttemptLog(tmp_path / "parts" / LOG_NAME) as log:
        before = log.totals()
    resumed = score(samples, tiny, config=CONFIG, folder=tmp_path / "parts", seed=3)
    assert resumed.rows == found.rows
    assert resumed.spent["attempts"] == found.spent["attempts"] > before["attempts"]
    with AttemptLog(tmp_path / "parts" / LOG_NAME) as log:
        rows = [one for one in log.attempts() if one.key.sample_id == samples[0].id]
    assert r_score(leaves_of(rows, SHAPE), edits=2) == found.rows[0].r_score

    fewer = replace(CONFIG, tree=replace(SHAPE, edits=1))  # the same answers, read another way
    again = score(samples, tiny, config=fewer, folder=tmp_path / "parts", seed=3)
    assert again.spent == resumed.spent
    for one, other in zip(again.rows, found.rows, strict=True):
        assert one.r_score is not None
        assert other.r_score is not None
        assert one.r_score <= other.r_score

    chosen = select(samples, found, Arm.HARD, seed=0, by="rscore")
    assert {row.rscore_stratum for row in chosen.scores} <= {Stratum.HARD}
    section = report_section(found, samples, masking=Masking(), seed=3)
    captions = [getattr(block, "caption", "") for block in section.blocks]
    assert any("Reasoning trees" in caption for caption in captions)


def test_text_without_a_picture_has_a_tree_too(tiny: LocalModel, tmp_path: Path) -> None:
    sample = Sample(id="text", question="what is the sum of the digit ?", answer="8")
    (row,) = score([sample], tiny, config=CONFIG, folder=tmp_path, seed=0).rows
    assert row.tree_leaves >= 2
    assert row.rscore_stratum is not Stratum.ERROR


def test_a_picture_that_cannot_be_read_and_a_model_that_fails(
    tiny: LocalModel, held_out: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, other = held_out.samples[:2]
    bad = replace(other, id="bad", images=(tmp_path / "none.png",))
    breaks = replace(other, id="breaks", question="break it")
    encode = tiny.encode

    def fragile(samples: list[Sample], images: object) -> object:
        if any(sample.id == "breaks" for sample in samples):
            raise RuntimeError("out of memory")
        return encode(samples, images)  # type: ignore[arg-type]

    monkeypatch.setattr(tiny, "encode", fragile)
    found = score([good, bad, breaks], tiny, config=CONFIG, folder=tmp_path / "out", seed=0).rows
    assert [row.error for row in found] == ["", "image_missing", "model_failed:RuntimeError"]
    assert [row.r_score is None for row in found] == [False, True, True]
    assert found[2].rscore_stratum is Stratum.ERROR


def test_a_server_cannot_grow_a_tree_and_settings_must_fit(
    plain_sample: Sample, tmp_path: Path
) -> None:
    pool = ServerPool(endpoints=("http://localhost:1",), model="m")
    with pytest.raises(UsageError, match="continues no beginning"):
        score([plain_sample], pool, config=CONFIG, folder=tmp_path, seed=0)
    with pytest.raises(ConfigError, match="does not fit into 8 new tokens"):
        replace(CONFIG, tree=replace(SHAPE, interval=4)).check()
    with pytest.raises(ConfigError, match="2 branches"):
        replace(CONFIG, tree=replace(SHAPE, branches=1)).check()
    replace(CONFIG, tree=Tree(interval=4000), rscore=False).check()
