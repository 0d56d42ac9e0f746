"""Adapters on a small real model: the weights stay, resume is exact, merged is what was trained."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tierwise.core.errors import ConfigError, DataError, StateError
from tierwise.curriculum.families import quiet_transformers
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, load_image
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training.book import TrainResult
from tierwise.curriculum.training.experience import SamplingConfig
from tierwise.curriculum.training.grpo import GrpoConfig
from tierwise.curriculum.training.learner import Learner, TrainConfig
from tierwise.curriculum.training.loop import train_grpo
from tierwise.curriculum.training.lora import (
    LoraConfig,
    adapter_dropout,
    attach_adapter,
    merge_adapter,
    without_adapter,
)
from tierwise.curriculum.training.recipe import RecipeConfig, run_recipe
from tierwise.curriculum.training.sft import SftConfig, train_sft

SMALL = build.TinyConfig(
    vision_width=16, vision_layers=1, vision_heads=2, width=24, layers=2, heads=2, mlp_width=48
)


@functools.cache
def _untrained() -> LocalModel:
    torch.set_num_threads(1)
    return LocalModel(build.build_model(SMALL, seed=0), build.build_processor(SMALL))


def small_model() -> LocalModel:
    return LocalModel(copy.deepcopy(_untrained().model), _untrained().processor)


def adapted(seed: int = 3, *, exclude: tuple[str, ...] = (), **changes: Any) -> LocalModel:
    model = small_model()
    config = LoraConfig(**{"rank": 4, "alpha": 8.0, **changes})
    attach_adapter(model, config, seed=seed, exclude=exclude)
    return model


def trained_names(model: LocalModel) -> set[str]:
    return {name for name, p in model.model.named_parameters() if p.requires_grad}


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


def logits(model: LocalModel, samples: list[Sample]) -> Tensor:
    prompts = model.encode(samples, [[load_image(p) for p in s.images] for s in samples])
    with torch.no_grad():
        made: Tensor = model.model(**prompts.inputs).logits[:, -1]
    return made


def train(
    folder: Path, samples: list[Sample], model: LocalModel, **rest: Any
) -> tuple[TrainResult, torch.optim.Optimizer]:
    trained = [p for p in model.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    settings = TrainConfig(
        steps=4,
        checkpoint_every=2,
        sampling=SamplingConfig(prompts_per_step=4, group_size=4, max_new_tokens=4),
        objective=GrpoConfig(kl_weight=0.01),
    )
    result = train_grpo(
        model, samples, optimizer, settings, folder=folder, seed=7,
        reward=lambda sample, text: float(text[:1].isdigit()), **rest,
    )  # fmt: skip
    return result, optimizer


def weights(model: LocalModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.model.state_dict().items()}


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return all(same_bits(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def values_of(result: TrainResult) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "timing"} for row in result.metrics]


def test_a_new_adapter_changes_nothing_and_depends_on_its_seed_alone(samples: list[Sample]) -> None:
    first = logits(small_model(), samples)
    before = torch.get_rng_state()
    model, again, other = adapted(), adapted(), adapted(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(model, samples), first)
    assert same_bits(weights(model), weights(again))
    assert not same_bits(weights(model), weights(other))
    assert model.model_hash() != other.model_hash()


def test_only_the_adapter_is_trained_and_merged_answers_as_the_adapter_does(
    samples: list[Sample], tmp_path: Path
) -> None:
    model, start = adapted(), weights(adapted())
    train(tmp_path, samples, model)
    end = weights(model)
    moved = {name for name in end if not torch.equal(end[name], start[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    learnt = logits(model, samples)
    first = logits(small_model(), samples)
    assert float((learnt - first).abs().max()) > 1e-2
    with without_adapter(model):
        assert torch.equal(logits(model, samples), first)
    merge_adapter(model)
    assert model.adapter is None
    assert model.model.state_dict().keys() == small_model().model.state_dict().keys()
    assert torch.allclose(logits(model, samples), learnt, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_resumed_equals_uninterrupted_bit_for_bit(
    samples: list[Sample], tmp_path: Path, dropout: float, stop_after: int
) -> None:
    torch.manual_seed(1)
    model = adapted(dropout=dropout)
    whole, optimizer = train(tmp_path / "whole", samples, model)
    steps = iter(range(1, 100))
    torch.manual_seed(1)
    part, _ = train(
        tmp_path / "parts", samples, adapted(dropout=dropout),
        stop=lambda: next(steps) == stop_after,
    )  # fmt: skip
    assert (part.steps, part.finished) == (stop_after, False)
    torch.manual_seed(2)
    going_on = adapted(dropout=dropout)
    rest, optimizer_rest = train(tmp_path / "parts", samples, going_on)
    assert rest.resumed_from == stop_after
    assert values_of(rest) == values_of(whole)
    assert same_bits(weights(going_on), weights(model))
    assert same_bits(optimizer_rest.state_dict(), optimizer.state_dict())


def test_drop_out_depends_on_the_seed_of_the_run_alone(
    samples: list[Sample], tmp_path: Path
) -> None:
    runs = []
    for number in range(2):
        torch.manual_seed(number)  # what a process begins with is not the same twice
        model = adapted(dropout=0.3)
        train(tmp_path / str(number), samples, model)
        runs.append(weights(model))
    assert same_bits(*runs)


def test_a_checkpoint_holds_the_adapter_alone_in_pefts_own_layout(
    samples: list[Sample], tmp_path: Path
) -> None:
    import peft

    kit: Any = peft
    model = adapted()
    result, _ = train(tmp_path, samples, model)
    assert not (result.model_folder / "model.safetensors").exists()
    size = (result.model_folder / "adapter_model.safetensors").stat().st_size
    whole = sum(t.numel() * t.element_size() for t in small_model().model.state_dict().values())
    assert size < whole / 2
    with quiet_transformers():
        theirs = kit.PeftModel.from_pretrained(small_model().model, result.model_folder)
    read = LocalModel(theirs.base_model.model, model.processor)
    assert torch.equal(logits(read, samples), logits(model, samples))
    with pytest.raises(DataError, match="holds an adapter"):
        LocalModel.load(result.model_folder)
    with pytest.raises(StateError, match="another starting model"):
        train(tmp_path, samples, small_model())
    with pytest.raises(StateError, match="another config"):
        train(tmp_path, samples, adapted(alpha=16.0))


def test_another_adapter_is_refused_not_half_loaded(samples: list[Sample], tmp_path: Path) -> None:
    from tierwise.curriculum.training.lora import load_adapter

    result, _ = train(tmp_path, samples, adapted())
    other = adapted(rank=2)
    before = weights(other)
    with pytest.raises(StateError, match="another adapter"):
        load_adapter(other.adapter, result.model_folder)
    assert same_bits(weights(other), before)


def test_divergence_is_measured_from_the_model_without_the_adapter(
    samples: list[Sample], tmp_path: Path
) -> None:
    model = adapted()
    learner = Learner(model, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), TrainConfig())
    assert learner.reference is None  # no second copy of the weights
    result, _ = train(tmp_path, samples, model)
    kl = [row["kl"] for row in result.metrics]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-6


def test_dropout_is_on_in_trained_passes_only(samples: list[Sample]) -> None:
    model = adapted(dropout=0.5)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    steady = logits(model, samples)
    assert torch.equal(logits(model, samples), steady)
    with adapter_dropout(model):
        assert not torch.equal(logits(model, samples), logits(model, samples))
        assert not model.model.training
    assert torch.equal(logits(model, samples), steady)


def test_targets_and_excluded_layers(samples: list[Sample]) -> None:
    everywhere = trained_names(adapted())
    assert any("vision" in name for name in everywhere)
    assert not any("lm_head" in name for name in everywhere)
    language = trained_names(adapted(exclude=("vision", "projector")))
    assert language
    assert not any("vision" in name or "projector" in name for name in language)
    chosen = trained_names(adapted(target_modules=("q_proj", "v_proj")))
    assert all(".q_proj." in name or ".v_proj." in name for name in chosen)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="rank"):
        LoraConfig(rank=0)
    with pytest.raises(ConfigError, match="dropout"):
        LoraConfig(dropout=1.0)
    with pytest.raises(ConfigError, match="empty"):
        LoraConfig(target_modules=())
    with pytest.raises(ConfigError, match="no layer is called 'w_proj'") as caught:
        adapted(target_modules=("w_proj",))
    assert "k_proj" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="no adapter can be put into this model"):
        adapted(target_modules=("language_model",))
    model = adapted()
    with pytest.raises(StateError, match="already"):
        attach_adapter(model, LoraConfig(), seed=1)


def test_supervised_steps_train_the_adapter(samples: list[Sample], tmp_path: Path) -> None:
    model = adapted(dropout=0.1)
    start = weights(model)
    trained = [p for p in model.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    result = train_sft(
        model, samples, {s.id: s.answer for s in samples}, optimizer,
        SftConfig(steps=20, batch_size=8), folder=tmp_path, seed=1,
    )  # fmt: skip
    losses = [row["loss"] for row in result.metrics]
    assert losses[-1] < losses[0] - 0.5
    end = weights(model)
    assert all("lora_" in name for name in end if not torch.equal(end[name], start[name]))


RECIPE = RecipeConfig(
    model="model", data="train/samples.jsonl", target_field="answer", seed=1,
    freeze=("vision",),
    lora=LoraConfig(rank=4, alpha=8.0, dropout=0.1),
    sft=SftConfig(steps=2, batch_size=4),
    grpo=TrainConfig(
        steps=2, checkpoint_every=1,
        sampling=SamplingConfig(prompts_per_step=4, group_size=4, max_new_tokens=6),
        objective=GrpoConfig(kl_weight=0.01),
    ),
)  # fmt: skip


def test_a_recipe_with_adapters_ends_in_one_model_wherever_it_was_stopped(tmp_path: Path) -> None:
    from tierwise.cli.curriculum_train import make_optimizer

    tasks.write_dataset(tmp_path / "train", num_samples=12, seed=3, split="train")
    model, processor = build.load_tiny()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    common: dict[str, Any] = {"base": tmp_path, "make_optimizer": make_optimizer}
    torch.manual_seed(5)
    whole = run_recipe(RECIPE, folder=tmp_path / "whole", **common)
    assert whole.model_folder == tmp_path / "whole" / "model"
    loaded = LocalModel.load(whole.model_folder)
    start = LocalModel.load(tmp_path / "model")
    moved = {
        name
        for name, tensor in loaded.model.state_dict().items()
        if not torch.equal(tensor, start.model.state_dict()[name])
    }
    assert moved
    assert not any("vision" in name for name in moved)
    torch.manual_seed(5)
    offloaded = replace(RECIPE, grpo_optimizer=replace(RECIPE.grpo_optimizer, offload=True))
    for recipe in (RECIPE, RECIPE, offloaded):
        part = run_recipe(recipe, folder=tmp_path / "parts", stop=lambda: True, **common)
        torch.manual_seed(6)
    assert part.finished
    name = "model/model.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    config = json.loads((tmp_path / "whole" / "model" / "config.json").read_text())
    assert "peft" not in json.dumps(config)
