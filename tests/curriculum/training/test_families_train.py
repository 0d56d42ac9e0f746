"""Both stages on random models of every family, with one, two and three pictures a sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.curriculum.test_families import (
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    save_gemma3,
    save_internvl,
    save_qwen,
    save_smolvlm,
)
from tierwise.core.errors import UsageError
from tierwise.curriculum.models import LocalModel, Prompts
from tierwise.curriculum.samples import Sample, load_image
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training.experience import SamplingConfig
from tierwise.curriculum.training.grpo import GrpoConfig
from tierwise.curriculum.training.learner import TrainConfig
from tierwise.curriculum.training.loop import train_grpo
from tierwise.curriculum.training.rollouts import (
    can_share_prompts,
    completion_logprobs,
    repeat_prompts,
    sample_rollouts,
)
from tierwise.curriculum.training.sft import SftConfig, train_sft


def save_llava(folder: Path) -> None:
    config = build.TinyConfig(layers=4)
    build.build_model(config, seed=0).save_pretrained(folder)
    build.build_processor(config).save_pretrained(folder)


FAMILIES: dict[str, Callable[[Path], None]] = {
    "qwen2_vl": lambda folder: save_qwen(qwen2_vl, folder),
    "qwen2_5_vl": lambda folder: save_qwen(qwen2_5_vl, folder),
    "qwen3_vl": lambda folder: save_qwen(qwen3_vl, folder),
    "gemma3": save_gemma3,
    "internvl": save_internvl,
    "smolvlm": lambda folder: save_smolvlm(folder, split=False),
    "llava": save_llava,
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Six samples of 1, 2, 3, 1, 2, 3 pictures, no picture twice."""
    folder = tmp_path_factory.mktemp("pictures")
    drawn = tasks.draw_samples(12, seed=5, split="train")
    made = []
    for number in range(6):
        taken = [next(drawn) for _ in range(1 + number % 3)]
        paths = tuple(folder / f"{one.id}.png" for one in taken)
        for one, path in zip(taken, paths, strict=True):
            one.image.save(path)
        made.append(
            Sample(id=taken[0].id, question=taken[0].question, answer=taken[0].answer, images=paths)
        )
    return made


def encoded(model: LocalModel, samples: list[Sample]) -> Prompts:
    return model.encode(samples, [[load_image(path) for path in one.images] for one in samples])


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_stay_with_their_sample(
    family: str, samples: list[Sample], tmp_path: Path
) -> None:
    FAMILIES[family](tmp_path)
    torch.set_num_threads(1)
    model = LocalModel.load(tmp_path)
    # no sample twice as often as another, so that a mix-up shows
    prompt_B = torch.tensor([0, 1, 1, 2, 4, 5])
    made = sample_rollouts(
        model, encoded(model, samples), prompt_B,
        seeds=range(6), temperature=1.0, max_new_tokens=4, share_prompts=False,
    )  # fmt: skip
    assert made.prompts.num_images == (1, 2, 3, 1, 2, 3)
    alone: list[Tensor] = []
    for row, prompt in enumerate(prompt_B.tolist()):
        one = sample_rollouts(
            model, encoded(model, [samples[prompt]]), torch.tensor([0]),
            seeds=[row], temperature=1.0, max_new_tokens=4, share_prompts=False,
        )  # fmt: skip
        assert one.texts == (made.texts[row],)
        alone.append(one.logprob_BT[one.mask_BT])
    with torch.no_grad():
        again_BT = completion_logprobs(model, made, temperature=1.0, share_prompts=False)
    for row, expected in enumerate(alone):
        torch.testing.assert_close(made.logprob_BT[row][made.mask_BT[row]], expected, atol=1e-4,
                                   rtol=0)  # fmt: skip
        torch.testing.assert_close(again_BT[row][made.mask_BT[row]], expected, atol=1e-4, rtol=0)
    assert can_share_prompts(model) != family.startswith("qwen")


