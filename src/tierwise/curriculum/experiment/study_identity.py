"""What all runs of a study's folder must have in common, so that no table mixes two studies.

    study.json   part -> hash, such as "held-out samples"; written before the first run

A study may grow: more arms, seeds and rates go on in the same folder. What makes finished runs
answers to another question is refused by name. Left out: the learning rate of the GRPO stage, which
each finished run states itself, and the device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tierwise.core.errors import StateError
from tierwise.core.records import hash_file, write_whole

STUDY_NAME = "study.json"


def begin_or_go_on(folder: Path, parts: Mapping[str, object]) -> None:
    """Note a study's parts in its folder, or return if they are those that are noted.

    Args:
        folder: The study's folder; a part it does not know yet is added.
        parts: Name -> anything that can be written as JSON.

    Raises:
        StateError: A part is another one now; names all of them.
    """
    path = folder / STUDY_NAME
    now = {name: _hash(value) for name, value in parts.items()}
    known = _read(path)
    differing = [name for name, value in now.items() if known.get(name, value) != value]
    if differing:
        raise StateError(
            f"{folder} holds a study with other {', other '.join(differing)}",
            hint="run the changed study in another folder",
        )
    if now.keys() - known.keys():
        write_whole(path, json.dumps(known | now, indent=1) + "\n")


def weights_hash(model_folder: Path) -> str:
    """Return 16 hex digits of a model folder's weights and configuration."""
    files = sorted([*model_folder.glob("*.safetensors"), *model_folder.glob("config.json")])
    return _hash([[file.name, hash_file(file)] for file in files])


def _read(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise StateError(f"{path} is not JSON", hint="remove the study's folder") from error
    return {str(name): str(value) for name, value in known.items()}


def _hash(value: object) -> str:
    text = json.dumps(msgspec.to_builtins(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
