"""Supervised fine-tuning on a very small real model: loss, learning, resume, refusals."""

from __future__ import annotations

import copy
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tierwise.core.errors import DataError, StateError, TrainingError, UsageError
from tierwise.core.progress import SilentProgress
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, load_image
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training import sft
from tierwise.curriculum.training.book import TrainResult
from tierwise.curriculum.training.rollouts import Rollouts, completion_logprobs
from tierwise.curriculum.training.sft import SftConfig, read_targets, target_rows, train_sft

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
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sample], dict[str, str]]:
    folder = tmp_path_factory.mktemp("pictures")
    samples, targets = [], {}
    for drawn in tasks.draw_samples(9, seed=5, split="train"):
        path = folder / f"{drawn.id}.png"
        drawn.image.save(path)
        samples.append(
            Sample(id=drawn.id, question=drawn.question, answer=drawn.answer, images=(path,))
        )
        targets[drawn.id] = drawn.target
    return samples, targets


def train(
    folder: Path, data: tuple[list[Sample], dict[str, str]], config: SftConfig, **rest: Any
) -> tuple[TrainResult, dict[str, Tensor]]:
    model = rest.pop("model", None) or small_model()
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-2, weight_decay=0.0)
    result = train_sft(model, *data, optimizer, config, folder=folder, **{"seed": 3, **rest})
    return result, dict(model.model.state_dict())


def values_of(result: TrainResult) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "timing"} for row in result.metrics]


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_loss_is_the_cross_entropy_of_target_and_end_tokens(
    data: tuple[list[Sample], dict[str, str]],
) -> None:
    model, (samples, targets) = small_model(), data
    texts = [targets[sample.id] for sample in samples[:4]]
    rows = target_rows(model, samples[:4], texts)
    with torch.no_grad():
        logprob_BT = completion_logprobs(model, rows, temperature=1.0)
    for place, sample in enumerate(samples[:4]):
        alone = dict(model.encode([sample], [[load_image(p) for p in sample.images]]).inputs)
        ids = model.tokenizer(texts[place], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*ids, model.tokenizer.eos_token_id]])
        prompt = alone["input_ids"]
        alone["input_ids"] = torch.cat([prompt, ids], dim=1)
        alone["attention_mask"] = torch.ones_like(alone["input_ids"])
        labels = torch.cat([torch.full_like(prompt, -100), ids], dim=1)
        with torch.no_grad():
            expected = model.model(**alone, labels=labels).loss
        ours = -logprob_BT[place][rows.mask_BT[place]].mean()
        # the image token takes no part in ours: the difference is its probability
        assert float(ours) == pytest.approx(float(expected), abs=0.03)
        assert int(rows.mask_BT[place].sum()) == ids.shape[1]


def test_it_learns_its_targets(tmp_path: Path, data: tuple[list[Sample], dict[str, str]]) -> None:
    result, _ = train(tmp_path, data, SftConfig(steps=30, batch_size=9))
    losses = [row["loss"] for row in result.metrics]
    assert losses[-1] < 0.4 * losses[0]


def test_resumed_equals_uninterrupted_and_passes_add_up(
    tmp_path: Path, data: tuple[list[Sample], dict[str, str]]
) -> None:
    config = SftConfig(steps=6, batch_size=4, checkpoint_every=2)
    whole, weights = train(tmp_path / "whole", data, config)
    steps = iter(range(1, 99))
    part, _ = train(tmp_path / "part", data, config, stop=lambda: next(steps) == 3)
    assert (part.steps, part.finished) == (3, False)
    rest, weights_rest = train(tmp_path / "part", data, config)
    assert (rest.resumed_from, rest.finished) == (3, True)
    assert values_of(rest) == values_of(whole)
    assert same_bits(weights, weights_rest)
    in_passes, _ = train(
        tmp_path / "passes", data, SftConfig(steps=2, batch_size=4, samples_per_pass=3)
    )
    once, _ = train(tmp_path / "once", data, SftConfig(steps=2, batch_size=4))
    for one, other in zip(values_of(in_passes), values_of(once), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_a_loss_that_is_not_finite_stops_before_the_weights(
    tmp_path: Path, data: tuple[list[Sample], dict[str, str]]
) -> None:
    model = small_model()
    with torch.no_grad():
        model.model.lm_head.weight[3] = math.nan
    with pytest.raises(TrainingError, match="loss is nan at step 1, samples train-5") as caught:
        train(tmp_path, data, SftConfig(steps=2), model=model)
    assert "step-000000" in str(caught.value.hint)


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


@pytest.mark.parametrize("limit", [2, 1])
def test_out_of_memory_halves_the_pass_once_and_says_so(
    tmp_path: Path,
    data: tuple[list[Sample], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
) -> None:
    halves = SftConfig(steps=3, batch_size=4, samples_per_pass=2)
    expected, weights = train(tmp_path / "halves", data, halves)

    def small(model: LocalModel, rollouts: Rollouts, **rest: Any) -> Tensor:
        if len(rollouts.texts) > limit:
            torch.empty(2**58)  # more than any machine has
        return completion_logprobs(model, rollouts, **rest)

    monkeypatch.setattr(sft, "completion_logprobs", small)
    notes, asked = Notes(), SftConfig(steps=3, batch_size=4)
    if limit == 1:
        with pytest.raises(TrainingError, match="out of memory with 2 samples a pass"):
            train(tmp_path / "oom", data, asked, progress=notes)
        return
    found, weights_found = train(tmp_path / "oom", data, asked, progress=notes)
    assert notes.said == ["out of memory at step 1: going on with 2 a pass"]
    assert values_of(found) == values_of(expected)
    assert same_bits(weights, weights_found)


def test_refusals(tmp_path: Path, data: tuple[list[Sample], dict[str, str]]) -> None:
    samples, targets = data
    with pytest.raises(TrainingError, match="no samples"):
        train(tmp_path, ([], {}), SftConfig())
    with pytest.raises(DataError, match="1 samples have no target"):
        train(tmp_path, (samples, {**targets, samples[2].id: " "}), SftConfig())
    with pytest.raises(UsageError, match="1 or more"):
        SftConfig(steps=0)
    with pytest.raises(UsageError, match="warmup_share"):
        SftConfig(warmup_share=2.0)
    train(tmp_path, data, SftConfig(steps=1))
    with pytest.raises(StateError, match="another data"):
        train(tmp_path, (samples, {**targets, samples[0].id: "7"}), SftConfig(steps=1))


def test_targets_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    rows = [{"id": "a", "question": "q?", "answer": "8", "target": "3 + 5 = 8"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_targets(file) == {"a": "3 + 5 = 8"}
    assert read_targets(file, "answer") == {"a": "8"}
    with pytest.raises(DataError, match=r"data.jsonl:1: no chain"):
        read_targets(file, "chain")
