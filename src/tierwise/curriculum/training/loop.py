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

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tierwise.core.errors import TrainingError
from tierwise.core.progress import SILENT, Progress
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.training.book import Book, TrainResult, data_hash
from tierwise.curriculum.training.budget import Meter
from tierwise.curriculum.training.experience import (
    Reward,
    RewardTimeoutError,
    SamplingConfig,
    collect,
    summarise,
)
from tierwise.curriculum.training.grpo import GrpoConfig
from tierwise.curriculum.training.learner import BadStepError, Learner, NotFiniteError, TrainConfig
from tierwise.curriculum.training.memory import half_a_pass, memory_told

__all__ = ["GrpoConfig", "Reward", "SamplingConfig", "TrainConfig", "TrainResult", "train_grpo"]


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
        folder: Gets `record.jsonl` (one event a step), `checkpoints/` and TensorBoard files.
        seed: Draws rollouts, and the order when shuffled.
        reward: Worth of a completion; one that raises counts as no verdict, and is reported.
        strata: Sample id -> name, for rewards by stratum.
        progress: Where to say how far it is.
        stop: Asked after every step; True saves a checkpoint and returns.
        clock: Seconds since the epoch; only ever seen under `timing`.

    Raises:
        TrainingError: No samples, a loss or gradient that is not finite (names the batch and the
            last good checkpoint), a reward that does not come in time (likewise), only equal
            rewards for `max_flat_steps` steps, no verdict at all, or out of memory after the pass
            was halved once.
        StateError: `folder` holds another run: another config, seed, data or starting model.
    """
    if not samples:
        raise TrainingError("no samples to train on", hint="the stratum is empty: choose another")
    learner = Learner(model, optimizer, config)
    book = Book(
        folder, model=model, optimizer=optimizer, config=config, data=data_hash(samples), seed=seed,
        clock=clock,
    )  # fmt: skip
    task_data = _TaskData(samples=samples, reward=reward, strata=strata or {}, seed=seed)
    sampling, finished = config.sampling, True
    with book, progress.task("training", config.steps) as task, _evaluating(model.model):
        state = book.resume_or_begin()
        learner.restore(state)
        start = state.step
        task.advance(start)
        meter = Meter(config.budget, book.steps())
        for step in range(start, config.steps if not meter.is_full else start):
            mark = learner.mark()
            while True:
                try:
                    with memory_told():
                        values, seconds = _make_step(learner, book, task_data, sampling, step)
                    break
                except torch.OutOfMemoryError as error:
                    sampling = _halved(sampling, config.sampling, error)
                    learner.back_to(mark)
                    size = sampling.prompts_per_pass
                    progress.note(f"out of memory at step {step + 1}: going on with {size} a pass")
            meter.add(book.note_step(step + 1, values, seconds))
            task.advance()
            finished = meter.is_full or step + 1 == config.steps
            stopping = not finished and stop()
            if finished or stopping or (step + 1) % config.checkpoint_every == 0:
                book.save(step + 1, position=learner.position, counters=learner.counters())
            if stopping:
                progress.note(f"stopped after step {step + 1}; run it again to go on")
            if finished or stopping:
                break
    return book.result(resumed_from=start, finished=finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskData:
    """What is learnt: the same in every step."""

    samples: Sequence[Sample]
    reward: Reward
    strata: Mapping[str, str]
    seed: int


def _make_step(
    learner: Learner, book: Book, data: _TaskData, sampling: SamplingConfig, step: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Sample, reward and update once; return the record's values and the seconds."""
    try:
        with learner.autocast():
            experience = collect(
                learner.model, data.samples, data.reward, sampling, position=learner.position,
                seed=data.seed, step=step, reward_timeout_s=learner.config.reward_timeout_s,
            )  # fmt: skip
    except RewardTimeoutError as error:
        raise _failure(
            str(error), step, error.samples, book, "mend the reward or raise reward_timeout_s"
        ) from error
    values = summarise(experience, data.strata)
    try:
        learner.check(experience, values)
        started = time.perf_counter()
        values |= learner.update(experience)
    except BadStepError as error:
        batch = [sample for part in experience.passes for sample in part.samples]
        raise _failure(
            str(error), step, batch, book, doubted=isinstance(error, NotFiniteError)
        ) from error
    return values, {**experience.seconds, "update_s": time.perf_counter() - started}


def _halved(
    sampling: SamplingConfig, asked: SamplingConfig, error: torch.OutOfMemoryError
) -> SamplingConfig:
    """Return half as many prompts a pass, once a run.

    Raises:
        TrainingError: It was halved before, or there is one prompt a pass already.
    """
    size = half_a_pass(
        sampling.prompts_per_pass or sampling.prompts_per_step,
        halved_before=sampling != asked,
        unit="prompts",
        cause=error,
        hint="set a smaller prompts_per_pass or max_new_tokens",
    )
    return replace(sampling, prompts_per_pass=size)


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def _failure(
    what: str,
    step: int,
    batch: Sequence[Sample],
    book: Book,
    advice: str = "",
    *,
    doubted: bool = False,
) -> TrainingError:
    """Return the error that names the batch and the last checkpoint, or the last good one."""
    ids = [sample.id for sample in batch]
    shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    kept = (
        book.where_to_go_back(step)
        if doubted
        else f"the last good checkpoint is {book.last_checkpoint()}"
    )
    return TrainingError(
        f"{what} at step {step + 1}, samples {shown}",
        hint=f"{advice}; {kept}" if advice else kept,
    )
