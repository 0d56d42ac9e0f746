"""Does the choice of samples matter: arms x seeds, the same budget each, and what the numbers bear.

    scores -> arms -+-> cell (arm, seed): [SFT] -> GRPO -> held-out scores -+-> accuracy by arm
    seeds ----------+   resumable, any order, several workers               +-> arm less control

An arm is `base` (no training), a choice of samples (`mid+hard`, `random`, ...) for GRPO, or two
choices `FIRST->SECOND` for SFT then GRPO. What SFT learns is the bare answer or the worked one:
`FIRST:worked->SECOND`, or `sft_target` where the arm does not say. The budget that is equal is the
number of samples drawn; tokens and seconds are reported beside it, because they are then not equal.
What the numbers bear is in `study_analysis`.

Left out: tuning the rate of each arm (give each study its own), judges.

Source: the arms: Qi et al., 2026, https://arxiv.org/abs/2511.06722 (Tables 1-4). Departures: seeds,
intervals, and a control of the same size for every arm.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tierwise.core.errors import ConfigError, DataError, TrainingError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import write_whole
from tierwise.curriculum.evaluate import (
    EvalConfig,
    SampleScore,
    evaluate,
    read_scores,
    write_scores,
)
from tierwise.curriculum.learner import TrainConfig
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.recipe import (
    MakeOptimizer,
    OptimizerConfig,
    Plan,
    judged,
    model_path,
    run_stages,
)
from tierwise.curriculum.samples import Sample, read_samples
from tierwise.curriculum.scores import SCORES_NAME, Scores
from tierwise.curriculum.scores import read_scores as read_difficulty
from tierwise.curriculum.select import Arm, select
from tierwise.curriculum.sft import SftConfig, read_targets

BASE = "base"
_ARROW, _COLON = "->", ":"


class SftTarget(StrEnum):
    """What the supervised stage learns; the two make different experiments."""

    BARE = "bare"
    WORKED = "worked"

    @property
    def field(self) -> str:
        """Return the field of a row that holds it."""
        return {SftTarget.BARE: "answer", SftTarget.WORKED: "target"}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """A study.

    Attributes:
        model: A model folder, or `tiny`.
        data: Plain JSONL that was scored.
        scores: Folder that `tierwise curriculum score` filled for this model and data.
        held_out: Plain JSONL to evaluate on; shares nothing with `data`.
        arms: See the module; `base` is always run.
        control: The arm the others are compared with, beside `base`.
        num_seeds: Training runs of each arm.
        first_seed: They are this and the following numbers.
        sft_target: What the SFT stage of arms that do not say learns; `bare`, as in the paper.
        sft: The supervised stage of two-stage arms.
        grpo: The reinforcement stage.
        sft_optimizer: Of the first.
        grpo_optimizer: Of the second.
        evaluate: How to evaluate.
    """

    model: str
    data: str
    scores: str
    held_out: str
    arms: tuple[str, ...] = ("all", "random", "mid+hard", "unsolved", "band")
    control: str = "random"
    num_seeds: int = 5
    first_seed: int = 1
    sft_target: SftTarget = SftTarget.BARE
    sft: SftConfig = field(default_factory=SftConfig)
    grpo: TrainConfig = field(default_factory=TrainConfig)
    sft_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    grpo_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluate: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if self.num_seeds < 1:
            raise ConfigError("num_seeds must be 1 or more")
        for name in self.arms:
            parse_arm(name)
        if self.control not in self.arms:
            raise ConfigError(f"control {self.control!r} is not one of the arms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training run: an arm under one seed. The base model is one cell, of seed 0."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Return its folder's name."""
        return f"{self.arm.replace(_ARROW, '_then_').replace(_COLON, '_')}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What a finished cell came to: held-out scores, and what it spent."""

    cell: Cell
    scores: tuple[SampleScore, ...]
    num_samples: int
    completions: int
    completion_tokens: float
    seconds: float


