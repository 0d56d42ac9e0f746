"""The loop on a very small real model: learns, repeats, resumes bit for bit, and refuses well."""

from __future__ import annotations

import copy
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tierwise.core.errors import ConfigError, StateError, TrainingError, UsageError
from tierwise.core.progress import SilentProgress
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, load_image
from tierwise.curriculum.tiny import build, tasks
from tierwise.curriculum.training import learner
from tierwise.curriculum.training.budget import Budget, Unit, spent
from tierwise.curriculum.training.experience import collect, take
from tierwise.curriculum.training.loop import (
    GrpoConfig,
    Reward,
    SamplingConfig,
    TrainConfig,
    TrainResult,
    train_grpo,
)
from tierwise.curriculum.training.rollouts import (
    Rollouts,
    can_share_prompts,
    completion_logprobs,
    sample_rollouts,
    select_prompts,
)

SMALL = build.TinyConfig(
    vision_width=16, vision_layers=1, vision_heads=2, width=24, layers=2, heads=2, mlp_width=48
)


@functools.cache
def _untrained(seed: int) -> LocalModel:
    torch.set_num_threads(1)
    return LocalModel(build.build_model(SMALL, seed=seed), build.build_processor(SMALL))


def small_model(seed: int = 0) -> LocalModel:
    made = _untrained(seed)
    return LocalModel(copy.deepcopy(made.model), made.processor)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    folder = tmp_path_factory.mktemp("pictures")
    made = []
    for drawn in tasks.draw_samples(11, seed=5, split="train"):
        path = folder / f"{drawn.id}.png"
        drawn.image.save(path)
        made.append(
            Sample(id=drawn.id, question=drawn.question, answer=drawn.answer, images=(path,))
        )
    return made


def starts_with_a_number(sample: Sample, text: str) -> float:
    """What an untrained model does now and then, so that there is something to learn."""
    return float(text[:1].isdigit())


def config(
    *, sampling: dict[str, Any] | None = None, objective: dict[str, Any] | None = None, **rest: Any
) -> TrainConfig:
    return TrainConfig(
        **{"steps": 6, "checkpoint_every": 2, **rest},
        sampling=SamplingConfig(
            **{"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4, **(sampling or {})}
        ),
        objective=GrpoConfig(**{"kl_weight": 0.0, **(objective or {})}),
    )


def adamw(model: LocalModel, lr: float = 3e-3) -> torch.optim.Optimizer:
    trained = [p for p in model.model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)


def train(
    folder: Path,
    samples: list[Sample],
    settings: TrainConfig,
    *,
    model: LocalModel | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    reward: Reward = starts_with_a_number,
    **rest: Any,
) -> tuple[TrainResult, dict[str, Tensor], torch.optim.Optimizer]:
    model = model or small_model()
    optimizer = optimizer or adamw(model)
    result = train_grpo(
        model, samples, optimizer, settings,
        folder=folder, **{"seed": 7, "reward": reward, **rest},
    )  # fmt: skip
    return result, dict(model.model.state_dict()), optimizer


def values_of(result: TrainResult) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "timing"} for row in result.metrics]


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=True)
        return type(one) is type(other) and all(same_bits(a, b) for a, b in pairs)
    return bool(one == other)


