"""A study: arms parsed, cells resumed and shared, intervals that know seeds, sentences that fit."""

from __future__ import annotations

import copy
import functools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tierwise.core.config import load_config
from tierwise.core.errors import ConfigError, DataError, StateError, UsageError
from tierwise.core.report import Figure, render_html
from tierwise.curriculum.difficulty.probes import Sampling
from tierwise.curriculum.difficulty.scores import read_scores as read_difficulty
from tierwise.curriculum.difficulty.scoring import ScoreConfig, score
from tierwise.curriculum.difficulty.select import PAPER_PAIRINGS
from tierwise.curriculum.experiment import study as study_module
from tierwise.curriculum.experiment.price import price
from tierwise.curriculum.experiment.study import (
    Cell,
    CellResult,
    PriceConfig,
    SftTarget,
    StudyConfig,
    cells_of,
    parse_arm,
    read_cells,
    read_rates,
    run_study,
    sft_target_of,
    tuning_cells,
)
from tierwise.curriculum.experiment.study_analysis import accuracy_by_group, analyse, spent_by_arm
from tierwise.curriculum.experiment.study_report import conclusions, study_report
from tierwise.curriculum.experiment.tuning import choose_rate
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import read_samples
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training.budget import Budget, Unit
from tierwise.curriculum.training.evaluate import Decoding, EvalConfig, SampleScore, evaluate
from tierwise.curriculum.training.experience import SamplingConfig
from tierwise.curriculum.training.grpo import GrpoConfig
from tierwise.curriculum.training.learner import TrainConfig
from tierwise.curriculum.training.lora import LoraConfig
from tierwise.curriculum.training.recipe import OptimizerConfig
from tierwise.curriculum.training.sft import SftConfig


def config(**changes: Any) -> StudyConfig:
    values: dict[str, Any] = {
        "model": "model",
        "data": "train/samples.jsonl",
        "scores": "scores",
        "held_out": "held/samples.jsonl",
        "arms": ("all", "random->all"),
        "control": "all",
        "num_seeds": 2,
        "sft": SftConfig(steps=1, batch_size=2),
        "grpo": TrainConfig(
            steps=2,
            checkpoint_every=1,
            sampling=SamplingConfig(prompts_per_step=2, group_size=2, max_new_tokens=3),
            objective=GrpoConfig(kl_weight=0.0),
        ),
        "evaluate": EvalConfig(num_draws=2, max_new_tokens=3),
        **changes,
    }
    return StudyConfig(**values)


@functools.cache
def _untrained() -> LocalModel:
    torch.set_num_threads(1)
    small = build.TinyConfig(
        vision_width=16, vision_layers=1, vision_heads=2, width=24, layers=4, heads=2, mlp_width=48
    )
    return LocalModel(build.build_model(small, seed=0), build.build_processor(small))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    tasks.write_dataset(folder / "train", num_samples=6, seed=3, split="train")
    tasks.write_dataset(folder / "held", num_samples=5, seed=3, split="held_out")
    tasks.write_dataset(folder / "validation", num_samples=5, seed=4, split="held_out")
    made = _untrained()
    made.model.save_pretrained(folder / "model")
    made.processor.save_pretrained(folder / "model")
    score(
        read_samples(folder / "train" / "samples.jsonl"),
        LocalModel(copy.deepcopy(made.model), made.processor),
        config=ScoreConfig(
            num_attempts=1, permilles=(0, 500), blind=False, cmab=False,
            sampling=Sampling(max_new_tokens=3),
        ),
        folder=folder / "scores",
        seed=1,
    )  # fmt: skip
    return folder


