from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tierwise.curriculum.answerers import Reply, Request
from tierwise.curriculum.difficulty.adaptive import (
    NUM_RATES,
    Adaptive,
    Grid,
    deciding,
    difficulty_from_few,
)
from tierwise.curriculum.difficulty.attempts import LOG_NAME, AttemptLog
from tierwise.curriculum.difficulty.fit import corrected_tau, monotone_rates, monotone_threshold
from tierwise.curriculum.difficulty.passrate import Tally
from tierwise.curriculum.difficulty.pism import Boundary, Stratum, failure_threshold
from tierwise.curriculum.difficulty.scoring import ScoreConfig, score
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.samples import Sample

ADAPTIVE = ScoreConfig(mode="adaptive", cmab=False, blind=False)


class Noisy:
    """Right with a known probability that falls with the share of black pixels."""

    def __init__(self, rates: dict[str, tuple[float, ...]]) -> None:
        self.rates = rates
        self.num_asked = 0

    def model_hash(self) -> str:
        return "noisy"

    def prompt_hash(self) -> str:
        return "plain"

    def answer(
        self, requests: Sequence[Request], *, temperature: float, max_new_tokens: int
    ) -> list[Reply]:
        self.num_asked += len(requests)
        return [Reply(text=self.text(one, temperature), num_tokens=1) for one in requests]

    def text(self, request: Request, temperature: float) -> str:
        assert request.images is not None
        black = (np.asarray(request.images[0]).max(axis=2) == 0).mean()
        rate = self.rates[request.sample.id][round(10 * black)]
        uniform = np.random.default_rng(key_seed("noise", request.seed)).random()
        return "1" if uniform < rate else "0"


