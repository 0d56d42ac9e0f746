"""The training loop: sample, reward, update; the same numbers again, and resumed bit for bit.

    order -> P prompts -> G rollouts each -> rewards -> advantages -> loss -> any optimizer
      ^                                                                          |
      +---- checkpoint: weights, optimizer, generators, position <---------------+

One device. Samples are taken in the order given (a curriculum is an order) or shuffled by the
seed. Every rollout draws from a seed made of (run seed, step, place in the order, number), so
nothing depends on the machine's history. A step that cannot be trusted (a loss or gradient that
is not finite) ends the run and says which batch it was; the last good checkpoint stays.

Left out: several devices (export the arm and use a trainer made for that), a value model, replay.
Departure: the model stays in evaluation mode, so that drop-out does not make the policy that is
trained another than the one that was sampled.

Source: Z. Shao et al., "DeepSeekMath", 2024, https://arxiv.org/abs/2402.03300 (algorithm 1).

Shapes: P prompts, B rollouts, T completion tokens.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from tierwise.core.errors import StateError, TrainingError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import RunRecord
from tierwise.curriculum.checkpoint import (
    MODEL_NAME,
    TrainState,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from tierwise.curriculum.experience import (
    Experience,
    Reward,
    SamplingConfig,
    collect,
    data_hash,
    summarise,
)
from tierwise.curriculum.grpo import GrpoConfig
from tierwise.curriculum.learner import BadStepError, Learner, TrainConfig
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample

CHECKPOINT_FOLDER = "checkpoints"

__all__ = ["GrpoConfig", "Reward", "SamplingConfig", "TrainConfig", "TrainResult", "train_grpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a stage left.

    Attributes:
        checkpoint: The last checkpoint.
        model_folder: The trained model in it; loads with `from_pretrained`.
        steps: Steps done in all.
        resumed_from: The step this call started at; 0 is from the beginning.
        finished: False when it was asked to stop before the last step.
        metrics: One row a step, from the first; `timing` holds what may differ between runs.
    """

    checkpoint: Path
    model_folder: Path
    steps: int
    resumed_from: int
    finished: bool
    metrics: tuple[dict[str, Any], ...]


def train_grpo(
    model: LocalModel,
    samples: Sequence[Sample],
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    *,
    folder: Path,
    seed: int,
    reward: Reward,
    strata: Mapping[str, str] | None = None,
    progress: Progress = SILENT,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.time,
) -> TrainResult:
    """Train a model in place by GRPO, or go on where `folder` says the same run stopped.

    Args:
        model: The starting model, also when resuming; parameters without `requires_grad` stay.
        samples: In curriculum order; taken again from the first when used up.
        optimizer: Any optimizer over the model's parameters, as new also when resuming.
        config: The stage.
        folder: Gets `record.jsonl` (one event a step) and `checkpoints/`.
        seed: Draws rollouts, and the order when shuffled.
        reward: Worth of a completion; one that raises counts as no verdict, and is reported.
        strata: Sample id -> name, for rewards by stratum.
        progress: Where to say how far it is.
        stop: Asked after every step; True saves a checkpoint and returns.
        clock: Seconds since the epoch; only ever seen under `timing`.

    Raises:
        TrainingError: No samples, a loss or gradient that is not finite (names the batch and the
            last good checkpoint), only equal rewards for `max_flat_steps` steps, or no verdict at
            all.
        StateError: `folder` holds another run: another config, seed, data or starting model.
    """
    if not samples:
        raise TrainingError("no samples to train on", hint="the stratum is empty: choose another")
    learner = Learner(model, optimizer, config)
    book = _Book(folder, learner, _identity(model, samples, config, seed), clock)
    finished = True
    with progress.task("training", config.steps) as task, _evaluating(model.model):
        start = book.resume_or_begin(seed)
        task.advance(start)
        for step in range(start, config.steps):
            with learner.autocast():
                experience = collect(
                    model, samples, reward, config.sampling,
                    position=learner.position, seed=seed, step=step,
                )  # fmt: skip
            values = summarise(experience, strata or {})
            try:
                learner.check(experience, values)
                started = time.perf_counter()
                values |= learner.update(experience)
            except BadStepError as error:
                raise _failure(str(error), step, experience, book) from error
            seconds = {**experience.seconds, "update_s": time.perf_counter() - started}
            book.note_step(step + 1, values, seconds)
            task.advance()
            finished = step + 1 == config.steps
            stopping = not finished and stop()
            if finished or stopping or (step + 1) % config.checkpoint_every == 0:
                book.save(step + 1)
            if stopping:
                progress.note(f"stopped after step {step + 1}; run it again to go on")
                break
    checkpoint = list_checkpoints(book.checkpoints)[-1]
    metrics = tuple(event for event in book.record.events() if event["event"] == "step")
    return TrainResult(
        checkpoint=checkpoint,
        model_folder=checkpoint / MODEL_NAME,
        steps=len(metrics),
        resumed_from=start,
        finished=finished,
        metrics=metrics,
    )


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def _failure(what: str, step: int, experience: Experience, book: _Book) -> TrainingError:
    ids = [sample.id for part in experience.passes for sample in part.samples]
    shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    return TrainingError(
        f"{what} at step {step + 1}, samples {shown}",
        hint=f"the last good checkpoint is {list_checkpoints(book.checkpoints)[-1]}",
    )


def _identity(
    model: LocalModel, samples: Sequence[Sample], config: TrainConfig, seed: int
) -> dict[str, str]:
    """Return what a checkpoint must agree in to be resumed."""
    plain = msgspec.to_builtins(config)
    counted = {key: value for key, value in plain.items() if key != "checkpoint_every"}
    return {
        "config": hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16],
        "seed": str(seed),
        "data": data_hash(samples),
        "starting model": model.model_hash(),
    }


class _Book:
    """The record and the checkpoints of one stage."""

    def __init__(
        self,
        folder: Path,
        learner: Learner,
        identity: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:
        self.record = RunRecord(folder, clock=clock)
        self.checkpoints = folder / CHECKPOINT_FOLDER
        self.learner, self.identity = learner, identity

    def resume_or_begin(self, seed: int) -> int:
        """Return the step to start at, with model, optimizer and counters as they were there."""
        found = list_checkpoints(self.checkpoints)
        if not found:
            self.record.truncate(0)
            self.record.event("train", seed=seed, identity=dict(self.identity))
            self.save(0)
            return 0
        known = read_state(found[-1]).identity
        differing = [name for name, value in self.identity.items() if known.get(name) != value]
        if differing:
            raise StateError(
                f"{self.checkpoints} holds a run with another {' and another '.join(differing)}",
                hint="train in another folder, or remove this one",
            )
        learner = self.learner
        state = load_checkpoint(found[-1], model=learner.model.model, optimizer=learner.optimizer)
        learner.position = state.position
        learner.flat_steps = int(state.counters["flat_steps"])
        learner.updates = int(state.counters["updates"])
        self.record.truncate(1 + state.step)
        return state.step

    def save(self, step: int) -> None:
        learner = self.learner
        save_checkpoint(
            self.checkpoints,
            TrainState(
                step=step,
                position=learner.position,
                identity=self.identity,
                config=msgspec.to_builtins(learner.config),
                counters={"flat_steps": learner.flat_steps, "updates": learner.updates},
            ),
            model=learner.model.model,
            optimizer=learner.optimizer,
            processor=learner.model.processor,
        )

    def note_step(self, step: int, values: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        timing = {name: round(value, 4) for name, value in seconds.items()}
        self.record.event("step", step=step, **values, timing=timing)
