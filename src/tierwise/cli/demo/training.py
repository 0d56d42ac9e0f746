"""Step 2, which device: GRPO with an update that runs beside backward, and the proof of its bits.

The same loop runs twice from the shipped weights: with `OffloadAdamW`, which updates on a second
thread while backward goes on, and with `torch.optim.AdamW(fused=True)` after `clip_grad_norm_`.
Weights and moments are compared bit for bit, gradient norms to the last digit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tierwise.cli.demo.settings import DemoSettings
from tierwise.cli.steps import StepContext
from tierwise.core.records import write_whole
from tierwise.core.report import Figure
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, read_samples
from tierwise.curriculum.tiny.build import tiny_model_path
from tierwise.curriculum.training.checkpoint import TENSORS_NAME
from tierwise.curriculum.training.evaluate import (
    EvalConfig,
    SampleScore,
    differences,
    evaluate,
    read_scores,
    write_scores,
)
from tierwise.curriculum.training.loop import (
    GrpoConfig,
    SamplingConfig,
    TrainConfig,
    TrainResult,
    train_grpo,
)
from tierwise.curriculum.training.recipe import judged
from tierwise.offload import OffloadAdamW, Trace, fingerprint
from tierwise.offload.trace import (
    draw_timeline,
    measure_overlap,
    update_window,
    write_chrome_trace,
)

MAX_NEW_TOKENS = 8  # the longest answer of the tiny tasks, "3 + 5 = 8" and its end
WEIGHT_DECAY = 1e-2  # AdamW's default in torch


def run_training(context: StepContext, settings: DemoSettings) -> None:
    """Examine, train twice, compare, examine again; leave checkpoint, trace, timeline, answers."""
    run = context.run_folder
    chosen = read_samples(run / "1-curriculum" / "selected.jsonl").samples
    strata = json.loads((run / "1-curriculum" / "strata.json").read_text())
    before = _examine(context, settings, tiny_model_path(), "before")
    overlapped = _train_overlapped(context, settings, chosen, strata)
    plain = _train_plain(context, settings, chosen, strata)
    _compare(context, overlapped, plain)
    after = _examine(context, settings, overlapped.model_folder, "after")
    for found in differences(before, after, seed=settings.seed):
        if found.group == "all":
            context.record.event("curriculum.examined", **_rounded(asdict(found)))


def _examine(
    context: StepContext, settings: DemoSettings, model_folder: Path, name: str
) -> tuple[SampleScore, ...]:
    """Return the held-out scores of a model; an interrupted run finds those it already has."""
    path = context.folder / f"examined-{name}.jsonl"
    if path.exists():
        return read_scores(path)
    held_out = context.run_folder / "0-data" / "held-out" / "samples.jsonl"
    scores = evaluate(
        LocalModel.load(model_folder),
        read_samples(held_out).samples,
        judged,
        EvalConfig(num_draws=settings.training.num_draws, max_new_tokens=MAX_NEW_TOKENS),
        seed=settings.seed,
        progress=context.progress,
    )
    write_scores(path, scores)
    return scores


def _train_overlapped(
    context: StepContext,
    settings: DemoSettings,
    chosen: Sequence[Sample],
    strata: Mapping[str, str],
) -> TrainResult:
    training, trace = settings.training, Trace()
    model = LocalModel.load(tiny_model_path())
    optimizer = OffloadAdamW(
        model.model,
        lr=training.lr,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=training.max_grad_norm,
        mode=training.mode,
        nonfinite="skip",
        trace=trace,
    )
    try:
        result = _train(
            context, settings, model, optimizer, name="overlapped", chosen=chosen, strata=strata
        )
    finally:
        optimizer.close()
    if result.resumed_from < result.steps:
        _keep_trace(context, trace, result.steps - result.resumed_from)
        counts = {"num_parameters": sum(p.numel() for p in model.model.parameters())}
        counts |= asdict(optimizer.counts)
        write_whole(context.folder / "counts.json", json.dumps(counts, indent=2) + "\n")
    return result


def _train_plain(
    context: StepContext,
    settings: DemoSettings,
    chosen: Sequence[Sample],
    strata: Mapping[str, str],
) -> TrainResult:
    model = LocalModel.load(tiny_model_path())
    optimizer = torch.optim.AdamW(
        model.model.parameters(),
        lr=settings.training.lr,
        weight_decay=WEIGHT_DECAY,
        fused=True,  # torch's other implementations round differently from each other
    )
    return _train(context, settings, model, optimizer, name="plain", chosen=chosen, strata=strata)


def _train(
    context: StepContext,
    settings: DemoSettings,
    model: LocalModel,
    optimizer: torch.optim.Optimizer,
    *,
    name: str,
    chosen: Sequence[Sample],
    strata: Mapping[str, str],
) -> TrainResult:
    training = settings.training
    config = TrainConfig(
        steps=training.steps,
        warmup_steps=training.warmup_steps,
        max_grad_norm=training.max_grad_norm,
        checkpoint_every=8,
        sampling=SamplingConfig(
            prompts_per_step=training.prompts_per_step,
            group_size=training.group_size,
            max_new_tokens=MAX_NEW_TOKENS,
            shuffle=True,
        ),
        objective=GrpoConfig(kl_weight=0.0),  # a few dozen small steps do not drift far
    )
    return train_grpo(
        model,
        chosen,
        optimizer,
        config,
        folder=context.folder / name,
        seed=settings.seed,
        reward=judged,
        strata=strata,
        progress=context.progress,
    )


def _keep_trace(context: StepContext, trace: Trace, num_steps: int) -> None:
    """Leave the trace of every step, the picture of one, and how much was hidden."""
    windows = [update_window(trace.spans, step) for step in range(num_steps)]
    write_chrome_trace([span for spans in windows for span in spans], context.folder / "trace.json")
    measured = [measure_overlap(spans) for spans in windows]
    update_s = sum(found.update_s for found in measured)
    overlap = {
        "num_steps": num_steps,
        "update_s": update_s,
        "hidden_s": sum(found.hidden_s for found in measured),
        "exposed_s": sum(found.exposed_s for found in measured),
        "device_s": sum(found.device_s for found in measured),
    }
    write_whole(context.folder / "overlap.json", json.dumps(overlap, indent=2) + "\n")
    shown = windows[num_steps // 2]
    first = min((span.start_ns for span in shown if span.lane == "host"), default=0)
    close = [
        replace(span, start_ns=max(span.start_ns, first)) for span in shown if span.end_ns > first
    ]
    for name, spans, what in (
        ("overlap", shown, "One training step"),
        ("overlap-close", close, "The same step from its first update on"),
    ):
        caption = (
            f"{what}, in milliseconds: forward and backward on the thread that trains (device), "
            "updates on the second thread (host). An update under a bar of backward is hidden."
        )
        figure = draw_timeline(spans, name=name, caption=caption)
        for kind, text in (("svg", figure.svg), ("csv", figure.csv), ("txt", caption)):
            write_whole(context.folder / f"{name}.{kind}", text)


def timelines(folder: Path) -> list[Figure]:
    """Return the timelines that training left in its folder."""
    figures = []
    for name in ("overlap", "overlap-close"):
        svg, csv, caption = (
            (folder / f"{name}.{kind}").read_text(encoding="utf-8")
            for kind in ("svg", "csv", "txt")
        )
        figures.append(Figure(name=name, caption=caption, svg=svg, csv=csv))
    return figures


def _compare(context: StepContext, overlapped: TrainResult, plain: TrainResult) -> None:
    """Compare both runs' last checkpoints bit for bit and note what was found."""
    hashes = {
        name: {
            "weights": fingerprint(load_file(result.model_folder / "model.safetensors")),
            "optimizer": fingerprint(load_file(result.checkpoint / TENSORS_NAME)),
        }
        for name, result in (("overlapped", overlapped), ("plain", plain))
    }
    norms = [[row["grad_norm"] for row in result.metrics] for result in (overlapped, plain)]
    proof: dict[str, Any] = {
        "steps": overlapped.steps,
        "bits_equal": hashes["overlapped"] == hashes["plain"],
        "grad_norms_equal": norms[0] == norms[1],
        "weights_sha256": hashes["overlapped"]["weights"],
        "plain_weights_sha256": hashes["plain"]["weights"],
    }
    write_whole(context.folder / "proof.json", json.dumps(proof, indent=2) + "\n")
    context.record.event("offload.compared", **proof)
    rewards = [row["reward"] for row in overlapped.metrics]
    flat = [row["zero_advantage_share"] for row in overlapped.metrics]
    context.record.event(
        "curriculum.trained", steps=overlapped.steps, reward=rewards, zero_advantage_share=flat
    )


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: round(v, 6) if isinstance(v, float) else v for key, v in values.items()}