CURVES = {
    "easy": (0.9, 0.9, 0.9, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.6),
    "falls late": (0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.01, 0.0, 0.0),
    "medium": (0.9, 0.9, 0.8, 0.7, 0.5, 0.02, 0.01, 0.0, 0.0, 0.0),
    "hard": (0.8, 0.5, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    "dips": (0.9, 0.6, 0.01, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3),
    "unsolved": (0.01,) * 10,
}
STRATA = {
    "easy": Stratum.EASY,
    "falls late": Stratum.EASY,
    "medium": Stratum.MEDIUM,
    "hard": Stratum.HARD,
    "dips": Stratum.HARD,
    "unsolved": Stratum.UNSOLVED,
}


def clear_cases(sample: Sample, copies: int) -> tuple[list[Sample], Noisy]:
    names = [f"{name}|{copy}" for name in CURVES for copy in range(copies)]
    rates: dict[str, tuple[float, ...]] = {name: CURVES[name.partition("|")[0]] for name in names}
    return [replace(sample, id=name) for name in names], Noisy(rates)


def test_clear_cases_get_their_stratum_for_a_fraction_of_the_grid(
    plain_sample: Sample, tmp_path: Path
) -> None:
    samples, noisy = clear_cases(plain_sample, 15)
    found = score(samples, noisy, config=ADAPTIVE, folder=tmp_path, seed=0)
    right = [row.pism_stratum is STRATA[row.id.partition("|")[0]] for row in found.rows]
    assert np.mean(right) >= 0.95
    asked = (noisy.num_asked - len(samples)) / len(samples)  # without the greedy answers
    assert asked <= 0.5 * 100  # a twentieth of ten times the paper's grid, which has 1,000
    assert noisy.num_asked == found.spent["attempts"]
    for row in found.rows:
        assert row.lambda_star is None or row.lambda_low <= row.lambda_star <= row.lambda_high
        assert 0.25 < row.stratum_confidence <= 1


def test_rates_that_rise_again_by_guessing_do_not_mislead(
    plain_sample: Sample, tmp_path: Path
) -> None:
    rates = (0.9, 0.4, 0.04, 0.02, 0.06, 0.15, 0.25, 0.3, 0.3, 0.3)
    samples = [replace(plain_sample, id=str(copy)) for copy in range(10)]
    noisy = Noisy({sample.id: rates for sample in samples})
    found = score(samples, noisy, config=ADAPTIVE, folder=tmp_path, seed=0)
    assert {row.pism_stratum for row in found.rows} == {Stratum.HARD}
    assert noisy.num_asked <= 10 * 100


def test_resuming_an_adaptive_run_asks_nothing_again(plain_sample: Sample, tmp_path: Path) -> None:
    samples, noisy = clear_cases(plain_sample, 2)
    first = score(samples, noisy, config=ADAPTIVE, folder=tmp_path / "a", seed=0)
    before = noisy.num_asked
    again = score(samples, noisy, config=ADAPTIVE, folder=tmp_path / "a", seed=0)
    assert (noisy.num_asked, again.rows) == (before, first.rows)

    with AttemptLog(tmp_path / "a" / LOG_NAME) as log:  # a run that stopped half way
        half = [row for number, row in enumerate(log.attempts()) if number % 2]
    with AttemptLog(tmp_path / "b" / LOG_NAME) as log:
        log.add(half)
    resumed = score(samples, noisy, config=ADAPTIVE, folder=tmp_path / "b", seed=0)
    assert resumed.rows == first.rows
    assert noisy.num_asked == 2 * before - len(half)


def test_the_answers_are_the_first_ones_of_the_grid(plain_sample: Sample, tmp_path: Path) -> None:
    """So the grid itself, asked afterwards in the same folder, costs only what is missing."""
    samples, noisy = clear_cases(plain_sample, 1)
    quick = score(samples, noisy, config=ADAPTIVE, folder=tmp_path, seed=0)
    before = noisy.num_asked
    grid = replace(ADAPTIVE, mode="grid", num_attempts=ADAPTIVE.adaptive.num_attempts)
    whole = score(samples, noisy, config=grid, folder=tmp_path, seed=0)
    assert noisy.num_asked == len(samples) * (1 + 10 * 100)
    assert before == quick.spent["attempts"]
    assert [row.pism_stratum for row in whole.rows] == [row.pism_stratum for row in quick.rows]


def test_a_sample_never_sure_enough_ends_with_the_grid_s_own_stratum(
    plain_sample: Sample, tmp_path: Path
) -> None:
    noisy = Noisy({"edge": (0.1,) * 10})
    sample = replace(plain_sample, id="edge")
    sure = Adaptive(num_attempts=30, confidence=1 - 1e-12)
    config = replace(ADAPTIVE, adaptive=sure)
    (row,) = score([sample], noisy, config=config, folder=tmp_path, seed=0).rows
    assert row.num_attempts <= 1 + 7 * 30
    assert row.stratum_confidence == 1.0
    grid = replace(ADAPTIVE, mode="grid", num_attempts=30)
    (whole,) = score([sample], noisy, config=grid, folder=tmp_path, seed=0).rows
    assert whole.pism_stratum is row.pism_stratum


class Broken(Noisy):
    def text(self, request: Request, temperature: float) -> str:
        return super().text(request, temperature)

    def answer(
        self, requests: Sequence[Request], *, temperature: float, max_new_tokens: int
    ) -> list[Reply]:
        return [Reply(text="", error="server_500") for _ in requests]


def test_an_answerer_that_only_fails_ends_as_an_error(plain_sample: Sample, tmp_path: Path) -> None:
    (row,) = score([plain_sample], Broken({}), config=ADAPTIVE, folder=tmp_path, seed=0).rows
    assert (row.pism_stratum, row.error) == (Stratum.ERROR, "server_500")
    assert row.num_attempts <= 25


def test_shares_that_decide_nothing_are_not_asked() -> None:
    grid = range(0, 1000, 100)
    assert deciding(grid, Boundary.TEXT)[-1] == 600
    assert deciding(grid, Boundary.TABLE)[-1] == 700


def whole_grid(num_shares: int = 7, num_attempts: int = 100) -> Grid:
    return Grid.of(
        range(0, 100 * num_shares, 100), tau=0.1, boundary=Boundary.TEXT, num_attempts=num_attempts
    )


def test_one_share_is_predicted_as_numerical_integration_says() -> None:
    """With one share the logit is a single normal number, and the rest of its answers binomial."""
    found = whole_grid(1).strata_chances({0: Tally(right=2, judged=20)})[Stratum.UNSOLVED]
    logit = np.linspace(-6, 6, 200_001)
    rate = 1 / (1 + np.exp(-logit))
    density = stats.norm.pdf(logit, 0.0, 2.5) * stats.binom.pmf(2, 20, rate)
    expected = (density * stats.binom.cdf(9 - 2, 80, rate)).sum() / density.sum()
    assert found == pytest.approx(expected, abs=0.002)


def test_a_chain_of_shares_is_predicted_as_simulation_says() -> None:
    """Draw curves from the prior, keep those that gave the answers seen, and finish their grids."""
    rng = np.random.default_rng(5)
    logits = np.linspace(-6, 6, NUM_RATES)
    start = stats.norm.pdf(logits, 0.0, 2.5)
    start /= start.sum()
    num_drawn, seen = 400_000, ((3, 4), (1, 3), (1, 2))
    place = rng.choice(NUM_RATES, num_drawn, p=start)
    moves = stats.norm.pdf(logits[None, :], logits[:, None] - 0.3, 0.6)
    moves = 0.8 * moves / moves.sum(axis=1, keepdims=True) + 0.2 * start
    kept = np.ones(num_drawn, dtype=bool)
    star = np.full(num_drawn, 1000)
    for number, (right, judged) in enumerate(seen):
        if number:
            uniform = rng.random(num_drawn)[:, None]
            place = (moves.cumsum(axis=1)[place] < uniform).sum(axis=1).clip(max=NUM_RATES - 1)
        rate = 1 / (1 + np.exp(-logits[place]))
        kept &= rng.binomial(judged, rate) == right
        total = right + rng.binomial(20 - judged, rate)
        star = np.where((star == 1000) & (total < 2), 100 * number, star)
    curve = {
        100 * number: Tally(right=right, judged=judged)
        for number, (right, judged) in enumerate(seen)
    }
    found = whole_grid(3, num_attempts=20).star_chances(curve)
    assert kept.sum() > 5000
    for one, chance in found.items():
        share = float((star[kept] == one).mean())
        assert chance == pytest.approx(share, abs=5 * (share * (1 - share) / kept.sum()) ** 0.5)


counts = st.integers(0, 20).flatmap(
    lambda judged: st.tuples(st.integers(0, judged), st.just(judged))
)


@settings(deadline=None, max_examples=30)
@given(st.lists(counts, min_size=7, max_size=7))
def test_chances_are_distributions_and_doubt_is_on_the_grid(
    counts: list[tuple[int, int]],
) -> None:
    curve = {
        100 * place: Tally(right=right, judged=judged)
        for place, (right, judged) in enumerate(counts)
    }
    grid = whole_grid(num_attempts=20)
    chances, stars = grid.strata_chances(curve), grid.star_chances(curve)
    assert sum(chances.values()) == pytest.approx(1.0, abs=1e-7)
    assert stars[0] == pytest.approx(chances[Stratum.UNSOLVED], abs=1e-7)
    assert stars[500] + stars[600] == pytest.approx(chances[Stratum.MEDIUM], abs=1e-7)
    for place, tally in curve.items():  # what the answers have settled is settled
        if tally.right >= 2:
            assert stars[place] == 0.0
    if any(tally.judged < 20 for tally in curve.values()):
        assert curve[grid.most_telling(curve, step=5)].judged < 20


@given(st.lists(st.integers(0, 20), min_size=7, max_size=7))
def test_a_finished_grid_is_certain(rights: list[int]) -> None:
    curve = {100 * place: Tally(right=one, judged=20) for place, one in enumerate(rights)}
    few = difficulty_from_few(
        curve, permilles=range(0, 1000, 100), tau=0.1, boundary=Boundary.TEXT, num_attempts=20
    )
    assert (few.star_permille, few.confidence) == (failure_threshold(curve, tau=0.1), 1.0)


def test_answers_are_asked_where_they_tell_most() -> None:
    grid = whole_grid()
    right = {100 * place: Tally(right=30, judged=30) for place in range(4)}
    # right up to 0.4, wrong at 0.6: whether 0.5 fails changes nothing, it is medium
    known = {**right, 400: Tally(right=30, judged=30), 600: Tally(right=0, judged=80)}
    assert grid.strata_chances(known)[Stratum.MEDIUM] > 0.95
    # right up to 0.3, wrong at 0.5: only 0.4 decides between hard and medium
    assert grid.most_telling({**right, 500: Tally(right=0, judged=80)}, step=5) == 400
    # nothing is known: the whole picture first
    assert grid.next_share({}, step=5) == 0


def test_errors_are_not_repeated_and_not_wrong() -> None:
    """Ten right of a hundred are enough; of ninety-nine judged, ten are still not below tau."""
    grid = whole_grid(1)
    assert grid.strata_chances({0: Tally(right=9, judged=80, errors=20)})[Stratum.UNSOLVED] == 0.0
    assert grid.strata_chances({0: Tally(right=7, judged=80, errors=20)})[Stratum.UNSOLVED] == 1.0


def test_the_first_crossing_counts_as_on_the_full_grid() -> None:
    curve = {
        0: Tally(right=10, judged=10),
        100: Tally(right=0, judged=60),
        200: Tally(right=8, judged=10),
    }
    found = difficulty_from_few(
        curve, permilles=range(0, 1000, 100), tau=0.1, boundary=Boundary.TEXT, num_attempts=100
    )
    assert (found.stratum, found.star_permille) == (Stratum.HARD, 100)


def curve(*rights: int) -> dict[int, Tally]:
    return {100 * place: Tally(right=right, judged=10) for place, right in enumerate(rights)}


def test_a_monotone_fit_is_not_fooled_by_one_dip() -> None:
    assert monotone_threshold(curve(9, 8, 0, 8, 7, 6), tau=0.1) is None
    assert monotone_threshold(curve(9, 8, 5, 0, 0, 1, 0), tau=0.1) == 300
    assert monotone_threshold({}, tau=0.1) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=10))
def test_the_monotone_fit_falls_and_keeps_the_total(rights: list[int]) -> None:
    rates = list(monotone_rates(curve(*rights)).values())
    assert all(first >= second for first, second in pairwise(rates))
    assert sum(rates) * 10 == sum(rights)
    from sklearn.isotonic import IsotonicRegression

    expected = IsotonicRegression(increasing=False).fit_transform(range(len(rights)), rights)
    assert [float(rate) for rate in rates] == pytest.approx(expected / 10)


def test_tau_allows_for_guessing() -> None:
    assert corrected_tau(0.1, Tally(right=0, judged=20)) == 0.1
    assert corrected_tau(0.1, Tally(right=5, judged=20)) == 0.325
    assert corrected_tau(0.1, Tally(right=0, judged=0)) == 0.1
