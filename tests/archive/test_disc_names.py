"""Names on discs: reversible, short enough for every reader, never ambiguous."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierwise.archive.disc_names import (
    MAX_DISC_NAME,
    disc_name,
    escape_name,
    escape_path,
    piece_mark,
    unescape_name,
    unescape_path,
    version_mark,
)
from tierwise.core.errors import DataError

names = st.binary(min_size=1, max_size=255).filter(lambda b: b"/" not in b and b"\0" not in b)
texts = st.text(min_size=1, max_size=120).map(lambda t: t.encode("utf-8", "surrogatepass"))


@settings(deadline=None)
@given(name=names | texts)
def test_escaping_is_reversible_and_plain(name: bytes) -> None:
    text = escape_name(name)
    assert unescape_name(text) == name
    assert "\n" not in text
    assert "\\" not in text
    assert text.encode("utf-8").decode("utf-8") == text
    assert all(ord(character) <= 0xFFFF for character in text)


@settings(deadline=None)
@given(name=names | texts)
def test_disc_names_fit_rock_ridge_and_udf(name: bytes) -> None:
    text = disc_name(name)
    room = len(piece_mark(99_998, 99_999)) + len(version_mark(9_999_999)) + 10
    assert len(text.encode("utf-8")) <= MAX_DISC_NAME
    assert len(text.encode("utf-8")) + room <= 250
    if any(ord(character) > 0xFF for character in text):
        assert 2 * (len(text) + room) <= 254
    assert re.fullmatch(r"(?:[^%]|%[0-9A-F]{2})*(?:%~[0-9a-f]{16})?", text)


@settings(deadline=None)
@given(first=names, second=names)
def test_disc_names_are_different_for_different_names(first: bytes, second: bytes) -> None:
    assert (disc_name(first) == disc_name(second)) == (first == second)


@settings(deadline=None)
@given(parts=st.lists(names, min_size=1, max_size=5))
def test_paths(parts: list[bytes]) -> None:
    path = b"/".join(parts)
    assert unescape_path(escape_path(path)) == path


@pytest.mark.parametrize("text", ["50%", "%2", "%zz", "%e9", "a%~0123456789abcdef"])
def test_what_is_no_escape_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        unescape_name(text)


def test_pieces_sort_as_they_join() -> None:
    marks = [piece_mark(index, 12_000) for index in range(12_000)]
    assert marks == sorted(marks)