@pytest.mark.parametrize("family", FAMILIES)
def test_both_stages_train(family: str, samples: list[Sample], tmp_path: Path) -> None:
    FAMILIES[family](tmp_path / "start")
    torch.set_num_threads(1)
    model = LocalModel.load(tmp_path / "start")
    start = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    optimizer: Any = torch.optim.AdamW(model.model.parameters(), lr=1e-3)
    tuned = train_sft(
        model, samples, {one.id: one.answer for one in samples}, optimizer,
        SftConfig(steps=2, batch_size=6, samples_per_pass=4), folder=tmp_path / "sft", seed=1,
    )  # fmt: skip
    assert tuned.metrics[1]["loss"] < tuned.metrics[0]["loss"]
    between = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-3)
    result = train_grpo(
        model, samples, optimizer,
        TrainConfig(
            steps=2,
            sampling=SamplingConfig(
                prompts_per_step=6, group_size=3, max_new_tokens=4, prompts_per_pass=4
            ),
            objective=GrpoConfig(kl_weight=0.01),
        ),
        folder=tmp_path / "grpo", seed=1,
        reward=lambda sample, text: float(len(text) % 7),
    )  # fmt: skip
    assert result.finished
    assert all(row["grad_norm"] > 0 for row in result.metrics)
    end = dict(model.model.state_dict())
    for before, after in ((start, between), (between, end)):
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert any("vision" in name or "visual" in name for name in moved)
        assert any("language_model" in name or "text_model" in name for name in moved)
    loaded = LocalModel.load(result.model_folder)
    assert all(torch.equal(end[name], t) for name, t in loaded.model.state_dict().items())


def test_prompts_without_pictures_leave_the_tensor_out(
    samples: list[Sample], tmp_path: Path
) -> None:
    save_qwen(qwen2_5_vl, tmp_path)
    model = LocalModel.load(tmp_path)
    blank = Sample(id="blank", question=samples[0].question, answer="1")
    prompts = encoded(model, [blank, samples[1]])
    assert prompts.num_images == (0, 2)
    kept = repeat_prompts(prompts, torch.tensor([0, 0]))
    assert kept.inputs.keys() == {"input_ids", "attention_mask", "mm_token_type_ids"}
    assert kept.num_images == (0, 0)
    both = repeat_prompts(prompts, torch.tensor([1, 0, 1]))
    assert len(both.inputs["image_grid_thw"]) == 4
    assert len(both.inputs["pixel_values"]) == 2 * len(prompts.inputs["pixel_values"])


def test_tiles_that_cannot_be_told_apart_are_refused() -> None:
    prompts = Prompts(
        inputs={"input_ids": torch.zeros(2, 3), "pixel_values": torch.zeros(5, 3, 4, 4)},
        texts=("a", "b"),
        num_images=(1, 2),
    )
    with pytest.raises(UsageError, match="pixel_values has 5 entries for 3 pictures"):
        repeat_prompts(prompts, torch.tensor([0, 1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_made_again_give_the_same_step(
    family: str, samples: list[Sample], tmp_path: Path
) -> None:
    FAMILIES[family](tmp_path / "start")
    torch.set_num_threads(1)
    steps = []
    for again in (False, True):
        model = LocalModel.load(tmp_path / "start")
        result = train_grpo(
            model, samples, torch.optim.AdamW(model.model.parameters(), lr=1e-3),
            TrainConfig(
                steps=1, gradient_checkpointing=again,
                sampling=SamplingConfig(
                    prompts_per_step=3, group_size=3, max_new_tokens=4, share_prompts=False
                ),
                objective=GrpoConfig(kl_weight=0.01),
            ),
            folder=tmp_path / f"grpo-{again}", seed=1,
            reward=lambda sample, text: float(len(text) % 7),
        )  # fmt: skip
        steps.append(result.metrics[0])
    plain, remade = steps
    assert plain["grad_norm"] > 0
    assert remade["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    assert remade["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
