"""A whole training from one TOML file: fine-tune, reinforce, evaluate before and after, report.

    data -> [SFT on targets] -> [GRPO on rewards] -> held-out accuracy before and after -> report

Every stage resumes by itself, so a recipe that was stopped anywhere is run again by the same call.
Left out: choosing the data (`select`), several seeds and arms (`study`).

    DIR/
      config.toml  record.jsonl      what was asked, what came out
      sft/  grpo/                    stages, see `book`
      model/                         with [lora]: the trained model, its last adapter merged
      evaluations/KEY.jsonl          scores by sample, one file a (model, data, settings)
      report.html  figures/
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import msgspec
import torch

from tierwise.core.config import dump_config
from tierwise.core.errors import ConfigError, DataError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import RunRecord, read_jsonl, write_whole
from tierwise.core.report import Report, write_report
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, read_samples, sample_of_plain_row
from tierwise.curriculum.training.book import TrainResult, data_hash
from tierwise.curriculum.training.checkpoint import MODEL_NAME, save_model
from tierwise.curriculum.training.evaluate import (
    Difference,
    EvalConfig,
    SampleScore,
    differences,
    evaluate,
    read_scores,
    write_scores,
)
from tierwise.curriculum.training.learner import TrainConfig
from tierwise.curriculum.training.loop import train_grpo
from tierwise.curriculum.training.lora import LoraConfig, attach_adapter, merge_adapter
from tierwise.curriculum.training.sft import SftConfig, read_targets, train_sft
from tierwise.curriculum.training.training_figures import training_section
from tierwise.curriculum.verdicts import reward

CONFIG_NAME = "config.toml"
_TINY = "tiny"


class Backend(StrEnum):
    """Whose loop trains."""

    TIERWISE = "tierwise"
    TRL = "trl"
    """TRL's `SFTTrainer` and `GRPOTrainer`, see `trl_backend`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW; the default rate is that of the difficulty-sampling paper's GRPO scripts.

    Attributes:
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of squares.
        offload: Update on the CPU while backward goes on; the numbers are those of AdamW.
    """

    lr: float = 5e-7
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    offload: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError("lr must be above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError("weight_decay must be 0 or more")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ConfigError("beta1 and beta2 must be 0 or more and below 1")


MakeOptimizer = Callable[[torch.nn.Module, OptimizerConfig, float], torch.optim.Optimizer]
"""(module, settings, norm to clip the gradient to) -> an optimizer of its trainable parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeConfig:
    """A training run.

    Attributes:
        model: A model folder, or `tiny` for the one that ships.
        data: Plain JSONL to reinforce on, such as an arm that `select` wrote.
        held_out: Plain JSONL to evaluate on before and after; "" for none.
        sft_data: Plain JSONL to fine-tune on; "" is `data`.
        target_field: Field of its rows to learn: `target` (worked) or `answer` (bare).
        seed: Of everything that is drawn.
        freeze: Parameters whose name has one of these parts stay as they are.
        lora: Train an adapter in each stage, merged at its end; left out, the weights themselves.
        sft: The supervised stage, if any.
        grpo: The reinforcement stage, if any.
        sft_optimizer: Of the first.
        grpo_optimizer: Of the second.
        evaluate: How to evaluate.
        backend: Whose loop trains.
        device: Where, such as `cuda`. Weights that are trained are 32 bit there too: at 16 bit an
            update of a usual rate is rounded away. Under an adapter the others stay as stored.
    """

    model: str
    data: str
    held_out: str = ""
    sft_data: str = ""
    target_field: str = "target"
    seed: int = 0
    freeze: tuple[str, ...] = ()
    lora: LoraConfig | None = None
    sft: SftConfig | None = None
    grpo: TrainConfig | None = None
    sft_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    grpo_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    backend: Backend = Backend.TIERWISE
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeResult:
    """What a run came to; `model_folder` is None while it is not finished.

    Only the first of several processes has a report.
    """

    finished: bool
    model_folder: Path | None
    stages: Mapping[str, TrainResult]
    changes: tuple[Difference, ...]
    report: Path | None


