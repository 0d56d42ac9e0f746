"""The two stages through TRL's `SFTTrainer` and `GRPOTrainer`, for those who live there.

    recipe -> SFTConfig / GRPOConfig -> TRL's trainer -> our record, checkpoints, report

TRL samples, computes the loss and updates; order, reward, learning rate, record and checkpoints are
ours, so a report reads the same. `accelerate launch` makes it several processes (data parallel).

Resume does not use the trainer's own, which restores no tensor of such models and goes on
(https://github.com/huggingface/transformers/issues/43701): weights and optimizer come from our
checkpoint, the data set begins at the position reached, and every update draws from a seed made
of (run seed, update, process), so a stopped run ends with the bits of one never stopped.

Left out, and refused by name: `refill`, `budget`, `offload`, sharded models. Departures from
`loop`, all of them TRL's: prompts are not shared among rollouts, the image token is kept out of
sampling but not out of the probabilities of the loss, the model is in training mode with drop-out
modules disabled, out of memory is not retried, and a supervised target is whatever the chat
template closes an assistant's turn with, line break included.

Source: TRL 1.16, https://huggingface.co/docs/trl/grpo_trainer, https://huggingface.co/docs/trl/sft_trainer.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from tierwise.core.errors import ConfigError, DataError, TrainingError, UsageError
from tierwise.core.extras import require_extra
from tierwise.core.progress import SILENT, Progress
from tierwise.curriculum.families import quiet_transformers
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.training.book import TrainResult, data_hash
from tierwise.curriculum.training.experience import Reward, take
from tierwise.curriculum.training.grpo import Scale
from tierwise.curriculum.training.learner import TrainConfig
from tierwise.curriculum.training.sft import SftConfig, learning_rate_share
from tierwise.curriculum.training.trl_data import grpo_row, ordered_dataset, sft_row, text_of
from tierwise.curriculum.training.trl_stage import Stage, Tally

if TYPE_CHECKING:
    from tierwise.curriculum.training.recipe import RecipeConfig


def refuse_unsupported(recipe: RecipeConfig) -> None:
    """Return if TRL, started as it is, can do what a recipe asks for.

    Raises:
        MissingExtraError: TRL is not installed.
        ConfigError: It cannot; the sentence names the option.
    """
    require_extra("trl")
    for name, stage, optimizer in (
        ("sft", recipe.sft, recipe.sft_optimizer),
        ("grpo", recipe.grpo, recipe.grpo_optimizer),
    ):
        if stage is not None and optimizer.offload:
            raise ConfigError(
                f"{name}_optimizer.offload = true is not for backend = trl",
                hint="set it to false, or use backend = tierwise",
            )
    if recipe.grpo is not None and recipe.grpo.sampling.refill:
        raise ConfigError(
            "grpo.sampling.refill = true is not for backend = trl, which draws no further prompts",
            hint="set it to false, or use backend = tierwise",
        )
    if recipe.grpo is not None and recipe.grpo.budget is not None:
        raise ConfigError(
            "grpo.budget is not for backend = trl, which counts steps",
            hint="set grpo.steps alone, or use backend = tierwise",
        )
    if recipe.lora is not None:
        if recipe.grpo is not None and recipe.grpo.objective.kl_weight > 0:
            raise ConfigError(
                "lora with grpo.objective.kl_weight above 0 is not for backend = trl, whose "
                "reference would hold the adapter",
                hint="set kl_weight = 0.0, or use backend = tierwise",
            )
        if recipe.lora.dropout > 0:
            raise ConfigError(
                "lora.dropout is not for backend = trl, which would sample with it",
                hint="set it to 0.0, or use backend = tierwise",
            )
    if recipe.sft is not None:
        num_passes(recipe.sft)
    if recipe.grpo is not None:
        num_passes(recipe.grpo)
    if recipe.held_out and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "held_out is not for several processes, which would all wait for one to evaluate",
            hint="leave it out, and run tierwise curriculum eval before and after",
        )


def num_passes(config: SftConfig | TrainConfig) -> int:
    """Return how many passes make a step.

    Raises:
        ConfigError: They would not be of equal size, as TRL's are.
    """
    if isinstance(config, SftConfig):
        step, name = config.batch_size, "sft.batch_size"
        part, part_name = config.samples_per_pass, "sft.samples_per_pass"
    else:
        step, name = config.sampling.prompts_per_step, "grpo.sampling.prompts_per_step"
        part, part_name = config.sampling.prompts_per_pass, "grpo.sampling.prompts_per_pass"
    if part and step % part:
        raise ConfigError(
            f"{name} = {step} is no multiple of {part_name} = {part}",
            hint="backend = trl needs passes of equal size",
        )
    return step // part if part else 1


def train_sft(
    model: LocalModel,
    samples: Sequence[Sample],
    targets: Mapping[str, str],
    optimizer: torch.optim.Optimizer,
    config: SftConfig,
    *,
    folder: Path,
    seed: int,
    progress: Progress = SILENT,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.time,
) -> TrainResult:
    """Do what `sft.train_sft` does, with TRL's `SFTTrainer`; arguments and errors are the same.

    Raises:
        UsageError: A processor, or a launch, that TRL or this module cannot work with.
    """
    _refuse_processor(model)
    if not samples:
        raise TrainingError("no samples to train on", hint="the stratum is empty: choose another")
    missing = [sample.id for sample in samples if not targets.get(sample.id, "").strip()]
    if missing:
        raise DataError(f"{len(missing)} samples have no target, first {missing[0]}")
    with quiet_transformers():
        trl: Any = importlib.import_module("trl")
        args = trl.SFTConfig(
            **_common(model, config, folder, seed, rows=config.batch_size),
            max_steps=config.steps, 
            max_length=None, packing=False, completion_only_loss=True,
            train_sampling_strategy="sequential", dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
    texts = [targets[sample.id] for sample in samples]
    stage = Stage(
        model, optimizer, config, args, folder=folder, seed=seed, steps=config.steps,
        data=data_hash(samples, texts), progress=progress, stop=stop, clock=clock,
        checkpoint_every=config.checkpoint_every,
    )  # fmt: skip
    state = stage.begin()

    def ids_of(step: int) -> list[str]:
        places = range(step * config.batch_size, (step + 1) * config.batch_size)
        return [take(samples, p, shuffle=config.shuffle, seed=seed).id for p in places]

    stage.ids_of, stage.rows_per_step = ids_of, config.batch_size
    rows = ordered_dataset(
        samples,
        lambda sample: sft_row(model, sample, targets[sample.id]),
        places=range(state.position, config.steps * config.batch_size),
        shuffle=config.shuffle,
        seed=seed,
    )

    def make(callback: TrainerCallback) -> Any:
        return trl.SFTTrainer(
            model=model.model, args=args, train_dataset=rows, processing_class=model.processor,
            callbacks=[callback],
            optimizers=stage.optimizers(
                lambda update: learning_rate_share(update, config.steps, config.warmup_share)
            ),
        )  # fmt: skip

    return stage.run(make)


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
    """Do what `loop.train_grpo` does, with TRL's `GRPOTrainer`; arguments and errors are the same.

    Raises:
        UsageError: A processor, or a launch, that TRL or this module cannot work with.
    """
    _refuse_processor(model)
    if not samples:
        raise TrainingError("no samples to train on", hint="the stratum is empty: choose another")
    sampling, objective = config.sampling, config.objective
    num_prompts, updates = sampling.prompts_per_step, config.inner_updates
    num_rows = num_prompts * sampling.group_size
    with quiet_transformers():
        trl: Any = importlib.import_module("trl")
        args = trl.GRPOConfig(
            **_common(model, config, folder, seed, rows=num_rows),
            max_steps=config.steps * updates, 
            num_generations=sampling.group_size, temperature=sampling.temperature,
            max_completion_length=sampling.max_new_tokens, num_iterations=updates,
            beta=objective.kl_weight, epsilon=objective.clip_low, epsilon_high=objective.clip_high,
            loss_type=objective.loss.value, disable_dropout=True, shuffle_dataset=False,
            scale_rewards="group" if objective.scale is Scale.STD else "none",
            top_p=1.0, top_k=0, repetition_penalty=1.0, mask_truncated_completions=False,
        )  # fmt: skip
        args.logging_steps = updates
    stage = Stage(
        model, optimizer, config, args, folder=folder, seed=seed, steps=config.steps,
        data=data_hash(samples), progress=progress, stop=stop, clock=clock,
        checkpoint_every=config.checkpoint_every, updates_per_step=updates,
    )  # fmt: skip
    if objective.kl_weight > 0:
        stage.keep_reference()
    state = stage.begin()
    stage.flat_steps = int(state.counters.get("flat_steps", 0))
    stage.max_flat_steps, stage.rows_per_step = config.max_flat_steps, num_prompts
    tally = stage.tally = Tally(
        reward=reward, strata=strata or {}, timeout_s=config.reward_timeout_s
    )

    def ids_of(step: int) -> list[str]:
        places = range(step * num_prompts, (step + 1) * num_prompts)
        return [take(samples, p, shuffle=sampling.shuffle, seed=seed).id for p in places]

    stage.ids_of = ids_of
    by_id = {sample.id: sample for sample in samples}

    def rewards(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        asked = [by_id[name] for name in columns["id"]]
        return tally.judge(asked, [text_of(completion) for completion in completions])

    rows = ordered_dataset(
        samples,
        lambda sample: grpo_row(model, sample),
        places=range(state.position, config.steps * num_prompts),
        shuffle=sampling.shuffle,
        seed=seed,
    )

    def make(callback: TrainerCallback) -> Any:
        return trl.GRPOTrainer(
            model=model.model, args=args, train_dataset=rows, processing_class=model.processor,
            reward_funcs=[rewards], callbacks=[callback],
            optimizers=stage.optimizers(
                lambda update: min(1.0, (update + 1) / max(1, config.warmup_steps))
            ),
        )  # fmt: skip

    return stage.run(make)


def _refuse_processor(model: LocalModel) -> None:
    from transformers import ProcessorMixin

    if not isinstance(model.processor, ProcessorMixin):
        raise UsageError(
            "TRL needs transformers' own processor, which this model's family has only with "
            "torchvision",
            hint="pip install torchvision, or use backend = tierwise",
        )


def _common(
    model: LocalModel, config: SftConfig | TrainConfig, folder: Path, seed: int, *, rows: int
) -> dict[str, Any]:
    """Return what both trainers are told.

    Args:
        model: Where it is, there it is trained.
        config: The stage.
        folder: The stage's folder; the trainer itself writes nothing there.
        seed: The stage's seed.
        rows: Rows of a step, over all processes.
    """
    from accelerate import PartialState

    passes = num_passes(config)
    use_cpu = model.device.type == "cpu"
    num_processes = PartialState(cpu=use_cpu).num_processes
    if rows // passes % num_processes:
        raise UsageError(
            f"{rows // passes} rows a pass cannot be shared by {num_processes} processes",
            hint="make them a multiple of the number of processes",
        )
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": rows // passes // num_processes,
        "gradient_accumulation_steps": passes,
        "seed": seed % 2**32,
        "use_cpu": use_cpu,
        "bf16": config.bf16,
        "fp16": False,
        "max_grad_norm": config.max_grad_norm,
        "gradient_checkpointing": config.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
