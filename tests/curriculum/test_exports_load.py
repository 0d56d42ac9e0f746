"""What `select --layout` writes, read by the loaders that the trainers themselves call.

TRL is run for a step. verl and EasyR1 read through `datasets.load_dataset`, and take the rows apart
as below; their own packages, and ms-swift's, are not installed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tierwise.cli.main import run
from tierwise.curriculum.difficulty.scores import SCORES_NAME
from tierwise.curriculum.samples import read_samples
from tierwise.curriculum.tiny import build, tasks

datasets = pytest.importorskip("datasets")
pandas = pytest.importorskip("pandas")
pytestmark = pytest.mark.filterwarnings("ignore")  # the loaders' own


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scored data set."""
    folder = tmp_path_factory.mktemp("scored")
    tasks.write_dataset(folder, num_samples=6, seed=3, split="train")
    command = ["curriculum", "score", str(folder / "samples.jsonl"), "--model", "tiny"]
    small = ["num_attempts=1", "blind=false", "cmab=false", "permilles=[0]"]
    settings = [part for one in small for part in ("--set", one)]
    assert run([*command, "--out", str(folder / "scores"), *settings]) == 0
    assert (folder / "scores" / SCORES_NAME).is_file()
    return folder


@pytest.fixture
def load(home: Path, tmp_path: Path) -> Any:
    """Export in a layout and load it with `datasets`, from nothing it may have kept."""

    def exported(layout: str, kind: str) -> Any:
        path = tmp_path / f"arm.{'parquet' if kind == 'parquet' else 'jsonl'}"
        data = [str(home / "samples.jsonl"), "--scores", str(home / "scores")]
        options = ["--arm", "all", "--layout", layout, "--out", str(path)]
        assert run(["curriculum", "select", *data, *options]) == 0
        return datasets.load_dataset(
            kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
        )

    return exported


def test_trl_loads_and_trains_on_its_layout(
    load: Any, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl")
    from huggingface_hub import constants

    from tierwise.curriculum.training.trl_data import verdict_rewards

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    rows = load("trl", "json")
    samples = read_samples(home / "samples.jsonl").samples
    assert rows["id"] == [sample.id for sample in samples]
    seen: list[str] = []

    def reward(**columns: Any) -> list[float | None]:
        seen.extend(columns["id"])
        return verdict_rewards(**columns)

    model, processor = build.load_tiny()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=[reward],
        train_dataset=rows,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=24,
            num_generations=4, max_completion_length=6, learning_rate=1e-3, use_cpu=True,
            bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
            shuffle_dataset=False, disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.train()
    assert seen == [sample.id for sample in samples for _ in range(4)]
    assert any(not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


def test_verl_reads_its_parquet(load: Any, home: Path, tmp_path: Path) -> None:
    rows = load("verl", "parquet")
    frame = pandas.read_parquet(tmp_path / "arm.parquet")
    samples = read_samples(home / "samples.jsonl").samples
    assert len(rows) == len(frame) == len(samples)
    for row, sample in zip(rows, samples, strict=True):
        # as verl's RLHFDataset builds messages: tags become pictures, in order
        content = row["prompt"][0]["content"]
        assert content.count("<image>") == len(row["images"]) == 1
        assert content.replace("<image>", "") == sample.question
        with Image.open(row["images"][0]["image"].removeprefix("file://")) as picture:
            assert picture.size == (48, 48)
        assert row["reward_model"]["ground_truth"] == sample.answer
        assert row["data_source"]
    assert frame["reward_model"][0]["ground_truth"] == samples[0].answer


def test_easyr1_reads_its_rows(load: Any, home: Path) -> None:
    rows = load("easyr1", "json")
    samples = read_samples(home / "samples.jsonl").samples
    for row, sample in zip(rows, samples, strict=True):
        # as EasyR1's RLHFDataset asks for them: prompt_key, answer_key, image_key
        assert row["problem"] == f"<image>{sample.question}"
        assert row["answer"] == sample.answer
        with Image.open(row["images"][0]) as picture:
            assert picture.size == (48, 48)


@pytest.mark.parametrize("layout", ["ms-swift", "sharegpt"])
def test_the_other_layouts_load_as_json(load: Any, home: Path, layout: str) -> None:
    rows = load(layout, "json")
    samples = read_samples(home / "samples.jsonl").samples
    assert [json.dumps(row["images"]) for row in rows] == [
        json.dumps([str(image) for image in sample.images]) for sample in samples
    ]
