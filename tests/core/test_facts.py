"""A fact without a source, a year for money, or an ordered range is refused by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierwise.core.errors import DataError, MissingFileError
from tierwise.core.facts import Distribution, FactKind, load_facts

HEADER = "key,value,low,high,unit,currency_year,source,retrieved,kind,note\n"
GOOD = "hdd.price,22,11,30,USD/TB,2026,https://example.org/hdd,2026-11-30,estimate,retail\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "facts.csv"
    path.write_text(text)
    return path


def test_a_row_becomes_a_fact(tmp_path: Path) -> None:
    fact = load_facts(write(tmp_path, HEADER + GOOD))["hdd.price"]
    assert (fact.value, fact.low, fact.high, fact.currency_year) == (22.0, 11.0, 30.0, 2026)
    assert fact.kind is FactKind.ESTIMATE
    assert fact.distribution is Distribution.TRIANGULAR
    assert fact.line == 2


def test_empty_bounds_are_the_value_itself(tmp_path: Path) -> None:
    row = "pue,1.58,,,1,,https://example.org/pue,2026-11-30,measured,\n"
    fact = load_facts(write(tmp_path, HEADER + row))["pue"]
    assert (fact.low, fact.high, fact.distribution) == (1.58, 1.58, Distribution.FIXED)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD.replace("https://example.org/hdd", ""), ":2: fact hdd.price has no source"),
        (GOOD.replace("2026,https", ",https"), "money without a currency_year"),
        (GOOD.replace(",22,", ",42,"), "not between low 11.0 and high 30.0"),
        (GOOD.replace(",22,", ",nan,"), "not between"),
        (GOOD.replace("estimate", "guess"), "guess"),
        (GOOD.replace("2026-11-30", "yesterday"), "yesterday"),
        (GOOD.replace(",22,", ",much,"), "much"),
        (GOOD + GOOD, ":3: fact hdd.price is given twice"),
        (GOOD.replace("hdd.price", ""), "has no key"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_facts(write(tmp_path, HEADER + row))
    assert message in str(caught.value)


def test_a_missing_column_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no column retrieved"):
        load_facts(write(tmp_path, HEADER.replace("retrieved,", "")))
    with pytest.raises(MissingFileError):
        load_facts(tmp_path / "none.csv")


def test_every_shipped_facts_file_is_readable() -> None:
    root = Path(__file__).parents[2] / "src" / "tierwise"
    files = [path for path in root.rglob("*.csv") if path.read_text().startswith("key,")]
    assert files
    for path in files:
        assert load_facts(path)
