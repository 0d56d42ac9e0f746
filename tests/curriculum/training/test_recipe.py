"""A user's own TOML over their own JSONL: train, stop, go on, evaluate, compare, refuse."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tierwise.cli.main import run
from tierwise.core.config import load_config
from tierwise.core.errors import ConfigError
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training.recipe import (
    OptimizerConfig,
    RecipeConfig,
    freeze,
    judged,
    run_recipe,
)

RECIPE = """
model = "model"
data = "train/samples.jsonl"
held_out = "held/samples.jsonl"
seed = 1
freeze = ["vision"]
target_field = "answer"
[grpo]
steps = 2
checkpoint_every = 1
[grpo.sampling]
prompts_per_step = 4
group_size = 4
max_new_tokens = 6
[grpo.objective]
kl_weight = 0.01
[grpo_optimizer]
lr = 1e-3
[evaluate]
max_new_tokens = 6
num_draws = 2
"""
SFT = """
[sft]
steps = 2
batch_size = 4
[sft_optimizer]
lr = 1e-3
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("home")
    tasks.write_dataset(folder / "train", num_samples=12, seed=3, split="train")
    tasks.write_dataset(folder / "held", num_samples=6, seed=3, split="held_out")
    model, processor = build.load_tiny()
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "both.toml").write_text(RECIPE + SFT)
    return folder


def plain(
    module: torch.nn.Module, settings: OptimizerConfig, max_grad_norm: float
) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=settings.lr)


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "record.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k != "timing"} for row in rows]


def test_both_stages_stopped_anywhere_end_as_if_never_stopped(home: Path, tmp_path: Path) -> None:
    config = load_config(RecipeConfig, home / "both.toml")
    common: dict[str, Any] = {"base": home, "make_optimizer": plain}
    whole = run_recipe(config, folder=tmp_path / "whole", **common)
    assert whole.finished
    tries = 0
    while True:
        tries += 1
        part = run_recipe(config, folder=tmp_path / "parts", stop=lambda: True, **common)
        if part.finished:
            break
        assert part.model_folder is None
    assert tries == 3
    assert part.changes == whole.changes
    assert events(tmp_path / "parts") == events(tmp_path / "whole")
    weights = [
        (result.model_folder / "model.safetensors").read_bytes()
        for result in (whole, part)
        if result.model_folder is not None
    ]
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert (tmp_path / "whole" / "report.html").read_text().count("held-out samples") >= 1


def test_the_command_trains_goes_on_and_compares(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    out = tmp_path / "run"
    train = ["curriculum", "train", "recipe.toml", "--out", str(out), "--json"]
    assert run(train) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["grpo_steps"] == 2
    assert {"sampled_before", "sampled_after", "sampled_reads"} <= first.keys()
    assert run(train) == 0
    assert json.loads(capsys.readouterr().out) == first
    data = str(home / "held" / "samples.jsonl")
    small = ["--set", "max_new_tokens=6", "--set", "num_draws=2"]
    before, after = str(tmp_path / "before.jsonl"), str(tmp_path / "after.jsonl")
    assert run(["curriculum", "eval", "model", data, "--out", before, *small]) == 0
    against = ["--against", before]
    assert run(["curriculum", "eval", first["model"], data, "--out", after, *small, *against]) == 0
    said = capsys.readouterr().out
    assert "change all sampled" in said


def test_an_answer_without_a_verdict_is_not_a_wrong_one() -> None:
    sample = Sample(id="a", question="how many ?", answer="quite a few", task="counting")
    assert math.isnan(judged(sample, "3"))
    assert judged(replace(sample, answer="3"), "3") == 1.0
    assert judged(replace(sample, answer="3"), "4") == 0.0


def test_an_evaluation_without_a_verdict_prints_no_rate(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    rows = [json.loads(line) for line in (home / "held" / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"answer": "quite a few", "task": "counting"}  # no number to compare with
    (home / "held" / "unreadable.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "scores.jsonl"
    small = ["--set", "max_new_tokens=4", "--set", "num_draws=2"]
    command = ["curriculum", "eval", "model", "held/unreadable.jsonl", "--out", str(out)]
    assert run([*command, *small, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("samples") == 6
    assert Path(told.pop("scores")) == out
    says = "not known: no answer to its 6 samples could be judged"
    assert told == {
        "all greedy": says, "all sampled": says,
        "task:counting greedy": says, "task:counting sampled": says,
    }  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(row["greedy"] is None and set(row["sampled"]) == {None} for row in rows)


def test_offloaded_training_ends_with_the_same_bits(home: Path, tmp_path: Path) -> None:
    for name in ("true", "false"):
        command = ["curriculum", "train", str(home / "recipe.toml"), "--out", str(tmp_path / name)]
        assert (
            run([*command, "--set", f"grpo_optimizer.offload={name}", "--set", "held_out=''"]) == 0
        )
    found = [
        next((tmp_path / name).rglob("step-000002/model/model.safetensors")).read_bytes()
        for name in ("true", "false")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "mistake",
    [
        ("grpo.stepz=3", 4, "unknown key grpo.stepz"),
        ("grpo.steps=0", 4, "1 or more"),
        ("data='nowhere.jsonl'", 6, "no file"),
        ("model='nowhere'", 6, "no model folder"),
        ("grpo_optimizer.lr=-1", 4, "lr must be above 0"),
        ("grpo_optimizer.beta2=1", 4, "beta1 and beta2"),
        ("freeze=['wheels']", 4, "no parameter has 'wheels'"),
        ("target_field=3", 4, "target_field"),
        ("device='toaster'", 2, "no device 'toaster' here"),
    ],
)
def test_mistakes_get_one_sentence(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: tuple[str, int, str]
) -> None:
    change, code, says = mistake
    command = ["curriculum", "train", str(home / "recipe.toml"), "--out", str(tmp_path / "x")]
    assert run([*command, "--set", change]) == code
    assert says in capsys.readouterr().err


def test_nothing_to_do_is_refused(home: Path, tmp_path: Path) -> None:
    config = RecipeConfig(model="model", data="train/samples.jsonl")
    with pytest.raises(ConfigError, match="neither"):
        run_recipe(config, base=home, folder=tmp_path, make_optimizer=plain)
    with pytest.raises(ConfigError, match="nothing to train"):
        freeze(torch.nn.Linear(2, 2), ["weight", "bias"])


def test_a_recipe_that_cannot_go_on_leaves_the_folder_as_it_was(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["curriculum", "train", str(home / "recipe.toml"), "--out", str(tmp_path)]
    command += ["--set", "held_out=''"]
    assert run(command) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run([*command, "--set", "grpo_optimizer.lr=1e-5"]) == 10
    assert "another setting of the optimizer" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_scores_that_cannot_be_written_are_refused_before_anything_is_asked(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(home / "held" / "samples.jsonl")
    (tmp_path / "file").write_text("x")
    places = ((tmp_path, "is a folder"), (tmp_path / "file" / "s.jsonl", "file exists"))
    for out, says in places:
        assert run(["curriculum", "eval", str(home / "model"), data, "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert "evaluating" not in said
