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
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from transformers import TrainerCallback

from tierwise.core.errors import ConfigError, DataError, TrainingError, UsageError
from tierwise.core.extras import require_extra
from tierwise.core.progress import SILENT, Progress
from tierwise.curriculum.book import Book, TrainResult, data_hash
from tierwise.curriculum.checkpoint import TrainState, list_checkpoints, load_checkpoint
from tierwise.curriculum.deadline import OverdueError, call_within
from tierwise.curriculum.experience import Reward, take
from tierwise.curriculum.families import quiet_transformers
from tierwise.curriculum.grpo import Scale
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.learner import TrainConfig
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.sft import SftConfig, learning_rate_share
from tierwise.curriculum.trl_data import grpo_row, ordered_dataset, sft_row, text_of

if TYPE_CHECKING:
    from tierwise.curriculum.recipe import RecipeConfig

_OURS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "reward": "reward",
    "kl": "kl",
    "entropy": "entropy",
    "mean_token_accuracy": "mean_token_accuracy",
    "frac_reward_zero_std": "zero_advantage_share",
    "completions/mean_length": "completion_tokens",
    "clip_ratio/region_mean": "clip_share",
}
"""TRL's names of measures -> those of our record."""


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
    stage = _Stage(
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
    stage = _Stage(
        model, optimizer, config, args, folder=folder, seed=seed, steps=config.steps,
        data=data_hash(samples), progress=progress, stop=stop, clock=clock,
        checkpoint_every=config.checkpoint_every, updates_per_step=updates,
    )  # fmt: skip
    if objective.kl_weight > 0:
        stage.keep_reference()
    state = stage.begin()
    stage.flat_steps = int(state.counters.get("flat_steps", 0))
    stage.max_flat_steps, stage.rows_per_step = config.max_flat_steps, num_prompts
    tally = stage.tally = _Tally(
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


@dataclass(slots=True, kw_only=True)
class _Tally:
    """The rewards of the rollouts since the last record, by stratum."""

    reward: Reward
    strata: Mapping[str, str]
    timeout_s: float
    rows: list[tuple[str, float]] = field(default_factory=list)
    error: str | None = None

    def judge(self, samples: Sequence[Sample], texts: Sequence[str]) -> list[float | None]:
        """Return a reward a text; None where there is no verdict.

        Raises:
            OverdueError: They did not come in time.
        """
        end_s = time.monotonic() + self.timeout_s
        values: list[float | None] = []
        for sample, text in zip(samples, texts, strict=True):
            call = partial(self.reward, sample, text)
            try:
                left_s = end_s - time.monotonic()
                value = float(call_within(left_s, call) if self.timeout_s else call())
            except Exception as error:  # a user's function: no verdict is not a wrong answer
                value, self.error = math.nan, self.error or f"{type(error).__name__}: {error}"
            if math.isinf(value):  # TRL would make it 0 and say nothing
                value, self.error = math.nan, self.error or "a reward is infinite"
            self.rows.append((self.strata.get(sample.id, "unsorted"), value))
            values.append(None if math.isnan(value) else value)
        return values

    def take(self) -> dict[str, Any]:
        """Return the measures over all processes, and begin anew."""
        from accelerate.utils import gather_object

        rows, self.rows = gather_object(self.rows), []
        known: dict[str, list[float]] = defaultdict(list)
        for name, value in rows:
            if not math.isnan(value):
                known[name].append(value)
        num_known = sum(len(values) for values in known.values())
        measures: dict[str, Any] = {"unscored_share": 1.0 - num_known / max(1, len(rows))}
        if self.strata:
            means = {name: sum(values) / len(values) for name, values in sorted(known.items())}
            measures["reward_by_stratum"] = means
        if self.error is not None:
            measures["reward_error"] = self.error
        return measures


class _Stage:
    """One stage's book and counters, around a TRL trainer."""

    def __init__(
        self,
        model: LocalModel,
        optimizer: torch.optim.Optimizer,
        config: SftConfig | TrainConfig,
        args: Any,
        *,
        folder: Path,
        seed: int,
        steps: int,
        data: str,
        progress: Progress,
        stop: Callable[[], bool],
        clock: Callable[[], float],
        checkpoint_every: int,
        updates_per_step: int = 1,
    ) -> None:
        from accelerate import PartialState

        if args.n_gpu > 1:
            raise UsageError(
                f"{args.n_gpu} GPUs are visible to one process",
                hint="start it with accelerate launch, or set CUDA_VISIBLE_DEVICES to one",
            )
        self.model, self.optimizer, self.folder, self.seed = model, optimizer, folder, seed
        self.steps, self.updates_per_step = steps, updates_per_step
        self.args, self.progress, self.stop = args, progress, stop
        self.checkpoint_every, self.max_flat_steps, self.flat_steps = checkpoint_every, 0, 0
        self.rows_per_step = 0
        self.ids_of: Callable[[int], list[str]] = lambda step: []
        self.tally: _Tally | None = None
        self.processes = PartialState()
        model.model.to(args.device)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        identity = {**msgspec.to_builtins(config), "backend": "trl"}
        self.book = Book(
            folder, model=model, optimizer=optimizer, config=identity, data=data, seed=seed,
            clock=clock,
        )  # fmt: skip
        self.start = 0

    @property
    def is_main(self) -> bool:
        """Return whether this process is the one that writes."""
        return bool(self.processes.is_main_process)

    def keep_reference(self) -> None:
        """Save the starting model where TRL will load the reference from, and say so to it."""
        path = self.folder / "reference"
        if self.is_main and not path.exists():
            with quiet_transformers():
                self.model.model.save_pretrained(path)
        self.processes.wait_for_everyone()
        self.model.model.config._name_or_path = str(path)

    def begin(self) -> TrainState:
        """Return where to go on; weights and optimizer are as they were there."""
        if self.is_main:
            state = self.book.resume_or_begin()
        self.processes.wait_for_everyone()
        if not self.is_main:
            newest = list_checkpoints(self.book.checkpoints)[-1]
            state = load_checkpoint(
                newest, model=self.model.model, optimizer=self.optimizer,
                adapter=self.model.adapter,
            )  # fmt: skip
        self.processes.wait_for_everyone()
        self.start = state.step
        self.args.max_steps = max(1, (self.steps - self.start) * self.updates_per_step)
        return state

    def optimizers(self, share: Callable[[int], float]) -> tuple[Any, Any]:
        """Return optimizer and schedule, from the update that was reached.

        Args:
            share: Update from 0 -> share of the optimizer's own learning rate.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        done = self.start * self.updates_per_step
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: share(done + n))
        return self.optimizer, schedule

    def run(self, make: Callable[[TrainerCallback], Any]) -> TrainResult:
        """Train with the trainer that `make` makes; return what the stage left."""
        from transformers import PrinterCallback

        module = self.model.model
        callback = _Scribe(self)
        if self.start < self.steps:
            with self.book, _quiet(), self.progress.task("training with TRL", self.steps) as task:
                task.advance(self.start)
                callback.advance = task.advance
                trainer = make(callback)
                if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
                    raise UsageError(
                        "backend = trl holds the whole model in every process",
                        hint="for FSDP or DeepSpeed export the arm (select --layout trl) and use "
                        "a script of your own",
                    )
                trainer.remove_callback(PrinterCallback)
                try:
                    trainer.train()
                except torch.OutOfMemoryError as error:
                    raise TrainingError(
                        f"out of memory at step {callback.step + 1}",
                        hint="set a smaller prompts_per_pass, samples_per_pass or max_new_tokens",
                    ) from error
                except OverdueError as error:
                    assert self.tally is not None
                    raise self.fail(
                        f"the rewards did not come within {self.tally.timeout_s:g} s",
                        callback.step,
                        "mend the reward or raise reward_timeout_s",
                    ) from error
                except RuntimeError as error:
                    if "probability tensor contains" not in str(error):
                        raise
                    raise self.fail("probabilities are not numbers", callback.step) from error
                finally:
                    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
                    if self.args.gradient_checkpointing:
                        module.gradient_checkpointing_disable()
                    module.eval()
        self.processes.wait_for_everyone()
        return self.book.result(
            resumed_from=self.start, finished=max(callback.step, self.start) == self.steps
        )

    def fail(self, what: str, step: int, advice: str = "") -> TrainingError:
        """Return the error that ends a run at a step, counted from 0."""
        ids = self.ids_of(step)
        shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
        kept = f"the last good checkpoint is {self.book.last_checkpoint()}"
        return TrainingError(
            f"{what} at step {step + 1}, samples {shown}",
            hint=f"{advice}; {kept}" if advice else kept,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the trainers' messages off the terminal, and their usage reports off the network."""
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_TELEMETRY
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        with quiet_transformers():
            yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = before


class _Scribe(TrainerCallback):
    """Seeds each update, keeps our record and checkpoints, and ends what cannot go on."""

    def __init__(self, stage: _Stage) -> None:
        self.stage, self.step = stage, stage.start
        self.advance: Callable[[], object] = lambda: None
        self._norm = self._lr = 0.0
        self._started = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the random numbers of an update depend on nothing before it."""
        stage = self.stage
        update = stage.start * stage.updates_per_step + state.global_step
        torch.manual_seed(key_seed("trl", stage.seed, update, stage.processes.process_index))
        if state.global_step % stage.updates_per_step == 0:
            self._started = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a gradient that is not finite, before it touches the weights."""
        parameters = self.stage.model.model.parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(self._norm):
            raise self.stage.fail(f"gradient norm is {self._norm}", self.step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the learning rate, before the schedule moves on."""
        self._lr = self.stage.optimizer.param_groups[0]["lr"]

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write a step into the record, save where it is time, and stop where asked to."""
        if logs is None or "loss" not in logs:
            return  # the trainer's closing words
        stage = self.stage
        values = {
            ours: float(logs[theirs])
            for theirs, ours in _OURS.items()
            if logs.get(theirs) is not None and math.isfinite(float(logs[theirs]))
        }
        values.setdefault("grad_norm", self._norm)
        measures: dict[str, Any] = {"prompts": stage.rows_per_step, **values, "lr": self._lr}
        if "completions/clipped_ratio" in logs:
            measures["finished_share"] = 1.0 - float(logs["completions/clipped_ratio"])
        if stage.tally is not None:
            measures |= stage.tally.take()
            self._refuse_flat(measures)
        self.step += 1
        if stage.is_main:
            seconds = time.perf_counter() - self._started
            stage.book.note_step(self.step, measures, {"step_s": seconds})
        self.advance()
        finished = self.step == stage.steps
        stopping = not finished and self._all_agree(stage.stop())
        if (finished or stopping or self.step % stage.checkpoint_every == 0) and stage.is_main:
            stage.book.save(
                self.step,
                position=self.step * stage.rows_per_step,
                counters={"flat_steps": stage.flat_steps},
            )
        if stopping:
            stage.progress.note(f"stopped after step {self.step}; run it again to go on")
            control.should_training_stop = True

    def _refuse_flat(self, measures: Mapping[str, Any]) -> None:
        stage = self.stage
        if measures["unscored_share"] == 1.0:
            raise stage.fail(f"no reward at all ({measures.get('reward_error', 'NaN')})", self.step)
        flat = measures.get("zero_advantage_share") == 1.0
        stage.flat_steps = stage.flat_steps + 1 if flat else 0
        if stage.flat_steps >= stage.max_flat_steps:
            raise stage.fail(
                f"equal rewards in every group for {stage.flat_steps} steps", self.step
            )

    def _all_agree(self, asked: bool) -> bool:
        """Return whether any process was asked to stop."""
        from accelerate.utils import gather_object

        return any(gather_object([asked]))
