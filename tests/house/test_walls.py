"""The walls: siblings do not know each other, core knows none, no tensor where none belongs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAPABILITIES = ("curriculum", "offload", "archive", "tco")


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=root,
        env={"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin", "HOME": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the sources, to break walls in."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignore)
    return tmp_path


def test_the_walls_stand(house: Path) -> None:
    done = lint_imports(house)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("tco", "import tierwise.offload"),
        ("archive", "from tierwise import curriculum"),
        ("curriculum", "import tierwise.offload.optimizer"),
        ("core", "import tierwise.tco"),
        ("tco", "import torch"),
        ("archive", "import torch"),
        ("core", "import numpy"),
        ("tco", "import tierwise.cli.main"),
        ("curriculum/difficulty", "import tierwise.curriculum.training.loop"),
        ("curriculum/training", "import tierwise.curriculum.experiment.study"),
    ],
)
def test_a_broken_wall_is_seen(house: Path, room: str, line: str) -> None:
    (house / "src" / "tierwise" / room / "hole.py").write_text(f'"""A hole."""\n\n{line}\n')
    done = lint_imports(house)
    assert done.returncode == 1, done.stdout
    assert "BROKEN" in done.stdout
    assert "tierwise." + room.replace("/", ".") in done.stdout.split("Broken contracts")[1]


@pytest.mark.parametrize("room", ["core", "archive", "tco", "cli"])
def test_importing_a_room_with_all_its_modules_loads_no_torch(room: str) -> None:
    names = [
        "tierwise." + ".".join(path.relative_to(ROOT / "src" / "tierwise").with_suffix("").parts)
        for path in sorted((ROOT / "src" / "tierwise" / room).rglob("*.py"))
        if path.stem != "__init__" and path.parent.name != "demo"  # the demo runs all four
    ]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "bad = {'torch', 'transformers'} & set(sys.modules)\nassert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_source_file_reads_pickles_or_runs_remote_code() -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert not {name.split(".")[0] for name in names} & banned, path
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "torch.load",
                "torch.save",
            ):
                pytest.fail(f"{path} reads or writes a pickle with torch")


def test_core_stays_thin() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "module_sizes.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"core: (\d+) of code", done.stdout)
    assert found is not None
    assert 100 < int(found[1]) <= 800


@pytest.mark.parametrize("room", CAPABILITIES)
def test_every_package_opens_with_its_map(room: str) -> None:
    source = (ROOT / "src" / "tierwise" / room / "__init__.py").read_text()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    assert "```" in docstring or "->" in docstring
