from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, SampleSet, read_samples
from tierwise.curriculum.tiny import build, tasks


@pytest.fixture(scope="session")
def tiny() -> LocalModel:
    """The model that ships."""
    return LocalModel.load(build.tiny_model_path())


@pytest.fixture(scope="session")
def random_tiny() -> Callable[[int, int], LocalModel]:
    """Untrained tiny models by (decoder layers, seed)."""

    def make(layers: int, seed: int) -> LocalModel:
        torch.set_num_threads(1)
        config = build.TinyConfig(layers=layers)
        return LocalModel(build.build_model(config, seed=seed), build.build_processor(config))

    return make


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    """Forty held-out samples of the tiny tasks, on disk."""
    folder = tmp_path_factory.mktemp("held_out")
    tasks.write_dataset(folder, num_samples=40, seed=3, split="held_out")
    return read_samples(folder / "samples.jsonl")


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[Sequence[str]], Path]:
    """Write lines into a JSONL file beside a good picture `good.png`; return the file."""
    from PIL import Image

    Image.new("RGB", (8, 6), (200, 10, 10)).save(tmp_path / "good.png")

    def write(lines: Sequence[str]) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def plain_sample(tmp_path: Path) -> Sample:
    """One sample with a picture of 10 x 10 white pixels; the answer is 1."""
    from PIL import Image

    path = tmp_path / "white.png"
    Image.new("RGB", (10, 10), (255, 255, 255)).save(path)
    return Sample(id="white", question="is it white ?", answer="1", images=(path,))
