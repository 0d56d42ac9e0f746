"""Trains the tiny model from scratch on fresh samples: seeded, minutes on one core.

    python -m tierwise.curriculum.tiny.train --out FOLDER --seed 0

Every step draws new scenes, so nothing is learnt by heart. The last part of the run has a
*noisy teacher*: a share of the targets ends in a number that is off by one. The model learns
to spread its probability over the right number and its neighbours, so greedy answers stay
good while sampled ones are often wrong. That is the headroom in which reinforcement learning
can show something; docs/tiny-model.md gives the numbers.

    scenes -> packed batch -> loss on answer tokens -> Muon + AdamW -> folder + model card

On one machine with one torch version and thread count, the same seed writes the same bytes.

Left out: resuming (a run takes minutes), several devices, mixed precision (no gain at this
size on a CPU).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tierwise.core.errors import TrainingError, UsageError
from tierwise.core.progress import SILENT, Progress, choose_progress
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.tiny.batches import Batch, Noise, Packer
from tierwise.curriculum.tiny.evaluate import Accuracy, answer_questions, measure_accuracy
from tierwise.curriculum.tiny.muon import Muon

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import LlavaForConditionalGeneration

HELD_OUT_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How the model is trained; the defaults are those of the shipped weights.

    Attributes:
        seed: Of the weights and the samples.
        steps: Optimizer steps in all.
        noisy_steps: How many of them, at the end, have a noisy teacher.
        scenes_per_step: Scenes a step.
        questions_per_scene: Questions asked of each scene.
        matrix_lr: Peak learning rate of Muon, for the matrices.
        other_lr: Peak learning rate of AdamW, for all other parameters.
        weight_decay: Of both.
        warmup_steps: Linear rise of the learning rates; a cosine over the steps follows.
        final_lr_share: Where the cosine ends, as a share of the peak.
        max_grad_norm: Gradients are clipped to this norm.
    """

    seed: int = 0
    steps: int = 600
    noisy_steps: int = 120
    scenes_per_step: int = 32
    questions_per_scene: int = 4
    matrix_lr: float = 5e-3
    other_lr: float = 2e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    final_lr_share: float = 0.05
    max_grad_norm: float = 1.0


def train_tiny(
    config: TrainConfig,
    *,
    model_config: build.TinyConfig | None = None,
    noise: Noise | None = None,
    progress: Progress = SILENT,
) -> LlavaForConditionalGeneration:
    """Return a trained model in evaluation mode.

    Args:
        config: How to train.
        model_config: What to train; the shipped sizes by default.
        noise: The teacher's mistakes in the last ``noisy_steps``; the shipped ones by default.
        progress: Told of each step and, now and then, of the loss.

    Raises:
        TrainingError: The loss is not a number.
    """
    sizes, mistakes = model_config or build.TinyConfig(), noise or Noise()
    model = build.build_model(sizes, seed=config.seed)
    model.train()
    packer, optimizers = Packer(sizes), build_optimizers(model, config)
    first_noisy = config.steps - config.noisy_steps
    recent = 0.0
    with progress.task("training the tiny model", config.steps) as task:
        for step in range(config.steps):
            batch = packer.draw_batch(
                seed=config.seed,
                step=step,
                num_scenes=config.scenes_per_step,
                num_questions=config.questions_per_scene,
                noise=mistakes if step >= first_noisy else None,
            )
            loss = _train_step(model, batch, optimizers, lr_share(step, config), config)
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss} at step {step + 1}", hint="lower the learning rates"
                )
            recent = loss if step == 0 else 0.95 * recent + 0.05 * loss
            if (step + 1) % 100 == 0:
                progress.note(f"step {step + 1}: loss {recent:.3f}")
            task.advance()
    model.train(mode=False)
    return model


