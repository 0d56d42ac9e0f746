"""Asks a model the held-out questions and counts right answers, task by task.

A small measuring stick for training and tests. The capability's own probes (pass rate,
masking, attention) live one folder up and do not use it. Left out: intervals, attempt logs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from tierwise.curriculum.tiny import tasks
from tierwise.curriculum.tiny.build import prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import LlavaForConditionalGeneration, LlavaProcessor

MAX_ANSWER_TOKENS = 8
_MID_GREY = (127, 127, 127)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Right answers among asked ones.

    Attributes:
        num_right: Over all tasks.
        num_asked: Over all tasks.
        by_task: Task -> (right, asked).
    """

    num_right: int
    num_asked: int
    by_task: dict[str, tuple[int, int]]

    @property
    def share(self) -> float:
        """Right over asked."""
        return self.num_right / self.num_asked


def answer_questions(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    samples: Sequence[tasks.Sample],
    *,
    temperature: float | None = None,
    seed: int = 0,
    blind: bool = False,
    batch_size: int = 256,
) -> list[str]:
    """Return the model's text for each sample.

    Args:
        model: A model from ``load_tiny``.
        processor: Its processor.
        samples: What to ask.
        temperature: None for greedy decoding.
        seed: Of the sampling; torch's global generator is left as it was.
        blind: Show uniform mid-grey instead of the image.
        batch_size: Prompts generated together.
    """
    how: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    grey = Image.new("RGB", (tasks.IMAGE_SIDE, tasks.IMAGE_SIDE), _MID_GREY)
    texts: list[str] = []
    decode: Any = processor.batch_decode
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        for start in range(0, len(samples), batch_size):
            some = samples[start : start + batch_size]
            inputs = processor(
                text=[prompt(sample.question) for sample in some],
                images=[grey if blind else sample.image for sample in some],
                return_tensors="pt",
                padding=True,
            )
            tokens = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, **how)
            answers = tokens[:, inputs["input_ids"].shape[1] :]
            texts += decode(answers, skip_special_tokens=True)
    return texts


def measure_accuracy(samples: Sequence[tasks.Sample], texts: Sequence[str]) -> Accuracy:
    """Return how many texts end in their sample's answer."""
    asked: Counter[str] = Counter(str(sample.task) for sample in samples)
    right: Counter[str] = Counter(
        str(sample.task)
        for sample, text in zip(samples, texts, strict=True)
        if tasks.final_answer(text) == sample.answer
    )
    return Accuracy(
        num_right=right.total(),
        num_asked=asked.total(),
        by_task={task: (right[task], asked[task]) for task in sorted(asked)},
    )
