"""docs/guide/curriculum.md, block by block, as a new user would type it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tierwise.core.config import parse_config
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import read_samples
from tierwise.curriculum.tiny.build import tiny_model_path
from tierwise.curriculum.training.recipe import RecipeConfig

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "curriculum.md"
_BLOCK = re.compile(r"<!-- walk(?:: file (\S+))? -->\n```(sh|python|toml)\n(.*?)```", re.DOTALL)
_ACCURACY = re.compile(r"[01]\.\d{4} \[[01]\.\d{4}, [01]\.\d{4}\] of 40")


def blocks() -> list[tuple[str, str, str]]:
    found = _BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    assert len(found) >= 12
    return found


def walk(folder: Path) -> dict[str, str]:
    """Save the files and run the commands in their order; return what each block printed."""
    scripts = Path(sys.executable).parent
    env = os.environ | {
        "PATH": f"{scripts}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
    }  # fmt: skip
    said = {}
    for name, _, text in blocks():
        if name:
            (folder / name).write_text(text, encoding="utf-8")
            continue
        done = subprocess.run(
            ["bash", "-euc", text], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        said[text] = done.stdout
    return said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_guide(tmp_path: Path) -> None:
    said = walk(tmp_path)
    printed = {text.split("--out ")[-1].split()[0]: out for text, out in said.items()}
    assert _ACCURACY.search(printed["before.jsonl"])
    after = next(out for text, out in said.items() if "--against" in text)
    assert after.count("change all sampled") == 2
    assert "change task:counting greedy" in after
    arm = read_samples(tmp_path / "arm.jsonl").samples
    assert 2 <= len(arm) < 60
    assert len((tmp_path / "arm-trl.jsonl").read_text().splitlines()) == len(arm)
    for name in ("run", "run-trl", "run-whole"):
        assert (tmp_path / name / "report.html").is_file()
        events = (tmp_path / name / "grpo" / "record.jsonl").read_text().splitlines()
        assert len(events) == 1 + 12
        assert {"reward", "loss", "grad_norm"} <= json.loads(events[-1]).keys()
    hashes = [LocalModel.load(tiny_model_path()).model_hash()]
    for name in ("run", "run-trl", "run-whole"):
        folder = tmp_path / name / "grpo" / "checkpoints" / "step-000012" / "model"
        hashes.append(LocalModel.load(folder).model_hash())
    assert len(set(hashes)) == 3  # three are trained, two of them by the same loop and seed
    assert hashes[1] == hashes[3]
    assert "held-out samples" in (tmp_path / "run-whole" / "report.html").read_text()


def test_its_files_are_what_it_says() -> None:
    """What does not need the minute: the recipes are read, the snippet is short, the links lead."""
    files = {name: text for name, _, text in blocks() if name}
    assert len([line for line in files["recipe.toml"].splitlines() if line.strip()]) <= 20
    assert parse_config(RecipeConfig, files["recipe.toml"]).grpo is not None
    text = GUIDE.read_text(encoding="utf-8")
    (large,) = re.findall(r"   ```toml\n(.*?)   ```", text, re.DOTALL)
    assert tomllib.loads(large)["device"] == "cuda"
    config = parse_config(RecipeConfig, large)
    assert config.lora is not None
    for link in re.findall(r"\]\((\.\./[^)#]+)", text):
        assert (GUIDE.parent / link).is_file(), link
    headings = re.findall(
        r"^#+ (.*)$", (GUIDE.parents[1] / "training.md").read_text(), re.MULTILINE
    )
    for anchor in re.findall(r"training\.md#([a-z-]+)\)", text):
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
