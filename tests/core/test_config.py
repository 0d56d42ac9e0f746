"""TOML to frozen dataclasses: what is wrong is named by file, line and key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tierwise.core.config import dump_config, load_config, parse_config
from tierwise.core.errors import ConfigError, MissingFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    ratio: float = 0.5
    fill: str = "mean"

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio {self.ratio} is not between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    seed: int = 0
    out: str | None = None
    mask: Mask = field(default_factory=Mask)
    extra: tuple[Mask, ...] = ()
    named: dict[str, Mask] = field(default_factory=dict)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_a_full_tree_is_read_and_printed_back(tmp_path: Path) -> None:
    text = 'seed = 3\n[mask]\nratio = 0.25\n[[extra]]\nfill = "black"\n[named.a]\nratio = 1.0\n'
    run = load_config(Run, write(tmp_path, text))
    assert run.mask.ratio == 0.25
    assert run.extra == (Mask(fill="black"),)
    assert parse_config(Run, dump_config(run)) == run


@pytest.mark.parametrize(
    ("text", "where", "hint"),
    [
        ("sead = 3\n", "run.toml:1: unknown key sead", "did you mean seed?"),
        ("seed = 1\n\n[mask]\nrato = 0.1\n", "run.toml:4: unknown key mask.rato", "ratio"),
        ("[[extra]]\nfil = 'x'\n", "run.toml:2: unknown key extra.fil", "fill"),
        ("[named.a]\nzzz = 1\n", "run.toml:2: unknown key named.a.zzz", "known keys there"),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest_one(
    tmp_path: Path, text: str, where: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Run, write(tmp_path, text))
    assert where in str(caught.value)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = 'three'\n", "run.toml:1: seed: expected `int`, got `str`"),
        ("[mask]\nratio = 1.5\n", "mask: ratio 1.5 is not between 0 and 1"),
        ("seed = \n", "not valid TOML"),
        ("mask = 3\n", "run.toml:1: mask: expected `object`, got `int`"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Run, write(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no configuration file"):
        load_config(Run, tmp_path / "no.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(Run, tmp_path)


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"seed = \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(Run, path)


def test_overrides_are_toml_values_or_bare_strings() -> None:
    run = parse_config(Run, "", overrides=["seed=7", "mask.ratio=0.1", "mask.fill=grey"])
    assert run == Run(seed=7, mask=Mask(ratio=0.1, fill="grey"))


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=1", "seed.x=1", "sead=1"])
def test_bad_overrides_are_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(Run, "seed = 1", overrides=[override])
