"""The demo's steps in order."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import tierwise
from tierwise.cli.demo.cost import run_cost
from tierwise.cli.demo.keep import let_go, run_keep
from tierwise.cli.demo.page import run_page
from tierwise.cli.demo.settings import DemoSettings
from tierwise.cli.demo.study import pool_path, run_data, run_study
from tierwise.cli.demo.training import run_training
from tierwise.cli.steps import Step, StepContext, run_steps
from tierwise.core.config import dump_config
from tierwise.core.progress import Progress
from tierwise.core.records import hash_file, write_manifest
from tierwise.curriculum.tiny.build import tiny_model_path

_PACKAGES = (
    "torch", "transformers", "numpy", "scipy", "scikit-learn", "pyarrow", "numba", "pycdlib",
    "matplotlib", "click", "msgspec",
)  # fmt: skip


def run_demo(folder: Path, settings: DemoSettings, *, progress: Progress) -> dict[str, object]:
    """Run or resume the demo; return where the report is and the numbers on top of it."""
    summary: dict[str, object] = {}

    def page(context: StepContext) -> None:
        _manifest(context.run_folder, settings)
        summary.update(run_page(context, settings))

    steps = [
        Step(
            name="0-data",
            title="draw questions about pictures",
            work=lambda context: run_data(context, settings),
        ),
        Step(
            name="1-curriculum",
            title="which sample: score and choose",
            work=lambda context: run_study(context, settings),
            resumable=True,
        ),
        Step(
            name="2-offload",
            title="which device: train with the overlapped update, and prove its bits",
            work=lambda context: run_training(context, settings),
            resumable=True,
        ),
        Step(
            name="3-archive",
            title="which medium: burn, lose a disc, read everything back",
            work=lambda context: run_keep(context, settings),
            clean=let_go,
        ),
        Step(
            name="4-tco",
            title="which generation: what keeping it costs",
            work=lambda context: run_cost(context, settings.cost, settings.seed),
        ),
        Step(name="5-report", title="the report", work=page),
    ]
    run_steps(steps, folder, config_text=dump_config(settings), progress=progress)
    return {**summary, "report": str(folder / "report.html")}


def _manifest(folder: Path, settings: DemoSettings) -> None:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    write_manifest(
        folder,
        seed=settings.seed,
        versions={"tierwise": tierwise.__version__, **versions},
        commit=_commit(),
        inputs={
            "0-data/pool/samples.jsonl": hash_file(pool_path(folder)),
            "model.safetensors": hash_file(tiny_model_path() / "model.safetensors"),
        },
    )


def _commit() -> str | None:
    """Return the commit of the checkout tierwise runs from, or None when it is installed."""
    root = Path(tierwise.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