def _train_step(
    model: LlavaForConditionalGeneration,
    batch: Batch,
    optimizers: Sequence[torch.optim.Optimizer],
    share: float,
    config: TrainConfig,
) -> float:
    """Make one update with learning rates at ``share`` of their peak; return the loss."""
    loss = answer_loss(model, batch)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def answer_loss(model: LlavaForConditionalGeneration, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over the answer tokens of a batch."""
    hidden_BTD = model.model(
        input_ids=batch.input_ids_BT,
        pixel_values=batch.pixels_B3HW,
        attention_mask=batch.mask_B1TT,
        position_ids=batch.position_ids_BT,
        use_cache=False,
    ).last_hidden_state
    kept_BT = batch.labels_BT >= 0
    return nn.functional.cross_entropy(model.lm_head(hidden_BTD[kept_BT]), batch.labels_BT[kept_BT])


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return AdamW for embeddings, biases and norms, and Muon for all other matrices."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            others, lr=config.other_lr, betas=(0.9, 0.98), weight_decay=config.weight_decay
        ),
        Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def lr_share(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step as a share of its peak: linear warm-up, then cosine.

    >>> config = TrainConfig(steps=100, warmup_steps=10, final_lr_share=0.1)
    >>> lr_share(0, config), lr_share(10, config), round(lr_share(100, config), 6)
    (0.1, 1.0, 0.1)
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.final_lr_share + (1 - config.final_lr_share) * (1 + math.cos(math.pi * done)) / 2


def describe(
    model: LlavaForConditionalGeneration,
    config: TrainConfig,
    sizes: build.TinyConfig,
    noise: Noise,
    *,
    num_held_out: int,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Return the model card: what was trained, with what, and held-out accuracy by task.

    Accuracy is measured greedily, sampled at temperature 1, and greedily on a grey image.
    """
    samples = list(tasks.draw_samples(num_held_out, seed=HELD_OUT_SEED, split="held_out"))
    processor = build.build_processor(sizes)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "sampled_at_temperature_1": {"temperature": 1.0},
        "greedy_on_grey_image": {"blind": True},
    }
    accuracy = {}
    with progress.task("held-out accuracy", len(ways)) as task:
        for name, how in ways.items():
            texts = answer_questions(model, processor, samples, **how)
            accuracy[name] = _accuracy_row(measure_accuracy(samples, texts))
            task.advance()
    return {
        "model": asdict(sizes),
        "training": asdict(config),
        "noisy_teacher": asdict(noise),
        "num_parameters": sum(one.numel() for one in model.parameters()),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        "held_out": {"seed": HELD_OUT_SEED, "n": num_held_out, "accuracy": accuracy},
    }


def _accuracy_row(measured: Accuracy) -> dict[str, Any]:
    by_task = {
        task: {"right": right, "n": asked} for task, (right, asked) in measured.by_task.items()
    }
    return {"share": round(measured.share, 4), "by_task": by_task}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure and write a model folder; return the exit code."""
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(description="Train the tiny vision-language model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--noisy-steps", type=int, default=defaults.noisy_steps)
    parser.add_argument("--held-out", type=int, default=1000, help="samples to measure on")
    parser.add_argument("--json", action="store_true", help="progress as JSON lines")
    chosen = parser.parse_args(arguments)
    if min(chosen.seed, chosen.noisy_steps) < 0 or min(chosen.steps, chosen.held_out) < 1:
        raise UsageError("seed and noisy steps must be 0 or more, steps and held-out 1 or more")
    torch.set_num_threads(1)
    config = replace(defaults, seed=chosen.seed, steps=chosen.steps, noisy_steps=chosen.noisy_steps)
    sizes, noise = build.TinyConfig(), Noise()
    progress = choose_progress(as_json=chosen.json)
    model = train_tiny(config, model_config=sizes, noise=noise, progress=progress)
    card = describe(model, config, sizes, noise, num_held_out=chosen.held_out, progress=progress)
    build.save_tiny(model, build.build_processor(sizes), chosen.out, card)
    sys.stdout.write(json.dumps(card["held_out"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
