"""What a study will take, before it runs: generations, tokens, and GPU hours at a given speed.

Generations follow from the configuration exactly (refills apart, and budgets, which end a run
before its last step). Hours follow only from speeds
that somebody measured; without them they are not known, and nothing is guessed:

    hours = generated tokens / generated tokens a second + trained tokens / trained tokens a second

A short run's `record.jsonl` has both speeds: the completion tokens of its steps over `sample_s` and
over `update_s`. Prompts are not counted as tokens; their cost is in the speeds. Left out: scoring
the data before, loading, checkpoints.
"""

from __future__ import annotations

from tierwise.curriculum.experiment.study import (
    BASE,
    StudyConfig,
    cells_of,
    parse_arm,
    tuning_cells,
)

Told = dict[str, int | float | str]


def price(
    config: StudyConfig, *, num_held_out: int | None, num_validation: int | None = None
) -> Told:
    """Return what a study will take, by name; a text says why a number is not known.

    Args:
        config: The study.
        num_held_out: Held-out samples; None if not known, then their answers are not counted.
        num_validation: Samples that rates are chosen by; likewise.
    """
    cells, tuning, sampling = cells_of(config), tuning_cells(config), config.grpo.sampling
    trained = [cell for cell in (*tuning, *cells) if cell.arm != BASE]
    num_sft = sum(parse_arm(cell.arm)[0] is not None for cell in trained)
    training = config.grpo.steps * sampling.prompts_per_step * sampling.group_size * len(trained)
    asked = (num_held_out or 0) * len(cells) + (num_validation or 0) * len(tuning)
    evaluation = asked * (1 + config.evaluate.num_draws)
    told: Told = {
        "cells": len(cells),
        "tuning_runs": len(tuning),
        "training_completions": training,
        "sft_samples": config.sft.steps * config.sft.batch_size * num_sft,
        "optimizer_steps": config.grpo.steps * config.grpo.inner_updates * len(trained)
        + config.sft.steps * num_sft,
        "evaluation_completions": evaluation,
        "tokens_at_most": training * sampling.max_new_tokens
        + evaluation * config.evaluate.max_new_tokens,
    }
    if num_held_out is None or (num_validation is None and tuning):
        told["evaluation"] = "not counted: the samples to evaluate on are not there yet"
    if sampling.refill:
        told["refills"] = f"not counted: up to {sampling.max_refills} rounds a step"
    budget = config.grpo.budget
    if budget is not None:
        told["budget"] = f"a run ends earlier once it took {budget.amount:,.0f} {budget.unit}"
    return told | _cost(config, told)


def _cost(config: StudyConfig, told: Told) -> Told:
    """Return hours, money and what they are counted with."""
    given, missing = config.price, []
    for name in ("generated_tokens_per_second", "trained_tokens_per_second"):
        if getattr(given, name) is None:
            missing.append(f"price.{name}")
    if told["sft_samples"] and given.target_tokens is None:
        missing.append("price.target_tokens")
    if missing:
        return {"gpu_hours": f"not known: give {', '.join(missing)}"}
    training, evaluation, num_sft = (
        float(told[name])
        for name in ("training_completions", "evaluation_completions", "sft_samples")
    )
    length = given.completion_tokens or config.grpo.sampling.max_new_tokens
    generated = training * length
    generated += evaluation * (given.completion_tokens or config.evaluate.max_new_tokens)
    updated = training * length * config.grpo.inner_updates
    updated += num_sft * (given.target_tokens or 0.0)
    assert given.generated_tokens_per_second is not None
    assert given.trained_tokens_per_second is not None
    seconds = generated / given.generated_tokens_per_second
    seconds += updated / given.trained_tokens_per_second
    cost: Told = {
        "generated_tokens": round(generated),
        "trained_tokens": round(updated),
        "gpu_hours": round(seconds / 3600, 1),
        "usd": "not known: give price.usd_per_gpu_hour",
    }
    if given.usd_per_gpu_hour is not None:
        cost["usd"] = round(seconds / 3600 * given.usd_per_gpu_hour)
    if given.completion_tokens is None:
        cost["answers"] = "each counted at max_new_tokens; give price.completion_tokens, their mean"
    if given.basis:
        cost["basis"] = given.basis
    return cost