def parse_arm(name: str) -> tuple[Arm | None, Arm | None]:
    """Return (SFT's samples, GRPO's samples) of an arm's name.

    >>> parse_arm("medium:worked->random-hard")
    (<Arm.MEDIUM: 'medium'>, <Arm.RANDOM_HARD: 'random-hard'>)

    Raises:
        ConfigError: No such arm.
    """
    if name == BASE:
        return None, None
    first, arrow, second = name.partition(_ARROW)
    try:
        if arrow:
            first, colon, target = first.partition(_COLON)
            SftTarget(target if colon else SftTarget.BARE)
        return (Arm(first), Arm(second)) if arrow else (None, Arm(first))
    except ValueError as error:
        known = ", ".join(arm.value for arm in Arm)
        raise ConfigError(
            f"no arm {name!r}", hint=f"{BASE}, {known}, two with ->, or FIRST:worked->SECOND"
        ) from error


def sft_target_of(arm: str, default: SftTarget) -> SftTarget | None:
    """Return what the supervised stage of an arm learns, or None if it has no such stage.

    >>> sft_target_of("medium:worked->hard", SftTarget.BARE).value
    'worked'
    """
    first, arrow, _ = arm.partition(_ARROW)
    if not arrow:
        return None
    _, colon, target = first.partition(_COLON)
    return SftTarget(target) if colon else default


def cells_of(config: StudyConfig) -> list[Cell]:
    """Return the study's cells, seed by seed, so that an unfinished study is balanced."""
    seeds = range(config.first_seed, config.first_seed + config.num_seeds)
    arms = [name for name in config.arms if name != BASE]
    return [Cell(arm=BASE, seed=0), *(Cell(arm=arm, seed=seed) for seed in seeds for arm in arms)]


def price(config: StudyConfig, *, num_held_out: int) -> dict[str, int]:
    """Return what a study will take, without running it.

    Args:
        config: The study.
        num_held_out: Held-out samples.
    """
    cells, sampling = cells_of(config), config.grpo.sampling
    trained = [cell for cell in cells if cell.arm != BASE]
    completions = config.grpo.steps * sampling.prompts_per_step * sampling.group_size
    evaluated = num_held_out * (1 + config.evaluate.num_draws)
    num_sft = sum(parse_arm(cell.arm)[0] is not None for cell in trained)
    return {
        "cells": len(cells),
        "training_completions": completions * len(trained),
        "optimizer_steps": config.grpo.steps * config.grpo.inner_updates * len(trained)
        + config.sft.steps * num_sft,
        "evaluation_completions": evaluated * len(cells),
        "tokens_at_most": completions * len(trained) * sampling.max_new_tokens
        + evaluated * len(cells) * config.evaluate.max_new_tokens,
    }


def run_study(
    config: StudyConfig,
    *,
    base: Path,
    folder: Path,
    make_optimizer: MakeOptimizer,
    progress: Progress = SILENT,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.time,
) -> tuple[CellResult, ...]:
    """Run every cell that is not done, and return those that are.

    Several processes may run the same study: a cell is taken by one of them, and a cell whose
    process died goes on from its last checkpoint.

    Args:
        config: The study.
        base: Folder that its paths are relative to.
        folder: Where everything goes.
        make_optimizer: Makes each stage's optimizer.
        progress: Where to say how far it is.
        stop: Asked after every step; True saves and returns.
        clock: Seconds since the epoch; only ever seen under `timing`.

    Raises:
        TrainingError: An arm is empty, or see `train_grpo`.
        DataError: Data and scores do not fit, training and held-out samples overlap, or a row has
            no target of a kind that an arm learns.
    """
    samples = read_samples(base / config.data).samples
    held_out = read_samples(base / config.held_out).samples
    shared = {sample.id for sample in samples} & {sample.id for sample in held_out}
    if shared:
        raise DataError(
            f"{len(shared)} held-out samples are also trained on, such as {min(shared)}"
        )
    targets = _read_targets(config, base)
    scores = read_difficulty(base / config.scores / SCORES_NAME)
    cells = cells_of(config)
    with progress.task("cells", len(cells)) as task:
        for cell in cells:
            place = folder / "cells" / cell.name
            with _claimed(place) as mine:
                if mine and not (place / "cell.json").exists():
                    plan = _plan(config, cell, samples, scores, targets)
                    done = _run_cell(
                        config, cell, plan, held_out, base=base, folder=place,
                        make_optimizer=make_optimizer, progress=progress, stop=stop, clock=clock,
                    )  # fmt: skip
                    if not done:
                        break
            task.advance()
    return read_cells(config, folder)


