"""Not a bit changes: weights, moments, step counters and norms against torch, over 20 steps."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from tests.offload.twins import ALWAYS, NEVER, SOMETIMES, Scenario, assert_same_bits

MODES = ("speculate", "defer", "barrier", "auto")
CLIPS = (NEVER, SOMETIMES, ALWAYS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping(clip: str, mode: str) -> None:
    assert_same_bits(Scenario(clip=clip), mode=mode)


@pytest.mark.parametrize("case", ["gpt-tied", "vit", "experts", "llava"])
@pytest.mark.parametrize("mode", ["speculate", "defer"])
def test_models(case: str, mode: str) -> None:
    assert_same_bits(Scenario(case=case), mode=mode, overlap_forward=True)


EVENTS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation": 3},
    "two groups": {"two_groups": True},
    "frozen": {"frozen": True},
    "skipped": {"skipped": True},
    "late lr": {"late_lr": True, "two_groups": True},
    "inf": {"poisoned": math.inf},
    "nan": {"poisoned": math.nan},
    "inf, no clip": {"poisoned": math.inf, "clip": "off"},
    "no clip": {"clip": "off"},
    "resumed": {"resumed": 9, "two_groups": True},
    "resumed at once": {"resumed": 0, "frozen": True},
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("mode", ["speculate", "defer"])
def test_events(event: str, mode: str) -> None:
    assert_same_bits(Scenario(**EVENTS[event]), mode=mode)


@pytest.mark.parametrize(
    "options",
    [
        {"num_threads": 2, "chunk_elements": 64},
        {"num_threads": 2, "chunk_elements": 128, "overlap_forward": True},
        {"resident_elements": 4000},
        {"resident_elements": 10**9},
        {"release_grads": True},
        {"host_budget_bytes": 500_000},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    assert_same_bits(Scenario(), mode="speculate", **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", [NEVER, SOMETIMES])
def test_bf16_weights_with_an_fp32_master(clip: str, mode: str) -> None:
    assert_same_bits(Scenario(case="gpt-tied", clip=clip, bf16=True), mode=mode)


def test_bf16_resident() -> None:
    assert_same_bits(Scenario(bf16=True, accumulation=2), mode="auto", resident_elements=5000)


def _any_scenario(draw: random.Random) -> tuple[Scenario, dict[str, Any]]:
    scenario = Scenario(
        case=draw.choice(["gpt", "gpt-tied", "experts"]),
        clip=draw.choice(CLIPS),
        accumulation=draw.choice([1, 2, 3]),
        two_groups=draw.random() < 0.5,
        frozen=draw.random() < 0.3,
        skipped=draw.random() < 0.3,
        late_lr=draw.random() < 0.3,
        resumed=draw.choice([None, None, 4, 11]),
    )
    options = {
        "mode": draw.choice(MODES),
        "num_threads": draw.choice([1, 2]),
        "chunk_elements": draw.choice([64, 1024, 1 << 18]),
        "overlap_forward": draw.choice([True, False]),
        "resident_elements": draw.choice([0, 0, 3000]),
    }
    return scenario, options


@pytest.mark.parametrize("seed", range(12))
def test_events_together(seed: int) -> None:
    scenario, options = _any_scenario(random.Random(seed))
    assert_same_bits(scenario, **options)


FACTORS: dict[str, tuple[Any, ...]] = {
    "case": ("gpt", "gpt-tied", "vit", "llava", "experts"),
    "clip": CLIPS,
    "accumulation": (1, 2, 3),
    "mode": MODES,
    "two_groups": (False, True),
    "frozen": (False, True),
    "event": (
        {}, {"skipped": True}, {"late_lr": True}, {"poisoned": math.inf}, {"poisoned": math.nan},
        {"resumed": 0}, {"resumed": 7}, {"resumed": 18},
    ),
    "work": (
        {"num_threads": 1, "chunk_elements": 1 << 18}, {"num_threads": 1, "chunk_elements": 1024},
        {"num_threads": 2, "chunk_elements": 64},
    ),
    "overlap_forward": (False, True),
}  # fmt: skip
"""What the result must not depend on; `test_full_product` has the product of most of it."""


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(row), 2))


def _covering_rows(seed: int = 0) -> list[tuple[int, ...]]:
    """Return rows of places in FACTORS in which every two values of two factors meet."""
    draw = random.Random(seed)
    sizes = [len(values) for values in FACTORS.values()]
    missing = {
        pair
        for (one, size), (other, other_size) in itertools.combinations(enumerate(sizes), 2)
        for pair in itertools.product(
            ((one, place) for place in range(size)), ((other, place) for place in range(other_size))
        )
    }
    rows = []
    while missing:
        fixed = dict(min(missing))  # so that every row brings something new
        tried = [
            tuple(fixed.get(n, draw.randrange(size)) for n, size in enumerate(sizes))
            for _ in range(200)
        ]
        best = max(tried, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        rows.append(best)
    return rows


@pytest.mark.parametrize("row", _covering_rows(), ids=lambda row: "".join(map(str, row)))
def test_every_two_of_the_matrix_together(row: tuple[int, ...]) -> None:
    values = {
        name: values[place] for (name, values), place in zip(FACTORS.items(), row, strict=True)
    }
    options = {"mode": values.pop("mode"), "overlap_forward": values.pop("overlap_forward")}
    work, event = values.pop("work"), values.pop("event")
    assert_same_bits(Scenario(**values, **event), **options, **work)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("case", ["gpt", "gpt-tied"])
def test_full_product(case: str, clip: str, accumulation: int, mode: str) -> None:
    events: list[dict[str, Any]] = [
        {}, {"skipped": True}, {"late_lr": True}, {"poisoned": math.inf}, {"poisoned": math.nan},
        {"resumed": 7},
    ]  # fmt: skip
    work = [{"num_threads": 1, "chunk_elements": 1 << 18}, {"num_threads": 2, "chunk_elements": 64}]
    for event, two_groups, frozen, options in itertools.product(
        events, (False, True), (False, True), work
    ):
        scenario = Scenario(case=case, clip=clip, accumulation=accumulation,
                            two_groups=two_groups, frozen=frozen, **event)  # fmt: skip
        assert_same_bits(scenario, mode=mode, **options)


@pytest.mark.slow
@pytest.mark.parametrize("resumed", range(0, 20, 1))
def test_resume_at_any_step(resumed: int) -> None:
    for mode in ("speculate", "defer"):
        assert_same_bits(Scenario(resumed=resumed, accumulation=2), mode=mode)