def test_shared_prompts_give_the_same_rollouts_and_gradient_as_whole_rows(
    samples: list[Sample],
) -> None:
    model = small_model()
    chosen = samples[:5]
    prompts = model.encode(chosen, [[load_image(p) for p in s.images] for s in chosen])
    prompt_B = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 4, 4])
    made = [
        sample_rollouts(
            model, prompts, prompt_B,
            seeds=range(10), temperature=0.8, max_new_tokens=6, share_prompts=share,
        )
        for share in (True, False)
    ]  # fmt: skip
    assert made[0].texts == made[1].texts
    assert torch.equal(made[0].token_ids_BT, made[1].token_ids_BT)
    assert torch.equal(made[0].finished_B, made[1].finished_B)
    gradients = []
    for share in (True, False):
        logprob_BT = completion_logprobs(model, made[0], temperature=0.8, share_prompts=share)
        assert torch.allclose(
            logprob_BT.detach()[made[0].mask_BT], made[0].logprob_BT[made[0].mask_BT], atol=1e-5
        )
        model.model.zero_grad()
        (logprob_BT * made[0].mask_BT).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append([p.grad for p in model.model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 20
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=2e-4, rtol=1e-3)


def test_a_rollout_does_not_depend_on_its_neighbours(samples: list[Sample]) -> None:
    model = small_model()
    prompts = model.encode(samples[:3], [[load_image(p) for p in s.images] for s in samples[:3]])
    all_rows = sample_rollouts(
        model, prompts, torch.tensor([0, 0, 1, 2]), seeds=[1, 2, 3, 4],
        temperature=1.0, max_new_tokens=5,
    )  # fmt: skip
    fewer = sample_rollouts(
        model, prompts, torch.tensor([0, 2]), seeds=[2, 4], temperature=1.0, max_new_tokens=5
    )
    assert fewer.texts == (all_rows.texts[1], all_rows.texts[3])


def test_dropping_prompts_keeps_the_other_log_probabilities(samples: list[Sample]) -> None:
    model = small_model()
    prompts = model.encode(samples[:4], [[load_image(p) for p in s.images] for s in samples[:4]])
    made = sample_rollouts(
        model, prompts, torch.arange(4).repeat_interleave(2), seeds=range(8),
        temperature=1.0, max_new_tokens=5,
    )  # fmt: skip
    kept = select_prompts(made, torch.tensor([True, False, True, False]))
    assert kept.prompt_B.tolist() == [0, 0, 1, 1]
    assert kept.texts == (*made.texts[0:2], *made.texts[4:6])
    with torch.no_grad():
        again_BT = completion_logprobs(model, kept, temperature=1.0)
    assert torch.allclose(again_BT[kept.mask_BT], kept.logprob_BT[kept.mask_BT], atol=1e-5)


def test_three_dimensional_positions_are_never_shared() -> None:
    model = small_model()
    assert can_share_prompts(model)
    model.model.config.get_text_config().rope_parameters["mrope_section"] = [4, 4, 4]
    assert not can_share_prompts(model)


def test_training_raises_the_reward(samples: list[Sample], tmp_path: Path) -> None:
    model = small_model()
    result, _, _ = train(
        tmp_path, samples, config(steps=20, checkpoint_every=50, sampling={"group_size": 8}),
        model=model, optimizer=adamw(model, lr=1e-2),
    )  # fmt: skip
    rewards = [row["reward"] for row in result.metrics]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6
    assert (result.finished, result.steps) == (True, 20)


def test_same_seed_same_bits_other_seed_other_numbers(
    samples: list[Sample], tmp_path: Path
) -> None:
    first, weights, _ = train(tmp_path / "a", samples, config())
    again, weights_again, _ = train(tmp_path / "b", samples, config())
    other, _, _ = train(tmp_path / "c", samples, config(), seed=8)
    assert values_of(first) == values_of(again)
    assert same_bits(weights, weights_again)
    assert values_of(first) != values_of(other)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"objective": {"kl_weight": 0.05}, "inner_updates": 2, "warmup_steps": 5},
    {"sampling": {"shuffle": True, "refill": True, "prompts_per_pass": 3}},
    {"objective": {"loss": "dr_grpo", "scale": "none", "clip_high": 0.28}, "bf16": True},
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stop_after", [1, 4])
def test_resumed_equals_uninterrupted_bit_for_bit(
    samples: list[Sample], tmp_path: Path, variant: dict[str, Any], stop_after: int
) -> None:
    settings = config(**variant)
    whole, weights, optimizer = train(tmp_path / "whole", samples, settings)
    steps = iter(range(1, 100))
    part, _, _ = train(
        tmp_path / "parts", samples, settings, stop=lambda: next(steps) == stop_after
    )
    assert (part.steps, part.finished) == (stop_after, False)
    rest, weights_rest, optimizer_rest = train(tmp_path / "parts", samples, settings)
    assert (rest.resumed_from, rest.steps, rest.finished) == (stop_after, 6, True)
    assert values_of(rest) == values_of(whole)
    assert same_bits(weights, weights_rest)
    assert same_bits(optimizer.state_dict(), optimizer_rest.state_dict())


