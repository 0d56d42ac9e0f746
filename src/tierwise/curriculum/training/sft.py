"""Supervised fine-tuning: learn the target text of each sample; the first half of SFT -> GRPO.

    order -> batch of (prompt, target + end token) -> cross-entropy on the target -> optimizer

What the target is decides what the comparison SFT -> GRPO against GRPO is worth: the bare answer
teaches a model to stop reasoning, a worked answer does not; both can be trained here. Shares
record, checkpoints and resume with `loop`.

Left out: packing several samples into a row, several devices.

Source: Qi et al., 2026, https://arxiv.org/abs/2511.06722, released scripts: cosine schedule with a
tenth of warm-up. Departures: the loss is the mean over the target tokens of a whole step; the model
stays in evaluation mode (no drop-out), as in `loop`.

Shapes: B samples, T target tokens.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tierwise.core.errors import DataError, TrainingError, UsageError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import read_jsonl
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, load_image, sample_of_plain_row
from tierwise.curriculum.training.book import Book, TrainResult, data_hash
from tierwise.curriculum.training.experience import take
from tierwise.curriculum.training.learner import accumulating, autocast, clip_and_step
from tierwise.curriculum.training.lora import adapter_dropout
from tierwise.curriculum.training.memory import half_a_pass, memory_told
from tierwise.curriculum.training.recompute import recomputing
from tierwise.curriculum.training.rollouts import Rollouts, completion_logprobs

_TARGET_HINTS = {
    "target": "add the worked answer to every row as `target`, or learn bare answers",
    "answer": "every row needs an `answer`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """A supervised stage.

    Attributes:
        steps: Optimizer steps.
        batch_size: Samples a step.
        samples_per_pass: Samples of one forward pass, to bound memory; 0 is all of a step.
        warmup_share: Share of the steps over which the learning rate rises to the optimizer's own;
            it then falls as a cosine to zero.
        max_grad_norm: As in `TrainConfig`.
        shuffle: Take samples in an order drawn from the seed for every epoch.
        checkpoint_every: Steps between checkpoints; the last step always makes one.
        bf16: As in `TrainConfig`.
        gradient_checkpointing: As in `TrainConfig`.
        tensorboard: As in `TrainConfig`.
    """

    steps: int = 100
    batch_size: int = 16
    samples_per_pass: int = 0
    warmup_share: float = 0.1
    max_grad_norm: float = 1.0
    shuffle: bool = True
    checkpoint_every: int = 50
    bf16: bool = False
    gradient_checkpointing: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.checkpoint_every) < 1:
            raise UsageError("steps, batch_size and checkpoint_every must be 1 or more")
        if not 0 <= self.warmup_share <= 1 or self.samples_per_pass < 0:
            raise UsageError("warmup_share is between 0 and 1, samples_per_pass 0 or more")


def train_sft(
    model: LocalModel,
    samples: Sequence[Sample],
    targets: Mapping[str, str],
    optimizer: torch.optim.Optimizer,
    config: SftConfig,
    *,
    folder: Path,
    seed: int,
    progress: Progress = SILENT,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.time,
) -> TrainResult:
    """Train a model in place on targets, or go on where `folder` says the same run stopped.

    Args:
        model: The starting model, also when resuming.
        samples: In curriculum order, or to be shuffled.
        targets: Sample id -> the text to learn.
        optimizer: Any optimizer over the model's parameters, as new also when resuming.
        config: The stage.
        folder: Gets `record.jsonl` and `checkpoints/`.
        seed: Draws the order when shuffled.
        progress: Where to say how far it is.
        stop: Asked after every step; True saves a checkpoint and returns.
        clock: Seconds since the epoch; only ever seen under `timing`.

    Raises:
        TrainingError: No samples, a loss or gradient that is not finite, or out of memory after
            the pass was halved once.
        DataError: A sample without a target.
        StateError: `folder` holds another run.
    """
    if not samples:
        raise TrainingError("no samples to train on", hint="the stratum is empty: choose another")
    missing = [sample.id for sample in samples if not targets.get(sample.id, "").strip()]
    if missing:
        raise DataError(f"{len(missing)} samples have no target, first {missing[0]}")
    texts = [targets[sample.id] for sample in samples]
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    book = Book(
        folder, model=model, optimizer=optimizer, config=config, data=data_hash(samples, texts),
        seed=seed, clock=clock,
    )  # fmt: skip
    model.model.eval()
    passes, finished = config, True
    with book, progress.task("fine-tuning", config.steps) as task:
        state = book.resume_or_begin()
        start, position = state.step, state.position
        task.advance(start)
        for step in range(start, config.steps):
            started = time.perf_counter()
            places = range(position, position + config.batch_size)
            chosen = [take(samples, p, shuffle=config.shuffle, seed=seed) for p in places]
            position += config.batch_size
            share = learning_rate_share(step, config.steps, config.warmup_share)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share
            try:
                while True:
                    try:
                        with memory_told():
                            values = _step(model, chosen, targets, optimizer, passes)
                        break
                    except torch.OutOfMemoryError as error:
                        optimizer.zero_grad(set_to_none=True)
                        passes = _halved(passes, config, error)
                        size = passes.samples_per_pass
                        progress.note(
                            f"out of memory at step {step + 1}: going on with {size} a pass"
                        )
            except FloatingPointError as error:
                ids = ", ".join(sample.id for sample in chosen[:4])
                raise TrainingError(
                    f"{error} at step {step + 1}, samples {ids}",
                    hint=book.where_to_go_back(step),
                ) from error
            values["lr"] = optimizer.param_groups[0]["lr"]
            book.note_step(step + 1, values, {"update_s": time.perf_counter() - started})
            task.advance()
            finished = step + 1 == config.steps
            stopping = not finished and stop()
            if finished or stopping or (step + 1) % config.checkpoint_every == 0:
                book.save(step + 1, position=position, counters={})
            if stopping:
                progress.note(f"stopped after step {step + 1}; run it again to go on")
                break
    return book.result(resumed_from=start, finished=finished)


def _halved(passes: SftConfig, asked: SftConfig, error: torch.OutOfMemoryError) -> SftConfig:
    """Return half as many samples a pass, once a run.

    Raises:
        TrainingError: It was halved before, or there is one sample a pass already.
    """
    size = half_a_pass(
        min(passes.samples_per_pass or passes.batch_size, passes.batch_size),
        halved_before=passes != asked,
        unit="samples",
        cause=error,
        hint="set a smaller samples_per_pass",
    )
    return replace(passes, samples_per_pass=size)


def learning_rate_share(step: int, steps: int, warmup_share: float) -> float:
    """Return the share of the full learning rate at a step: a line up, then a cosine down to 0.

    >>> [round(learning_rate_share(step, 10, 0.2), 3) for step in (0, 1, 2, 5, 9)]
    [0.5, 1.0, 1.0, 0.691, 0.038]
    """
    warmup = round(steps * warmup_share)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _step(
    model: LocalModel,
    chosen: Sequence[Sample],
    targets: Mapping[str, str],
    optimizer: torch.optim.Optimizer,
    config: SftConfig,
) -> dict[str, float]:
    """Make one update; return loss, gradient norm and mean target length.

    Raises:
        FloatingPointError: The loss or the gradient is not finite; the weights are untouched,
            unless the optimizer clips by itself.
    """
    size = config.samples_per_pass or len(chosen)
    batches = [
        target_rows(model, part, [targets[sample.id] for sample in part])
        for part in (chosen[i : i + size] for i in range(0, len(chosen), size))
    ]
    num_tokens = sum(int(batch.mask_BT.sum()) for batch in batches)
    loss_sum = 0.0
    optimizer.zero_grad(set_to_none=True)
    for place, batch in enumerate(batches):
        last = place == len(batches) - 1
        with (
            accumulating(optimizer, last=last),
            adapter_dropout(model),
            recomputing(model.model, enabled=config.gradient_checkpointing),
        ):
            with autocast(model, bf16=config.bf16):
                logprob_BT = completion_logprobs(
                    model, batch, temperature=1.0, share_prompts=not config.gradient_checkpointing
                )
            loss = -torch.where(batch.mask_BT, logprob_BT, 0.0).sum() / num_tokens
            if not bool(torch.isfinite(loss)):
                optimizer.zero_grad(set_to_none=True)
                raise FloatingPointError(f"loss is {loss.item()}")
            loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.item()
    trained = [p for p in model.model.parameters() if p.requires_grad]
    norm = clip_and_step(optimizer, trained, config.max_grad_norm)
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm}")
    return {
        "prompts": len(chosen),
        "completions": len(chosen),
        "loss": loss_sum,
        "grad_norm": norm,
        "completion_tokens": num_tokens / len(chosen),
    }


def target_rows(model: LocalModel, samples: Sequence[Sample], texts: Sequence[str]) -> Rollouts:
    """Return targets in the form of completions: their tokens and the end token.

    Args:
        model: Whose tokenizer to use.
        samples: B samples.
        texts: Their targets.
    """
    end, pad = model.end_token_ids()[0], int(model.tokenizer.pad_token_id)
    rows = [[*model.tokenizer(t, add_special_tokens=False)["input_ids"], end] for t in texts]
    longest = max(len(row) for row in rows)
    length_B = torch.tensor([len(row) for row in rows], device=model.device)
    token_ids_BT = torch.tensor(
        [row + [pad] * (longest - len(row)) for row in rows], device=model.device
    )
    mask_BT = torch.arange(longest, device=model.device) < length_B[:, None]
    return Rollouts(
        prompts=model.encode(samples, [[load_image(path) for path in s.images] for s in samples]),
        prompt_B=torch.arange(len(rows), device=model.device),
        token_ids_BT=token_ids_BT,
        mask_BT=mask_BT,
        logprob_BT=torch.zeros_like(token_ids_BT, dtype=torch.float32),
        finished_B=torch.ones_like(length_B, dtype=torch.bool),
        texts=tuple(texts),
    )


def read_targets(path: Path, field: str = "target") -> dict[str, str]:
    """Return sample id -> target from a plain JSONL file whose rows have that field.

    Args:
        path: The file the samples were read from.
        field: `target` for worked answers; `answer` for bare ones.

    Raises:
        MissingFileError: No such file.
        DataError: A malformed row, or one without the field.
    """
    targets = {}
    for number, row in read_jsonl(path):
        value = row.get(field)
        if not isinstance(value, str | int | float) or not str(value).strip():
            raise DataError(
                f"{path}:{number}: no {field} to learn from: {json.dumps(row)[:60]}",
                hint=_TARGET_HINTS.get(field),
            )
        targets[sample_of_plain_row(row, path.parent).id] = str(value)
    return targets
