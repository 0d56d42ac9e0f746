from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierwise.core.errors import UsageError
from tierwise.curriculum.difficulty.masks import Fill, MaskKind, grey_picture, mask_picture
from tierwise.curriculum.difficulty.probes import mask_seed


def picture(height: int, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(1, 255, (height, width, 3), dtype=np.uint8)


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 1000),
    st.integers(0, 2**62),
    st.sampled_from(list(MaskKind)),
)
def test_a_mask_covers_what_it_says_and_leaves_the_rest(
    height: int, width: int, permille: int, seed: int, kind: MaskKind
) -> None:
    pixels = picture(height, width)
    before = pixels.copy()
    masked = mask_picture(pixels, permille=permille, seed=seed, kind=kind, patch_side=3)
    assert np.array_equal(pixels, before)
    hidden = (masked == 0).all(axis=2)
    assert np.array_equal(masked[~hidden], pixels[~hidden])
    if kind is MaskKind.PIXEL:
        assert hidden.sum() == (height * width * permille + 500) // 1000
    again = mask_picture(pixels, permille=permille, seed=seed, kind=kind, patch_side=3)
    assert np.array_equal(masked, again)


def test_pixel_masks_are_uniform_over_the_picture() -> None:
    hits = np.zeros((6, 5))
    for seed in range(3000):
        masked = mask_picture(picture(6, 5), permille=300, seed=seed)
        hits += (masked == 0).all(axis=2)
    assert hits.sum() == 3000 * 9
    assert np.abs(hits / 3000 - 0.3).max() < 0.05


def test_a_block_is_one_rectangle_and_a_patch_is_whole() -> None:
    block = mask_picture(picture(20, 20), permille=250, seed=4, kind=MaskKind.BLOCK)
    hidden = (block == 0).all(axis=2)
    rows, columns = np.nonzero(hidden.any(axis=1))[0], np.nonzero(hidden.any(axis=0))[0]
    assert (len(rows), len(columns), hidden.sum()) == (10, 10, 100)
    patch = mask_picture(picture(12, 12), permille=500, seed=4, kind=MaskKind.PATCH, patch_side=4)
    cells = (patch == 0).all(axis=2).reshape(3, 4, 3, 4).sum(axis=(1, 3))
    assert sorted(np.unique(cells)) == [0, 16]


def test_fills() -> None:
    pixels = picture(10, 10)
    hidden = (mask_picture(pixels, permille=500, seed=1) == 0).all(axis=2)
    mean = mask_picture(pixels, permille=500, seed=1, fill=Fill.MEAN)
    assert (mean[hidden] == np.rint(pixels.reshape(-1, 3).mean(0))).all()
    assert (mask_picture(pixels, permille=500, seed=1, fill=Fill.GREY)[hidden] == 127).all()
    noise = mask_picture(pixels, permille=500, seed=1, fill=Fill.NOISE)
    assert np.array_equal(noise[~hidden], pixels[~hidden])
    assert len(np.unique(noise[hidden])) > 20
    assert (grey_picture(pixels) == 127).all()


def test_a_mask_s_seed_depends_on_its_sample_share_number_and_run_alone() -> None:
    base = mask_seed("a", permille=100, k=0, seed=0)
    assert base == mask_seed("a", permille=100, k=0, seed=0)
    others = {
        mask_seed("b", permille=100, k=0, seed=0),
        mask_seed("a", permille=200, k=0, seed=0),
        mask_seed("a", permille=100, k=1, seed=0),
        mask_seed("a", permille=100, k=0, seed=1),
        mask_seed("a", permille=100, k=0, seed=0, place=1),
    }
    assert len(others | {base}) == 6


def test_a_share_beyond_one_is_refused() -> None:
    with pytest.raises(UsageError, match="not between 0 and 1"):
        mask_picture(picture(2, 2), permille=1001, seed=0)
