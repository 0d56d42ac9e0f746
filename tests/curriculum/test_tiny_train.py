"""Training the tiny model: same bytes for a seed, packing changes nothing, the teacher's noise."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tierwise.core.errors import TrainingError, UsageError
from tierwise.curriculum.tiny import batches, build, tasks, train
from tierwise.curriculum.tiny.muon import Muon, orthogonalize

SMALL = train.TrainConfig(
    steps=3, noisy_steps=1, scenes_per_step=2, questions_per_scene=2, warmup_steps=1
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    arguments = ["--steps", "3", "--noisy-steps", "1", "--held-out", "20"]
    for name in ("first", "again"):
        assert train.main([*arguments, "--out", str(tmp_path / name)]) == 0
    first, again = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again")
    )
    assert first == again
    card = json.loads((tmp_path / "first" / build.CARD_NAME).read_text())
    assert card["training"]["steps"] == 3
    assert card == json.loads((tmp_path / "again" / build.CARD_NAME).read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"first", "again"}


def test_another_seed_is_another_model() -> None:
    first, same, other = (train.train_tiny(replace(SMALL, seed=seed)) for seed in (0, 0, 1))
    name = "lm_head.weight"
    assert torch.equal(first.state_dict()[name], same.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


def test_some_steps_lower_the_loss() -> None:
    sizes = build.TinyConfig()
    batch = batches.Packer(sizes).draw_batch(
        seed=5, step=0, num_scenes=8, num_questions=3, noise=None
    )
    untrained: Any = build.build_model(sizes, seed=0).train(mode=False)
    config = train.TrainConfig(steps=15, noisy_steps=0, scenes_per_step=8, warmup_steps=3)
    trained = train.train_tiny(config)
    with torch.no_grad():
        before, after = (train.answer_loss(model, batch).item() for model in (untrained, trained))
    assert after < before - 0.5


def test_a_packed_batch_is_the_same_as_asking_one_by_one() -> None:
    sizes = build.TinyConfig()
    model = build.build_model(sizes, seed=1).train(mode=False)
    packer = batches.Packer(sizes)
    packed = packer.draw_batch(seed=2, step=7, num_scenes=3, num_questions=4, noise=None)
    processor = build.build_processor(sizes)
    total, num_tokens = 0.0, 0
    for place in range(3):
        rng = tasks.sample_rng(2, 7 * 3 + place, "train")
        scene = tasks.draw_scene(rng, "train")
        for question in [tasks.ask(scene, rng) for _ in range(4)]:
            text = build.prompt(question.text)
            inputs = processor(
                text=f"{text}{question.target}{build.END}",
                images=_picture(scene),
                return_tensors="pt",
            )
            num_answer = len(question.target.split()) + 1
            labels = inputs["input_ids"].clone()
            labels[:, :-num_answer] = -100
            with torch.no_grad():
                loss = model(**inputs, labels=labels).loss.item()
            total, num_tokens = total + loss * num_answer, num_tokens + num_answer
    with torch.no_grad():
        assert train.answer_loss(model, packed).item() == pytest.approx(
            total / num_tokens, rel=1e-5
        )


def _picture(scene: tasks.Scene) -> object:
    from PIL import Image

    return Image.fromarray(scene.pixels)


def test_the_processor_and_the_trainer_see_the_same_pixels() -> None:
    samples = list(tasks.draw_samples(12, seed=1, split="train"))
    processor = build.build_processor(build.TinyConfig())
    inputs = processor(
        text=[build.prompt(sample.question) for sample in samples],
        images=[sample.image for sample in samples],
        return_tensors="pt",
        padding=True,
    )
    trained = batches.normalized_pixels(np.stack([np.asarray(one.image) for one in samples]))
    torch.testing.assert_close(inputs["pixel_values"], trained)


def test_the_noisy_teacher_is_wrong_by_one_in_the_last_number_only() -> None:
    rng = np.random.default_rng(0)
    noise = batches.Noise(share=0.4, share_below=0.7)
    question = tasks.Question(
        text="what is the sum of the digits ?",
        answer="8",
        target="3 + 5 = 8",
        task=tasks.Task.SUM,
    )
    drawn = Counter(batches.noisy_target(question, rng, noise) for _ in range(4000))
    assert set(drawn) == {"3 + 5 = 8", "3 + 5 = 7", "3 + 5 = 9"}
    assert drawn["3 + 5 = 8"] / 4000 == pytest.approx(0.6, abs=0.03)
    assert drawn["3 + 5 = 7"] / 4000 == pytest.approx(0.28, abs=0.03)


@pytest.mark.parametrize(("answer", "only"), [("0", "1"), ("18", "17")])
def test_a_wrong_number_stays_in_range(answer: str, only: str) -> None:
    rng = np.random.default_rng(0)
    question = tasks.Question(text="?", answer=answer, target=answer, task=tasks.Task.COUNT)
    always = batches.Noise(share=1.0, share_below=0.5)
    assert {batches.noisy_target(question, rng, always) for _ in range(50)} == {only}


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((96, 96), (96, 288), (128, 432)):
        values = torch.linalg.svdvals(
            orthogonalize(torch.randn(2, rows, columns, generator=generator))
        )
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_muon_moves_tall_and_wide_matrices_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.nn.Parameter(torch.randn(6, 20, generator=generator))
    tall = torch.nn.Parameter(wide.detach().T.clone())
    still = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([wide, tall, still], lr=0.01)
    for _ in range(3):
        gradient = torch.randn(6, 20, generator=generator)
        wide.grad, tall.grad = gradient, gradient.T.clone()
        optimizer.step()
    torch.testing.assert_close(wide.detach(), tall.detach().T)
    assert torch.equal(still.detach(), torch.ones(2, 2))


def test_every_parameter_has_one_optimizer() -> None:
    model = build.build_model(build.TinyConfig(), seed=0)
    optimizers = train.build_optimizers(model, SMALL)
    owned = [
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    assert sorted(owned) == sorted(id(parameter) for parameter in model.parameters())


def test_a_loss_that_is_not_a_number_stops_the_run() -> None:
    config = train.TrainConfig(
        steps=6, noisy_steps=0, scenes_per_step=2, warmup_steps=1, other_lr=float("inf")
    )
    with pytest.raises(TrainingError, match="the loss is"):
        train.train_tiny(config)


def test_nonsense_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        train.main(["--out", str(tmp_path / "x"), "--steps", "0"])
    assert not (tmp_path / "x").exists()
