"""Loss and gradient against TRL's own, on the same tensors, where TRL is installed.

TRL is no dependency of tierwise, so this is skipped where it is absent; `pip install trl` runs it.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tierwise.curriculum.training.grpo import GrpoConfig, Loss, policy_loss, token_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")


def loss_of_trl(tensors: dict[str, Tensor], config: GrpoConfig, longest: int) -> Any:
    """Call the trainer's loss with a stand-in for everything around it."""
    new_BT, mask_BT = tensors["new"], tensors["mask"]
    trainer = SimpleNamespace(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=config.kl_weight, loss_type=config.loss.value,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        epsilon_low=config.clip_low, epsilon_high=config.clip_high, use_vllm=False,
        vllm_importance_sampling_correction=False, model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1, max_completion_length=longest,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (new_BT, torch.zeros_like(new_BT), None),
    )  # fmt: skip
    ones = torch.ones(len(new_BT), 1, dtype=torch.int)
    inputs = {
        "prompt_ids": ones, "prompt_mask": ones, "completion_ids": mask_BT,
        "completion_mask": mask_BT, "advantages": tensors["advantage"],
        "old_per_token_logps": tensors["old"], "ref_per_token_logps": tensors["reference"],
        "num_items_in_batch": mask_BT.sum(),
    }  # fmt: skip
    return grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("kl_weight", [0.0, 0.04])
@pytest.mark.parametrize("clip_high", [0.2, 0.28])
def test_loss_and_gradient_equal_those_of_trl(
    loss: Loss, kl_weight: float, clip_high: float
) -> None:
    config = GrpoConfig(loss=loss, kl_weight=kl_weight, clip_high=clip_high)
    for seed in range(10):
        rng = torch.Generator().manual_seed(seed)
        new = (-torch.rand(8, 6, generator=rng) * 3).requires_grad_()
        tensors = {
            "new": new,
            "old": new.detach() + torch.randn(8, 6, generator=rng) * 0.3,
            "reference": new.detach() + torch.randn(8, 6, generator=rng) * 0.3,
            "advantage": torch.randn(8, generator=rng),
            "mask": (torch.arange(6) < torch.randint(1, 7, (8, 1), generator=rng)).int(),
        }
        theirs = loss_of_trl(tensors, config, 10)
        ours = policy_loss(
            new, tensors["old"], tensors["advantage"],
            token_weights(tensors["mask"], loss, 10), config,
            reference_logprob_BT=tensors["reference"],
        )  # fmt: skip
        (gradient_theirs,) = torch.autograd.grad(theirs, new)
        (gradient_ours,) = torch.autograd.grad(ours, new)
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
        assert torch.allclose(gradient_ours, gradient_theirs, rtol=0.0, atol=1e-6)
