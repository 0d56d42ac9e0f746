"""TensorBoard's own reader finds the record's numbers, each step once, wherever the run stopped."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tierwise.core.errors import MissingExtraError
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training.book import TrainResult
from tierwise.curriculum.training.curves import Curves
from tierwise.curriculum.training.experience import SamplingConfig
from tierwise.curriculum.training.grpo import GrpoConfig
from tierwise.curriculum.training.learner import TrainConfig
from tierwise.curriculum.training.loop import train_grpo
from tierwise.curriculum.training.sft import SftConfig, train_sft

SMALL = build.TinyConfig(
    vision_width=16, vision_layers=1, vision_heads=2, width=24, layers=2, heads=2, mlp_width=48
)


@functools.cache
def _untrained() -> LocalModel:
    torch.set_num_threads(1)
    return LocalModel(build.build_model(SMALL, seed=0), build.build_processor(SMALL))


def small_model() -> LocalModel:
    return LocalModel(copy.deepcopy(_untrained().model), _untrained().processor)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    folder = tmp_path_factory.mktemp("pictures")
    made = []
    for drawn in tasks.draw_samples(6, seed=5, split="train"):
        path = folder / f"{drawn.id}.png"
        drawn.image.save(path)
        made.append(
            Sample(id=drawn.id, question=drawn.question, answer=drawn.answer, images=(path,))
        )
    return made


def read_back(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Return tag -> (step, value, time) as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(one.step, one.value, one.wall_time) for one in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def as_told(result: TrainResult) -> dict[str, list[tuple[int, float]]]:
    """Return tag -> (step, value) as the record has them."""
    told: dict[str, list[tuple[int, float]]] = {}

    def add(step: int, name: str, value: Any) -> None:
        if isinstance(value, dict):
            for part, inner in value.items():
                if part != "time":
                    add(step, f"{name}/{part}", inner)
        elif isinstance(value, int | float):
            told.setdefault(name, []).append((step, float(np.float32(value))))

    for row in result.metrics:
        for name, value in row.items():
            if name not in ("event", "step"):
                add(row["step"], name, value)
    return told


def train(folder: Path, samples: list[Sample], **rest: Any) -> TrainResult:
    model = small_model()
    settings = TrainConfig(
        steps=5, checkpoint_every=2, tensorboard=True,
        sampling=SamplingConfig(prompts_per_step=3, group_size=3, max_new_tokens=3),
        objective=GrpoConfig(kl_weight=0.01),
    )  # fmt: skip
    strata = {samples[0].id: "hard"}
    return train_grpo(
        model, samples, torch.optim.AdamW(model.model.parameters(), lr=1e-3), settings,
        folder=folder, seed=1, strata=strata,
        **{"reward": lambda s, text: float(len(text) % 3), **rest},
    )  # fmt: skip


def test_tensorboard_shows_the_numbers_of_the_record(samples: list[Sample], tmp_path: Path) -> None:
    result = train(tmp_path, samples, clock=lambda: 1234.5)
    shown = read_back(tmp_path)
    told = as_told(result)
    assert {"reward", "kl", "loss", "grad_norm", "lr", "reward_by_stratum/hard"} <= told.keys()
    assert {"timing/sample_s", "timing/update_s"} <= told.keys()
    assert {tag: [(s, v) for s, v, _ in rows] for tag, rows in shown.items()} == told
    assert {time for rows in shown.values() for _, _, time in rows} == {1234.5}


def test_a_step_made_again_is_shown_once(samples: list[Sample], tmp_path: Path) -> None:
    calls = iter(range(1000))

    def killed(sample: Sample, text: str) -> float:
        if next(calls) == 9 * 3 + 2:  # in the fourth step, after the checkpoint at two
            raise KeyboardInterrupt
        return 9.0 * len(text)  # other numbers than the run that goes on will have

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, samples, reward=killed)
    assert [step for step, _, _ in read_back(tmp_path)["reward"]] == [1, 2, 3]
    steps = iter(range(1, 9))
    train(tmp_path, samples, stop=lambda: next(steps) == 2)
    rest = train(tmp_path, samples)
    assert rest.resumed_from == 4
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 3
    shown = read_back(tmp_path)
    assert [step for step, _, _ in shown["reward"]] == [1, 2, 3, 4, 5]
    assert {tag: [(s, v) for s, v, _ in rows] for tag, rows in shown.items()} == as_told(rest)


def test_a_supervised_stage_has_curves_too_and_none_unless_asked(
    samples: list[Sample], tmp_path: Path
) -> None:
    targets = {sample.id: sample.answer for sample in samples}
    for name, asked in (("with", True), ("without", False)):
        model = small_model()
        result = train_sft(
            model, samples, targets, torch.optim.AdamW(model.model.parameters(), lr=1e-3),
            SftConfig(steps=2, batch_size=2, tensorboard=asked), folder=tmp_path / name, seed=1,
        )  # fmt: skip
        if asked:
            shown = read_back(tmp_path / name)
            assert {t: [(s, v) for s, v, _ in r] for t, r in shown.items()} == as_told(result)
        else:
            assert not list((tmp_path / name).glob("events*"))


def test_without_tensorboard_the_sentence_is_the_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        Curves(tmp_path, first_step=1)
    assert caught.value.hint == "pip install 'tierwise[tensorboard]'"
