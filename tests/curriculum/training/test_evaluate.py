"""Intervals against tables and simulation, paired differences, and a real model scored twice."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierwise.core.errors import DataError, UsageError
from tierwise.curriculum.difficulty.passrate import wilson_interval
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training.evaluate import (
    Decoding,
    EvalConfig,
    SampleScore,
    accuracies,
    bootstrap_interval,
    differences,
    evaluate,
    read_scores,
    unjudged,
    write_scores,
)


def score(
    number: int, greedy: float, *sampled: float, task: str = "count", stratum: str = ""
) -> SampleScore:
    return SampleScore(
        id=f"s{number}", task=task, stratum=stratum, greedy=greedy, sampled=tuple(sampled)
    )


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_stays_between_0_and_1(counts: tuple[int, int]) -> None:
    right, total = counts
    low, high = wilson_interval(right, total)
    assert 0.0 <= low <= right / total <= high <= 1.0
    mirrored = wilson_interval(total - right, total)
    assert mirrored == pytest.approx((1 - high, 1 - low))


def test_wilson_solves_its_defining_equation() -> None:
    # an end p of the interval is where |share - p| = z * sqrt(p * (1 - p) / n)
    for right, total in ((3, 17), (50, 60), (1, 400)):
        for end in wilson_interval(right, total):
            gap = abs(right / total - end)
            assert gap == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / total), rel=1e-6)


def test_bootstrap_agrees_with_the_normal_interval_of_a_large_sample() -> None:
    value_N = np.random.default_rng(0).random(4000)
    low, high = bootstrap_interval(value_N, seed=1, num_resamples=4000)
    half = 1.96 * value_N.std() / math.sqrt(4000)
    assert low == pytest.approx(value_N.mean() - half, abs=half / 10)
    assert high == pytest.approx(value_N.mean() + half, abs=half / 10)
    assert (low, high) == bootstrap_interval(value_N, seed=1, num_resamples=4000)


def test_bootstrap_covers_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for trial in range(200):
        low, high = bootstrap_interval(rng.random(60), seed=trial, num_resamples=300)
        hits += low <= 0.5 <= high
    assert 178 <= hits <= 199


def test_accuracies_by_hand() -> None:
    rows = [
        score(0, 1.0, 1.0, 0.0, stratum="hard"),
        score(1, 0.0, 0.0, math.nan, task="bar", stratum="hard"),
        score(2, math.nan, 1.0, 1.0, task="bar"),
    ]
    found = {(a.group, a.decoding): a for a in accuracies(rows, seed=0)}
    assert {group for group, _ in found} == {"all", "task:bar", "task:count", "stratum:hard"}
    greedy = found["all", Decoding.GREEDY]
    assert (greedy.num_samples, greedy.num_unscored, greedy.value) == (2, 1, 0.5)
    assert greedy.interval == "wilson"
    sampled = found["all", Decoding.SAMPLED]
    assert (sampled.num_samples, sampled.value, sampled.interval) == (3, 0.5, "bootstrap")
    assert found["task:bar", Decoding.GREEDY].num_samples == 1


def test_partial_scores_get_a_bootstrap_interval() -> None:
    rows = [score(n, 0.5 + 0.1 * (n % 2)) for n in range(10)]
    (found,) = [a for a in accuracies(rows, seed=0) if a.group == "all"]
    assert found.interval == "bootstrap"


def test_a_change_is_seen_when_paired_though_the_intervals_overlap() -> None:
    rng = np.random.default_rng(0)
    easy = rng.random(400) < 0.5
    before = [score(n, float(right)) for n, right in enumerate(easy)]
    after = [score(n, 1.0 if n % 25 == 0 else float(right)) for n, right in enumerate(easy)]
    found = differences(before, after, seed=0)[0]
    assert found.verdict == "higher"
    assert found.difference == pytest.approx(found.after - found.before)
    overall = [a for a in accuracies(before, seed=0) if a.group == "all"]
    assert overall[0].low < found.after < overall[0].high


def test_noise_is_not_called_a_difference_more_often_than_it_should() -> None:
    rng = np.random.default_rng(5)
    called = 0
    for trial in range(100):
        before = [score(n, float(rng.random() < 0.5)) for n in range(100)]
        after = [score(n, float(rng.random() < 0.5)) for n in range(100)]
        called += differences(before, after, seed=trial, num_resamples=300)[0].verdict != (
            "no difference seen"
        )
    assert called <= 12


def test_unlike_evaluations_are_refused() -> None:
    with pytest.raises(UsageError, match="same samples"):
        differences([score(0, 1.0)], [score(1, 1.0)], seed=0)
    with pytest.raises(UsageError, match="temperature"):
        EvalConfig(temperature=0.0)


def test_no_answers_are_no_rate() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)  # nothing is known: no rate is claimed
    rows = [
        score(0, math.nan, math.nan, math.nan, task="chart"),
        score(1, math.nan, 1.0, math.nan, task="count"),
    ]
    found = {(one.group, one.decoding): one for one in accuracies(rows, seed=0)}
    assert set(found) == {("all", Decoding.SAMPLED), ("task:count", Decoding.SAMPLED)}
    assert found["all", Decoding.SAMPLED].num_unscored == 1
    assert set(unjudged(rows)) == {
        ("all", Decoding.GREEDY, 2),
        ("task:chart", Decoding.GREEDY, 1),
        ("task:count", Decoding.GREEDY, 1),
        ("task:chart", Decoding.SAMPLED, 1),
    }
    assert unjudged([score(0, 0.0, 0.0)]) == ()
    assert unjudged([]) == ()
    assert accuracies([], seed=0) == ()
    assert differences(rows[:1], rows[:1], seed=0) == ()


def test_scores_survive_a_file(tmp_path: Path) -> None:
    rows = (score(0, 1.0, 0.0, 1.0), score(1, math.nan, math.nan, stratum="hard"))
    write_scores(tmp_path / "scores.jsonl", rows)
    assert repr(read_scores(tmp_path / "scores.jsonl")) == repr(rows)
    (tmp_path / "bad.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:1"):
        read_scores(tmp_path / "bad.jsonl")


@functools.cache
def small_model() -> LocalModel:
    torch.set_num_threads(1)
    small = build.TinyConfig(
        vision_width=16, vision_layers=1, vision_heads=2, width=24, layers=2, heads=2, mlp_width=48
    )
    return LocalModel(build.build_model(small, seed=0), build.build_processor(small))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    folder = tmp_path_factory.mktemp("pictures")
    made = []
    for drawn in tasks.draw_samples(9, seed=5, split="held_out"):
        path = folder / f"{drawn.id}.png"
        drawn.image.save(path)
        made.append(
            Sample(
                id=drawn.id, question=drawn.question, answer=drawn.answer, images=(path,),
                task=str(drawn.task),
            )
        )  # fmt: skip
    return made


def test_a_model_scored_twice_shows_no_difference(samples: list[Sample]) -> None:
    def long(sample: Sample, text: str) -> float:
        if sample.id == samples[0].id:
            raise RuntimeError
        return float(len(text) % 2)

    config = EvalConfig(num_draws=3, max_new_tokens=4, prompts_per_pass=4)
    strata = {samples[1].id: "hard"}
    first = evaluate(small_model(), samples, long, config, seed=1, strata=strata)
    again = evaluate(small_model(), samples, long, config, seed=1, strata=strata)
    assert repr(first) == repr(again)
    assert [row.id for row in first] == [sample.id for sample in samples]
    assert math.isnan(first[0].greedy)
    assert first[1].stratum == "hard"
    for found in differences(first, again, seed=0):
        assert (found.difference, found.verdict) == (0.0, "no difference seen")


def test_a_draw_depends_on_its_sample_and_seed_not_on_its_company(samples: list[Sample]) -> None:
    texts: dict[str, list[str]] = {}

    def keep(sample: Sample, text: str) -> float:
        texts.setdefault(sample.id, []).append(text)
        return 1.0

    config = EvalConfig(num_draws=2, max_new_tokens=4)
    evaluate(small_model(), samples, keep, config, seed=1)
    in_company = dict(texts)
    texts.clear()
    evaluate(small_model(), samples[3:5], keep, config, seed=1)
    assert texts == {sample.id: in_company[sample.id] for sample in samples[3:5]}
