"""Group-relative advantages and clipped policy losses, as pure functions on tensors.

    reward_B, group_B -> advantage_B -+
    logprob_BT, old_logprob_BT -------+-> objective_BT (what each token costs)
    mask_BT -> weight_BT (what each token counts) --------> loss = sum(weight * objective)

Every loss variant is a choice of weights, so a batch cut into micro-batches adds up to the
whole batch exactly as defined: weights are made once for the batch, then sliced.

Shapes: P prompts, G rollouts of a prompt (may differ by prompt), B = all rollouts (P*G when
groups are equal), T completion tokens. `group_B` holds each rollout's prompt, 0 to P-1.

Left out: sequence-level importance ratios (GSPO), entropy bonuses, batch-wide scaling.

Source: Z. Shao et al., "DeepSeekMath", 2024, https://arxiv.org/abs/2402.03300 (GRPO, eq. 3-4);
DeepSeek-AI, "DeepSeek-R1", 2025, https://arxiv.org/abs/2501.12948 (eq. 1-3);
Q. Yu et al., "DAPO", 2025, https://arxiv.org/abs/2503.14476 (eq. 8-12: token mean, clip-higher,
dynamic sampling); Z. Liu et al., "Understanding R1-Zero-Like Training" (Dr. GRPO), 2025,
https://arxiv.org/abs/2503.20783 (section 3.2: no division by the std, constant normaliser).
Departures: the standard deviation is the sample one (n - 1) with 1e-4 added, as trainers in
use have it, where the papers leave both open; a rollout without a verdict (NaN reward) counts
neither in its group's mean nor in the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from tierwise.core.errors import UsageError

STD_FLOOR = 1e-4


class Loss(StrEnum):
    """How token losses are averaged."""

    GRPO = "grpo"
    """Mean over the tokens of a rollout, then over rollouts."""
    DAPO = "dapo"
    """Mean over all tokens of the batch: long rollouts weigh more."""
    DR_GRPO = "dr_grpo"
    """Sum over tokens divided by rollouts x the longest length allowed: no length bias."""


class Scale(StrEnum):
    """What a group's centred rewards are divided by."""

    STD = "std"
    """The group's standard deviation (GRPO, DAPO)."""
    NONE = "none"
    """Nothing (Dr. GRPO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoConfig:
    """The objective; the defaults are GRPO with the settings of the difficulty-sampling paper.

    Attributes:
        loss: How token losses are averaged.
        scale: What centred rewards are divided by; Dr. GRPO is `dr_grpo` with `none`.
        clip_low: The ratio is clipped below at 1 - clip_low.
        clip_high: The ratio is clipped above at 1 + clip_high; DAPO's clip-higher is 0.28.
        kl_weight: Weight of the divergence from the starting model (beta); 0 needs no reference.

    Source: clip 0.2 is the default of the trainer used by Qi et al., 2026,
    https://arxiv.org/abs/2511.06722, whose scripts set beta to 0.001.
    """

    loss: Loss = Loss.GRPO
    scale: Scale = Scale.STD
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.001

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise UsageError(f"clip range {self.clip_low}, {self.clip_high} makes no sense")
        if not self.kl_weight >= 0:
            raise UsageError(f"kl_weight {self.kl_weight} is negative")


def group_advantages(reward_B: Tensor, group_B: Tensor, scale: Scale = Scale.STD) -> Tensor:
    """Return advantage_B: each reward less its group's mean, and divided by its spread if asked.

    Groups may have any sizes. A group of equal rewards, or of one, gets exact zeros.

    Args:
        reward_B: Rewards; NaN where there is no verdict.
        group_B: The prompt of each rollout, 0 to P-1, in any order.
        scale: See `Scale`.

    >>> group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]), Scale.NONE)
    tensor([ 0.5000, -0.5000,  0.0000,  0.0000])

    Source: DeepSeek-R1, eq. 3; Dr. GRPO, section 3.2 (no division).
    """
    known_B = ~torch.isnan(reward_B)
    flat_B = zero_advantage_groups(reward_B, group_B)[group_B]
    reward_B = torch.where(known_B, reward_B, 0.0)
    size_P = _group_sum(known_B.to(reward_B.dtype), group_B)
    mean_P = _group_sum(reward_B, group_B) / size_P.clamp(min=1.0)
    centred_B = torch.where(known_B & ~flat_B, reward_B - mean_P[group_B], 0.0)
    if scale is Scale.NONE:
        return centred_B
    std_P = (_group_sum(centred_B.square(), group_B) / (size_P - 1.0).clamp(min=1.0)).sqrt()
    return centred_B / (std_P[group_B] + STD_FLOOR)


def zero_advantage_groups(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Return flat_P: True where a group's known rewards are all equal, so it teaches nothing."""
    known_B = ~torch.isnan(reward_B)
    num_groups = int(group_B.max()) + 1 if group_B.numel() else 0
    high_P = reward_B.new_full((num_groups,), -torch.inf)
    low_P = reward_B.new_full((num_groups,), torch.inf)
    high_P = high_P.scatter_reduce(0, group_B[known_B], reward_B[known_B], "amax")
    low_P = low_P.scatter_reduce(0, group_B[known_B], reward_B[known_B], "amin")
    return ~(high_P > low_P)


