"""One stage around a TRL trainer: our record, checkpoints, seeds and rewards, and its ends.

    begin (resume) -> trainer made and run -> every step: record, checkpoint, stop -> result

Left out: what the trainers are told (`trl_backend`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import TrainerCallback

from tierwise.core.errors import TrainingError, UsageError
from tierwise.core.progress import Progress
from tierwise.curriculum.families import quiet_transformers
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.training.book import Book, TrainResult
from tierwise.curriculum.training.checkpoint import TrainState, list_checkpoints, load_checkpoint
from tierwise.curriculum.training.deadline import OverdueError, call_within
from tierwise.curriculum.training.experience import Reward
from tierwise.curriculum.training.learner import TrainConfig
from tierwise.curriculum.training.sft import SftConfig

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


@dataclass(slots=True, kw_only=True)
class Tally:
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


class Stage:
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
        self.tally: Tally | None = None
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
            with (
                self.book,
                quiet_trainers(),
                self.progress.task("training with TRL", self.steps) as task,
            ):
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
                    raise self.fail(
                        "probabilities are not numbers", callback.step, doubted=True
                    ) from error
                finally:
                    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
                    if self.args.gradient_checkpointing:
                        module.gradient_checkpointing_disable()
                    module.eval()
        self.processes.wait_for_everyone()
        return self.book.result(
            resumed_from=self.start, finished=max(callback.step, self.start) == self.steps
        )

    def fail(
        self, what: str, step: int, advice: str = "", *, doubted: bool = False
    ) -> TrainingError:
        """Return the error that ends a run at a step, counted from 0."""
        ids = self.ids_of(step)
        shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
        kept = (
            self.book.where_to_go_back(step)
            if doubted
            else f"the last good checkpoint is {self.book.last_checkpoint()}"
        )
        return TrainingError(
            f"{what} at step {step + 1}, samples {shown}",
            hint=f"{advice}; {kept}" if advice else kept,
        )


@contextmanager
def quiet_trainers() -> Iterator[None]:
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

    def __init__(self, stage: Stage) -> None:
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
            raise self.stage.fail(f"gradient norm is {self._norm}", self.step, doubted=True)

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
