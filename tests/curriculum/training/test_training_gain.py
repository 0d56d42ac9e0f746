"""Slow: from the shipped noisy start, GRPO raises sampled accuracy by more than chance explains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import read_samples
from tierwise.curriculum.tiny.build import tiny_model_path
from tierwise.curriculum.tiny.tasks import write_dataset
from tierwise.curriculum.training.evaluate import Decoding, EvalConfig, differences, evaluate
from tierwise.curriculum.training.loop import GrpoConfig, SamplingConfig, TrainConfig, train_grpo
from tierwise.curriculum.training.recipe import judged


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_sampled_accuracy_rises_on_held_out_samples(tmp_path: Path, seed: int) -> None:
    write_dataset(tmp_path / "train", num_samples=400, seed=100 + seed, split="train")
    write_dataset(tmp_path / "held", num_samples=400, seed=1, split="held_out")
    samples = read_samples(tmp_path / "train" / "samples.jsonl").samples
    held_out = read_samples(tmp_path / "held" / "samples.jsonl").samples
    model = LocalModel.load(tiny_model_path())
    asked = EvalConfig(num_draws=4, max_new_tokens=8)
    before = evaluate(model, held_out, judged, asked, seed=0)
    train_grpo(
        model,
        samples,
        torch.optim.AdamW(model.model.parameters(), lr=1e-4, weight_decay=0.0),
        TrainConfig(
            steps=16,
            warmup_steps=5,
            sampling=SamplingConfig(prompts_per_step=64, group_size=8, max_new_tokens=8),
            objective=GrpoConfig(kl_weight=0.0),
        ),
        folder=tmp_path / "run",
        seed=seed,
        reward=judged,
    )
    after = evaluate(model, held_out, judged, asked, seed=0)
    found = {one.decoding: one for one in differences(before, after, seed=0) if one.group == "all"}
    assert found[Decoding.SAMPLED].low > 0.02
    assert found[Decoding.GREEDY].high > 0