def run_recipe(
    config: RecipeConfig,
    *,
    base: Path,
    folder: Path,
    make_optimizer: MakeOptimizer,
    progress: Progress = SILENT,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.time,
) -> RecipeResult:
    """Run a recipe, or go on with it; the same call does both.

    Args:
        config: The recipe.
        base: Folder that its paths are relative to.
        folder: Where everything goes.
        make_optimizer: Makes each stage's optimizer.
        progress: Where to say how far it is.
        stop: Asked after every step; True saves and returns.
        clock: Seconds since the epoch; only ever seen under `timing`.

    Raises:
        ConfigError: Neither stage is asked for, `freeze` leaves nothing to train, or the backend
            cannot do what is asked.
        TrainingError: See `train_grpo`.
        StateError: `folder` holds another run.
    """
    if config.sft is None and config.grpo is None:
        raise ConfigError("neither [sft] nor [grpo] is given", hint="add [grpo] to the file")
    if config.backend is Backend.TRL:
        from tierwise.curriculum.training.trl_backend import refuse_unsupported

        refuse_unsupported(config)
    samples = read_samples(base / config.data).samples
    strata = read_strata(base / config.data)
    held_out = read_samples(base / config.held_out).samples if config.held_out else ()
    model = load_to_train(
        config.model, base, device=config.device, lora=config.lora, frozen=config.freeze
    )
    if not (folder / CONFIG_NAME).exists():
        write_whole(folder / CONFIG_NAME, dump_config(config))

    def score() -> tuple[SampleScore, ...]:
        return evaluate_once(
            model, held_out, config.evaluate, folder=folder, seed=config.seed, progress=progress
        )

    before = score() if held_out else ()
    sft_path = base / (config.sft_data or config.data)
    plan = Plan(
        sft=config.sft,
        sft_samples=read_samples(sft_path).samples if config.sft is not None else (),
        targets=read_targets(sft_path, config.target_field) if config.sft is not None else {},
        sft_optimizer=config.sft_optimizer,
        grpo=config.grpo,
        grpo_samples=samples,
        strata=strata,
        grpo_optimizer=config.grpo_optimizer,
        lora=config.lora,
        freeze=config.freeze,
        backend=config.backend,
    )
    stages = run_stages(
        model, plan, folder=folder, seed=config.seed, make_optimizer=make_optimizer,
        progress=progress, stop=stop, clock=clock,
    )  # fmt: skip
    # only now: a run that another recipe may not go on with keeps its own
    write_whole(folder / CONFIG_NAME, dump_config(config))
    if stages is None:
        return RecipeResult(finished=False, model_folder=None, stages={}, changes=(), report=None)
    trained = list(stages.values())[-1].model_folder
    if not is_first_process():
        return RecipeResult(
            finished=True, model_folder=trained, stages=stages, changes=(), report=None
        )
    if config.lora is not None:
        trained = folder / MODEL_NAME
        save_model(trained, model=model.model, processor=model.processor)
    changes = differences(before, score(), seed=config.seed) if held_out else ()
    _record(folder, stages, changes, clock)
    return RecipeResult(
        finished=True,
        model_folder=trained,
        stages=stages,
        changes=changes,
        report=write_report(_report(stages, changes), folder),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The stages of a run with what they train on; a stage that is None is left out."""

    sft: SftConfig | None
    sft_samples: Sequence[Sample]
    targets: Mapping[str, str]
    sft_optimizer: OptimizerConfig
    grpo: TrainConfig | None
    grpo_samples: Sequence[Sample]
    strata: Mapping[str, str]
    grpo_optimizer: OptimizerConfig
    lora: LoraConfig | None = None
    freeze: tuple[str, ...] = ()
    backend: Backend = Backend.TIERWISE


def run_stages(
    model: LocalModel,
    plan: Plan,
    *,
    folder: Path,
    seed: int,
    make_optimizer: MakeOptimizer,
    progress: Progress = SILENT,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.time,
) -> dict[str, TrainResult] | None:
    """Train a model in place through the stages of a plan; None when it was asked to stop.

    A budget of the GRPO stage is that of both: the supervised stage is whole and counts first.
    """
    stages: dict[str, TrainResult] = {}
    run_sft, run_grpo = _trainers(plan.backend)
    if plan.sft is not None:
        _adapt(model, plan, seed=seed, stage="sft")
        optimizer = make_optimizer(model.model, plan.sft_optimizer, plan.sft.max_grad_norm)
        try:
            stages["sft"] = run_sft(
                model, plan.sft_samples, plan.targets, optimizer, plan.sft, folder=folder / "sft",
                seed=seed, progress=progress, stop=stop, clock=clock,
            )  # fmt: skip
        finally:
            close(optimizer)
        if not stages["sft"].finished:
            return None
        merge_adapter(model)
    if plan.grpo is not None:
        grpo = plan.grpo
        if grpo.budget is not None and "sft" in stages:
            grpo = replace(grpo, budget=grpo.budget.less(stages["sft"].metrics))
        _adapt(model, plan, seed=seed, stage="grpo")
        optimizer = make_optimizer(model.model, plan.grpo_optimizer, grpo.max_grad_norm)
        try:
            stages["grpo"] = run_grpo(
                model, plan.grpo_samples, optimizer, grpo, folder=folder / "grpo", seed=seed,
                reward=judged, strata=plan.strata, progress=progress, stop=stop, clock=clock,
            )  # fmt: skip
        finally:
            close(optimizer)
        if not stages["grpo"].finished:
            return None
        merge_adapter(model)
    return stages


def _adapt(model: LocalModel, plan: Plan, *, seed: int, stage: str) -> None:
    if plan.lora is not None:
        seed = key_seed("stage", seed, stage)
        attach_adapter(model, plan.lora, seed=seed, exclude=plan.freeze)


def _trainers(
    backend: Backend,
) -> tuple[Callable[..., TrainResult], Callable[..., TrainResult]]:
    """Return what trains each stage; both backends take the same arguments."""
    if backend is Backend.TIERWISE:
        return train_sft, train_grpo
    from tierwise.curriculum.training import trl_backend

    return trl_backend.train_sft, trl_backend.train_grpo


def judged(sample: Sample, text: str) -> float:
    """Return the score of an answer by the sample's task: what a stage maximises by default."""
    return reward(sample.answer, text, task=sample.task)


def is_first_process() -> bool:
    """Return whether this is the process that writes, where a launcher started several."""
    return os.environ.get("RANK", "0") == "0"


def model_path(name: str, base: Path) -> Path:
    """Return the folder of a model named in a configuration."""
    if name != _TINY:
        return base / name
    from tierwise.curriculum.tiny.build import tiny_model_path

    return tiny_model_path()


def load_to_train(
    name: str, base: Path, *, device: str, lora: LoraConfig | None, frozen: Sequence[str]
) -> LocalModel:
    """Return a model named in a configuration; weights that are trained are of 32 bit.

    Args:
        name: A model folder, or `tiny`.
        base: Folder that it is relative to.
        device: Where it runs.
        lora: What is trained instead, if anything.
        frozen: See `freeze`.
    """
    model = LocalModel.load(model_path(name, base), device=device)
    if lora is None:
        model.model.float()
    freeze(model.model, frozen)
    return model


def freeze(module: torch.nn.Module, parts: Sequence[str]) -> None:
    """Take the gradient from every parameter whose name has one of the parts.

    Raises:
        ConfigError: A part is in no name, or nothing is left to train.
    """
    names = dict(module.named_parameters())
    for part in parts:
        found = [name for name in names if part in name]
        if not found:
            raise ConfigError(f"freeze: no parameter has {part!r} in its name")
        for name in found:
            names[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        raise ConfigError("freeze leaves nothing to train")


def close(optimizer: torch.optim.Optimizer) -> None:
    """End what an optimizer keeps running, where it keeps anything."""
    ending = getattr(optimizer, "close", None)
    if ending is not None:
        ending()


def read_strata(path: Path) -> dict[str, str]:
    """Return sample id -> stratum for the rows of a plain JSONL file that name one."""
    strata = {}
    for _, row in read_jsonl(path):
        if isinstance(row.get("stratum"), str):
            strata[sample_of_plain_row(row, path.parent).id] = row["stratum"]
    return strata


def evaluate_once(
    model: LocalModel,
    samples: Sequence[Sample],
    config: EvalConfig,
    *,
    folder: Path,
    seed: int,
    progress: Progress = SILENT,
) -> tuple[SampleScore, ...]:
    """Return the scores of a model, from `folder/evaluations` when it was evaluated before."""
    parts = [model.model_hash(), data_hash(samples), msgspec.to_builtins(config), seed]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / "evaluations" / f"{key}.jsonl"
    if path.exists():
        try:
            return read_scores(path)
        except DataError:
            path.unlink()  # damaged: it can be made again
    scores = evaluate(model, samples, judged, config, seed=seed, progress=progress)
    write_scores(path, scores)
    return scores


def _record(
    folder: Path,
    stages: Mapping[str, TrainResult],
    changes: Sequence[Difference],
    clock: Callable[[], float],
) -> None:
    record = RunRecord(folder, clock=clock)
    record.truncate(0)
    for name, stage in stages.items():
        last = {key: value for key, value in stage.metrics[-1].items() if key != "timing"}
        record.event(f"{name}.trained", steps=stage.steps, last_step=last)
    for change in changes:
        record.event("evaluated", **asdict(change))


def _report(stages: Mapping[str, TrainResult], changes: Sequence[Difference]) -> Report:
    summary = [(f"{name} steps", str(stage.steps)) for name, stage in stages.items()]
    summary += [
        (f"{change.decoding.value} accuracy", f"{100 * change.before:.1f} -> "
         f"{100 * change.after:.1f} % ({change.verdict})")
        for change in changes if change.group == "all"
    ]  # fmt: skip
    last = stages.get("grpo")
    section = training_section(last.metrics if last is not None else (), changes)
    return Report(title="Training", summary=tuple(summary), sections=(section,))