def test_a_killed_step_is_made_again_from_the_last_checkpoint(
    samples: list[Sample], tmp_path: Path
) -> None:
    whole, weights, _ = train(tmp_path / "whole", samples, config())
    calls = iter(range(1000))

    def killed(sample: Sample, text: str) -> float:
        if next(calls) == 16 * 4 + 5:  # in the fifth step, after the checkpoint at four
            raise KeyboardInterrupt
        return starts_with_a_number(sample, text)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", samples, config(), reward=killed)
    rest, weights_rest, _ = train(tmp_path / "killed", samples, config())
    assert rest.resumed_from == 4
    assert values_of(rest) == values_of(whole)
    assert same_bits(weights, weights_rest)


def test_a_finished_run_is_not_trained_again(samples: list[Sample], tmp_path: Path) -> None:
    first, weights, _ = train(tmp_path, samples, config())
    again, weights_again, _ = train(tmp_path, samples, config())
    assert again.resumed_from == 6
    assert again.metrics == first.metrics
    assert same_bits(weights, weights_again)


def test_passes_add_up_to_the_whole_step(samples: list[Sample], tmp_path: Path) -> None:
    _, whole, _ = train(tmp_path / "a", samples, config(steps=2))
    _, parts, _ = train(tmp_path / "b", samples, config(steps=2, sampling={"prompts_per_pass": 1}))
    for name, tensor in whole.items():
        assert torch.allclose(tensor, parts[name], atol=3e-4), name


