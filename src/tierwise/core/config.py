"""One TOML file a run -> a tree of frozen dataclasses; unknown keys are refused by name.

A configuration class is a frozen dataclass defined beside its owner; this module reads it from
TOML, applies `key=value` overrides, and prints the resolved tree back as TOML for the run's
record. Left out: environment variables, includes and inheritance, which hide where a value
came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from tierwise.core.errors import ConfigError, MissingFileError

T = TypeVar("T")


def load_config(kind: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """Return `kind` read from the TOML file `path`, with overrides applied on top.

    Args:
        kind: A frozen dataclass; nested dataclasses are tables.
        path: The TOML file.
        overrides: `"table.key=value"` strings; the value is TOML, or else a bare string.

    Raises:
        MissingFileError: `path` does not exist.
        ConfigError: Not TOML, an unknown key (with the nearest right one), a wrong type or value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MissingFileError(f"no configuration file {path}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder, not a TOML file") from error
    return parse_config(kind, text, overrides=overrides, name=str(path))


def parse_config(
    kind: type[T], text: str, *, overrides: Sequence[str] = (), name: str = "config"
) -> T:
    """Return `kind` read from TOML text; `name` stands for the file in errors."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    for key_path, siblings in _unknown_keys(kind, tree, ()):
        raise _unknown_key_error(name, text, key_path, siblings)
    try:
        return msgspec.convert(tree, kind, strict=True)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        key = where.rstrip("`").lstrip(".")
        place = f"{name}{_line_note(text, key.split('.'))}: " + (f"{key}: " if key else "")
        raise ConfigError(place + reason[:1].lower() + reason[1:]) from error


def dump_config(config: object) -> str:
    """Return a configuration dataclass as TOML; keys that are None are left out."""
    tree = msgspec.to_builtins(config)
    return tomli_w.dumps(_without_none(tree))


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    if isinstance(tree, list | tuple):
        return [_without_none(value) for value in tree]
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {override!r} is not key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override!r}: {part} is not a table")
    tree[parts[-1]] = value


def _unknown_keys(
    kind: Any, tree: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield (path of each unknown key, the keys known there), depth first."""
    for dataclass_kind, branch, place in _branches(kind, tree, path):
        hints = typing.get_type_hints(dataclass_kind)
        known = [field.name for field in dataclasses.fields(dataclass_kind) if field.init]
        for key, value in branch.items():
            if key not in known:
                yield (*place, key), known
            else:
                yield from _unknown_keys(hints[key], value, (*place, key))


def _branches(
    kind: Any, tree: Any, path: tuple[str, ...]
) -> Iterator[tuple[Any, Mapping[str, Any], tuple[str, ...]]]:
    """Yield the dataclass tables found in `tree`, looking through unions, lists and mappings."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            yield from _branches(option, tree, path)
    elif origin in (list, tuple, Sequence) and isinstance(tree, list) and arguments:
        for item in tree:
            yield from _branches(arguments[0], item, path)
    elif origin in (dict, Mapping) and isinstance(tree, dict) and arguments:
        for key, item in tree.items():
            yield from _branches(arguments[1], item, (*path, key))
    elif dataclasses.is_dataclass(kind) and isinstance(tree, dict):
        yield kind, tree, path


def _unknown_key_error(
    name: str, text: str, key_path: Sequence[str], known: Sequence[str]
) -> ConfigError:
    near = difflib.get_close_matches(key_path[-1], known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known keys there: {', '.join(known)}"
    where = f"{name}{_line_note(text, key_path)}"
    return ConfigError(f"{where}: unknown key {'.'.join(key_path)}", hint=hint)


def _line_note(text: str, key_path: Sequence[str]) -> str:
    """Return `":LINE"` of a key in TOML text, or nothing where it cannot be found (overrides)."""
    if not key_path or not key_path[-1]:
        return ""
    leaf = re.escape(re.sub(r"\[.*", "", key_path[-1]))
    table, wanted = "", ".".join(key_path[:-1])
    pattern = re.compile(rf"\s*(?:[\w\"'.-]+\.)?[\"']?{leaf}[\"']?\s*=|\s*\[+[\w.]*\b{leaf}\]+")
    fallback = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+([^\]]+)\]", line):
            table = header[1].strip()
        if pattern.match(line):
            if table in (wanted, ".".join(key_path)):
                return f":{number}"
            fallback = fallback or f":{number}"
    return fallback