def plain(
    module: torch.nn.Module, settings: OptimizerConfig, max_grad_norm: float
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


@pytest.fixture(autouse=True)
def _number_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model is never right; let it be rewarded for what it does now and then."""
    for module in (
        study_module,
        __import__("tierwise.curriculum.training.recipe", fromlist=["judged"]),
    ):
        monkeypatch.setattr(module, "judged", lambda sample, text: float(len(text) % 2))


def values_of(cells: tuple[CellResult, ...]) -> list[Any]:
    return [(c.cell, c.scores, c.completions, c.completion_tokens) for c in cells]


def test_arms_are_those_of_the_paper() -> None:
    for first, second in PAPER_PAIRINGS:
        assert parse_arm(f"{first.value}->{second.value}") == (first, second)
    with pytest.raises(ConfigError, match="no arm 'medum->hard'"):
        parse_arm("medum->hard")
    with pytest.raises(ConfigError, match="no arm"):
        config(arms=("all", "everything"))
    with pytest.raises(ConfigError, match="control"):
        config(control="random")


def test_an_arm_says_what_its_supervised_stage_learns(home: Path) -> None:
    assert parse_arm("medium:worked->hard") == parse_arm("medium->hard")
    assert sft_target_of("all", SftTarget.WORKED) is None
    assert sft_target_of("medium->hard", SftTarget.WORKED) is SftTarget.WORKED
    assert sft_target_of("medium:bare->hard", SftTarget.WORKED) is SftTarget.BARE
    for wrong in ("medium:long->hard", "medium->hard:worked", "medium:worked"):
        with pytest.raises(ConfigError, match="no arm"):
            parse_arm(wrong)
    both = config(arms=("all", "random:bare->all", "random:worked->all"))
    names = [cell.name for cell in cells_of(both)]
    assert names[2:4] == ["random_bare_then_all-1", "random_worked_then_all-1"]
    plans = {
        kind: study_module._plan(
            config(arms=("all", f"unsolved:{kind}->all")),
            Cell(arm=f"unsolved:{kind}->all", seed=1),
            read_samples(home / "train" / "samples.jsonl").samples,
            read_difficulty(home / "scores" / "scores.parquet"),
            study_module._read_targets(config(arms=("all", f"unsolved:{kind}->all")), home),
        )
        for kind in ("bare", "worked")
    }
    rows = [
        json.loads(line) for line in (home / "train" / "samples.jsonl").read_text().splitlines()
    ]
    assert dict(plans["bare"].targets) == {row["id"]: row["answer"] for row in rows}
    assert dict(plans["worked"].targets) == {row["id"]: row["target"] for row in rows}
    assert plans["bare"].targets != plans["worked"].targets
    assert plans["bare"].sft_samples == plans["worked"].sft_samples


def test_a_missing_worked_answer_is_refused_before_anything_is_trained(
    home: Path, tmp_path: Path
) -> None:
    settings = config(arms=("all", "unsolved:worked->all"))
    file = home / "train" / "bare.jsonl"
    rows = [
        json.loads(line) for line in (home / "train" / "samples.jsonl").read_text().splitlines()
    ]
    del rows[3]["target"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"bare.jsonl:4: no target to learn from") as caught:
        run_study(
            replace(settings, data="train/bare.jsonl"), base=home, folder=tmp_path,
            make_optimizer=plain,
        )  # fmt: skip
    assert "learn bare answers" in str(caught.value.hint)
    assert not list(tmp_path.iterdir())


def test_cells_come_seed_by_seed_after_the_base() -> None:
    names = [cell.name for cell in cells_of(config())]
    assert names == ["base-0", "all-1", "random_then_all-1", "all-2", "random_then_all-2"]


def test_the_price_is_what_is_then_spent(home: Path, tmp_path: Path) -> None:
    # an untrained model solves nothing, so the arms random and mid+hard would be empty
    settings = config(arms=("all",), num_seeds=1)
    told = price(settings, num_held_out=5)
    cells = run_study(settings, base=home, folder=tmp_path, make_optimizer=plain)
    assert told["cells"] == len(cells) == 2
    assert told["training_completions"] == sum(cell.completions for cell in cells) == 8
    assert told["evaluation_completions"] == 2 * 5 * 3
    at_most = told["tokens_at_most"]
    assert isinstance(at_most, int)
    assert sum(cell.completion_tokens for cell in cells) <= at_most


def test_stopped_anywhere_and_shared_by_two_ends_the_same(home: Path, tmp_path: Path) -> None:
    settings = config(arms=("all", "unsolved:worked->all"), control="all")
    common: dict[str, Any] = {"base": home, "make_optimizer": plain}
    whole = run_study(settings, folder=tmp_path / "whole", **common)
    assert len(whole) == 5
    calls = 0
    while len(read_cells(settings, tmp_path / "parts")) < 5:
        run_study(settings, folder=tmp_path / "parts", stop=lambda: True, **common)
        calls += 1
        assert calls < 20
    assert calls > 3
    assert values_of(read_cells(settings, tmp_path / "parts")) == values_of(whole)
    with study_module._claimed(tmp_path / "two" / "cells" / "all-1") as mine:
        assert mine
        others = run_study(settings, folder=tmp_path / "two", **common)
    assert [cell.cell.name for cell in others] == [
        "base-0", "unsolved_worked_then_all-1", "all-2", "unsolved_worked_then_all-2",
    ]  # fmt: skip
    rest = run_study(settings, folder=tmp_path / "two", **common)
    assert values_of(rest) == values_of(whole)


def test_held_out_samples_must_not_be_trained_on(home: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="6 held-out samples are also trained on"):
        run_study(
            config(held_out="train/samples.jsonl"), base=home, folder=tmp_path, make_optimizer=plain
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"grpo": replace(config().grpo, steps=3)}, "other training settings"),
        ({"sft_optimizer": OptimizerConfig(lr=1e-3)}, "other training settings"),
        ({"evaluate": EvalConfig(num_draws=3, max_new_tokens=3)}, "other evaluation settings"),
        ({"held_out": "validation/samples.jsonl"}, "other held-out samples"),
        ({"model": "other"}, "other weights to start from"),
    ],
)
def test_no_table_mixes_two_studies(
    home: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    settings = config(arms=("all",), num_seeds=1)
    run_study(settings, base=home, folder=tmp_path, make_optimizer=plain)
    other = build.build_model(
        build.TinyConfig(
            vision_width=16, vision_layers=1, vision_heads=2, width=24, layers=4, heads=2,
            mlp_width=48,
        ),
        seed=1,
    )  # fmt: skip
    other.save_pretrained(home / "other")
    with pytest.raises(StateError, match=says):
        run_study(replace(settings, **changes), base=home, folder=tmp_path, make_optimizer=plain)


def test_a_study_may_grow_and_change_what_changes_no_number(home: Path, tmp_path: Path) -> None:
    settings = config(arms=("all",), num_seeds=1)
    common: dict[str, Any] = {"base": home, "folder": tmp_path, "make_optimizer": plain}
    first = run_study(settings, **common)
    grown = replace(
        settings,
        arms=("all", "unsolved:worked->all"),
        num_seeds=2,
        grpo=replace(settings.grpo, checkpoint_every=7),
        grpo_optimizer=replace(settings.grpo_optimizer, offload=True),
        evaluate=replace(settings.evaluate, num_resamples=50),
    )
    cells = run_study(grown, **common)
    assert len(cells) == 5
    assert values_of(cells)[:2] == values_of(first)


def test_samples_changed_since_they_were_scored_are_refused(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    data = tmp_path / "home" / "train" / "samples.jsonl"
    common: dict[str, Any] = {
        "base": tmp_path / "home", "folder": tmp_path / "out", "make_optimizer": plain,
    }  # fmt: skip
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    edited = [{**rows[0], "answer": "other"}, *rows[1:]]
    data.write_text("".join(json.dumps(row) + "\n" for row in edited))
    with pytest.raises(DataError, match=f"1 samples have changed since .* {rows[0]['id']!r}"):
        run_study(config(), **common)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = data.parent / rows[2]["images"][0]
    picture.write_bytes((data.parent / rows[3]["images"][0]).read_bytes())
    with pytest.raises(DataError, match=f"1 samples have changed since .* {rows[2]['id']!r}"):
        run_study(config(), **common)
    assert not list((tmp_path / "out").rglob("checkpoints"))


def test_adapters_and_frozen_parts_are_those_of_the_recipe(home: Path, tmp_path: Path) -> None:
    settings = config(
        arms=("all",), num_seeds=1, lora=LoraConfig(rank=2), freeze=("vision",), device="cpu"
    )
    run_study(settings, base=home, folder=tmp_path, make_optimizer=trained_only)
    saved = next(tmp_path.rglob("adapter_model.safetensors"))
    names = list(load_file(saved))
    assert names
    assert not any("vision" in name for name in names)
    with pytest.raises(UsageError, match="no device 'toaster' here"):
        run_study(
            replace(settings, device="toaster"), base=home, folder=tmp_path / "other",
            make_optimizer=plain,
        )  # fmt: skip


def trained_only(
    module: torch.nn.Module, settings: OptimizerConfig, max_grad_norm: float
) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)


def tuned(**changes: Any) -> StudyConfig:
    return config(
        **{
            "arms": ("all", "unsolved->all"), "num_seeds": 1, "learning_rates": (1e-4, 3e-2),
            "validation": "validation/samples.jsonl", **changes,
        }
    )  # fmt: skip


def by_rate(
    module: torch.nn.Module, settings: OptimizerConfig, max_grad_norm: float
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=settings.lr)


@pytest.mark.slow
def test_rates_are_chosen_on_the_validation_split_at_one_budget(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[str]] = []
    real = evaluate

    def noted(model: LocalModel, samples: Any, *rest: Any, **more: Any) -> Any:
        asked.append({sample.id for sample in samples})
        return real(model, samples, *rest, **more)

    monkeypatch.setattr(study_module, "evaluate", noted)
    settings = tuned()
    whole = run_study(settings, base=home, folder=tmp_path / "whole", make_optimizer=by_rate)
    ids = {
        name: {sample.id for sample in read_samples(home / name / "samples.jsonl").samples}
        for name in ("validation", "held")
    }
    assert asked == [ids["validation"]] * 4 + [ids["held"]] * 3  # tuning never asks the test split
    rates = read_rates(settings, tmp_path / "whole")
    assert [one.arm for one in rates] == ["all", "unsolved->all"]
    for one in rates:
        assert [rate for rate, _ in one.tried] == [1e-4, 3e-2]
        best = max(value for _, value in one.tried)
        assert dict(one.tried)[one.rate] == best
        assert (one.num_runs, one.num_samples, one.at_the_edge) == (1, 5, True)
    cells = {cell.cell.arm: cell for cell in whole}
    assert {arm: cells[arm].learning_rate for arm in ("all", "unsolved->all")} == {
        one.arm: one.rate for one in rates
    }
    assert cells["base"].learning_rate is None
    spent = [
        json.loads(path.read_text())["completions"]
        for path in sorted((tmp_path / "whole" / "tuning").glob("*/cell.json"))
    ]
    assert spent == [8] * 4  # 2 steps of 2 x 2
    told = price(settings, num_held_out=5, num_validation=5)
    assert told["tuning_runs"] == 4
    assert told["training_completions"] == sum(spent) + sum(cell.completions for cell in whole)
    page = render_html(study_report(settings, whole, rates))
    assert "Learning rate of each arm" in page
    assert "5 validation samples" in page

    calls = 0
    while len(read_cells(settings, tmp_path / "parts")) < 3:
        run_study(
            settings, base=home, folder=tmp_path / "parts", make_optimizer=by_rate,
            stop=lambda: True,
        )  # fmt: skip
        calls += 1
        assert calls < 30
    assert read_rates(settings, tmp_path / "parts") == rates
    assert values_of(read_cells(settings, tmp_path / "parts")) == values_of(whole)

    with study_module._claimed(tmp_path / "two" / "tuning" / "all-0.03-2") as mine:
        assert mine
        others = run_study(settings, base=home, folder=tmp_path / "two", make_optimizer=by_rate)
    assert {cell.cell.arm for cell in others} == {"base", "unsolved->all"}
    rest = run_study(settings, base=home, folder=tmp_path / "two", make_optimizer=by_rate)
    assert values_of(rest) == values_of(whole)

    other = 1e-4 if cells["all"].learning_rate == 3e-2 else 3e-2
    changed = replace(
        settings, learning_rates=(), validation="",
        grpo_optimizer=replace(settings.grpo_optimizer, lr=other),
    )  # fmt: skip
    with pytest.raises(StateError, match=r"all-1 was trained at rate .*, the study now says"):
        run_study(changed, base=home, folder=tmp_path / "whole", make_optimizer=by_rate)


def test_a_rate_is_the_best_mean_and_a_tie_goes_to_the_smaller() -> None:
    def scores(*values: float) -> tuple[SampleScore, ...]:
        return tuple(
            SampleScore(id=str(n), task="", stratum="", greedy=0.0, sampled=(value,))
            for n, value in enumerate(values)
        )

    found = choose_rate(
        "all",
        {
            0.1: [scores(1.0, 0.0), scores(1.0, 0.0)],
            0.01: [scores(1.0, 1.0), scores(1.0, math.nan)],
            0.001: [scores(1.0, 1.0), scores(1.0, 1.0)],
            0.2: [scores(0.0, 0.0), scores(1.0, 1.0)],
        },
    )
    assert found.tried == ((0.001, 1.0), (0.01, 1.0), (0.1, 0.5), (0.2, 0.5))
    assert (found.rate, found.num_runs, found.num_samples) == (0.001, 2, 2)
    assert found.at_the_edge
    with pytest.raises(DataError, match=r"no sampled answer of all at rate 0\.1 could be judged"):
        choose_rate("all", {0.1: [scores(math.nan)]})


def test_hours_follow_from_given_speeds_alone() -> None:
    settings = config(num_seeds=3)  # 2 arms, one of them with SFT
    told = price(settings, num_held_out=10)
    assert told["training_completions"] == 6 * 2 * 2 * 2
    assert told["sft_samples"] == 3 * 2
    assert told["evaluation_completions"] == 7 * 10 * 3
    assert told["gpu_hours"] == (
        "not known: give price.generated_tokens_per_second, price.trained_tokens_per_second, "
        "price.target_tokens"
    )
    assert "usd" not in told
    speeds = PriceConfig(
        generated_tokens_per_second=0.1, trained_tokens_per_second=0.05, target_tokens=7.0,
        completion_tokens=2.0, usd_per_gpu_hour=3.0, basis="made up",
    )  # fmt: skip
    told = price(replace(settings, price=speeds), num_held_out=10)
    seconds = (48 + 210) * 2 / 0.1 + (48 * 2 + 6 * 7) / 0.05
    assert told["gpu_hours"] == round(seconds / 3600, 1) == 2.2
    assert told["usd"] == round(seconds / 3600 * 3) == 7
    assert told["basis"] == "made up"
    at_the_limit = replace(speeds, completion_tokens=None, usd_per_gpu_hour=None)
    told = price(replace(settings, price=at_the_limit), num_held_out=10)
    assert (told["generated_tokens"], told["trained_tokens"]) == (258 * 3, 48 * 3 + 42)
    assert "max_new_tokens" in str(told["answers"])
    assert "not known" in str(told["usd"])


def test_what_cannot_be_counted_is_said() -> None:
    refilled = replace(config().grpo.sampling, refill=True)
    told = price(
        config(grpo=replace(config().grpo, sampling=refilled), arms=("all",)), num_held_out=None
    )
    assert told["evaluation_completions"] == 0
    assert "not counted" in str(told["evaluation"])
    assert "up to 3 rounds" in str(told["refills"])
    assert "not counted" in str(price(tuned(), num_held_out=5)["evaluation"])
    assert "evaluation" not in price(tuned(), num_held_out=5, num_validation=5)
    with pytest.raises(ConfigError, match="trained_tokens_per_second must be above 0"):
        PriceConfig(trained_tokens_per_second=0.0)


def test_rates_want_a_validation_split_of_its_own(home: Path, tmp_path: Path) -> None:
    for split, says in (("train", "also trained on"), ("held", "also held out")):
        with pytest.raises(DataError, match=f"validation samples are {says}"):
            run_study(
                tuned(validation=f"{split}/samples.jsonl"), base=home, folder=tmp_path,
                make_optimizer=plain,
            )  # fmt: skip
    assert not list(tmp_path.iterdir())
    for wrong, says in (
        ({"validation": ""}, "go together"),
        ({"learning_rates": (0.1, 0.1)}, "twice"),
        ({"learning_rates": (0.0,)}, "above 0"),
        ({"num_tuning_seeds": 0}, "1 or more"),
        ({"evaluate": EvalConfig(num_draws=0)}, "num_draws"),
    ):
        with pytest.raises(ConfigError, match=says):
            tuned(**wrong)
    cells = tuning_cells(tuned(num_tuning_seeds=2, num_seeds=3))
    assert {cell.seed for cell in cells}.isdisjoint({1, 2, 3})
    assert len({cell.name for cell in cells}) == len(cells) == 8


def made_cells(
    shift: dict[str, float], *, num_seeds: int, seed_noise: float, num_samples: int = 300
) -> list[CellResult]:
    """Cells of a world in which an arm adds `shift` to every sample's chance of a right answer."""
    rng = np.random.default_rng(0)
    chance_N = rng.uniform(0.2, 0.7, num_samples)
    cells = []
    for arm, added in {"base": 0.0, **shift}.items():
        for seed in range(1 if arm == "base" else num_seeds):
            moved_N = np.clip(chance_N + added + seed_noise * rng.standard_normal(), 0, 1)
            scores = tuple(
                SampleScore(
                    id=str(n), task="t", stratum="", greedy=float(rng.random() < moved_N[n]),
                    sampled=tuple(float(x < moved_N[n]) for x in rng.random(4)),
                )
                for n in range(num_samples)
            )  # fmt: skip
            cells.append(
                CellResult(
                    cell=Cell(arm=arm, seed=seed), scores=scores, num_samples=9, completions=8,
                    completion_tokens=24.0, seconds=1.0,
                )
            )  # fmt: skip
    return cells


def test_an_effect_is_seen_and_a_null_is_not() -> None:
    cells = made_cells({"random": 0.15, "mid+hard": 0.15}, num_seeds=5, seed_noise=0.01)
    found = {
        (c.arm, c.control): c
        for c in analyse(cells, "random", num_resamples=4000).comparisons
        if c.decoding is Decoding.SAMPLED
    }
    assert set(found) == {("random", "base"), ("mid+hard", "base"), ("mid+hard", "random")}
    assert found["random", "base"].verdict == "higher"
    assert found["random", "base"].difference == pytest.approx(0.15, abs=0.03)
    assert found["mid+hard", "random"].verdict == "no difference seen"
    for one in found.values():
        assert one.wide_low <= one.low <= one.difference <= one.high <= one.wide_high


@pytest.mark.parametrize("unit", [Unit.SAMPLES, Unit.TOKENS])
def test_arms_of_one_and_of_two_stages_get_the_same_budget(
    home: Path, tmp_path: Path, unit: Unit
) -> None:
    amount = {Unit.SAMPLES: 8, Unit.TOKENS: 40}[unit]
    grpo = replace(config().grpo, steps=30, budget=Budget(unit=unit, amount=amount))
    settings = config(grpo=grpo, num_seeds=1, sft=SftConfig(steps=2, batch_size=2))
    found = run_study(settings, base=home, folder=tmp_path, make_optimizer=plain)
    trained = {one.cell.arm: one for one in found if one.cell.arm != "base"}
    assert set(trained) == {"all", "random->all"}
    a_step = {Unit.SAMPLES: 2, Unit.TOKENS: 2 * 2 * 3}[unit]  # at most
    for one in trained.values():
        taken = one.num_drawn if unit is Unit.SAMPLES else one.completion_tokens + one.target_tokens
        assert amount <= taken < amount + a_step
        assert one.budget_reached
    assert trained["all"].target_tokens == 0
    assert trained["random->all"].target_tokens > 0
    assert trained["random->all"].completions < trained["all"].completions
    page = render_html(study_report(settings, found))
    assert f"{amount} {unit.value}, both stages together" in page
    told = price(settings, num_held_out=5)
    assert told["budget"] == f"a run ends earlier once it took {amount} {unit.value}"


def test_a_supervised_stage_that_takes_the_whole_budget_is_refused(
    home: Path, tmp_path: Path
) -> None:
    grpo = replace(config().grpo, budget=Budget(unit=Unit.SAMPLES, amount=2))
    with pytest.raises(ConfigError, match="supervised stage alone takes 2 of 2 samples"):
        run_study(
            config(grpo=grpo, arms=("all", "random->all")), base=home, folder=tmp_path,
            make_optimizer=plain,
        )  # fmt: skip


def test_a_run_out_of_steps_says_that_it_missed_the_budget(home: Path, tmp_path: Path) -> None:
    grpo = replace(config().grpo, budget=Budget(unit=Unit.TOKENS, amount=1e6))
    settings = config(grpo=grpo, arms=("all",), num_seeds=1)
    found = run_study(settings, base=home, folder=tmp_path, make_optimizer=plain)
    assert [one.budget_reached for one in found] == [True, False]  # the base takes none
    assert spent_by_arm(found)["all"]["budget_reached"] == 0.0


def test_accuracy_is_told_by_stratum_and_task(home: Path, tmp_path: Path) -> None:
    model = LocalModel.load(home / "model")
    held_out = read_samples(home / "held" / "samples.jsonl")
    scoring = ScoreConfig(
        num_attempts=1, permilles=(0,), blind=False, cmab=False, sampling=Sampling(max_new_tokens=3)
    )
    found = score(held_out, model, config=scoring, folder=home / "held-scores", seed=1)
    settings = config(held_out_scores="held-scores", arms=("all",), num_seeds=2)
    cells = run_study(settings, base=home, folder=tmp_path / "study", make_optimizer=plain)
    strata = {row.id: row.pism_stratum.value for row in found.rows}
    assert {row.id: row.stratum for row in cells[1].scores} == strata
    page = render_html(study_report(settings, cells))
    assert "by stratum, with 95 % intervals" in page
    for name in set(strata.values()):
        size = list(strata.values()).count(name)
        assert f"<th>{name} ({size})</th>" in page

    (home / "held-scores" / "short").mkdir()
    short = score(
        held_out.samples[1:], model, config=scoring, folder=home / "held-scores" / "short", seed=1
    )
    assert len(short.rows) == 4
    with pytest.raises(DataError, match="1 held-out samples have no score"):
        run_study(
            replace(settings, held_out_scores="held-scores/short"), base=home,
            folder=tmp_path / "other", make_optimizer=plain,
        )  # fmt: skip


def test_groups_are_means_over_their_own_samples() -> None:
    cells = made_cells({"random": 0.15}, num_seeds=3, seed_noise=0.05)
    even = {row.id for row in cells[0].scores if int(row.id) % 2 == 0}
    found = accuracy_by_group(
        cells, lambda row: "even" if row.id in even else "", num_resamples=500
    )
    assert {(one.arm, one.group) for one in found} == {("base", "even"), ("random", "even")}
    for one in found:
        rows = [row for cell in cells if cell.cell.arm == one.arm for row in cell.scores]
        values = [value for row in rows if row.id in even for value in row.sampled]
        assert one.value == pytest.approx(np.mean(values))
        assert one.low < one.value < one.high
        assert one.num_samples == len(even)


def test_spread_between_seeds_widens_the_interval() -> None:
    def width(seed_noise: float) -> float:
        cells = made_cells({"random": 0.1, "all": 0.1}, num_seeds=5, seed_noise=seed_noise)
        (one,) = [
            c for c in analyse(cells, "random", num_resamples=1000).comparisons
            if (c.arm, c.control, c.decoding) == ("all", "random", Decoding.SAMPLED)
        ]  # fmt: skip
        return one.high - one.low

    assert width(0.08) > 1.5 * width(0.0)


def test_the_report_says_what_the_intervals_say() -> None:
    settings = config(arms=("random", "mid+hard"), control="random", num_seeds=5)
    cells = made_cells({"random": 0.2, "mid+hard": 0.2}, num_seeds=5, seed_noise=0.0)
    report = study_report(settings, cells)
    page = render_html(report)
    assert "11 of 11" in page
    assert "Sampled accuracy against random: mid+hard" in page
    assert "(no difference seen)" in page
    names = {b.name for s in report.sections for b in s.blocks if isinstance(b, Figure)}
    assert names == {"forest-sampled", "forest-greedy"}
    lines = conclusions(analyse(cells, "random", num_resamples=1000), "random")
    assert len(lines) == 4
    assert spent_by_arm(cells)["random"]["completions"] == 8


def test_the_committed_study_follows_from_its_raw_records() -> None:
    folder = Path(__file__).parents[3] / "bench" / "results" / "study-tiny_2026-11"
    settings = load_config(StudyConfig, folder / "config.toml")
    cells = read_cells(settings, folder)
    assert len(cells) == len(cells_of(settings)) == 106
    rates = {one.arm: one.rate for one in read_rates(settings, folder)}
    assert all(cell.learning_rate == rates.get(cell.cell.arm) for cell in cells)
    for cell in cells[1:]:  # equal tokens, to within a step
        tokens = cell.completion_tokens + cell.target_tokens
        assert 12_000 <= tokens < 12_000 + 32 * 8 * 8
        assert cell.budget_reached
    found = {
        (c.arm, c.control): (f"{100 * c.difference:+.1f}", c.verdict)
        for c in analyse(cells, settings.control).comparisons
        if c.decoding is Decoding.SAMPLED
    }
    assert found["mid+hard", "base"] == ("+6.4", "higher")
    assert found["mid+hard", "random"] == ("-2.4", "no difference seen")
    assert found["unsolved", "random"] == ("-9.2", "lower")
    assert found["hard:bare->medium", "random"] == ("-6.4", "lower")
    assert not any(
        verdict == "higher" for (_, other), (_, verdict) in found.items() if other == "random"
    )
    line = conclusions(analyse(cells, settings.control), settings.control)[1]
    assert line.startswith(
        "Sampled accuracy against random: lower for 3 of 20 arms (unsolved -9.2, "
    )
    assert "; no difference seen for 17 of 20 arms (-4.3 to +2.3 points)" in line
    assert line in " ".join((folder / "report.md").read_text(encoding="utf-8").split("\n"))
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    for number in ("-2.4 points", "-9.2", "-6.4 and +2.3"):
        assert number in readme


def test_the_command_prices_runs_and_reports(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tierwise.cli.main import run

    (home / "study.toml").write_text(
        'model = "model"\ndata = "train/samples.jsonl"\nscores = "scores"\n'
        'held_out = "held/samples.jsonl"\narms = ["all"]\ncontrol = "all"\nnum_seeds = 1\n'
        "[grpo]\nsteps = 1\n[grpo.sampling]\nprompts_per_step = 2\ngroup_size = 2\n"
        "max_new_tokens = 3\n[evaluate]\nnum_draws = 2\nmax_new_tokens = 3\n"
    )
    command = ["curriculum", "study", str(home / "study.toml"), "--out", str(tmp_path), "--json"]
    assert run([*command, "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["training_completions"] == 4
    assert not list(tmp_path.iterdir())
    assert run(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["runs_done"], said["runs_planned"]) == (2, 2)
    assert Path(said["report"]).is_file()


@pytest.mark.parametrize("name", ["study-tiny.toml", "study-7b.toml"])
def test_the_shipped_studies_can_be_read_and_priced(name: str) -> None:
    settings = load_config(StudyConfig, Path(__file__).parents[3] / "configs" / name)
    told = price(settings, num_held_out=100)
    assert told["cells"] == 1 + len(settings.arms) * 5
    if name == "study-7b.toml":
        assert isinstance(told["gpu_hours"], float)
        assert "bound" in str(told["basis"])
        pairings = {f"{first.value}->{second.value}" for first, second in PAPER_PAIRINGS}
        assert pairings <= set(settings.arms)
