"""Packs scenes with several questions each into one training batch.

The questions of a scene share its image tokens and do not see each other: a block mask hides
them, and positions start again after the image, so every question is trained exactly as it
will be asked. Sharing costs a third of the arithmetic of asking them one by one.

    <user> <image>... | question <ans> answer <eos> | question <ans> answer <eos> | ...
       segment 0               segment 1                     segment 2

A *noisy* batch has some targets that end in a number off by one (``noisy_target``).

Left out: packing different scenes into one row.

Shapes: B scenes, T tokens, H and W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tierwise.curriculum.tiny import build, tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.random import Generator
    from numpy.typing import NDArray

IGNORED_LABEL = -100
_LENGTH_MULTIPLE = 8
_PADDING_SEGMENT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A teacher's mistakes in the final number.

    Attributes:
        share: Share of targets whose final number is wrong.
        share_below: Share of the wrong ones that are one below; the rest are one above.
    """

    share: float = 0.45
    share_below: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One training batch; ``labels_BT[b, t]`` is the token to predict after token t."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    mask_B1TT: Tensor
    labels_BT: Tensor
    pixels_B3HW: Tensor


@dataclass(slots=True)
class _Row:
    """One scene's tokens while they are collected."""

    ids: list[int]
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        length = len(self.ids)
        self.positions = list(range(length))
        self.segments = [0] * length
        self.labels = [IGNORED_LABEL] * length

    def add(self, segment: int, start: int, asked: list[int], answered: list[int]) -> None:
        both = [*asked, *answered]
        self.ids += both
        self.positions += range(start, start + len(both))
        self.segments += [segment] * len(both)
        self.labels += [IGNORED_LABEL] * (len(asked) - 1) + answered + [IGNORED_LABEL]


class Packer:
    """Turns scenes into batches for a model of one configuration."""

    def __init__(self, config: build.TinyConfig) -> None:
        self._token_id = {word: place for place, word in enumerate(build.vocabulary())}
        image = [self._token_id[build.IMAGE]] * build.num_image_tokens(config)
        self._prefix = [self._token_id[build.USER], *image]

    def draw_batch(
        self,
        *,
        seed: int,
        step: int,
        num_scenes: int,
        num_questions: int,
        noise: Noise | None,
    ) -> Batch:
        """Return the batch of one step: fresh training scenes, several questions each."""
        rows, pictures = [], []
        for place in range(num_scenes):
            rng = tasks.sample_rng(seed, step * num_scenes + place, "train")
            scene = tasks.draw_scene(rng, "train")
            questions = [tasks.ask(scene, rng) for _ in range(num_questions)]
            targets = [
                one.target if noise is None else noisy_target(one, rng, noise) for one in questions
            ]
            rows.append(self._row([one.text for one in questions], targets))
            pictures.append(scene.pixels)
        return self._stack(rows, np.stack(pictures))

    def _row(self, questions: Sequence[str], targets: Sequence[str]) -> _Row:
        row = _Row(list(self._prefix))
        for segment, (question, target) in enumerate(zip(questions, targets, strict=True), 1):
            row.add(
                segment,
                len(self._prefix),
                [*self._words(question), self._token_id[build.ANSWER]],
                [*self._words(target), self._token_id[build.END]],
            )
        return row

    def _words(self, text: str) -> list[int]:
        return [self._token_id[word] for word in text.split()]

    def _stack(self, rows: list[_Row], pictures: tasks.Pixels) -> Batch:
        longest = max(len(row.ids) for row in rows)
        length = -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE

        def pad(lists: list[list[int]], fill: int) -> Tensor:
            return torch.tensor([one + [fill] * (length - len(one)) for one in lists])

        segments_BT = pad([row.segments for row in rows], _PADDING_SEGMENT)
        return Batch(
            input_ids_BT=pad([row.ids for row in rows], self._token_id[build.PAD]),
            position_ids_BT=pad([row.positions for row in rows], 0),
            mask_B1TT=_block_mask(segments_BT),
            labels_BT=pad([row.labels for row in rows], IGNORED_LABEL),
            pixels_B3HW=normalized_pixels(pictures),
        )


def _block_mask(segments_BT: Tensor) -> Tensor:
    """Return 0 where token t may see token s, and the lowest float where it may not."""
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    image_BTT = segments_BT[:, None, :] == 0
    seen_BTT = (same_BTT | image_BTT).tril()
    mask_BTT = torch.zeros(seen_BTT.shape).masked_fill_(~seen_BTT, torch.finfo(torch.float32).min)
    return mask_BTT[:, None]


def normalized_pixels(pictures: tasks.Pixels | NDArray[np.uint8]) -> Tensor:
    """Return (N, 3, H, W) in [-1, 1] from (N, H, W, 3) bytes: what the processor computes."""
    scaled = torch.from_numpy(pictures.astype(np.float32)) / 127.5 - 1
    return scaled.permute(0, 3, 1, 2).contiguous()


def noisy_target(question: tasks.Question, rng: Generator, noise: Noise) -> str:
    """Return the target; with probability ``noise.share`` its last number is off by one."""
    if rng.random() >= noise.share:
        return question.target
    right = int(question.answer)
    wrong = right - 1 if rng.random() < noise.share_below else right + 1
    if not 0 <= wrong <= tasks.MAX_ANSWER:
        wrong = 2 * right - wrong
    return " ".join([*question.target.split()[:-1], str(wrong)])
