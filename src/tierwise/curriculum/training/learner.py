"""The model and its optimizer: from a step's experience to changed weights.

    rewards -> advantages -+
    rollouts -> log probabilities -> weighted, clipped loss -> backward -> clip -> optimizer

Any `torch.optim.Optimizer` will do. One that works while backward is still running says so by
what it has: with `max_grad_norm` it clips by itself and tells its `grad_norm`; with `accumulate()`
it is told when more gradient of the same step is to come.

Left out: several devices, scaling for float16.

Shapes: P prompts, B rollouts, T completion tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tierwise.core.errors import TrainingError, UsageError
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.training.budget import Budget
from tierwise.curriculum.training.checkpoint import TrainState
from tierwise.curriculum.training.experience import Experience, Pass, SamplingConfig
from tierwise.curriculum.training.grpo import (
    GrpoConfig,
    clip_share,
    group_advantages,
    kl_estimate,
    policy_loss,
    token_weights,
)
from tierwise.curriculum.training.lora import adapter_dropout, without_adapter
from tierwise.curriculum.training.memory import memory_told
from tierwise.curriculum.training.recompute import recomputing
from tierwise.curriculum.training.rollouts import Rollouts, completion_logprobs, select_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A GRPO stage.

    Attributes:
        steps: Steps of sampling and updating.
        inner_updates: Optimizer steps on the same rollouts; more than one makes the clip matter.
        warmup_steps: Steps over which the learning rate rises to the optimizer's own.
        max_grad_norm: The gradient is clipped to this norm; 0 is not. Not used with an optimizer
            that clips by itself (it has a `max_grad_norm`).
        max_flat_steps: Steps in a row without one usable group after which the run ends.
        reward_timeout_s: How long the rewards of a pass may take together before the run ends; 0
            waits for ever. The default is our choice.
        checkpoint_every: Steps between checkpoints; the last step always makes one.
        bf16: Forward passes under bfloat16 autocast.
        gradient_checkpointing: Make activations again in backward instead of keeping them; see
            `recompute`.
        tensorboard: Write every step as TensorBoard event files too, beside `record.jsonl`.
        budget: What the stage may take in samples, tokens or seconds; left out, all its steps.
        sampling: How rollouts are made.
        objective: The loss.

    Source: one update a batch and clip norm 1: Qi et al., 2026, https://arxiv.org/abs/2511.06722,
    released scripts and the defaults of the trainer they call.
    """

    steps: int = 100
    inner_updates: int = 1
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    max_flat_steps: int = 8
    reward_timeout_s: float = 1800.0
    checkpoint_every: int = 20
    bf16: bool = False
    gradient_checkpointing: bool = False
    tensorboard: bool = False
    budget: Budget | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    objective: GrpoConfig = field(default_factory=GrpoConfig)

    def __post_init__(self) -> None:
        if min(self.steps, self.inner_updates, self.checkpoint_every, self.max_flat_steps) < 1:
            raise UsageError(
                "steps, inner_updates, checkpoint_every and max_flat_steps must be 1 or more"
            )
        if not 0 <= self.reward_timeout_s < math.inf:
            raise UsageError("reward_timeout_s must be 0 or more; 0 waits for ever")


class BadStepError(Exception):
    """Raised within a step that cannot go on; becomes a TrainingError that names the batch."""


class NotFiniteError(BadStepError):
    """Raised when a step's numbers are infinite or none at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A pass ready for updates; `old_BT` is None when the first update is the only one."""

    rollouts: Rollouts
    advantage_B: Tensor
    weight_BT: Tensor
    old_BT: Tensor | None
    reference_BT: Tensor | None


