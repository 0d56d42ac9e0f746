"""The objective against hand-computed values, the published formulas written as loops, and laws."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tierwise.core.errors import UsageError
from tierwise.curriculum.keyed import keyed_uniform
from tierwise.curriculum.training.grpo import (
    GrpoConfig,
    Loss,
    Scale,
    clip_share,
    group_advantages,
    kl_estimate,
    policy_loss,
    token_weights,
    zero_advantage_groups,
)

VARIANTS = {
    "grpo": GrpoConfig(kl_weight=0.01),
    "dapo": GrpoConfig(loss=Loss.DAPO, clip_high=0.28, kl_weight=0.0),
    "dr_grpo": GrpoConfig(loss=Loss.DR_GRPO, scale=Scale.NONE, kl_weight=0.0),
}
# rewards of steps 1, 11, 21, 31, 41, the sum of all preferences, one preference
PINNED: dict[str, list[float]] = {
    "grpo": [
        0.1666666667, 0.4722222222, 0.8611111111, 0.9583333333, 0.9722222222,
        -12.4229730406, 3.7805218674,
    ],
    "dapo": [
        0.1666666667, 0.5, 0.8611111111, 0.9583333333, 0.9722222222,
        -15.1535146774, 3.6539433708,
    ],
    "dr_grpo": [
        0.1666666667, 0.4722222222, 0.8611111111, 0.9583333333, 0.9722222222,
        -16.5357571668, 3.3146367115,
    ],
}  # fmt: skip

GROUPS = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=6
)


def flatten(groups: list[list[float]]) -> tuple[Tensor, Tensor]:
    reward_B = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    group_B = torch.tensor([p for p, group in enumerate(groups) for _ in group])
    return reward_B, group_B


def random_batch(
    seed: int, num_rollouts: int = 6, num_tokens: int = 5
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log probabilities (new, old, reference), advantages and a ragged mask."""
    rng = torch.Generator().manual_seed(seed)
    shape = (num_rollouts, num_tokens)
    new_BT = -torch.rand(shape, generator=rng, dtype=torch.float64) * 3
    old_BT = new_BT + torch.randn(shape, generator=rng, dtype=torch.float64) * 0.3
    reference_BT = new_BT + torch.randn(shape, generator=rng, dtype=torch.float64) * 0.3
    advantage_B = torch.randn(num_rollouts, generator=rng, dtype=torch.float64)
    length_B = torch.randint(1, num_tokens + 1, (num_rollouts,), generator=rng)
    mask_BT = (torch.arange(num_tokens)[None] < length_B[:, None]).double()
    return new_BT.requires_grad_(), old_BT, reference_BT, advantage_B, mask_BT


def loss_by_loops(tensors: tuple[Tensor, ...], c: GrpoConfig, longest: int) -> float:
    """The published sums, term by term: DeepSeekMath eq. 3, DAPO eq. 12, Dr. GRPO appendix A."""
    new, old, ref, advantage, mask = (tensor.detach() for tensor in tensors)
    per_rollout: list[list[float]] = []
    for i in range(new.shape[0]):
        terms = []
        for t in range(int(mask[i].sum())):
            ratio = math.exp(float(new[i, t]) - float(old[i, t]))
            clipped = min(max(ratio, 1 - c.clip_low), 1 + c.clip_high)
            a = float(advantage[i])
            gap = float(ref[i, t]) - float(new[i, t])
            kl = math.exp(gap) - gap - 1
            terms.append(-(min(ratio * a, clipped * a) - c.kl_weight * kl))
        per_rollout.append(terms)
    if c.loss is Loss.GRPO:
        return statistics.fmean(statistics.fmean(terms) for terms in per_rollout)
    every = [term for terms in per_rollout for term in terms]
    if c.loss is Loss.DAPO:
        return statistics.fmean(every)
    return sum(every) / (len(per_rollout) * longest)


def test_advantages_by_hand() -> None:
    reward_B = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    group_B = torch.tensor([0, 0, 0, 0, 1, 1])
    plain = group_advantages(reward_B, group_B, Scale.NONE)
    assert plain.tolist() == [0.75, -0.25, -0.25, -0.25, 0.0, 0.0]
    scaled = group_advantages(reward_B, group_B)
    # sample standard deviation of (1, 0, 0, 0) is 0.5
    assert scaled.tolist() == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3, 0.0, 0.0])


def test_a_missing_verdict_counts_neither_in_the_mean_nor_in_the_gradient() -> None:
    reward_B = torch.tensor([1.0, 0.0, torch.nan, torch.nan, torch.nan])
    group_B = torch.tensor([0, 0, 0, 1, 1])
    assert group_advantages(reward_B, group_B, Scale.NONE).tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]
    assert zero_advantage_groups(reward_B, group_B).tolist() == [False, True]


