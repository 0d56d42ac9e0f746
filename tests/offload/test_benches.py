"""The GPU script runs end to end at toy size, so that a card's time is not spent on debugging it.

The examples print equal hashes.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], capture_output=True, text=True,
        check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_gpu_script_on_the_cpu_lane() -> None:
    lines = run("bench/offload_gpu.py", "--toy").splitlines()
    counts = {line[:70].strip(): line[70:].split() for line in lines}
    assert counts["trained weights, OffloadAdamW against host AdamW"][0] == "0"
    assert all(words[0] == "0" for words in counts.values() if words[1] == "differ")
    assert sum("OffloadAdamW, defer" in name for name in counts) == 2
    assert "measured step over predicted bound" in counts


@pytest.mark.parametrize("name", ["offload_plain.py", "offload_trainer.py"])
def test_examples_print_equal_hashes(name: str) -> None:
    if name == "offload_trainer.py" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("the HF Trainer needs accelerate")
    assert run(f"examples/{name}").splitlines()[-1] == "equal"