class Learner:
    """The model and its optimizer, and the counters that go with them from step to step."""

    def __init__(
        self, model: LocalModel, optimizer: torch.optim.Optimizer, config: TrainConfig
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.position, self.flat_steps, self.updates = 0, 0, 0
        self.parameters = [p for p in model.model.parameters() if p.requires_grad]
        self.reference: LocalModel | None = None
        if config.objective.kl_weight > 0 and model.adapter is None:
            frozen = _twin(model.model).requires_grad_(False).eval()
            self.reference = LocalModel(frozen, model.processor, template=model.template)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def restore(self, state: TrainState) -> None:
        """Take up the counters of a checkpoint."""
        self.position = state.position
        self.flat_steps = int(state.counters.get("flat_steps", 0))
        self.updates = int(state.counters.get("updates", 0))

    def counters(self) -> dict[str, float]:
        """Return what a checkpoint must hold beside weights, optimizer and position."""
        return {"flat_steps": self.flat_steps, "updates": self.updates}

    def mark(self) -> tuple[int, int, int]:
        """Return where the step begins, for `back_to`."""
        return self.position, self.flat_steps, self.updates

    def back_to(self, mark: tuple[int, int, int]) -> None:
        """Begin the step again.

        Raises:
            UsageError: The weights have changed since.
        """
        if self.updates != mark[2]:
            raise UsageError("out of memory between two updates of one step: set inner_updates = 1")
        self.optimizer.zero_grad(set_to_none=True)
        self.position, self.flat_steps, _ = mark

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of every forward pass."""
        return autocast(self.model, bf16=self.config.bf16)

    def check(self, experience: Experience, values: Mapping[str, Any]) -> None:
        """Count the step, and refuse it when there has been nothing to learn for too long."""
        self.position = experience.position
        if not math.isfinite(values["surprise"]):
            raise NotFiniteError(f"mean log probability is {-values['surprise']}")
        if values["unscored_share"] == 1.0:
            raise BadStepError(f"no reward at all ({experience.reward_error or 'NaN'})")
        self.flat_steps = self.flat_steps + 1 if values["zero_advantage_share"] == 1.0 else 0
        if self.flat_steps >= self.config.max_flat_steps:
            raise BadStepError(f"equal rewards in every group for {self.flat_steps} steps")

    def update(self, experience: Experience) -> dict[str, Any]:
        """Make the step's optimizer updates; return their mean measures."""
        config = self.config.objective
        kept = [
            batch
            for part, weight_BT in zip(
                experience.passes, self.weights(experience.passes), strict=True
            )
            if (batch := self.batch(part, weight_BT)) is not None
        ]
        values: dict[str, Any] = {"loss": 0.0, "grad_norm": 0.0, "clip_share": 0.0}
        if config.kl_weight > 0:
            values["kl"] = 0.0
        for _ in range(self.config.inner_updates if kept else 0):
            share = min(1.0, (self.updates + 1) / max(1, self.config.warmup_steps))
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share
            for name, value in self.one_update(kept).items():
                values[name] += value / self.config.inner_updates
            self.updates += 1
        values["lr"] = self.optimizer.param_groups[0]["lr"]
        return values

    def weights(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Return weight_BT of each pass, made over all of them at once."""
        masks = [part.rollouts.mask_BT for part in passes]
        longest = max(mask_BT.shape[1] for mask_BT in masks)
        padded = [torch.nn.functional.pad(m, (0, longest - m.shape[1])) for m in masks]
        whole_BT = token_weights(
            torch.cat(padded), self.config.objective.loss, self.config.sampling.max_new_tokens
        )
        parts = torch.split(whole_BT, [len(mask_BT) for mask_BT in masks])
        return [w_BT[:, : m_BT.shape[1]] for w_BT, m_BT in zip(parts, masks, strict=True)]

    def batch(self, part: Pass, weight_BT: Tensor) -> _Batch | None:
        """Return a pass ready for updates, without the groups that cannot change the gradient."""
        config, rollouts = self.config.objective, part.rollouts
        advantage_B = group_advantages(part.reward_B, rollouts.prompt_B, config.scale)
        weight_BT = torch.where(torch.isnan(part.reward_B)[:, None], 0.0, weight_BT)
        if config.kl_weight == 0 and bool(part.flat_P.any()):
            keep_B = ~part.flat_P[rollouts.prompt_B]
            if not bool(keep_B.any()):
                return None
            rollouts = select_prompts(rollouts, ~part.flat_P)
            advantage_B = advantage_B[keep_B]
            weight_BT = weight_BT[keep_B][:, : rollouts.mask_BT.shape[1]]
        reference_BT = None
        with torch.no_grad():
            if self.reference is not None:
                reference_BT = self.logprobs(self.reference, rollouts)
            elif config.kl_weight > 0:
                with without_adapter(self.model):  # what the stage began with, at no memory
                    reference_BT = self.logprobs(self.model, rollouts)
            old_BT = self.logprobs(self.model, rollouts) if self.config.inner_updates > 1 else None
        return _Batch(
            rollouts=rollouts,
            advantage_B=advantage_B,
            weight_BT=weight_BT,
            old_BT=old_BT,
            reference_BT=reference_BT,
        )

    def logprobs(self, model: LocalModel, rollouts: Rollouts) -> Tensor:
        """Return logprob_BT of a pass under the model being trained, or the reference."""
        sampling = self.config.sampling
        with self.autocast():
            return completion_logprobs(
                model,
                rollouts,
                temperature=sampling.temperature,
                share_prompts=sampling.share_prompts and not self.config.gradient_checkpointing,
            )

    def one_update(self, batches: Sequence[_Batch]) -> dict[str, float]:
        """Make one optimizer step over all batches; return its measures."""
        config = self.config.objective
        values = {"loss": 0.0, "clip_share": 0.0}
        num_tokens = sum(int(batch.rollouts.mask_BT.sum()) for batch in batches)
        self.optimizer.zero_grad(set_to_none=True)
        for place, batch in enumerate(batches):
            last = place == len(batches) - 1
            with (
                accumulating(self.optimizer, last=last),
                adapter_dropout(self.model),
                recomputing(self.model.model, enabled=self.config.gradient_checkpointing),
            ):
                logprob_BT = self.logprobs(self.model, batch.rollouts)
                now_BT = logprob_BT.detach()
                old_BT = now_BT if batch.old_BT is None else batch.old_BT
                loss = policy_loss(
                    logprob_BT, old_BT, batch.advantage_B, batch.weight_BT, config,
                    reference_logprob_BT=batch.reference_BT,
                )  # fmt: skip
                if not bool(torch.isfinite(loss)):
                    self.optimizer.zero_grad(set_to_none=True)
                    raise NotFiniteError(f"loss is {loss.item()}")
                loss.backward()  # type: ignore[no-untyped-call]
            mask_BT = batch.rollouts.mask_BT
            share = float(mask_BT.sum()) / num_tokens
            cut = clip_share(now_BT, old_BT, batch.advantage_B, mask_BT, config)
            values["loss"] += loss.item()
            values["clip_share"] += share * cut
            if batch.reference_BT is not None:
                kl_BT = kl_estimate(now_BT, batch.reference_BT)[mask_BT]
                values["kl"] = values.get("kl", 0.0) + share * float(kl_BT.mean())
        norm = clip_and_step(self.optimizer, self.parameters, self.config.max_grad_norm)
        if not math.isfinite(norm):
            raise NotFiniteError(f"gradient norm is {norm}")
        values["grad_norm"] = norm
        return values


def autocast(model: LocalModel, *, bf16: bool) -> AbstractContextManager[object]:
    """Return the context of a forward pass: bfloat16 where it is safe, or as the weights are."""
    return torch.autocast(model.device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def accumulating(optimizer: torch.optim.Optimizer, *, last: bool) -> AbstractContextManager[object]:
    """Tell an optimizer that works during backward that more gradient of the step is to come."""
    accumulate = getattr(optimizer, "accumulate", None)
    return nullcontext() if last or accumulate is None else accumulate()


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    max_grad_norm: float,
) -> float:
    """Clip, step, clear the gradients, and return their norm before clipping.

    No step is made when the norm is not finite, unless the optimizer clips by itself and decides.

    Args:
        optimizer: Clips by itself when it has a `max_grad_norm`; then its `grad_norm` is returned.
        parameters: What is trained.
        max_grad_norm: The limit for other optimizers; 0 is none.

    Raises:
        TrainingError: No memory for the update itself.
    """
    if getattr(optimizer, "max_grad_norm", None) is not None:
        _step(optimizer)
        norm = float(getattr(optimizer, "grad_norm", math.nan))
    else:
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf))
        if math.isfinite(norm):
            _step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return norm


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        with memory_told():
            optimizer.step()
    except torch.OutOfMemoryError as error:
        # some weights may have moved, so that the step cannot be made again; smaller passes would
        # not help either
        raise TrainingError(
            "out of memory in the optimizer's own update",
            hint="set offload = true for the optimizer or train an adapter ([lora]), then go on "
            "from the last checkpoint",
        ) from error


def _twin(module: torch.nn.Module) -> torch.nn.Module:
    """Return another module of the same weights, without the hooks somebody put on this one."""
    # a deep copy would take the hooks along, and what they hold (threads) cannot be copied
    twin = type(module)(copy.deepcopy(module.config))
    first = next(module.parameters())
    twin.to(device=first.device, dtype=first.dtype)
    twin.load_state_dict(module.state_dict())
    return twin
