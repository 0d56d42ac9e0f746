"""What one step learns from: samples taken in order, rollouts, rewards, and what they add up to.

    order -> pass of prompts -> rollouts -> rewards -+-> enough groups that differ? -> Experience
      ^                                              |
      +------------------- refill -------------------+

Left out: the update (`loop`), rewards computed in other processes.

Source: refill: Q. Yu et al., "DAPO", 2025, https://arxiv.org/abs/2503.14476 (eq. 11, dynamic
sampling). Departure: the number of rounds is bounded, and a step that ran out of rounds goes on
with what it has, since a stratum may hold nothing else.

Shapes: P prompts, B rollouts, T completion tokens.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tierwise.core.errors import UsageError
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, load_image
from tierwise.curriculum.training.deadline import OverdueError, call_within
from tierwise.curriculum.training.grpo import zero_advantage_groups
from tierwise.curriculum.training.rollouts import Rollouts, sample_rollouts

Reward = Callable[[Sample, str], float]
"""What a completion is worth: (sample, text) -> a number, or NaN where there is no verdict."""


class RewardTimeoutError(Exception):
    """Raised when a pass's rewards do not come; becomes a TrainingError that names the batch.

    It ends the run, unlike a reward that raises: a verdict that depends on the clock would make
    the run another one each time.
    """

    def __init__(self, samples: Sequence[Sample], waited_for: str, timeout_s: float) -> None:
        super().__init__(f"the reward of {waited_for} did not come within {timeout_s:g} s")
        self.samples = samples


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How a step's rollouts are made; the defaults are the difficulty-sampling paper's scripts'.

    Attributes:
        prompts_per_step: Prompts a step (P).
        group_size: Rollouts a prompt (G).
        temperature: Of the draw; above 0.
        max_new_tokens: Where a completion is cut.
        prompts_per_pass: Prompts of one forward pass, to bound memory; 0 is all of a step.
        shuffle: Take samples in an order drawn from the seed for every epoch.
        refill: Draw further prompts in place of those whose rewards are all equal.
        max_refills: Rounds of drawing a step; then the step goes on with what it has.
        share_prompts: Compute a prompt once for all its rollouts; False for families that cannot.

    Source: Qi et al., 2026, https://arxiv.org/abs/2511.06722, released scripts (8 prompts a step
    of 64 completions is inferred from them).
    """

    prompts_per_step: int = 8
    group_size: int = 8
    temperature: float = 1.0
    max_new_tokens: int = 1024
    prompts_per_pass: int = 0
    shuffle: bool = False
    refill: bool = False
    max_refills: int = 3
    share_prompts: bool = True

    def __post_init__(self) -> None:
        if min(self.prompts_per_step, self.max_new_tokens) < 1 or self.prompts_per_pass < 0:
            raise UsageError("prompts_per_step and max_new_tokens must be 1 or more")
        if self.group_size < 2:
            raise UsageError("group_size must be 2 or more: a group of one has no advantage")
        if not 0 < self.temperature < math.inf:
            raise UsageError("temperature must be above 0")


@dataclass(slots=True, kw_only=True)
class Pass:
    """One forward pass's worth of a step: `samples` are the prompts of `rollouts`, in order."""

    samples: tuple[Sample, ...]
    rollouts: Rollouts
    reward_B: Tensor
    flat_P: Tensor


@dataclass(slots=True, kw_only=True)
class Experience:
    """A step's passes, where the order stands after them, and the seconds they took."""

    passes: list[Pass]
    position: int
    refills: int
    reward_error: str | None
    seconds: dict[str, float] = field(default_factory=dict)


def take(samples: Sequence[Sample], position: int, *, shuffle: bool, seed: int) -> Sample:
    """Return the sample at a position of the endless order: epoch after epoch."""
    epoch, place = divmod(position, len(samples))
    if not shuffle:
        return samples[place]
    generator = torch.Generator().manual_seed(key_seed("order", seed, epoch))
    return samples[int(torch.randperm(len(samples), generator=generator)[place])]