def test_equal_rewards_that_do_not_average_exactly_still_give_exact_zeros() -> None:
    reward_B = torch.full((7,), 0.1)
    group_B = torch.zeros(7, dtype=torch.long)
    assert group_advantages(reward_B, group_B).tolist() == [0.0] * 7


@given(GROUPS)
def test_advantages_agree_with_the_statistics_module(groups: list[list[float]]) -> None:
    reward_B, group_B = flatten(groups)
    expected = []
    for group in groups:
        mean = statistics.fmean(group)
        spread = statistics.stdev(group) if len(group) > 1 else 0.0
        expected += [(r - mean) / (spread + 1e-4) for r in group]
    assert group_advantages(reward_B, group_B).tolist() == pytest.approx(expected, abs=1e-9)


@given(GROUPS, st.floats(-5, 5), st.floats(0.1, 10), st.randoms())
def test_laws_of_advantages(
    groups: list[list[float]], shift: float, factor: float, rng: object
) -> None:
    reward_B, group_B = flatten(groups)
    advantage_B = group_advantages(reward_B, group_B, Scale.NONE)
    for p in range(len(groups)):
        assert float(advantage_B[group_B == p].sum()) == pytest.approx(0.0, abs=1e-12)
    moved_B = group_advantages(reward_B * factor + shift, group_B, Scale.NONE)
    assert torch.allclose(moved_B, advantage_B * factor, atol=1e-9)
    order = torch.randperm(len(reward_B))
    shuffled_B = group_advantages(reward_B[order], group_B[order], Scale.NONE)
    assert torch.allclose(shuffled_B, advantage_B[order])
    flat_P = zero_advantage_groups(reward_B, group_B)
    assert flat_P.tolist() == [len(set(group)) == 1 for group in groups]


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("clip_high", [0.2, 0.28])
@pytest.mark.parametrize("kl_weight", [0.0, 0.04])
@pytest.mark.parametrize("seed", range(5))
def test_loss_equals_the_published_sums(
    loss: Loss, clip_high: float, kl_weight: float, seed: int
) -> None:
    config = GrpoConfig(loss=loss, clip_high=clip_high, kl_weight=kl_weight)
    new, old, ref, advantage, mask = random_batch(seed)
    ours = policy_loss(
        new, old, advantage, token_weights(mask, loss, 8), config, reference_logprob_BT=ref
    )
    expected = loss_by_loops((new, old, ref, advantage, mask), config, 8)
    assert float(ours.detach()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("loss", list(Loss))
def test_gradient_equals_finite_differences(loss: Loss) -> None:
    config = GrpoConfig(loss=loss, kl_weight=0.1)
    new, old, ref, advantage, mask = random_batch(3)
    weight = token_weights(mask, loss, 8).double()

    def at(point: Tensor) -> Tensor:
        return policy_loss(point, old, advantage, weight, config, reference_logprob_BT=ref)

    assert torch.autograd.gradcheck(at, (new,), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", list(Loss))
def test_micro_batches_add_up_to_the_batch(loss: Loss) -> None:
    config = GrpoConfig(loss=loss, kl_weight=0.1)
    new, old, ref, advantage, mask = random_batch(4, num_rollouts=7)
    weight = token_weights(mask, loss, 8)
    whole = policy_loss(new, old, advantage, weight, config, reference_logprob_BT=ref)
    parts = [
        policy_loss(new[i], old[i], advantage[i], weight[i], config, reference_logprob_BT=ref[i])
        for i in (slice(0, 3), slice(3, 4), slice(4, 7))
    ]
    assert float(torch.stack(parts).sum().detach()) == pytest.approx(
        float(whole.detach()), rel=1e-12
    )


def test_padding_cannot_leak_even_when_it_is_not_finite() -> None:
    config = GrpoConfig(kl_weight=0.0)
    new = torch.tensor([[-1.0, -torch.inf]], requires_grad=True)
    old = torch.tensor([[-1.0, torch.nan]])
    weight = token_weights(torch.tensor([[1, 0]]), Loss.GRPO, 2)
    loss = policy_loss(new, old, torch.tensor([2.0]), weight, config)
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss.item() == -2.0
    assert gradient.tolist() == [[-2.0, 0.0]]


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    new = torch.tensor([[-0.5, -1.5]], requires_grad=True)
    weight = token_weights(torch.ones(1, 2), Loss.GRPO, 2)
    loss = policy_loss(new, new.detach(), torch.tensor([3.0]), weight, GrpoConfig(kl_weight=0.0))
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.tolist() == [[-1.5, -1.5]]


def test_the_clip_stops_the_gradient_on_its_own_side_only() -> None:
    new = torch.log(torch.tensor([[1.25, 1.25], [0.7, 0.7]])).requires_grad_()
    old = torch.zeros(2, 2)
    advantage = torch.tensor([1.0, -1.0])
    mask = torch.ones(2, 2)
    narrow, wide = GrpoConfig(kl_weight=0.0), GrpoConfig(clip_high=0.28, kl_weight=0.0)
    weight = token_weights(mask, Loss.DAPO, 2)
    (cut,) = torch.autograd.grad(policy_loss(new, old, advantage, weight, narrow), new)
    assert cut.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    (open_above,) = torch.autograd.grad(policy_loss(new, old, advantage, weight, wide), new)
    assert open_above[0].tolist() == pytest.approx([-0.3125, -0.3125])
    assert open_above[1].tolist() == [0.0, 0.0]
    assert clip_share(new, old, advantage, mask, narrow) == 1.0
    assert clip_share(new, old, advantage, mask, wide) == 0.5
    assert clip_share(new, old, -advantage, mask, narrow) == 0.0


@given(st.floats(-8, 0), st.floats(-8, 0))
def test_divergence_is_never_negative_and_zero_only_when_equal(new: float, ref: float) -> None:
    k3 = float(kl_estimate(torch.tensor(new).double(), torch.tensor(ref).double()))
    assert k3 >= 0
    assert (k3 == 0) == (new == ref) or abs(new - ref) < 1e-6


def test_divergence_estimate_is_unbiased() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    exact = float((p * (p / q).log()).sum())
    assert float((p * kl_estimate(p.log(), q.log())).sum()) == pytest.approx(exact, rel=1e-6)


def test_length_bias_is_what_the_variants_differ_in() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    by_rollout = {loss: token_weights(mask, loss, 4).sum(dim=1).tolist() for loss in Loss}
    assert by_rollout[Loss.GRPO] == [0.5, 0.5]
    assert by_rollout[Loss.DAPO] == pytest.approx([0.8, 0.2])
    assert by_rollout[Loss.DR_GRPO] == [0.5, 0.125]


def test_refusals() -> None:
    new, old, _, advantage, mask = random_batch(0)
    with pytest.raises(UsageError, match="reference"):
        policy_loss(new, old, advantage, token_weights(mask, Loss.GRPO, 8), GrpoConfig())
    with pytest.raises(UsageError, match="negative"):
        GrpoConfig(kl_weight=-1.0)
    with pytest.raises(UsageError, match="clip range"):
        GrpoConfig(clip_low=2.0)


def fifty_steps(config: GrpoConfig) -> tuple[list[float], Tensor]:
    """Train a table of next-token preferences; every draw comes from a key, in float64."""
    num_prompts, group_size, num_tokens, vocabulary = 3, 6, 4, 5
    table_PV = torch.zeros(num_prompts, vocabulary, dtype=torch.float64, requires_grad=True)
    start_PV = torch.log_softmax(table_PV.detach().clone(), dim=1)
    optimizer = torch.optim.AdamW([table_PV], lr=0.1, weight_decay=0.0)
    prompt_B = torch.arange(num_prompts).repeat_interleave(group_size)
    wanted_P = torch.tensor([1, 2, 4])
    rewards = []
    for step in range(50):
        logprob_PV = torch.log_softmax(table_PV, dim=1)
        seeds = np.arange(len(prompt_B), dtype=np.uint64) + np.uint64(1000 * step)
        draws = [torch.from_numpy(keyed_uniform(seeds, t)) for t in range(num_tokens)]
        edge_BV = logprob_PV.detach().exp().cumsum(dim=1)[prompt_B].contiguous()
        token_BT = torch.stack(
            [torch.searchsorted(edge_BV, u_B[:, None], right=True)[:, 0] for u_B in draws], dim=1
        ).clamp(max=vocabulary - 1)
        mask_BT = torch.cummax((token_BT == 0).long(), dim=1).values  # token 0 ends a row
        mask_BT = torch.cat([torch.ones(len(prompt_B), 1), 1 - mask_BT[:, :-1]], dim=1)
        hits_B = ((token_BT == wanted_P[prompt_B][:, None]) * mask_BT).sum(dim=1)
        reward_B = hits_B.double() / num_tokens
        now_BT = logprob_PV[prompt_B].gather(1, token_BT)
        loss = policy_loss(
            now_BT,
            now_BT.detach(),
            group_advantages(reward_B, prompt_B, config.scale),
            token_weights(mask_BT.double(), config.loss, num_tokens),
            config,
            reference_logprob_BT=start_PV[prompt_B].gather(1, token_BT),
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rewards.append(float(reward_B.mean()))
    return rewards, table_PV.detach()


@pytest.mark.parametrize("name", list(PINNED))
def test_a_trajectory_of_fifty_steps_is_pinned(name: str) -> None:
    rewards, table_PV = fifty_steps(VARIANTS[name])
    found = [*rewards[::10], float(table_PV.sum()), float(table_PV[1, 2])]
    assert found == pytest.approx(PINNED[name], abs=1e-7)
    assert rewards[-1] > 2 * rewards[0]
