"""Activations made again in backward: the same loss and gradient from less memory; and bfloat16."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tierwise.core.errors import ConfigError
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training.experience import SamplingConfig, collect
from tierwise.curriculum.training.grpo import GrpoConfig
from tierwise.curriculum.training.learner import Learner, TrainConfig, autocast
from tierwise.curriculum.training.loop import train_grpo
from tierwise.curriculum.training.lora import LoraConfig, attach_adapter
from tierwise.curriculum.training.recompute import recomputing
from tierwise.curriculum.training.rollouts import completion_logprobs
from tierwise.curriculum.training.sft import SftConfig, target_rows, train_sft

DEEP = build.TinyConfig(
    vision_width=16, vision_layers=4, vision_heads=2, width=24, layers=6, heads=2, mlp_width=48
)


@functools.cache
def _untrained() -> LocalModel:
    torch.set_num_threads(1)
    return LocalModel(build.build_model(DEEP, seed=0), build.build_processor(DEEP))


def small_model() -> LocalModel:
    return LocalModel(copy.deepcopy(_untrained().model), _untrained().processor)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    folder = tmp_path_factory.mktemp("pictures")
    made = []
    for drawn in tasks.draw_samples(8, seed=5, split="train"):
        path = folder / f"{drawn.id}.png"
        drawn.image.save(path)
        made.append(
            Sample(id=drawn.id, question=drawn.question, answer=drawn.answer, images=(path,))
        )
    return made


def loss_of(model: LocalModel, samples: list[Sample]) -> Tensor:
    rows = target_rows(model, samples, [sample.answer for sample in samples])
    logprob_BT = completion_logprobs(model, rows, temperature=1.0, share_prompts=False)
    return -logprob_BT[rows.mask_BT].mean()


def test_loss_and_gradient_are_the_same(samples: list[Sample]) -> None:
    found = []
    for enabled in (False, True):
        model = small_model()
        with recomputing(model.model, enabled=enabled):
            loss = loss_of(model, samples)
            loss.backward()  # type: ignore[no-untyped-call]
        assert not any(module.training for module in model.model.modules())
        assert not any(getattr(m, "gradient_checkpointing", False) for m in model.model.modules())
        found.append(
            (loss.item(), [p.grad for p in model.model.parameters() if p.grad is not None])
        )
    (loss_kept, kept), (loss_again, again) = found
    assert loss_again == loss_kept
    assert len(again) == len(kept) > 60
    assert all(torch.equal(one, other) for one, other in zip(again, kept, strict=True))


def bytes_left_by_forward(model: LocalModel, samples: list[Sample], *, enabled: bool) -> int:
    """Return what forward has allocated and not freed while its graph is alive."""
    with recomputing(model.model, enabled=enabled):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
            loss = loss_of(model, samples)
        loss.backward()  # type: ignore[no-untyped-call]
    model.model.zero_grad()
    return sum(int(event.self_cpu_memory_usage) for event in told.key_averages())


def test_forward_leaves_less_memory_taken(samples: list[Sample]) -> None:
    model = small_model()
    kept = bytes_left_by_forward(model, samples, enabled=False)
    again = bytes_left_by_forward(model, samples, enabled=True)
    assert 0 < again < 0.4 * kept


@pytest.mark.parametrize("adapter", [False, True])
def test_an_update_of_the_loop_is_the_same(samples: list[Sample], adapter: bool) -> None:
    norms = []
    for enabled in (False, True):
        model = small_model()
        if adapter:
            attach_adapter(model, LoraConfig(rank=4), seed=1)
        settings = TrainConfig(
            gradient_checkpointing=enabled,
            sampling=SamplingConfig(prompts_per_step=4, group_size=4, max_new_tokens=4),
            objective=GrpoConfig(kl_weight=0.01),
        )
        trained = [p for p in model.model.parameters() if p.requires_grad]
        learner = Learner(model, torch.optim.SGD(trained, lr=0.1), settings)
        experience = collect(
            model, samples, lambda s, text: float(len(text)), settings.sampling,
            position=0, seed=1, step=0,
        )  # fmt: skip
        norms.append(learner.update(experience)["grad_norm"])
    assert norms[0] > 0
    # one runs prompts shared, the other row by row
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_both_stages_resume_with_it(samples: list[Sample], tmp_path: Path) -> None:
    targets = {sample.id: sample.answer for sample in samples}
    ends: list[dict[str, Tensor]] = []
    for folder, stops in (("whole", ()), ("parts", (1, 2))):
        model = small_model()
        for turn in (*stops, 0):
            steps = iter(range(1, 99))
            stop = lambda turn=turn, steps=steps: next(steps) == turn  # noqa: E731
            model = small_model()
            common: dict[str, Any] = {"seed": 1, "stop": stop}
            train_sft(
                model, samples, targets, torch.optim.AdamW(model.model.parameters(), lr=1e-3),
                SftConfig(steps=3, batch_size=4, gradient_checkpointing=True, bf16=True),
                folder=tmp_path / folder / "sft", **common,
            )  # fmt: skip
        ends.append(dict(model.model.state_dict()))
        train_grpo(
            model, samples, torch.optim.AdamW(model.model.parameters(), lr=1e-3),
            TrainConfig(
                steps=2, gradient_checkpointing=True, bf16=True,
                sampling=SamplingConfig(prompts_per_step=2, group_size=4, max_new_tokens=4),
                objective=GrpoConfig(kl_weight=0.01),
            ),
            folder=tmp_path / folder / "grpo", seed=1, reward=lambda s, text: float(len(text)),
        )  # fmt: skip
        ends.append(dict(model.model.state_dict()))
    for one, other in ((ends[0], ends[2]), (ends[1], ends[3])):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_that_cannot_is_refused() -> None:
    layer = torch.nn.Linear(2, 2)
    with recomputing(layer, enabled=False):
        pass
    with (
        pytest.raises(ConfigError, match="Linear cannot recompute"),
        recomputing(layer, enabled=True),
    ):
        pass


def test_bfloat16_passes_keep_weights_and_gradient_in_float32(samples: list[Sample]) -> None:
    model, exact = small_model(), small_model()
    seen: set[torch.dtype] = set()
    hook = model.model.lm_head.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
    with autocast(model, bf16=True):
        loss = loss_of(model, samples)
    hook.remove()
    loss.backward()  # type: ignore[no-untyped-call]
    expected = loss_of(exact, samples)
    expected.backward()  # type: ignore[no-untyped-call]
    assert seen == {torch.bfloat16}
    assert loss.dtype is torch.float32
    assert loss.item() != expected.item()
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    ours, theirs = (
        torch.cat([p.grad.flatten() for p in m.model.parameters() if p.grad is not None])
        for m in (model, exact)
    )
    assert ours.dtype is torch.float32
    assert float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)) > 0.99
