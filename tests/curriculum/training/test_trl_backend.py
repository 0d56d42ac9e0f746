"""The same recipe through TRL's trainers: same order, same numbers, resumed bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tierwise.cli.curriculum_train import make_optimizer
from tierwise.cli.main import run
from tierwise.core.config import load_config
from tierwise.core.errors import StateError, TrainingError
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, read_samples
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training import sft
from tierwise.curriculum.training.book import TrainResult
from tierwise.curriculum.training.experience import SamplingConfig, take
from tierwise.curriculum.training.grpo import GrpoConfig, Loss, Scale
from tierwise.curriculum.training.learner import TrainConfig
from tierwise.curriculum.training.recipe import RecipeConfig, judged, run_recipe
from tierwise.curriculum.training.sft import SftConfig, target_rows
from tierwise.curriculum.training.trl_data import sft_row, verdict_rewards

trl_backend = pytest.importorskip("tierwise.curriculum.training.trl_backend")
pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own

SMALL = TrainConfig(
    steps=4,
    warmup_steps=2,
    checkpoint_every=1,
    sampling=SamplingConfig(prompts_per_step=4, group_size=4, max_new_tokens=6),
    objective=GrpoConfig(kl_weight=0.0),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def samples(data: Path) -> tuple[Sample, ...]:
    """Six of the tiny tasks: fewer than two steps take, so that the order runs over its end."""
    tasks.write_dataset(data, num_samples=6, seed=3, split="train")
    return read_samples(data / "samples.jsonl").samples


@pytest.fixture
def fresh() -> LocalModel:
    """A model to train."""
    return LocalModel.load(build.tiny_model_path())


def adamw(model: LocalModel, lr: float = 1e-4) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.model.parameters() if p.requires_grad], lr=lr)


def weights(model: LocalModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.model.state_dict().items()}


def reinforce(
    samples: tuple[Sample, ...], config: TrainConfig, folder: Path, **more: Any
) -> tuple[TrainResult, LocalModel]:
    model = LocalModel.load(build.tiny_model_path())
    more = {"reward": judged, "seed": 1} | more
    result = trl_backend.train_grpo(model, samples, adamw(model), config, folder=folder, **more)
    return result, model


def untimed(result: TrainResult) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "timing"} for row in result.metrics]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"samples_per_pass": 2, "gradient_checkpointing": True},
        {"bf16": True},
    ],
)
def test_fine_tuning_gives_the_numbers_of_our_own_loop(
    samples: tuple[Sample, ...], tmp_path: Path, more: dict[str, Any]
) -> None:
    """Loss, gradient and rate of each step agree only where order, tokens and means do."""
    config = SftConfig(steps=5, batch_size=4, shuffle=True, **more)
    targets = {sample.id: f"so {sample.answer}" for sample in samples}
    rows = {}
    for name, train in (("own", sft.train_sft), ("trl", trl_backend.train_sft)):
        model = LocalModel.load(build.tiny_model_path())
        result = train(
            model, samples, targets, adamw(model), config, folder=tmp_path / name, seed=2
        )
        assert result.finished
        rows[name] = untimed(result)
        assert not any(
            getattr(one, "gradient_checkpointing", False) for one in model.model.modules()
        )
    close = 0.1 if config.bf16 else 1e-3
    for own, trl in zip(rows["own"], rows["trl"], strict=True):
        # not bit by bit: we keep the image token out of the probabilities, TRL does not
        assert trl["loss"] == pytest.approx(own["loss"], rel=close)
        assert trl["grad_norm"] == pytest.approx(own["grad_norm"], rel=close)
        assert trl["lr"] == own["lr"]


def test_the_tokens_learnt_are_ours(fresh: LocalModel, samples: tuple[Sample, ...]) -> None:
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    targets = ["7", "3 + 5 = 8"]
    collate = DataCollatorForVisionLanguageModeling(fresh.processor, completion_only_loss=True)
    rows = [sft_row(fresh, sample, text) for sample, text in zip(samples, targets, strict=False)]
    labels = collate(rows)["labels"]
    ours = target_rows(fresh, samples[:2], targets)
    for row, tokens, mask in zip(labels, ours.token_ids_BT, ours.mask_BT, strict=True):
        assert row[row != -100].tolist() == tokens[mask].tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_trained_on_is_ours(
    samples: tuple[Sample, ...], tmp_path: Path, shuffle: bool
) -> None:
    seen: list[str] = []

    def note(sample: Sample, text: str) -> float:
        seen.append(sample.id)
        return judged(sample, text)

    config = replace(SMALL, sampling=replace(SMALL.sampling, shuffle=shuffle, prompts_per_pass=2))
    reinforce(samples, config, tmp_path, reward=note)
    ours = [take(samples, place, shuffle=shuffle, seed=1).id for place in range(4 * 4)]
    assert seen == [name for name in ours for _ in range(4)]
    assert len(set(ours)) == 6


def test_the_prompt_is_ours(fresh: LocalModel, samples: tuple[Sample, ...], tmp_path: Path) -> None:
    from trl.data_utils import apply_chat_template, prepare_multimodal_messages

    from tierwise.curriculum.training.trl_data import grpo_row

    two = replace(samples[0], question="left <image> right <image> ?", images=samples[0].images * 2)
    for sample in (samples[0], two):
        row = grpo_row(fresh, sample)
        filled = prepare_multimodal_messages(row["prompt"], images=row["images"])
        text = apply_chat_template({"prompt": filled}, fresh.processor)["prompt"]
        assert text == fresh.prompt_text(sample.question, num_images=len(sample.images))


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        pytest.param(
            replace(
                SMALL,
                inner_updates=2,
                objective=GrpoConfig(
                    loss=Loss.DAPO, scale=Scale.NONE, clip_high=0.28, kl_weight=0.01
                ),
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stopped_after_every_step_it_ends_with_the_same_bits(
    samples: tuple[Sample, ...], tmp_path: Path, config: TrainConfig
) -> None:
    whole, model = reinforce(samples, config, tmp_path / "whole")
    start = weights(LocalModel.load(build.tiny_model_path()))
    for step in range(1, 5):
        part, other = reinforce(samples, config, tmp_path / "parts", stop=lambda: True)
        assert part.resumed_from == step - 1
        assert part.finished == (step == 4)
    ends = weights(model)
    assert any(not torch.equal(ends[name], start[name]) for name in ends)
    assert all(torch.equal(tensor, ends[name]) for name, tensor in weights(other).items())
    assert untimed(part) == untimed(whole)
    again = LocalModel.load(part.model_folder)
    assert all(torch.equal(tensor, ends[name]) for name, tensor in weights(again).items())
    last = whole.metrics[-1]
    for name in ("reward", "zero_advantage_share", "grad_norm", "completion_tokens", "lr", "loss"):
        assert isinstance(last[name], float)
    assert [row["lr"] for row in whole.metrics][:2] == [5e-5 * config.inner_updates, 1e-4]
    assert ("kl" in last) is (config.objective.kl_weight > 0)


def test_another_backend_or_seed_is_another_run(
    samples: tuple[Sample, ...], tmp_path: Path, fresh: LocalModel
) -> None:
    from tierwise.curriculum.training.loop import train_grpo

    short = replace(SMALL, steps=1)
    reinforce(samples, short, tmp_path)
    with pytest.raises(StateError, match="another config"):
        train_grpo(fresh, samples, adamw(fresh), short, folder=tmp_path, seed=1, reward=judged)
    with pytest.raises(StateError, match="another seed"):
        reinforce(samples, short, tmp_path, seed=2)


def test_a_step_that_cannot_be_trusted_ends_the_run(
    samples: tuple[Sample, ...], tmp_path: Path
) -> None:
    def broken(sample: Sample, text: str) -> float:
        raise OSError("no judge")

    with pytest.raises(TrainingError, match=r"no reward at all .OSError: no judge. at step 1"):
        reinforce(samples, SMALL, tmp_path / "raising", reward=broken)
    flat = replace(SMALL, max_flat_steps=2)
    with pytest.raises(TrainingError, match="equal rewards in every group for 2 steps"):
        reinforce(samples, flat, tmp_path / "flat", reward=lambda sample, text: 1.0)
    with pytest.raises(TrainingError, match=r"no reward at all .a reward is infinite"):
        reinforce(samples, SMALL, tmp_path / "inf", reward=lambda sample, text: float("inf"))
    with pytest.raises(TrainingError, match="no samples"):
        reinforce((), SMALL, tmp_path / "none")


def test_a_reward_that_hangs_ends_the_run_and_tensorboard_files_are_written(
    samples: tuple[Sample, ...], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")

    def hang(sample: Sample, text: str) -> float:
        time.sleep(5)
        return 1.0

    hasty = replace(SMALL, reward_timeout_s=0.2)
    with pytest.raises(TrainingError, match=r"did not come within 0.2 s at step 1") as caught:
        reinforce(samples, hasty, tmp_path / "hanging", reward=hang)
    assert "reward_timeout_s" in str(caught.value.hint)
    reinforce(samples, replace(SMALL, steps=1, tensorboard=True), tmp_path / "board")
    assert list((tmp_path / "board").glob("*tfevents*"))


def test_weights_that_are_no_numbers_end_the_run(
    samples: tuple[Sample, ...], tmp_path: Path
) -> None:
    def breaking(model: LocalModel) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.model.parameters(), lr=1e30, weight_decay=0.0)

    model, other = (LocalModel.load(build.tiny_model_path()) for _ in range(2))
    targets = {sample.id: sample.answer for sample in samples}
    config = SftConfig(steps=3, batch_size=4, warmup_share=0.0)
    with pytest.raises(TrainingError, match=r"gradient norm is nan at step 2, samples") as caught:
        trl_backend.train_sft(
            model, samples, targets, breaking(model), config, folder=tmp_path / "sft", seed=1
        )
    assert "step-000000" in str(caught.value.hint)
    with pytest.raises(TrainingError, match="probabilities are not numbers at step 2"):
        trl_backend.train_grpo(
            other, samples, breaking(other), replace(SMALL, warmup_steps=0),
            folder=tmp_path / "grpo", seed=1, reward=judged,
        )  # fmt: skip


def test_the_verdicts_are_a_reward_function_of_trl() -> None:
    message = [[{"role": "assistant", "content": [{"type": "text", "text": " 3 + 5 = 8 "}]}]]
    assert verdict_rewards(message, ["8"], ["sum"]) == [1.0]
    assert verdict_rewards(["helo world", "B"], ["hello world", "A"], ["ocr", ""]) == [
        pytest.approx(10 / 11),
        0.0,
    ]
    assert verdict_rewards(["[1, 2, 3, 4]"], ["no box"], ["detection"]) == [None]


RECIPE = """
model = "tiny"
data = "samples.jsonl"
target_field = "answer"
seed = 1
backend = "trl"
freeze = ["vision"]
[sft]
steps = 2
batch_size = 4
[grpo]
steps = 2
[grpo.sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = 6
[grpo.objective]
kl_weight = 0.01
[sft_optimizer]
lr = 1e-4
[grpo_optimizer]
lr = 1e-4
[evaluate]
max_new_tokens = 6
num_draws = 2
"""


@pytest.fixture
def home(data: Path, samples: tuple[Sample, ...], tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    shutil.copytree(data, folder)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def test_the_command_trains_both_stages_reports_and_asks_no_network(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []  # not raised: it may be asked in a thread

    def note(*arguments: object) -> None:
        asked.append(arguments[1:])
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", note)
    monkeypatch.setattr(socket, "getaddrinfo", note)
    command = ["curriculum", "train", str(home / "recipe.toml"), "--out", str(home / "run")]
    assert run([*command, "--json", "--set", "held_out='samples.jsonl'"]) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert (record["sft_steps"], record["grpo_steps"]) == (2, 2)
    assert {"sampled_before", "sampled_after", "sampled_reads"} <= record.keys()
    assert all(line.startswith('{"progress"') for line in said.err.splitlines())
    assert asked == []
    page = (home / "run" / "report.html").read_text()
    assert "Groups that agree" in page
    start = LocalModel.load(build.tiny_model_path()).model.state_dict()
    ends = LocalModel.load(record["model"]).model.state_dict()
    for name, tensor in ends.items():
        assert not ("vision" in name and not torch.equal(tensor, start[name]))
    assert any(not torch.equal(tensor, start[name]) for name, tensor in ends.items())


@pytest.mark.slow
def test_an_adapter_is_trained_stopped_merged_and_nothing_else_changes(
    home: Path,
) -> None:
    config = load_config(
        RecipeConfig,
        home / "recipe.toml",
        ["grpo.objective.kl_weight=0.0", "lora.rank=2", "lora.target_modules=['q_proj']"],
    )
    common: dict[str, Any] = {"base": home, "make_optimizer": make_optimizer}
    whole = run_recipe(config, folder=home / "whole", **common)
    parts = [
        run_recipe(config, folder=home / "parts", stop=lambda: True, **common) for _ in range(3)
    ]
    assert [one.finished for one in parts] == [False, False, True]
    folders = [one.model_folder for one in (whole, parts[-1]) if one.model_folder is not None]
    start = LocalModel.load(build.tiny_model_path()).model.state_dict()
    ends, same = (LocalModel.load(folder).model.state_dict() for folder in folders)
    changed = {name for name in start if not torch.equal(start[name], ends[name])}
    assert changed
    assert all("language_model" in name and "q_proj.weight" in name for name in changed)
    assert all(torch.equal(same[name], tensor) for name, tensor in ends.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("grpo.sampling.refill=true", "grpo.sampling.refill = true is not for backend = trl"),
        ("grpo_optimizer.offload=true", "grpo_optimizer.offload = true is not for backend"),
        ("sft_optimizer.offload=true", "sft_optimizer.offload = true is not for backend"),
        ("grpo.sampling.prompts_per_pass=3", "prompts_per_step = 4 is no multiple of"),
        ("sft.samples_per_pass=3", "sft.batch_size = 4 is no multiple of"),
        ("lora.rank=4", "lora with grpo.objective.kl_weight above 0 is not for backend = trl"),
        ("backend='axolotl'", "backend"),
    ],
)
def test_what_trl_cannot_do_is_refused_by_name(
    home: Path, capsys: pytest.CaptureFixture[str], change: str, says: str
) -> None:
    command = ["curriculum", "train", str(home / "recipe.toml"), "--out", str(home / "run")]
    assert run([*command, "--set", change]) == 4
    assert says in capsys.readouterr().err
    assert not (home / "run").exists()


@pytest.mark.slow
def test_two_processes_train_one_model_and_resume(home: Path) -> None:
    """`accelerate launch` on the CPU: gloo, two processes, as docs/training.md has it."""
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    source = str(Path(trl_backend.__file__).parents[3])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}

    def launch(out: str, *more: str) -> subprocess.CompletedProcess[str]:
        start = [accelerate, "launch", "--multi_gpu", "--num_processes", "2", "-m", "tierwise"]
        train = ["curriculum", "train", "recipe.toml", "--out", out, "--json", *more]
        return subprocess.run(
            [*start, *train], cwd=home, env=env, capture_output=True, text=True, check=False,
            timeout=300,
        )  # fmt: skip

    half = ["--set", "grpo.checkpoint_every=1"]
    done = launch("whole", *half)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1
    assert json.loads(lines[0])["grpo_steps"] == 2
    events = [json.loads(x) for x in (home / "whole/grpo/record.jsonl").read_text().splitlines()]
    assert [event.get("step") for event in events] == [None, 1, 2]
    assert [event["lr"] for event in events[1:]] == [1e-4, 1e-4]
    shutil.copytree(home / "whole", home / "again")
    shutil.rmtree(home / "again/grpo/checkpoints/step-000002")
    assert launch("again", *half).returncode == 0
    files = [
        (home / name / "grpo/checkpoints/step-000002/model/model.safetensors").read_bytes()
        for name in ("whole", "again")
    ]
    assert files[0] == files[1]
    refused = launch("held", "--set", "held_out='samples.jsonl'")
    assert refused.returncode != 0
    assert "held_out is not for several processes" in refused.stderr
