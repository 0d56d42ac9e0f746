from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from tierwise.curriculum.difficulty.agreement import agreement, kappa, rank_correlation
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.duplicates import NEAR_BITS, Duplicates, difference_hash, find_duplicates
from tierwise.curriculum.samples import Sample

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=40)


@settings(deadline=None)
@given(PAIRS)
def test_kappa_is_scikit_learn_s(pairs: list[tuple[int, int]]) -> None:
    left, right = zip(*pairs, strict=True)
    if len(set(left) | set(right)) == 1:
        assert kappa(pairs) is None
        return
    for weighted in (False, True):
        expected = cohen_kappa_score(
            left, right, labels=range(4), weights="linear" if weighted else None
        )
        assert kappa(pairs, weighted=weighted) == pytest.approx(expected)


@settings(deadline=None)
@given(PAIRS)
def test_rank_correlation_is_scipy_s(pairs: list[tuple[int, int]]) -> None:
    left, right = zip(*pairs, strict=True)
    found = rank_correlation(left, right)
    if len(pairs) < 3 or len(set(left)) == 1 or len(set(right)) == 1:
        assert found is None
        return
    assert found == pytest.approx(stats.spearmanr(left, right).statistic)


def test_errors_are_left_out_of_an_agreement() -> None:
    found = agreement(
        [Stratum.EASY, Stratum.ERROR, Stratum.HARD],
        [Stratum.EASY, Stratum.HARD, Stratum.MEDIUM],
        measures=([0.1, None, 0.3], [0.2, 0.3, 0.4]),
    )
    assert (found.num_samples, found.same, found.rank_correlation) == (2, 0.5, None)


def test_exact_and_near_duplicates_are_told_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    smooth = np.asarray(
        Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)).resize((64, 64))
    )
    other = np.asarray(
        Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)).resize((64, 64))
    )
    Image.fromarray(smooth).save(tmp_path / "a.png")
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    Image.fromarray(smooth).resize((40, 40)).save(tmp_path / "small.jpg", quality=80)
    Image.fromarray(other).save(tmp_path / "other.png")

    def sample(identity: str, name: str, question: str = "what is it ?") -> Sample:
        return Sample(id=identity, question=question, answer="1", images=(tmp_path / name,))

    found = find_duplicates(
        [
            sample("a", "a.png"),
            sample("b", "copy.png"),
            sample("small", "small.jpg", "What is  it ?"),
            sample("other", "other.png"),
            sample("asked otherwise", "a.png", "what colour is it ?"),
            sample("missing", "nothing.png"),
        ]
    )
    assert found.exact == (("a", "b"),)
    assert found.near == (("a", "b", "small"),)


def test_an_exact_pair_is_not_reported_as_near_too(plain_sample: Sample) -> None:
    found = find_duplicates([plain_sample, replace(plain_sample, id="again")])
    assert (found.exact, found.near) == ((("white", "again"),), ())


def test_difference_hashes_of_different_pictures_are_far_apart() -> None:
    rng = np.random.default_rng(1)
    hashes = [
        difference_hash(Image.fromarray(rng.integers(0, 255, (17, 17, 3), dtype=np.uint8)))
        for _ in range(12)
    ]
    assert min((one ^ other).bit_count() for one, other in itertools.combinations(hashes, 2)) > 60


def test_different_drawings_on_an_even_ground_are_no_duplicates(tmp_path: Path) -> None:
    """Their hashes differ in few bits, since most cells are as light as their neighbours."""
    samples = []
    for number, (colour, left) in enumerate([("blue", 60), ("red", 60), ("blue", 20)]):
        picture = Image.new("RGB", (96, 96), (240, 240, 240))
        picture.paste(colour, (left, 40, left + 14, 54))
        picture.save(tmp_path / f"{number}.png")
        images = (tmp_path / f"{number}.png",)
        samples.append(Sample(id=str(number), question="how many ?", answer="1", images=images))
    hashes = [difference_hash(Image.open(tmp_path / f"{number}.png")) for number in range(3)]
    assert (hashes[0] ^ hashes[1]).bit_count() <= NEAR_BITS
    assert find_duplicates(samples) == Duplicates(exact=(), near=())
