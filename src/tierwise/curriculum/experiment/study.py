"""Does the choice of samples matter: arms x seeds, the same budget each, rates tuned alike.

    scores -> arms -+-> cell (arm, seed): [SFT] -> GRPO -> held-out scores -+-> accuracy by arm
    seeds ----------+   resumable, any order, several workers               +-> arm less control

An arm is `base` (no training), a choice of samples (`mid+hard`, `random`, ...) for GRPO, or two
choices `FIRST->SECOND` for SFT then GRPO. What SFT learns is the bare answer or the worked one:
`FIRST:worked->SECOND`, or `sft_target` where the arm does not say. What is equal is the budget that
`grpo.budget` names, in samples, tokens or seconds, over both stages; without one it is the number
of steps of each stage. All three are reported of every arm. What the numbers bear is in
`study_analysis`.

With `learning_rates`, every arm is first trained at each of them under seeds of its own and gets
the rate that answers best on a validation split (`tuning`); the held-out samples are not looked at.
A process leaves the arms that others still tune to them.

Left out: tuning anything but the rate of the GRPO stage, judges.

Source: the arms: Qi et al., 2026, https://arxiv.org/abs/2511.06722 (Tables 1-4). Departures: seeds,
intervals, and a control of the same size for every arm.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from tierwise.core.errors import ConfigError, DataError, StateError, TrainingError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import write_whole
from tierwise.curriculum.difficulty.scores import SCORES_NAME, Scores, as_dict
from tierwise.curriculum.difficulty.scores import read_scores as read_difficulty
from tierwise.curriculum.difficulty.select import Arm, select
from tierwise.curriculum.experiment.study_identity import begin_or_go_on, weights_hash
from tierwise.curriculum.experiment.tuning import ArmRate, choose_rate
from tierwise.curriculum.samples import Sample, read_samples
from tierwise.curriculum.training.book import counted_settings, data_hash
from tierwise.curriculum.training.budget import Meter, Unit, spent
from tierwise.curriculum.training.evaluate import (
    EvalConfig,
    SampleScore,
    evaluate,
    read_scores,
    write_scores,
)
from tierwise.curriculum.training.learner import TrainConfig
from tierwise.curriculum.training.lora import LoraConfig
from tierwise.curriculum.training.recipe import (
    MakeOptimizer,
    OptimizerConfig,
    Plan,
    judged,
    load_to_train,
    model_path,
    run_stages,
)
from tierwise.curriculum.training.sft import SftConfig, read_targets

BASE = "base"
CELLS_FOLDER, TUNING_FOLDER = "cells", "tuning"
CELL_NAME, SCORES_FILE = "cell.json", "scores.jsonl"
_ARROW, _COLON = "->", ":"


class SftTarget(StrEnum):
    """What the supervised stage learns; the two make different experiments."""

    BARE = "bare"
    WORKED = "worked"

    @property
    def field(self) -> str:
        """Return the field of a row that holds it."""
        return {SftTarget.BARE: "answer", SftTarget.WORKED: "target"}[self]


Targets = Mapping[SftTarget, Mapping[str, str]]
"""Sample id -> text to learn, for each kind of target that an arm learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceConfig:
    """What `--dry-run` needs to know for GPU hours; nothing else reads it.

    Attributes:
        generated_tokens_per_second: Completion tokens that one GPU samples a second.
        trained_tokens_per_second: Completion or target tokens that it puts through an update a
            second.
        completion_tokens: Mean length of an answer; left out, each counts `max_new_tokens`.
        target_tokens: Mean length of what SFT learns; needed with SFT arms.
        usd_per_gpu_hour: What a GPU hour costs.
        basis: Where these numbers are from; printed with the hours.
    """

    generated_tokens_per_second: float | None = None
    trained_tokens_per_second: float | None = None
    completion_tokens: float | None = None
    target_tokens: float | None = None
    usd_per_gpu_hour: float | None = None
    basis: str = ""

    def __post_init__(self) -> None:
        for name in (
            "generated_tokens_per_second", "trained_tokens_per_second", "completion_tokens",
            "target_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"price.{name} must be above 0")
        if self.usd_per_gpu_hour is not None and not 0 <= self.usd_per_gpu_hour < math.inf:
            raise ConfigError("price.usd_per_gpu_hour must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """A study.

    Attributes:
        model: A model folder, or `tiny`.
        data: Plain JSONL that was scored.
        scores: Folder that `tierwise curriculum score` filled for this model and data.
        held_out: Plain JSONL to evaluate on; shares nothing with `data`.
        held_out_scores: Folder with the scores of `held_out`, for accuracy by stratum; "" for none.
        arms: See the module; `base` is always run.
        control: The arm the others are compared with, beside `base`.
        learning_rates: Rates of the GRPO stage to choose from for each arm; empty: that of
            `grpo_optimizer` for all.
        validation: Plain JSONL to choose by; shares nothing with `data` and `held_out`.
        num_tuning_seeds: Training runs of each arm at each rate, under the seeds after the others.
        num_seeds: Training runs of each arm.
        first_seed: They are this and the following numbers.
        sft_target: What the SFT stage of arms that do not say learns; `bare`, as in the paper.
        sft: The supervised stage of two-stage arms.
        grpo: The reinforcement stage.
        sft_optimizer: Of the first.
        grpo_optimizer: Of the second.
        freeze: As in `RecipeConfig`, for every arm alike.
        lora: As in `RecipeConfig`, for every arm alike.
        evaluate: How to evaluate.
        device: As in `RecipeConfig`.
        price: For `--dry-run` only.
    """

    model: str
    data: str
    scores: str
    held_out: str
    held_out_scores: str = ""
    arms: tuple[str, ...] = ("all", "random", "mid+hard", "unsolved", "band")
    control: str = "random"
    learning_rates: tuple[float, ...] = ()
    validation: str = ""
    num_tuning_seeds: int = 1
    num_seeds: int = 5
    first_seed: int = 1
    sft_target: SftTarget = SftTarget.BARE
    sft: SftConfig = field(default_factory=SftConfig)
    grpo: TrainConfig = field(default_factory=TrainConfig)
    sft_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    grpo_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    freeze: tuple[str, ...] = ()
    lora: LoraConfig | None = None
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    device: str = "cpu"
    price: PriceConfig = field(default_factory=PriceConfig)

    def __post_init__(self) -> None:
        if min(self.num_seeds, self.num_tuning_seeds) < 1:
            raise ConfigError("num_seeds and num_tuning_seeds must be 1 or more")
        if any(not 0 < rate < math.inf for rate in self.learning_rates):
            raise ConfigError("learning_rates must be above 0")
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise ConfigError("learning_rates holds a rate twice")
        if bool(self.learning_rates) != bool(self.validation):
            raise ConfigError(
                "learning_rates and validation go together",
                hint="name a JSONL file of samples that are neither trained on nor held out",
            )
        if self.learning_rates and self.evaluate.num_draws < 1:
            raise ConfigError("a rate is chosen by sampled answers: set evaluate.num_draws")
        for name in self.arms:
            parse_arm(name)
        if self.control not in self.arms:
            raise ConfigError(f"control {self.control!r} is not one of the arms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training run: an arm under one seed. The base model is one cell, of seed 0.

    `rate` is set in the runs that choose the learning rate.
    """

    arm: str
    seed: int
    rate: float | None = None

    @property
    def name(self) -> str:
        """Return its folder's name."""
        arm = self.arm.replace(_ARROW, "_then_").replace(_COLON, "_")
        return f"{arm}-{self.seed}" if self.rate is None else f"{arm}-{self.rate!r}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What a finished cell came to.

    Attributes:
        cell: Which one.
        scores: Its answers to the samples asked.
        num_samples: Samples that the GRPO stage could draw from.
        completions: Sampled in training.
        completion_tokens: Theirs in all.
        seconds: Of all steps of both stages, wall time.
        num_drawn: Samples drawn in both stages, as often as they were.
        target_tokens: What the supervised stage learned from.
        budget_reached: Whether the budget ended it, if there is one, and not the number of steps.
        learning_rate: Of the GRPO stage; None if unknown.
    """

    cell: Cell
    scores: tuple[SampleScore, ...]
    num_samples: int
    completions: int
    completion_tokens: float
    seconds: float
    num_drawn: int = 0
    target_tokens: float = 0.0
    budget_reached: bool = True
    learning_rate: float | None = None


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


def tuning_cells(config: StudyConfig) -> list[Cell]:
    """Return the runs that choose each arm's learning rate; the same ones for every arm."""
    first = config.first_seed + config.num_seeds
    return [
        Cell(arm=arm, seed=seed, rate=rate)
        for seed in range(first, first + config.num_tuning_seeds)
        for arm in config.arms
        if arm != BASE
        for rate in config.learning_rates
    ]


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
        DataError: Data and scores do not fit, a sample has changed since it was scored, training,
            validation and held-out samples overlap, or a row has no target of a kind that an arm
            learns.
        StateError: The folder holds another study, or a cell that was trained at another rate.
    """
    samples = read_samples(base / config.data).samples
    held_out = read_samples(base / config.held_out).samples
    refuse_shared(held_out, samples, "held-out samples are also trained on")
    validation: Sequence[Sample] = ()
    if config.validation:
        validation = read_samples(base / config.validation).samples
        refuse_shared(validation, samples, "validation samples are also trained on")
        refuse_shared(validation, held_out, "validation samples are also held out")
    targets = _read_targets(config, base)
    scores = read_difficulty(base / config.scores / SCORES_NAME)
    strata = _held_out_strata(config, held_out, base)
    scores.refuse_changed(samples)
    begin_or_go_on(
        folder,
        _parts(
            config, base, samples=samples, targets=targets, scores=scores, held_out=held_out,
            validation=validation, strata=strata,
        ),
    )  # fmt: skip

    def run(cell: Cell, place: Path, asked: Sequence[Sample], rate: float | None) -> bool:
        """Run a cell if it is this process's to run; return False when asked to stop."""
        with _claimed(place) as mine:
            if not mine:
                return True
            if (place / CELL_NAME).exists():
                _check_rate(place, rate)
                return True
            plan = _plan(config, cell, samples, scores, targets, rate=rate)
            return _run_cell(
                config, cell, plan, asked, strata=strata, base=base, folder=place,
                make_optimizer=make_optimizer, progress=progress, stop=stop, clock=clock,
            )  # fmt: skip

    choosing, cells = tuning_cells(config), cells_of(config)
    with progress.task("cells", len(choosing) + len(cells)) as task:
        for cell in choosing:
            if not run(cell, folder / TUNING_FOLDER / cell.name, validation, cell.rate):
                return read_cells(config, folder)
            task.advance()
        rates = {one.arm: one.rate for one in read_rates(config, folder)}
        for cell in cells:
            if choosing and cell.arm not in (*rates, BASE):
                continue
            rate = rates.get(cell.arm, config.grpo_optimizer.lr) if cell.arm != BASE else None
            if not run(cell, folder / CELLS_FOLDER / cell.name, held_out, rate):
                break
            task.advance()
    return read_cells(config, folder)


def _held_out_strata(config: StudyConfig, held_out: Sequence[Sample], base: Path) -> dict[str, str]:
    """Return held-out sample id -> PISM stratum for the base model; empty if not asked for.

    Raises:
        DataError: A held-out sample was not scored, or has changed since.
    """
    if not config.held_out_scores:
        return {}
    place = base / config.held_out_scores / SCORES_NAME
    scores = read_difficulty(place)
    scores.refuse_changed(held_out)
    strata = {row.id: row.pism_stratum.value for row in scores.rows}
    missing = [sample.id for sample in held_out if sample.id not in strata]
    if missing:
        raise DataError(
            f"{place}: {len(missing)} held-out samples have no score, such as {missing[0]}",
            hint="score the held-out file as it is now",
        )
    return strata


def refuse_shared(one: Sequence[Sample], other: Sequence[Sample], what: str) -> None:
    """Return if two sets of samples share no id.

    Raises:
        DataError: They do; says what that means.
    """
    shared = {sample.id for sample in one} & {sample.id for sample in other}
    if shared:
        raise DataError(f"{len(shared)} {what}, such as {min(shared)}")


def _check_rate(place: Path, rate: float | None) -> None:
    """Return if a finished cell was trained at this rate, or does not say.

    Raises:
        StateError: It was another one.
    """
    known = json.loads((place / CELL_NAME).read_text(encoding="utf-8")).get("learning_rate")
    if known is not None and known != rate:
        raise StateError(
            f"{place} was trained at rate {known:g}, the study now says {rate:g}",
            hint="run the changed study in another folder",
        )


def _parts(
    config: StudyConfig,
    base: Path,
    *,
    samples: Sequence[Sample],
    targets: Targets,
    scores: Scores,
    held_out: Sequence[Sample],
    validation: Sequence[Sample],
    strata: Mapping[str, str],
) -> dict[str, object]:
    """Return what no run of the study's folder may differ in, by name."""
    # whether or not an optimizer is offloaded, its numbers are the same
    optimizers = [
        replace(config.sft_optimizer, offload=False),
        replace(config.grpo_optimizer, offload=False, lr=1.0),
    ]
    stages = [counted_settings(config.sft), counted_settings(config.grpo)]
    parts: dict[str, object] = {
        "weights to start from": weights_hash(model_path(config.model, base)),
        "training settings": [stages, optimizers, config.sft_target, config.lora, config.freeze],
        "evaluation settings": replace(config.evaluate, num_resamples=1),
        "data": data_hash(samples),
        "difficulty scores": [as_dict(row) for row in scores.rows],
        "held-out samples": [data_hash(held_out), strata],
    }
    if validation:
        parts["validation samples"] = data_hash(validation)
    return parts | {f"{kind.value} targets": texts for kind, texts in targets.items()}


def read_cells(config: StudyConfig, folder: Path) -> tuple[CellResult, ...]:
    """Return the finished cells of a study's folder, in the study's order."""
    return _finished(cells_of(config), folder / CELLS_FOLDER)


def read_rates(config: StudyConfig, folder: Path) -> tuple[ArmRate, ...]:
    """Return the learning rate of every arm whose tuning runs are all done."""
    wanted = tuning_cells(config)
    found = {one.cell: one.scores for one in _finished(wanted, folder / TUNING_FOLDER)}
    chosen = []
    for arm in dict.fromkeys(cell.arm for cell in wanted):
        runs: dict[float, list[tuple[SampleScore, ...]]] = {}
        members = [cell for cell in wanted if cell.arm == arm]
        if all(cell in found for cell in members):
            for cell in members:
                assert cell.rate is not None
                runs.setdefault(cell.rate, []).append(found[cell])
            chosen.append(choose_rate(arm, runs))
    return tuple(chosen)


def _finished(cells: Sequence[Cell], folder: Path) -> tuple[CellResult, ...]:
    found = []
    for cell in cells:
        place = folder / cell.name
        if (place / CELL_NAME).exists():
            known = json.loads((place / CELL_NAME).read_text(encoding="utf-8"))
            found.append(CellResult(cell=cell, scores=read_scores(place / SCORES_FILE), **known))
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
    config: StudyConfig,
    cell: Cell,
    samples: Sequence[Sample],
    scores: Scores,
    targets: Targets,
    *,
    rate: float | None = None,
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
        grpo_optimizer=(
            config.grpo_optimizer if rate is None else replace(config.grpo_optimizer, lr=rate)
        ),
        lora=config.lora,
        freeze=config.freeze,
    )


def _run_cell(
    config: StudyConfig,
    cell: Cell,
    plan: Plan,
    asked: Sequence[Sample],
    *,
    strata: Mapping[str, str],
    base: Path,
    folder: Path,
    make_optimizer: MakeOptimizer,
    progress: Progress,
    stop: Callable[[], bool],
    clock: Callable[[], float],
) -> bool:
    """Train a cell and ask it the samples; return False when it was asked to stop."""
    model = load_to_train(
        config.model, base, device=config.device, lora=config.lora, frozen=config.freeze
    )
    stages = run_stages(
        model, plan, folder=folder, seed=cell.seed, make_optimizer=make_optimizer,
        progress=progress, stop=stop, clock=clock,
    )  # fmt: skip
    if stages is None:
        return False
    # the same answers are drawn in every cell, as far as the models agree
    scores = evaluate(
        model, asked, judged, config.evaluate, seed=0, strata=strata, progress=progress
    )
    write_scores(folder / SCORES_FILE, scores)
    sft_rows, rows = (stages[name].metrics if name in stages else () for name in ("sft", "grpo"))
    every, budget = (*sft_rows, *rows), config.grpo.budget
    spending = {
        "learning_rate": plan.grpo_optimizer.lr if plan.grpo is not None else None,
        "num_samples": len(plan.grpo_samples),
        "completions": sum(row["completions"] for row in rows),
        "completion_tokens": spent(rows, Unit.TOKENS),
        "seconds": spent(every, Unit.SECONDS),
        "num_drawn": spent(every, Unit.SAMPLES),
        "target_tokens": spent(sft_rows, Unit.TOKENS),
        "budget_reached": not rows or budget is None or Meter(budget, every).is_full,
    }
    write_whole(folder / CELL_NAME, json.dumps(spending) + "\n")
    return True
