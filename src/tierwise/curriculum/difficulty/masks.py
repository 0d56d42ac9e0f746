"""Masks over pictures: a pure function of (picture size, share, kind, fill, seed).

The paper masks "a random fraction of the image's pixels"; here exactly `round(share * pixels)` of
them, drawn without replacement, so that the share is the share. The colour of a masked pixel is
not stated there; the default is black. Departures offered by name: whole patches instead of
pixels, one rectangle (what the paper's released code draws), the picture's mean colour or noise as
fill. Left out: blur.

Source: Qi et al., https://arxiv.org/abs/2511.06722, section on progressive image semantic masking.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np

from tierwise.core.errors import UsageError

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

MID_GREY = 127


class MaskKind(StrEnum):
    """Which pixels are masked together."""

    PIXEL = "pixel"
    PATCH = "patch"
    BLOCK = "block"


class Fill(StrEnum):
    """What a masked pixel becomes."""

    BLACK = "black"
    MEAN = "mean"
    GREY = "grey"
    NOISE = "noise"


def mask_picture(
    pixels: Pixels,
    *,
    permille: int,
    seed: int,
    kind: MaskKind = MaskKind.PIXEL,
    fill: Fill = Fill.BLACK,
    patch_side: int = 14,
) -> Pixels:
    """Return the picture with a share of its pixels masked; the input is not changed.

    Args:
        pixels: (height, width, 3).
        permille: Share to mask, in 1/1000; 0 returns a copy.
        seed: Decides which pixels, and the noise.
        kind: Single pixels, patches of a grid, or one rectangle.
        fill: Colour of a masked pixel.
        patch_side: Side of a patch in pixels, for `MaskKind.PATCH`.

    Raises:
        UsageError: `permille` is not in 0-1000.
    """
    if not 0 <= permille <= 1000:
        raise UsageError(f"a masked share of {permille}/1000 is not between 0 and 1")
    masked = pixels.copy()
    if permille == 0:
        return masked
    rng = np.random.default_rng(seed)
    mask = draw_mask(
        pixels.shape[0],
        pixels.shape[1],
        permille=permille,
        rng=rng,
        kind=kind,
        patch_side=patch_side,
    )
    masked[mask] = _colour(pixels, mask, fill, rng)
    return masked


def draw_mask(
    height: int,
    width: int,
    *,
    permille: int,
    rng: np.random.Generator,
    kind: MaskKind,
    patch_side: int,
) -> Mask:
    """Return a (height, width) mask, True where masked."""
    match kind:
        case MaskKind.PIXEL:
            return _random_cells(height, width, permille, rng)
        case MaskKind.PATCH:
            rows, columns = -(-height // patch_side), -(-width // patch_side)
            cells = _random_cells(rows, columns, permille, rng)
            grown = cells.repeat(patch_side, axis=0).repeat(patch_side, axis=1)
            return grown[:height, :width]
        case MaskKind.BLOCK:
            return _rectangle(height, width, permille, rng)


def _random_cells(rows: int, columns: int, permille: int, rng: np.random.Generator) -> Mask:
    total = rows * columns
    mask = np.zeros(total, dtype=np.bool_)
    mask[rng.permutation(total)[: (total * permille + 500) // 1000]] = True
    return mask.reshape(rows, columns)


def _rectangle(height: int, width: int, permille: int, rng: np.random.Generator) -> Mask:
    """Return one rectangle of the picture's own shape and of the wanted area, somewhere inside."""
    scale = (permille / 1000) ** 0.5
    tall, wide = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = rng.integers(0, height - tall + 1), rng.integers(0, width - wide + 1)
    mask = np.zeros((height, width), dtype=np.bool_)
    mask[top : top + tall, left : left + wide] = True
    return mask


def _colour(pixels: Pixels, mask: Mask, fill: Fill, rng: np.random.Generator) -> Any:
    match fill:
        case Fill.BLACK:
            return 0
        case Fill.GREY:
            return MID_GREY
        case Fill.MEAN:
            return np.rint(pixels.reshape(-1, pixels.shape[2]).mean(axis=0)).astype(np.uint8)
        case Fill.NOISE:
            return rng.integers(0, 256, size=(int(mask.sum()), pixels.shape[2]), dtype=np.uint8)


def grey_picture(pixels: Pixels) -> Pixels:
    """Return a picture of the same size that shows nothing: uniform mid-grey."""
    return np.full_like(pixels, MID_GREY)
