"""The sourced numbers the model runs on: CSV rows beside this module -> `FactSet`.

Facts are looked up as `MEDIUM.name`, falling back to the medium's parent, and money is brought
to one currency year by the US consumer price index in `facts/cpi.csv`. Left out: other
currencies (one currency a fact set), and price indices by product: a deflator for hard disks
would be the price decline itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from tierwise.core.errors import ConfigError, DataError
from tierwise.core.facts import Fact, load_facts

FACTS_FOLDER = Path(__file__).parent / "facts"
_MODEL_FILES = ("media.csv", "cloud.csv", "site.csv")


class MediumKind(StrEnum):
    """What has to be bought to read a medium."""

    DRIVE = "drive"
    REMOVABLE = "removable"
    CLOUD = "cloud"
    ANNOUNCED = "announced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """One kind of storage; `parent` lends it the facts it has none of its own for."""

    name: str
    title: str
    kind: MediumKind
    parent: str | None = None
    why_disabled: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSet:
    """Facts by key, the media they describe, and the price index by year."""

    facts: Mapping[str, Fact]
    media: Mapping[str, Medium]
    price_index: Mapping[int, float]

    def find(self, medium: str, name: str) -> Fact:
        """Return the fact `medium.name`, the medium's own or its parent's.

        Raises:
            DataError: Neither has one.
        """
        at: str | None = medium
        while at is not None:
            if (fact := self.facts.get(f"{at}.{name}")) is not None:
                return fact
            at = self.media[at].parent if at in self.media else None
        raise DataError(f"no fact {medium}.{name}", hint="tierwise tco facts lists them")

    def medium(self, name: str) -> Medium:
        """Return a medium that can be costed.

        Raises:
            ConfigError: Unknown, or announced without a price; the message says why.
        """
        import difflib

        if name not in self.media:
            near = difflib.get_close_matches(name, self.media, n=1)
            hint = f"did you mean {near[0]}?" if near else f"media: {', '.join(self.media)}"
            raise ConfigError(f"no medium {name!r}", hint=hint)
        medium = self.media[name]
        if medium.kind is MediumKind.ANNOUNCED:
            raise ConfigError(f"{name} cannot be costed: {medium.why_disabled}")
        return medium

    def in_year(self, fact: Fact, year: int) -> tuple[float, float, float]:
        """Return (value, low, high) of a fact in the prices of `year`; other units unchanged.

        Raises:
            ConfigError: One of the two years is not in the price index.
        """
        if fact.currency_year is None or fact.currency_year == year:
            return fact.value, fact.low, fact.high
        for wanted in (fact.currency_year, year):
            if wanted not in self.price_index:
                years = f"{min(self.price_index)}-{max(self.price_index)}"
                raise ConfigError(
                    f"{fact.key} is in prices of {fact.currency_year} and the scenario in "
                    f"{year}: no price index for {wanted}",
                    hint=f"the index covers {years}; add a row to cpi.csv",
                )
        scale = self.price_index[year] / self.price_index[fact.currency_year]
        return fact.value * scale, fact.low * scale, fact.high * scale


@lru_cache(maxsize=8)
def load_fact_set(extra_files: tuple[Path, ...] = ()) -> FactSet:
    """Return the facts shipped with tierwise, with rows of `extra_files` in their place.

    Args:
        extra_files: CSV files in the same format; a row replaces the shipped row of its key.

    Raises:
        MissingFileError, DataError: A file is absent, malformed or has a row without source.
    """
    facts: dict[str, Fact] = {}
    for path in (*(FACTS_FOLDER / name for name in _MODEL_FILES), *extra_files):
        facts.update(load_facts(path))
    index = {
        int(key.removeprefix("cpi.")): fact.value
        for key, fact in load_facts(FACTS_FOLDER / "cpi.csv").items()
    }
    return FactSet(facts=facts, media=_load_media(), price_index=index)


def _load_media() -> dict[str, Medium]:
    table = tomllib.loads((FACTS_FOLDER / "media.toml").read_text(encoding="utf-8"))
    return {
        name: Medium(name=name, **{**row, "kind": MediumKind(row["kind"])})
        for name, row in table.items()
    }


def facts_of_files(names: Iterable[str]) -> FactSet:
    """Return the shipped facts with files, given as text, laid over them."""
    return load_fact_set(tuple(Path(name) for name in names))


def facts_titles(facts: FactSet) -> list[tuple[str, str, MediumKind]]:
    """Return (name, title, kind) of every medium, in the file's order."""
    return [(medium.name, medium.title, medium.kind) for medium in facts.media.values()]


def all_fact_files() -> Iterator[Path]:
    """Yield every facts file shipped with tierwise."""
    yield from sorted(FACTS_FOLDER.glob("*.csv"))


def describe(facts: Iterable[Fact]) -> list[dict[str, object]]:
    """Return facts as plain rows for a table, JSON or CSV."""
    return [
        {
            "key": fact.key,
            "value": fact.value,
            "low": fact.low,
            "high": fact.high,
            "unit": fact.unit,
            "currency_year": fact.currency_year,
            "distribution": str(fact.distribution),
            "kind": str(fact.kind),
            "source": fact.source,
            "retrieved": fact.retrieved.isoformat(),
            "note": fact.note,
        }
        for fact in facts
    ]