def _group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    num_groups = int(group_B.max()) + 1 if group_B.numel() else 0
    return value_B.new_zeros(num_groups).index_add(0, group_B, value_B)


def token_objective(
    logprob_BT: Tensor,
    old_logprob_BT: Tensor,
    advantage_B: Tensor,
    config: GrpoConfig,
    reference_logprob_BT: Tensor | None = None,
) -> Tensor:
    """Return objective_BT: what each token costs, to be weighed by `token_weights`.

    Args:
        logprob_BT: Log probabilities under the model being trained; carries the gradient.
        old_logprob_BT: Under the model that made the rollouts; no gradient.
        advantage_B: See `group_advantages`.
        config: Clip range and weight of the divergence.
        reference_logprob_BT: Under the starting model; needed when `kl_weight` is not 0.

    Raises:
        UsageError: `kl_weight` is not 0 and there is no reference.

    Source: DeepSeekMath, eq. 3; clip-higher: DAPO, eq. 10.
    """
    ratio_BT = (logprob_BT - old_logprob_BT).exp()
    clipped_BT = ratio_BT.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    advantage_B1 = advantage_B[:, None]
    objective_BT = -torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
    if config.kl_weight == 0:
        return objective_BT
    if reference_logprob_BT is None:
        raise UsageError(f"kl_weight {config.kl_weight} needs log probabilities of a reference")
    return objective_BT + config.kl_weight * kl_estimate(logprob_BT, reference_logprob_BT)


def kl_estimate(logprob_BT: Tensor, reference_logprob_BT: Tensor) -> Tensor:
    """Return k3_BT, an unbiased, never negative estimate of KL(model || reference) by token.

    Source: J. Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html
    (k3); DeepSeekMath, eq. 4.
    """
    difference_BT = reference_logprob_BT - logprob_BT
    return difference_BT.exp() - difference_BT - 1.0


def token_weights(mask_BT: Tensor, loss: Loss, max_tokens: int) -> Tensor:
    """Return weight_BT: what each token counts, so that the loss is the weighted sum.

    Args:
        mask_BT: 1 for tokens of the completion (its end token included), 0 for padding.
        loss: See `Loss`.
        max_tokens: Longest completion allowed; only `dr_grpo` uses it.

    Source: DeepSeekMath, eq. 3 (`grpo`); DAPO, eq. 12 (`dapo`); Dr. GRPO, appendix A (`dr_grpo`).
    """
    mask_BT = mask_BT if mask_BT.is_floating_point() else mask_BT.float()
    num_rollouts = mask_BT.shape[0]
    if loss is Loss.GRPO:
        return mask_BT / mask_BT.sum(dim=1, keepdim=True).clamp(min=1.0) / num_rollouts
    if loss is Loss.DAPO:
        return mask_BT / mask_BT.sum().clamp(min=1.0)
    return mask_BT / (num_rollouts * max_tokens)


def policy_loss(
    logprob_BT: Tensor,
    old_logprob_BT: Tensor,
    advantage_B: Tensor,
    weight_BT: Tensor,
    config: GrpoConfig,
    *,
    reference_logprob_BT: Tensor | None = None,
) -> Tensor:
    """Return the scalar loss of a batch, or a micro-batch's part of it.

    Padding (weight 0) cannot leak into the gradient, whatever its log probabilities are.

    Args:
        logprob_BT: See `token_objective`, as the next two and the last.
        old_logprob_BT: No gradient.
        advantage_B: See `group_advantages`.
        weight_BT: From `token_weights` of the whole batch, cut to the micro-batch.
        config: The objective.
        reference_logprob_BT: Needed when `kl_weight` is not 0.
    """
    counted_BT = weight_BT > 0
    logprob_BT = torch.where(counted_BT, logprob_BT, 0.0)
    old_logprob_BT = torch.where(counted_BT, old_logprob_BT, 0.0)
    if reference_logprob_BT is not None:
        reference_logprob_BT = torch.where(counted_BT, reference_logprob_BT, 0.0)
    objective_BT = token_objective(
        logprob_BT, old_logprob_BT, advantage_B, config, reference_logprob_BT
    )
    return (weight_BT * objective_BT).sum()


def clip_share(
    logprob_BT: Tensor,
    old_logprob_BT: Tensor,
    advantage_B: Tensor,
    mask_BT: Tensor,
    config: GrpoConfig,
) -> float:
    """Return the share of tokens whose gradient the clip has cut off, from 0 to 1."""
    ratio_BT = (logprob_BT - old_logprob_BT).exp()
    advantage_B1 = advantage_B[:, None]
    low_BT = (ratio_BT < 1.0 - config.clip_low) & (advantage_B1 < 0)
    high_BT = (ratio_BT > 1.0 + config.clip_high) & (advantage_B1 > 0)
    cut_BT = (low_BT | high_BT) & mask_BT.bool()
    return float(cut_BT.sum()) / max(1.0, float(mask_BT.sum()))