def collect(
    model: LocalModel,
    samples: Sequence[Sample],
    reward: Reward,
    config: SamplingConfig,
    *,
    position: int,
    seed: int,
    step: int,
    reward_timeout_s: float = 0.0,
) -> Experience:
    """Return the rollouts of one step with their rewards.

    Args:
        model: The policy.
        samples: In curriculum order.
        reward: Worth of a completion; one that raises gives NaN, and its error is kept.
        config: How rollouts are made.
        position: Samples taken before.
        seed: The run's seed; with `step`, sample and number it seeds every rollout.
        step: The step's number.
        reward_timeout_s: How long the rewards of a pass may take together; 0 is for ever.

    Raises:
        RewardTimeoutError: They took longer.
    """
    experience = Experience(passes=[], position=position, refills=0, reward_error=None)
    seconds: dict[str, float] = defaultdict(float)
    wanted = config.prompts_per_step
    while wanted > 0:
        size = min(wanted, config.prompts_per_pass or wanted)
        places = range(experience.position, experience.position + size)
        chosen = tuple(take(samples, p, shuffle=config.shuffle, seed=seed) for p in places)
        experience.position += size
        started = time.perf_counter()
        prompt_B = torch.arange(size, device=model.device).repeat_interleave(config.group_size)
        seeds = [
            key_seed("rollout", seed, step, place, number)
            for place in places
            for number in range(config.group_size)
        ]
        rollouts = sample_rollouts(
            model,
            model.encode(chosen, [[load_image(path) for path in s.images] for s in chosen]),
            prompt_B,
            seeds=seeds,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            share_prompts=config.share_prompts,
        )
        sampled = time.perf_counter()
        reward_B, error = _rewards(reward, chosen, rollouts, reward_timeout_s)
        seconds["sample_s"] += sampled - started
        seconds["reward_s"] += time.perf_counter() - sampled
        experience.reward_error = experience.reward_error or error
        flat_P = zero_advantage_groups(reward_B, prompt_B)
        experience.passes.append(
            Pass(samples=chosen, rollouts=rollouts, reward_B=reward_B, flat_P=flat_P)
        )
        num_flat = int(flat_P.sum()) if config.refill else 0
        wanted -= size - num_flat
        if num_flat and wanted > 0:
            experience.refills += 1
            if experience.refills > config.max_refills:
                break
    experience.seconds = dict(seconds)
    return experience


def _rewards(
    reward: Reward, chosen: Sequence[Sample], rollouts: Rollouts, timeout_s: float
) -> tuple[Tensor, str | None]:
    values, first_error = [], None
    end_s = time.monotonic() + timeout_s
    for prompt, text in zip(rollouts.prompt_B.tolist(), rollouts.texts, strict=True):
        call = partial(reward, chosen[prompt], text)
        try:
            made = call_within(end_s - time.monotonic(), call) if timeout_s else call()
            values.append(float(made))
        except OverdueError as error:
            raise RewardTimeoutError(chosen, chosen[prompt].id, timeout_s) from error
        except Exception as error:  # a user's function: no verdict is not a wrong answer
            values.append(math.nan)
            first_error = first_error or f"{type(error).__name__}: {error}"
    return torch.tensor(values, device=rollouts.prompt_B.device), first_error


def summarise(experience: Experience, strata: Mapping[str, str]) -> dict[str, Any]:
    """Return what a step's rollouts say, as record values.

    Args:
        experience: The step.
        strata: Sample id -> stratum, or empty.
    """
    passes = experience.passes
    reward_B = torch.cat([part.reward_B for part in passes])
    known_B = ~torch.isnan(reward_B)
    num_tokens = sum(int(part.rollouts.mask_BT.sum()) for part in passes)
    finished_B = torch.cat([part.rollouts.finished_B for part in passes])
    logprob = sum(float(part.rollouts.logprob_BT.sum()) for part in passes)
    values: dict[str, Any] = {
        "prompts": sum(len(part.samples) for part in passes),
        "completions": len(reward_B),
        "reward": float(reward_B[known_B].mean()) if bool(known_B.any()) else 0.0,
        "zero_advantage_share": float(torch.cat([part.flat_P for part in passes]).float().mean()),
        "unscored_share": 1.0 - float(known_B.float().mean()),
        "completion_tokens": num_tokens / len(reward_B),
        "finished_share": float(finished_B.float().mean()),
        "surprise": -logprob / max(1, num_tokens),
        "refills": experience.refills,
    }
    if strata:
        values["reward_by_stratum"] = _by_stratum(passes, strata)
    if experience.reward_error is not None:
        values["reward_error"] = experience.reward_error
    return values


def _by_stratum(passes: Sequence[Pass], strata: Mapping[str, str]) -> dict[str, float]:
    rows: dict[str, list[float]] = defaultdict(list)
    for part in passes:
        prompts = part.rollouts.prompt_B.tolist()
        for prompt, value in zip(prompts, part.reward_B.tolist(), strict=True):
            if not math.isnan(value):
                rows[strata.get(part.samples[prompt].id, "unsorted")].append(value)
    return {name: sum(row) / len(row) for name, row in sorted(rows.items())}
