"""Sizes, durations and money: printed values parse back, and units are never confused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierwise.core import units
from tierwise.core.errors import ConfigError


def test_a_pebibyte_is_an_eighth_larger_than_a_petabyte() -> None:
    ratio = units.parse_size("1 PiB") / units.parse_size("1 PB")
    assert ratio == pytest.approx(1.1259, abs=1e-4)


@given(st.integers(min_value=0, max_value=10**19))
def test_plain_bytes_parse_to_themselves(num_bytes: int) -> None:
    assert units.parse_size(f"{num_bytes}") == num_bytes
    assert units.parse_size(f"{num_bytes} B") == num_bytes


@given(st.integers(min_value=0, max_value=10**19), st.booleans())
def test_a_printed_size_is_within_half_a_percent(num_bytes: int, binary: bool) -> None:
    again = units.parse_size(units.format_size(num_bytes, binary=binary).replace(" ", ""))
    assert again == pytest.approx(num_bytes, rel=0.005)


@pytest.mark.parametrize("text", ["", "GB", "-1 GB", "1 XB", "1.5 B", "1e9", "1 G B", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a"):
        units.parse_size(text)


@given(st.floats(min_value=1e-3, max_value=1e10))
def test_a_printed_duration_parses_back_to_within_its_last_digit(seconds: float) -> None:
    again = units.parse_duration(units.format_duration(seconds))
    assert again == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize("text", ["", "5", "5 parsecs", "h", "1h x", "-1 s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        units.parse_duration(text)


def test_money_of_two_years_does_not_add() -> None:
    old, new = units.parse_money("600 USD (2017)"), units.parse_money("25", year=2026)
    with pytest.raises(ConfigError, match="USD of 2026 to USD of 2017"):
        _ = new + old
    assert (new + units.parse_money("$1.5K (2026)")).amount == 1525.0


@pytest.mark.parametrize("text", ["25 USD", "twelve", "25 (26)", "USD 25 (2026)"])
def test_money_without_a_year_or_amount_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        units.parse_money(text)
