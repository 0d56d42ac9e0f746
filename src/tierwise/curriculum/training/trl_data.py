"""What TRL's trainers are given: our samples, in our order, and our verdicts as their reward.

    samples, places of the order -> datasets.Dataset (pictures are read when a row is asked for)
    completions, solution, task  -> rewards

The order is written out row by row, so a trainer that does not shuffle goes through the same
curriculum as `loop`, over the end of an epoch too. Left out: training (`trl_backend`).

Source of the layouts: TRL, "Dataset formats and types" and "GRPO Trainer", version 1.16,
https://huggingface.co/docs/trl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, load_image
from tierwise.curriculum.training.experience import take
from tierwise.curriculum.verdicts import reward as verdict_reward


def verdict_rewards(
    completions: Sequence[Any],
    solution: Sequence[str],
    task: Sequence[str] | None = None,
    **columns: object,
) -> list[float | None]:
    """Return the reward of each completion, as `GRPOTrainer(reward_funcs=...)` wants it.

    None, which TRL leaves out of the group, stands for a completion without a verdict.

    The columns are those that `tierwise curriculum select --layout trl` writes.

    Args:
        completions: Texts, or lists of messages.
        solution: The right answer of each.
        task: The task of each, which may name the kind of answer.
        **columns: Whatever else TRL passes; not used.

    >>> verdict_rewards([[{"role": "assistant", "content": "3 + 5 = 8"}], "7"], ["8", "8"])
    [1.0, 0.0]
    """
    tasks = task if task is not None else [""] * len(solution)
    scores = [
        verdict_reward(gold, text_of(completion), task=kind or "")
        for completion, gold, kind in zip(completions, solution, tasks, strict=True)
    ]
    return [None if math.isnan(score) else score for score in scores]


def text_of(completion: Any) -> str:
    """Return a completion's text: of the text itself, or of a list of messages."""
    if isinstance(completion, str):
        return completion.strip()
    content = completion[-1]["content"] if completion else ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text") or "") for part in content)
    return content.strip()


def grpo_row(model: LocalModel, sample: Sample) -> dict[str, Any]:
    """Return a sample as a row of a prompt-only set; `id`, `solution` and `task` go along."""
    return {
        "prompt": model.messages(sample.question, num_images=len(sample.images)),
        "images": [load_image(path) for path in sample.images],
        "solution": sample.answer,
        "task": sample.task,
        "id": sample.id,
    }


def sft_row(model: LocalModel, sample: Sample, target: str) -> dict[str, Any]:
    """Return a sample as a row of a prompt-completion set."""
    answer = [{"role": "assistant", "content": [{"type": "text", "text": target}]}]
    return {
        "prompt": model.messages(sample.question, num_images=len(sample.images)),
        "images": [load_image(path) for path in sample.images],
        "completion": answer,
    }


def ordered_dataset(
    samples: Sequence[Sample],
    row: Callable[[Sample], Mapping[str, Any]],
    *,
    places: range,
    shuffle: bool,
    seed: int,
) -> Any:
    """Return a `datasets.Dataset` with one row a place of the order, made when it is asked for.

    Args:
        samples: In curriculum order.
        row: Makes a sample's row.
        places: Positions in the endless order, see `take`.
        shuffle: Whether the order of every epoch is drawn from the seed.
        seed: The run's seed.
    """
    import datasets

    order = [take(samples, place, shuffle=shuffle, seed=seed) for place in places]
    numbers = datasets.Dataset.from_dict({"number": list(range(len(order)))})
    return numbers.with_transform(_Rows(order, row))


class _Rows:
    """Makes the rows of a batch of numbers."""

    def __init__(self, order: Sequence[Sample], row: Callable[[Sample], Mapping[str, Any]]) -> None:
        self._order, self._row = order, row

    def __call__(self, batch: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        made = [self._row(self._order[number]) for number in batch["number"]]
        return {name: [one[name] for one in made] for name in made[0]}

    def __reduce__(self) -> tuple[object, ...]:
        """Stand for nothing: `datasets` pickles a transform to name its cache, model and all."""
        return (object, ())