def test_frozen_parameters_do_not_move(samples: list[Sample], tmp_path: Path) -> None:
    model = small_model()
    for name, parameter in model.model.named_parameters():
        parameter.requires_grad_("vision" not in name)
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    _, after, _ = train(tmp_path, samples, config(steps=2), model=model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not [name for name in moved if "vision" in name]


def test_the_trained_model_loads_by_itself(samples: list[Sample], tmp_path: Path) -> None:
    result, weights, _ = train(tmp_path, samples, config(steps=2))
    loaded = LocalModel.load(result.model_folder)
    assert same_bits(dict(loaded.model.state_dict()), weights)


def test_divergence_from_the_start_is_measured(samples: list[Sample], tmp_path: Path) -> None:
    result, _, _ = train(tmp_path, samples, config(objective={"kl_weight": 0.01}))
    kl = [row["kl"] for row in result.metrics]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > kl[0]


def test_inner_updates_after_the_first_are_off_policy(
    samples: list[Sample], tmp_path: Path
) -> None:
    model = small_model()
    result, _, _ = train(
        tmp_path, samples,
        config(steps=3, inner_updates=4, objective={"clip_low": 0.01, "clip_high": 0.01}),
        model=model, optimizer=adamw(model, lr=1e-2),
    )  # fmt: skip
    assert max(row["clip_share"] for row in result.metrics) > 0


def test_order_is_kept_or_shuffled_by_the_seed(samples: list[Sample]) -> None:
    kept = [take(samples, p, shuffle=False, seed=1).id for p in range(22)]
    assert kept == [sample.id for sample in samples] * 2
    drawn = [take(samples, p, shuffle=True, seed=1).id for p in range(22)]
    assert sorted(drawn[:11]) == sorted(drawn[11:]) == sorted(kept[:11])
    assert drawn[:11] != drawn[11:]
    assert drawn == [take(samples, p, shuffle=True, seed=1).id for p in range(22)]
    assert drawn != [take(samples, p, shuffle=True, seed=2).id for p in range(22)]


def test_refill_draws_in_place_of_groups_that_agree(samples: list[Sample]) -> None:
    flat = {sample.id for sample in samples[:3]}

    def reward(sample: Sample, text: str) -> float:
        return 1.0 if sample.id in flat else float(len(text))

    settings = SamplingConfig(prompts_per_step=4, group_size=4, max_new_tokens=4, refill=True)
    found = collect(small_model(), samples, reward, settings, position=0, seed=1, step=0)
    assert [len(part.samples) for part in found.passes] == [4, 3]
    assert (found.position, found.refills) == (7, 1)
    everything_flat = collect(
        small_model(), samples, lambda s, t: 1.0, settings, position=0, seed=1, step=0
    )
    assert everything_flat.refills == settings.max_refills + 1


def test_rewards_by_stratum(samples: list[Sample], tmp_path: Path) -> None:
    strata = {sample.id: ("hard", "medium")[i % 2] for i, sample in enumerate(samples[:3])}
    result, _, _ = train(tmp_path, samples, config(steps=1), strata=strata)
    assert set(result.metrics[0]["reward_by_stratum"]) == {"hard", "medium", "unsorted"}


def test_a_reward_that_raises_is_no_verdict(samples: list[Sample], tmp_path: Path) -> None:
    def sometimes(sample: Sample, text: str) -> float:
        if sample.id == samples[0].id:
            raise ZeroDivisionError("oh")
        return starts_with_a_number(sample, text)

    result, _, _ = train(tmp_path, samples, config(steps=1), reward=sometimes)
    assert result.metrics[0]["unscored_share"] == 0.25
    assert result.metrics[0]["reward_error"] == "ZeroDivisionError: oh"


def test_no_verdict_at_all_ends_the_run(samples: list[Sample], tmp_path: Path) -> None:
    def never(sample: Sample, text: str) -> float:
        raise RuntimeError("server gone")

    with pytest.raises(TrainingError, match=r"no reward at all \(RuntimeError: server gone\)"):
        train(tmp_path, samples, config(), reward=never)


def test_equal_rewards_end_the_run_in_time(samples: list[Sample], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="equal rewards in every group for 3 steps"):
        train(tmp_path, samples, config(max_flat_steps=3), reward=lambda s, t: 1.0)
    events = (tmp_path / "record.jsonl").read_text().splitlines()
    assert [json.loads(line).get("step") for line in events] == [None, 1, 2]


def test_a_loss_that_is_not_finite_names_the_batch_and_keeps_the_last_checkpoint(
    samples: list[Sample], tmp_path: Path
) -> None:
    model, calls = small_model(), iter(range(1000))

    def poisoned(sample: Sample, text: str) -> float:
        if next(calls) == 16 * 3:  # the fourth step
            with torch.no_grad():
                model.model.lm_head.weight[3] = math.nan
        return starts_with_a_number(sample, text)

    with pytest.raises(TrainingError, match="loss is nan at step 4, samples train-5") as caught:
        train(tmp_path, samples, config(), model=model, reward=poisoned)
    assert "step-000002" in str(caught.value.hint)
    rest, _, _ = train(tmp_path, samples, config())
    assert rest.resumed_from == 2
    assert rest.finished


def test_weights_that_a_rate_has_blown_up_are_no_good_checkpoint(
    samples: list[Sample], tmp_path: Path
) -> None:
    model = small_model()
    settings = config(steps=6, checkpoint_every=1)
    with pytest.raises(TrainingError, match=r"nan at step 2, samples train-5") as caught:
        train(tmp_path, samples, settings, model=model, optimizer=adamw(model, lr=1e30))
    assert "the last good checkpoint is" in str(caught.value.hint)
    assert "step-000000: step-000001 holds the weights of now" in str(caught.value.hint)
    assert len((tmp_path / "record.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_stopped_after_every_step_it_ends_as_if_never_stopped(
    samples: list[Sample], tmp_path: Path, variant: dict[str, Any]
) -> None:
    settings = config(**variant)
    whole, weights, optimizer = train(tmp_path / "whole", samples, settings)
    for step in range(settings.steps):
        part, found, state = train(tmp_path / "parts", samples, settings, stop=lambda: True)
        assert (part.resumed_from, part.steps) == (step, step + 1)
    assert values_of(part) == values_of(whole)
    assert same_bits(weights, found)
    assert same_bits(optimizer.state_dict(), state.state_dict())


def test_a_reward_that_hangs_names_the_batch_and_keeps_the_last_checkpoint(
    samples: list[Sample], tmp_path: Path
) -> None:
    calls = iter(range(1000))

    def hangs(sample: Sample, text: str) -> float:
        if next(calls) == 16 * 3 + 5:  # in the fourth step, at its second sample
            while True:
                time.sleep(1000)
        return starts_with_a_number(sample, text)

    started = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        train(tmp_path, samples, config(reward_timeout_s=2.0), reward=hangs)
    assert time.monotonic() - started < 60
    said = f"the reward of {samples[(3 * 4 + 1) % 11].id} did not come within 2 s at step 4"
    assert said in str(caught.value)
    assert "step-000002" in str(caught.value.hint)
    assert "reward_timeout_s" in str(caught.value.hint)
    rest, weights, _ = train(tmp_path, samples, config(reward_timeout_s=0.0))
    _, expected, _ = train(tmp_path / "whole", samples, config())
    assert (rest.resumed_from, rest.finished) == (2, True)
    assert same_bits(weights, expected)


def test_slow_rewards_of_a_pass_add_up(samples: list[Sample], tmp_path: Path) -> None:
    def slow(sample: Sample, text: str) -> float:
        time.sleep(0.1)
        return starts_with_a_number(sample, text)

    with pytest.raises(TrainingError, match=r"within 0\.5 s at step 1"):
        train(tmp_path, samples, config(reward_timeout_s=0.5), reward=slow)
    with pytest.raises(UsageError, match="reward_timeout_s"):
        config(reward_timeout_s=-1.0)


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


@pytest.mark.parametrize("limit", [8, 4])
def test_out_of_memory_halves_the_pass_once_and_says_so(
    samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    kept: dict[str, Any] = {
        "objective": {"kl_weight": 0.01},
        "steps": 3,
    }  # with it no group is dropped
    expected, weights, _ = train(
        tmp_path / "halves", samples, config(sampling={"prompts_per_pass": 2}, **kept)
    )

    def small(model: LocalModel, rollouts: Rollouts, **rest: Any) -> Tensor:
        if len(rollouts.texts) > limit:
            torch.empty(2**58)  # more than any machine has: what torch raises on the CPU
        return completion_logprobs(model, rollouts, **rest)

    monkeypatch.setattr(learner, "completion_logprobs", small)
    notes = Notes()
    if limit == 4:
        with pytest.raises(TrainingError, match="out of memory with 2 prompts a pass"):
            train(tmp_path / "oom", samples, config(**kept), progress=notes)
        return
    found, weights_found, _ = train(tmp_path / "oom", samples, config(**kept), progress=notes)
    assert len(notes.said) == 1
    assert "out of memory" in notes.said[0]
    assert values_of(found) == values_of(expected)
    assert same_bits(weights, weights_found)


def test_no_memory_for_the_update_itself_ends_the_run(
    samples: list[Sample], tmp_path: Path
) -> None:
    class Greedy(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            torch.empty(2**58)

    model = small_model()
    optimizer = Greedy(model.model.parameters(), lr=0.1)
    with pytest.raises(TrainingError, match="out of memory in the optimizer's own update"):
        train(tmp_path, samples, config(), model=model, optimizer=optimizer)


def test_a_folder_of_another_run_is_refused(samples: list[Sample], tmp_path: Path) -> None:
    train(tmp_path, samples, config(steps=1))
    with pytest.raises(StateError, match="another config"):
        train(tmp_path, samples, config(steps=1, warmup_steps=3))
    with pytest.raises(StateError, match="another seed"):
        train(tmp_path, samples, config(steps=1), seed=9)
    with pytest.raises(StateError, match="another data"):
        train(tmp_path, samples[1:], config(steps=1))
    with pytest.raises(StateError, match="another data"):
        train(tmp_path, [replace(samples[0], task="bar"), *samples[1:]], config(steps=1))
    with pytest.raises(StateError, match="another starting model"):
        train(tmp_path, samples, config(steps=1), model=small_model(1))
    other = small_model()
    with pytest.raises(StateError, match="another setting of the optimizer"):
        train(tmp_path, samples, config(steps=1), model=other, optimizer=adamw(other, lr=1e-3))
    other.model.lm_head.requires_grad_(False)
    with pytest.raises(StateError, match="another choice of what is trained"):
        train(tmp_path, samples, config(steps=1), model=other)


def test_refusals(samples: list[Sample], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no samples"):
        train(tmp_path, [], config())
    with pytest.raises(UsageError, match="1 or more"):
        config(steps=0)
    with pytest.raises(UsageError, match="group_size"):
        config(sampling={"group_size": 1})
    with pytest.raises(UsageError, match="temperature"):
        config(sampling={"temperature": 0.0})


class ClipsItself(torch.optim.SGD):
    """Stands for an optimizer that updates during backward: clips and accumulates by itself."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter], *, max_grad_norm: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.max_grad_norm, self.grad_norm, self.waiting = max_grad_norm, 0.0, 0

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.waiting += 1
        yield

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm))
        super().step()


def test_an_optimizer_that_clips_by_itself_is_left_to_it(
    samples: list[Sample], tmp_path: Path
) -> None:
    settings = config(steps=2, max_grad_norm=1e-9, sampling={"prompts_per_pass": 2})
    model, plain = small_model(), small_model()
    own = ClipsItself(model.model.parameters(), max_grad_norm=0.5)
    result, weights, _ = train(tmp_path / "own", samples, settings, model=model, optimizer=own)
    assert own.waiting == 2  # one of the two passes of each step
    expected, weights_plain, _ = train(
        tmp_path / "plain", samples,
        config(steps=2, max_grad_norm=0.5, sampling={"prompts_per_pass": 2}),
        model=plain, optimizer=torch.optim.SGD(plain.model.parameters(), lr=0.1),
    )  # fmt: skip
    norms = [row["grad_norm"] for row in result.metrics]
    assert norms == [row["grad_norm"] for row in expected.metrics]
    assert same_bits(weights, weights_plain)


@pytest.mark.parametrize(
    ("unit", "amount", "steps"),
    [(Unit.SAMPLES, 9, 3), (Unit.SAMPLES, 8, 2), (Unit.SECONDS, 1e-9, 1), (Unit.TOKENS, 1e9, 6)],
)
def test_a_stage_ends_with_the_step_that_reaches_its_budget(
    samples: list[Sample], tmp_path: Path, unit: Unit, amount: float, steps: int
) -> None:
    limited = config(budget=Budget(unit=unit, amount=amount))
    result, weights, _ = train(tmp_path / "limited", samples, limited)
    assert (result.steps, result.finished) == (steps, True)
    assert spent(result.metrics, Unit.SAMPLES) == 4 * steps
    assert [row["completions"] for row in result.metrics] == [16] * steps
    # it is the run of so many steps, bit for bit, and done when it is asked again
    _, short, _ = train(tmp_path / "short", samples, config(steps=steps))
    assert same_bits(weights, short)
    again, after, _ = train(tmp_path / "limited", samples, limited)
    assert (again.resumed_from, again.finished) == (steps, True)
    assert same_bits(after, weights)
    assert again.metrics == result.metrics


def test_a_budget_in_tokens_is_met_alike_after_a_stop(
    samples: list[Sample], tmp_path: Path
) -> None:
    whole, _, _ = train(tmp_path / "steps", samples, config())
    tokens = [row["completions"] * row["completion_tokens"] for row in whole.metrics]
    limited = config(budget=Budget(unit=Unit.TOKENS, amount=sum(tokens[:4]) - 1))
    done, weights, _ = train(tmp_path / "whole", samples, limited)
    assert done.steps == 4
    assert spent(done.metrics, Unit.TOKENS) == pytest.approx(sum(tokens[:4]))
    part, _, _ = train(tmp_path / "stopped", samples, limited, stop=lambda: True)
    assert (part.steps, part.finished) == (1, False)
    resumed, same, _ = train(tmp_path / "stopped", samples, limited)
    assert (resumed.resumed_from, resumed.finished) == (1, True)
    assert values_of(resumed) == values_of(done)
    assert same_bits(same, weights)


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"budget\.amount must be above 0"):
        Budget(unit=Unit.TOKENS, amount=0)
