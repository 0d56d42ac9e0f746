"""What a training stage writes as it goes: its record, its checkpoints, and how it begins again.

    folder/record.jsonl              one event "train", then one "step" a step
    folder/events.out.tfevents.*     the same numbers for TensorBoard, if asked for
    folder/checkpoints/step-NNNNNN/  see docs/formats/checkpoint.md

A stage resumes only what it began itself: a checkpoint agrees in configuration, seed, data and
starting model, or it is refused by name. Left out: what a step does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import torch

from tierwise.core.errors import StateError
from tierwise.core.records import RunRecord
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, image_digest
from tierwise.curriculum.training.checkpoint import (
    MODEL_NAME,
    TrainState,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from tierwise.curriculum.training.curves import Curves
from tierwise.curriculum.training.lora import adapter_settings

CHECKPOINT_FOLDER = "checkpoints"
_NOT_IDENTITY = ("checkpoint_every", "tensorboard", "reward_timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a stage left.

    Attributes:
        checkpoint: The last checkpoint.
        model_folder: The trained model in it, or the adapter; loads with `from_pretrained`.
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


class Book:
    """The record and the checkpoints of one stage.

    Args:
        folder: The stage's folder.
        model: The starting model, which is trained in place.
        optimizer: The optimizer, as new.
        config: The stage's configuration, a dataclass.
        data: Hash of what is trained on, see `data_hash`.
        seed: The stage's seed.
        clock: Seconds since the epoch; only ever seen under `timing`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: LocalModel,
        optimizer: torch.optim.Optimizer,
        config: object,
        data: str,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self.record = RunRecord(folder, clock=clock)
        self._folder, self._clock = folder, clock
        self._curves: Curves | None = None
        self.checkpoints = folder / CHECKPOINT_FOLDER
        self._model, self._optimizer = model, optimizer
        self._config: dict[str, Any] = msgspec.to_builtins(config)
        counted = counted_settings(config)
        if model.adapter is not None:
            counted["adapter"] = adapter_settings(model.adapter)
        trained = [name for name, p in model.model.named_parameters() if p.requires_grad]
        self.identity = {
            "config": _hash(counted),
            "seed": str(seed),
            "data": data,
            "starting model": model.model_hash(),
            "choice of what is trained": _hash(trained),
            "setting of the optimizer": _hash(_settings_of(optimizer)),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._curves is not None:
            self._curves.close()

    def resume_or_begin(self) -> TrainState:
        """Return where to go on, with model, optimizer and generators as they were there.

        Raises:
            StateError: The folder holds another run's checkpoints.
            MissingExtraError: TensorBoard files are asked for, and it is not installed.
        """
        state = self._resume_or_begin()
        if self._config.get("tensorboard"):
            self._curves = Curves(self._folder, first_step=state.step + 1)
        return state

    def _resume_or_begin(self) -> TrainState:
        found = list_checkpoints(self.checkpoints)
        if not found:
            # drop-out of an adapter draws from torch's own generator, and so may a reward
            torch.manual_seed(key_seed("generators", int(self.identity["seed"])) % 2**63)
            self.record.truncate(0)
            self.record.event("train", identity=self.identity)
            return self.save(0, position=0, counters={})
        known = read_state(found[-1]).identity
        differing = [name for name, value in self.identity.items() if known.get(name) != value]
        if differing:
            raise StateError(
                f"{self.checkpoints} holds a run with another {' and another '.join(differing)}",
                hint="train in another folder, or remove this one",
            )
        state = load_checkpoint(
            found[-1],
            model=self._model.model,
            optimizer=self._optimizer,
            adapter=self._model.adapter,
        )
        self.record.truncate(1 + state.step)
        return state

    def save(self, step: int, *, position: int, counters: Mapping[str, float]) -> TrainState:
        """Write a checkpoint; return the state in it."""
        state = TrainState(
            step=step,
            position=position,
            identity=self.identity,
            config=self._config,
            counters=counters,
        )
        save_checkpoint(
            self.checkpoints,
            state,
            model=self._model.model,
            optimizer=self._optimizer,
            processor=self._model.processor,
            adapter=self._model.adapter,
        )
        return state

    def note_step(
        self, step: int, values: Mapping[str, Any], seconds: Mapping[str, float]
    ) -> dict[str, Any]:
        """Append a step to the record, seconds under `timing`; return what was written."""
        timing = {name: round(value, 4) for name, value in seconds.items()}
        self.record.event("step", step=step, **values, timing=timing)
        told = {**values, "timing": timing}
        if self._curves is not None:
            self._curves.note(step, told, time_s=self._clock())
        return told

    def last_checkpoint(self) -> Path:
        """Return the newest checkpoint; there is one from the first moment on."""
        return list_checkpoints(self.checkpoints)[-1]

    def where_to_go_back(self, step: int) -> str:
        """Return what to say of the checkpoints when numbers are not finite after so many steps.

        A checkpoint of just these steps holds the weights that gave the numbers, so that the one
        before it is the last that is known to be good.
        """
        found = list_checkpoints(self.checkpoints)
        if len(found) < 2 or read_state(found[-1]).step < step:
            return f"the last good checkpoint is {found[-1]}"
        return f"the last good checkpoint is {found[-2]}: {found[-1].name} holds the weights of now"

    def steps(self) -> tuple[dict[str, Any], ...]:
        """Return the record's steps so far."""
        return tuple(event for event in self.record.events() if event["event"] == "step")

    def result(self, *, resumed_from: int, finished: bool) -> TrainResult:
        """Return what the stage left."""
        checkpoint, metrics = self.last_checkpoint(), self.steps()
        return TrainResult(
            checkpoint=checkpoint,
            model_folder=checkpoint / MODEL_NAME,
            steps=len(metrics),
            resumed_from=resumed_from,
            finished=finished,
            metrics=metrics,
        )


def counted_settings(config: object) -> dict[str, Any]:
    """Return a stage's configuration without what cannot change its numbers."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    return {name: value for name, value in values.items() if name not in _NOT_IDENTITY}


def data_hash(samples: Sequence[Sample], targets: Sequence[str] = ()) -> str:
    """Return 16 hex digits of the samples in their order, pictures and targets included."""
    rows = [
        [
            sample.id,
            sample.question,
            sample.answer,
            sample.task,
            [image_digest(path) for path in sample.images],
        ]
        for sample in samples
    ]
    return _hash([rows, list(targets)])


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what any optimizer of a kind is told: rate, decay and betas of each group."""
    return [
        {
            "lr": float(group.get("initial_lr", group["lr"])),
            "weight_decay": float(group.get("weight_decay", 0.0)),
            "betas": [float(beta) for beta in group.get("betas", ())],
        }
        for group in optimizer.param_groups
    ]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
