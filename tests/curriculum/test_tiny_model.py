"""The shipped model: ordinary loading without network, its size, and what it can do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tierwise.core.errors import MissingFileError
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.tiny.evaluate import answer_questions, measure_accuracy

Tiny = tuple[Any, Any]

GREEDY_FLOOR = 0.625  # measured 0.675 on these 200, less 0.05

LOAD_OFFLINE = """
import sys
sys.modules["torchvision"] = None
from transformers import AutoModelForImageTextToText, AutoProcessor
from tierwise.curriculum.tiny.build import load_tiny, tiny_model_path
from tierwise.curriculum.tiny.tasks import draw_sample
from tierwise.curriculum.tiny.evaluate import answer_questions
model, processor = load_tiny()
sample = draw_sample(0, 0, "held_out")
print(type(model).__name__, type(processor).__name__)
print(answer_questions(model, processor, [sample])[0])
"""


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    torch.set_num_threads(1)
    return build.load_tiny()


@pytest.fixture(scope="module")
def samples() -> list[tasks.Sample]:
    return list(tasks.draw_samples(200, seed=0, split="held_out"))


@pytest.fixture(scope="module")
def answers(tiny: Tiny, samples: list[tasks.Sample]) -> list[str]:
    return answer_questions(tiny[0], tiny[1], samples)


def test_loads_offline_without_torchvision_and_without_a_word() -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD_OFFLINE],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    classes, answer = done.stdout.splitlines()
    assert classes == "LlavaForConditionalGeneration LlavaProcessor"
    assert tasks.final_answer(answer).isdigit()
    assert done.stderr == ""


def test_is_small(tiny: Tiny) -> None:
    model, _ = tiny
    assert sum(one.numel() for one in model.parameters()) < 2_000_000
    assert all(one.dtype is torch.float32 for one in model.parameters())
    assert model.config.text_config.num_hidden_layers >= 4
    size = sum(path.stat().st_size for path in build.tiny_model_path().iterdir())
    assert size < 4_000_000


def test_greedy_accuracy_on_held_out_samples(
    samples: list[tasks.Sample], answers: list[str]
) -> None:
    measured = measure_accuracy(samples, answers)
    assert measured.num_asked == 200
    assert measured.share >= GREEDY_FLOOR


def test_needs_to_look_except_for_hints(tiny: Tiny, samples: list[tasks.Sample]) -> None:
    blind = measure_accuracy(samples, answer_questions(tiny[0], tiny[1], samples, blind=True))
    right_hints, num_hints = blind.by_task["hint"]
    assert right_hints / num_hints > 0.8
    assert (blind.num_right - right_hints) / (blind.num_asked - num_hints) < 0.3


def test_sampling_leaves_room_below_greedy(
    tiny: Tiny, samples: list[tasks.Sample], answers: list[str]
) -> None:
    sampled = answer_questions(tiny[0], tiny[1], samples, temperature=1.0, seed=1)
    greedy = measure_accuracy(samples, answers).share
    assert measure_accuracy(samples, sampled).share < greedy - 0.05
    assert sampled == answer_questions(tiny[0], tiny[1], samples, temperature=1.0, seed=1)
    assert sampled != answer_questions(tiny[0], tiny[1], samples, temperature=1.0, seed=2)


def test_eager_attention_gives_the_same_tokens_and_gives_maps(
    samples: list[tasks.Sample], answers: list[str]
) -> None:
    model, processor = cast("Tiny", build.load_tiny())
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    assert answer_questions(model, processor, samples) == answers
    inputs = processor(
        text=build.prompt(samples[0].question), images=samples[0].image, return_tensors="pt"
    )
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions
    length = inputs["input_ids"].shape[1]
    assert len(maps) == model.config.text_config.num_hidden_layers
    assert maps[0].shape == (1, model.config.text_config.num_attention_heads, length, length)


def test_batching_and_padding_do_not_change_answers(
    tiny: Tiny, samples: list[tasks.Sample], answers: list[str]
) -> None:
    assert answer_questions(tiny[0], tiny[1], samples[:12], batch_size=1) == answers[:12]


def test_save_and_load_keep_every_weight(tiny: Tiny, tmp_path: Path) -> None:
    model, processor = tiny[0], build.build_processor(build.TinyConfig())
    (tmp_path / "mine.txt").write_text("keep")
    build.save_tiny(model, processor, tmp_path, {"seed": 0})
    again, _ = build.load_tiny(tmp_path)
    for (name, one), (other_name, other) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert torch.equal(one, other)
    assert (tmp_path / "mine.txt").read_text() == "keep"
    shipped = build.tiny_model_path()
    assert {path.name for path in shipped.iterdir()} <= {path.name for path in tmp_path.iterdir()}
    for name in ("tokenizer.json", "processor_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (shipped / name).read_bytes()


def test_chat_template_writes_the_trained_prompt(tiny: Tiny) -> None:
    _, processor = tiny
    question = "what is the sum of the digits ?"
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
    said = {"role": "assistant", "content": [{"type": "text", "text": "3 + 5 = 8"}]}
    asked = processor.apply_chat_template([turn], add_generation_prompt=True)
    assert asked == build.prompt(question)
    both = processor.apply_chat_template([turn, said])
    assert both == f"{build.prompt(question)}3 + 5 = 8<eos>"


def test_numbers_are_single_tokens_and_spacing_does_not_matter() -> None:
    tokenizer: Any = build.build_tokenizer()
    assert all(len(tokenizer(str(number)).input_ids) == 1 for number in range(19))
    assert tokenizer("3+5=8").input_ids == tokenizer("3 + 5 = 8").input_ids
    assert tokenizer("How many Red circles?").input_ids == (
        tokenizer("how many red circles ?").input_ids
    )
    assert tokenizer.decode(tokenizer("7 - 2 = 5").input_ids) == "7 - 2 = 5"
    assert tokenizer("zebra").input_ids == [tokenizer.unk_token_id]


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no model in"):
        build.load_tiny(tmp_path)


def test_the_card_says_what_was_measured() -> None:
    card = json.loads((build.tiny_model_path() / build.CARD_NAME).read_text())
    held_out = card["held_out"]
    assert held_out["n"] >= 1000
    for measured in held_out["accuracy"].values():
        rows = measured["by_task"].values()
        assert sum(row["n"] for row in rows) == held_out["n"]
        share = sum(row["right"] for row in rows) / held_out["n"]
        assert measured["share"] == pytest.approx(share, abs=1e-4)
    assert set(card["versions"]) == {"torch", "transformers", "numpy"}
