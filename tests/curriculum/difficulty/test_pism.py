from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tierwise.curriculum.difficulty.passrate import Tally, jeffreys_interval, wilson_interval
from tierwise.curriculum.difficulty.pism import (
    PAPER_ATTEMPTS,
    PAPER_PERMILLES,
    PAPER_TAU,
    Boundary,
    Stratum,
    below,
    chance_below,
    difficulty,
    failure_threshold,
    star_distribution,
    strata_counts,
    stratum_of,
)


def curve(*rights: int, judged: int = 10) -> dict[int, Tally]:
    return {100 * place: Tally(right=right, judged=judged) for place, right in enumerate(rights)}


def test_the_paper_s_grid_and_constants() -> None:
    assert [permille / 1000 for permille in PAPER_PERMILLES] == pytest.approx(np.arange(10) / 10)
    assert (PAPER_ATTEMPTS, PAPER_TAU) == (10, 0.1)


def test_below_tau_is_decided_in_whole_numbers() -> None:
    assert not below(Tally(right=1, judged=10), 0.1)
    assert below(Tally(right=0, judged=10), 0.1)
    assert not below(Tally(right=3, judged=30), 0.1)
    assert below(Tally(right=2, judged=30), 0.1)
    assert not below(Tally(right=7, judged=10), 0.7)  # 7/10 < 0.7 is true in binary floats' 0.7


@given(st.integers(1, 300), st.data())
def test_below_agrees_with_exact_fractions(judged: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, judged))
    assert below(Tally(right=right, judged=judged), 0.1) == (
        Fraction(right, judged) < Fraction(1, 10)
    )


def test_the_threshold_is_the_first_failure_even_when_the_curve_climbs_back() -> None:
    assert failure_threshold(curve(9, 5, 0, 8, 0)) == 200
    assert failure_threshold(curve(9, 5, 1, 1, 1)) is None
    assert failure_threshold(curve(0, 5, 5)) == 0


@pytest.mark.parametrize(
    ("star", "stratum"),
    [
        (0, Stratum.UNSOLVED),
        (100, Stratum.HARD),
        (400, Stratum.HARD),
        (500, Stratum.MEDIUM),
        (600, Stratum.MEDIUM),
        (700, Stratum.EASY),
        (900, Stratum.EASY),
        (None, Stratum.EASY),
    ],
)
def test_strata_of_the_text(star: int | None, stratum: Stratum) -> None:
    assert stratum_of(star) is stratum


def test_the_paper_contradicts_itself_at_seven_tenths() -> None:
    """The text says lambda* >= 0.7 is easy; its Table A prints medium as (0.4, 0.7]."""
    assert stratum_of(700, boundary=Boundary.TEXT) is Stratum.EASY
    assert stratum_of(700, boundary=Boundary.TABLE) is Stratum.MEDIUM
    for star in (0, 100, 400, 500, 600, 800, 900, None):
        assert stratum_of(star, boundary=Boundary.TEXT) is stratum_of(star, boundary=Boundary.TABLE)


def test_unsolved_is_decided_before_hard() -> None:
    """lambda* = 0 also satisfies the paper's 'hard', lambda* <= 0.4."""
    assert difficulty(curve(0, 0, 0)).stratum is Stratum.UNSOLVED


def test_a_share_without_a_judged_attempt_is_an_error_not_a_failure() -> None:
    broken = {**curve(9, 9, 9), 300: Tally(right=0, judged=0, errors=10)}
    assert difficulty(broken).stratum is Stratum.ERROR
    assert difficulty({}).stratum is Stratum.ERROR


def test_errors_do_not_count_as_wrong_answers() -> None:
    with_errors = {**curve(9, 9), 200: Tally(right=1, judged=4, errors=6)}
    assert failure_threshold(with_errors) is None


def test_the_distribution_of_the_threshold_matches_simulation() -> None:
    seen = curve(8, 3, 1, 0, 0)
    exact = star_distribution(seen, tau=0.1)
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(exact, 0)
    rates = {
        permille: rng.beta(one.right + 0.5, one.judged - one.right + 0.5, 20_000)
        for permille, one in seen.items()
    }
    fresh = {permille: rng.binomial(10, rate) for permille, rate in rates.items()}
    for place in range(20_000):
        star = next((permille for permille in sorted(seen) if fresh[permille][place] < 1), 1000)
        counts[star] += 1
    for permille, chance in exact.items():
        assert counts[permille] / 20_000 == pytest.approx(chance, abs=0.015)
    assert sum(exact.values()) == pytest.approx(1.0)
    assert chance_below(Tally(right=0, judged=10), tau=0.1) == pytest.approx(
        stats.betabinom.pmf(0, 10, 0.5, 10.5)
    )


def test_the_interval_holds_the_threshold_and_confidence_is_a_probability() -> None:
    found = difficulty(curve(9, 8, 5, 2, 0, 0, 0, 0, 0, 0))
    assert found.star_permille == 400
    assert found.low_permille <= 400 <= found.high_permille
    assert 0 < found.confidence < 1
    sure = difficulty(curve(*[100] * 10, judged=100))
    assert (sure.star_permille, sure.stratum) == (None, Stratum.EASY)
    assert sure.confidence > 0.999


def test_counts_name_all_strata() -> None:
    assert strata_counts([Stratum.HARD, Stratum.HARD])[Stratum.HARD] == 2
    assert set(strata_counts([])) == set(Stratum)


@given(st.integers(0, 200), st.integers(0, 200))
def test_intervals_hold_the_rate_and_match_scipy(right: int, more: int) -> None:
    judged = right + more
    if judged == 0:
        assert wilson_interval(0, 0) == (0.0, 1.0)
        return
    low, high = wilson_interval(right, judged)
    expected = stats.binomtest(right, judged).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    for bounds in ((low, high), jeffreys_interval(right, judged)):
        assert 0 <= bounds[0] <= right / judged <= bounds[1] <= 1


def test_jeffreys_is_the_beta_quantile() -> None:
    low, high = jeffreys_interval(3, 10)
    assert (low, high) == pytest.approx(stats.beta.ppf([0.025, 0.975], 3.5, 7.5))
