"""Steps 0 and 1, which sample: draw questions about pictures, score them, choose what to train on.

The pictures are handwritten digits (scikit-learn's), counting scenes and bar charts; the model is
the one tierwise ships. The held-out questions use digits the training ones never show.
"""

from __future__ import annotations

import json
from pathlib import Path

from tierwise.cli.demo.settings import DemoSettings
from tierwise.cli.steps import StepContext
from tierwise.core.records import hash_file, write_whole
from tierwise.core.report import Section
from tierwise.curriculum.difficulty.figures import report_section
from tierwise.curriculum.difficulty.probes import Masking, Sampling
from tierwise.curriculum.difficulty.scores import SCORES_NAME, read_scores
from tierwise.curriculum.difficulty.scoring import ScoreConfig, score
from tierwise.curriculum.difficulty.select import Arm, select, write_selection
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import read_samples
from tierwise.curriculum.tiny.build import tiny_model_path
from tierwise.curriculum.tiny.tasks import write_dataset

_FRESH = 1_000_003  # seeds from here on are not among those the model was trained with


def pool_path(run: Path) -> Path:
    """Return the questions to choose from."""
    return run / "0-data" / "pool" / "samples.jsonl"


def run_data(context: StepContext, settings: DemoSettings) -> None:
    """Draw both sets of questions."""
    data, seed = settings.data, settings.seed + _FRESH
    pool = write_dataset(context.folder / "pool", data.num_pool, seed, "train")
    held_out = write_dataset(context.folder / "held-out", data.num_held_out, seed, "held_out")
    context.record.event(
        "data.drawn",
        num_pool=data.num_pool,
        num_held_out=data.num_held_out,
        pool_sha256=hash_file(pool),
        held_out_sha256=hash_file(held_out),
    )


def run_study(context: StepContext, settings: DemoSettings) -> None:
    """Score the pool under the shipped model and write the medium and hard samples."""
    samples = read_samples(pool_path(context.run_folder)).samples
    config = ScoreConfig(
        num_attempts=settings.scoring.num_attempts, sampling=Sampling(max_new_tokens=8)
    )
    scores = score(
        samples,
        LocalModel.load(tiny_model_path()),
        config=config,
        folder=context.folder,
        seed=settings.seed,
        progress=context.progress,
    )
    strata = {row.id: row.pism_stratum.value for row in scores.rows}
    chosen = select(samples, scores, Arm.MID_HARD, seed=settings.seed)
    write_selection(chosen, context.folder / "selected.jsonl")
    write_whole(context.folder / "strata.json", json.dumps(strata, indent=1) + "\n")
    found = [row for row in scores.rows if row.pass_rate is not None]
    counts = {name: list(strata.values()).count(name) for name in sorted(set(strata.values()))}
    context.record.event(
        "curriculum.scored",
        num_samples=len(scores.rows),
        num_attempts=sum(row.num_attempts for row in scores.rows),
        num_errors=sum(row.num_errors for row in scores.rows),
        pass_rate=round(sum(row.pass_rate or 0.0 for row in found) / max(1, len(found)), 6),
        num_blind_answerable=sum(row.blind_answerable for row in scores.rows),
        pism_strata=counts,
        cmab_mean_median=_median([row.cmab_mean for row in scores.rows]),
        num_selected=len(chosen.samples),
        model_hash=scores.model_hash,
    )


def study_section(context: StepContext, settings: DemoSettings) -> Section:
    """Return the report's section about difficulty."""
    return report_section(
        read_scores(context.run_folder / "1-curriculum" / SCORES_NAME),
        read_samples(pool_path(context.run_folder)).samples,
        masking=Masking(),
        seed=settings.seed,
        title="Which sample",
    )


def _median(values: list[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return round(known[len(known) // 2], 6) if known else None