def read_cells(config: StudyConfig, folder: Path) -> tuple[CellResult, ...]:
    """Return the finished cells of a study's folder, in the study's order."""
    found = []
    for cell in cells_of(config):
        place = folder / "cells" / cell.name
        if (place / "cell.json").exists():
            spent = json.loads((place / "cell.json").read_text(encoding="utf-8"))
            found.append(CellResult(cell=cell, scores=read_scores(place / "scores.jsonl"), **spent))
    return tuple(found)


@contextmanager
def _claimed(place: Path) -> Iterator[bool]:
    """Yield whether this process may work there; a process that dies lets go by itself."""
    place.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(place / ".claim", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


Targets = Mapping[SftTarget, Mapping[str, str]]
"""Sample id -> text to learn, for each kind of target that an arm learns."""


def _read_targets(config: StudyConfig, base: Path) -> Targets:
    """Return the targets of all arms, so that a missing one is found before anything is trained.

    Raises:
        DataError: A row without one; names file, line and field.
    """
    wanted = {sft_target_of(arm, config.sft_target) for arm in config.arms}
    return {
        kind: read_targets(base / config.data, kind.field) for kind in SftTarget if kind in wanted
    }


def _plan(
    config: StudyConfig, cell: Cell, samples: Sequence[Sample], scores: Scores, targets: Targets
) -> Plan:
    """Return the stages of a cell; its samples are in an order of the cell's seed."""
    first, second = parse_arm(cell.arm)
    target = sft_target_of(cell.arm, config.sft_target)
    strata = {row.id: row.pism_stratum.value for row in scores.rows}

    def chosen(arm: Arm | None) -> tuple[Sample, ...]:
        if arm is None:
            return ()
        made = list(select(samples, scores, arm, seed=cell.seed).samples)
        if not made:
            raise TrainingError(f"the arm {arm.value} is empty", hint="leave it out of the study")
        random.Random(f"order|{cell.seed}").shuffle(made)
        return tuple(made)

    return Plan(
        sft=config.sft if first is not None else None,
        sft_samples=chosen(first),
        targets=targets[target] if target is not None else {},
        sft_optimizer=config.sft_optimizer,
        grpo=config.grpo if second is not None else None,
        grpo_samples=chosen(second),
        strata=strata,
        grpo_optimizer=config.grpo_optimizer,
    )


def _run_cell(
    config: StudyConfig,
    cell: Cell,
    plan: Plan,
    held_out: Sequence[Sample],
    *,
    base: Path,
    folder: Path,
    make_optimizer: MakeOptimizer,
    progress: Progress,
    stop: Callable[[], bool],
    clock: Callable[[], float],
) -> bool:
    """Train and evaluate one cell; return False when it was asked to stop."""
    model = LocalModel.load(model_path(config.model, base))
    stages = run_stages(
        model, plan, folder=folder, seed=cell.seed, make_optimizer=make_optimizer,
        progress=progress, stop=stop, clock=clock,
    )  # fmt: skip
    if stages is None:
        return False
    # the same answers are drawn in every cell, as far as the models agree
    scores = evaluate(model, held_out, judged, config.evaluate, seed=0, progress=progress)
    write_scores(folder / "scores.jsonl", scores)
    rows = [row for stage in stages.values() for row in stage.metrics]
    group = config.grpo.sampling.group_size
    spent = {
        "num_samples": len(plan.grpo_samples),
        "completions": sum(row.get("prompts", 0) * group for row in rows),
        "completion_tokens": sum(
            row.get("prompts", 0) * group * row["completion_tokens"] for row in rows
        ),
        "seconds": sum(
            value for row in rows for name, value in row["timing"].items() if name.endswith("_s")
        ),
    }
    write_whole(folder / "cell.json", json.dumps(spent) + "\n")
    return True
