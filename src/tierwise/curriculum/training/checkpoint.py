"""A checkpoint of a training run: a folder that is there whole or not at all, and resumes exactly.

    step-000012/
      model/                 weights and config (`save_pretrained`, safetensors), processor;
                             where an adapter is trained, the adapter alone
      optimizer.safetensors  the optimizer's tensors, and the random generators' states
      state.json             everything else, and the SHA-256 of every other file

The folder is written under another name, synced and renamed, so what carries the right name is
good; older ones are removed only then. Loading copies into the live model and optimizer, tensor
by tensor, and refuses a name or shape that does not fit, rather than leave a tensor as it was.
Nothing is pickled. The format is docs/formats/checkpoint.md.

Left out: sharded and multi-device checkpoints, and the generators of Python and numpy, which
nothing here draws from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierwise.core.errors import (
    DataError,
    IntegrityError,
    MissingFileError,
    StateError,
    StorageFullError,
)
from tierwise.core.records import hash_file
from tierwise.curriculum.training.lora import load_adapter, save_adapter

FORMAT = "tierwise-checkpoint"
VERSION = 1
STATE_NAME = "state.json"
TENSORS_NAME = "optimizer.safetensors"
MODEL_NAME = "model"
_PREFIX = "step-"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Where a run stands.

    Attributes:
        step: Steps done.
        position: Samples taken from the order so far, counted over epochs.
        identity: What a checkpoint must agree in to be resumed: hashes of config, data, start.
        config: The resolved configuration, to read and to compare.
        counters: Whatever else the loop carries from step to step.
    """

    step: int
    position: int
    identity: Mapping[str, str]
    config: Mapping[str, Any]
    counters: Mapping[str, float]


def save_checkpoint(
    folder: Path,
    state: TrainState,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    processor: Any = None,
    adapter: Any = None,
    keep: int = 2,
) -> Path:
    """Write `folder/step-NNNNNN` whole, remove all but the newest `keep`, and return its path.

    Args:
        folder: Where the run's checkpoints are.
        state: Where the run stands.
        model: A transformers model.
        optimizer: Any optimizer; its `state_dict` may hold tensors, numbers, text and containers.
        processor: Saved beside the weights, so that the model folder loads by itself.
        adapter: Saved instead of the model's weights, which it leaves as they were.
        keep: How many checkpoints stay.

    Raises:
        StorageFullError: No space; the checkpoints before are as they were.
    """
    from safetensors.torch import save_file

    from tierwise.curriculum.families import quiet_transformers

    path = folder / f"{_PREFIX}{state.step:06d}"
    for unfinished in folder.glob(f".{_PREFIX}*.part"):  # of a run that was killed while writing
        shutil.rmtree(unfinished)
    with _staged_folder(path) as temporary:
        with quiet_transformers():
            if adapter is None:
                model.save_pretrained(temporary / MODEL_NAME)
            else:
                save_adapter(adapter, temporary / MODEL_NAME)
            if processor is not None:
                processor.save_pretrained(temporary / MODEL_NAME)
        tensors: dict[str, Tensor] = {}
        tree = _pack({"optimizer": optimizer.state_dict(), "rng": _rng_state()}, tensors, "")
        save_file(tensors, temporary / TENSORS_NAME)
        document = {
            "format": FORMAT,
            "version": VERSION,
            "step": state.step,
            "position": state.position,
            "identity": dict(state.identity),
            "config": dict(state.config),
            "counters": dict(state.counters),
            "tree": tree,
            "sha256": _hashes(temporary),
        }
        text = json.dumps(document, indent=1, allow_nan=False)
        (temporary / STATE_NAME).write_text(text + "\n", encoding="utf-8")
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return path


@contextlib.contextmanager
def _staged_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`; on a clean exit it is synced and takes `path`'s place.

    On any exception it is removed, and what was at `path` stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        _sync(temporary)
        if path.exists():
            shutil.rmtree(path)  # the same step of the same run; the one before it is kept
        temporary.replace(path)
        _sync(path.parent)
    except Exception as error:
        # safetensors wraps the system's error in one of its own
        if getattr(error, "errno", None) in _FULL or "os error 28" in str(error):
            raise StorageFullError(
                f"no space left while writing {path}", hint="free some space and run it again"
            ) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_model(path: Path, *, model: Any, processor: Any) -> None:
    """Write a model folder that loads by itself, whole or not at all.

    Raises:
        StorageFullError: No space; nothing is there, or what was there before.
    """
    from tierwise.curriculum.families import quiet_transformers

    with _staged_folder(path) as temporary, quiet_transformers():
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the run's checkpoints, oldest first; unfinished ones are not among them."""
    found = [path for path in folder.glob(f"{_PREFIX}*") if (path / STATE_NAME).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def read_state(path: Path) -> TrainState:
    """Return where the run of a checkpoint stood, without loading any tensor.

    Raises:
        MissingFileError: No checkpoint there.
        DataError: Not a checkpoint of this format and version.
    """
    document = _document(path)
    fields = dataclasses.fields(TrainState)
    return TrainState(**{field.name: document[field.name] for field in fields})


def load_checkpoint(
    path: Path, *, model: Any, optimizer: torch.optim.Optimizer, adapter: Any = None
) -> TrainState:
    """Copy a checkpoint into the live model, optimizer and random generators; return its state.

    Parameters keep their identity, so whatever refers to them (an optimizer, hooks) goes on.

    Raises:
        MissingFileError: No checkpoint there.
        IntegrityError: A file is missing or differs from its hash; nothing was loaded.
        StateError: The model has other tensors than the checkpoint; nothing was loaded.
    """
    from safetensors.torch import load_file

    document = _document(path)
    found = _hashes(path)
    for name, digest in document["sha256"].items():
        if found.get(name) != digest:
            wrong = "differs from its hash" if name in found else "is missing"
            raise IntegrityError(f"{path / name} {wrong}", hint="resume from the checkpoint before")
    if adapter is None:
        load_weights(path / MODEL_NAME, model)
    else:
        load_adapter(adapter, path / MODEL_NAME)
    tree = _unpack(document["tree"], load_file(path / TENSORS_NAME))
    optimizer.load_state_dict(tree["optimizer"])
    _set_rng_state(tree["rng"])
    return read_state(path)


@torch.no_grad()
def load_weights(folder: Path, model: Any) -> None:
    """Copy the weights of a model folder into a live model of the same shape, all or none.

    Names are matched after transformers has loaded the folder its own way, because the names in
    the file are not always those of the live model and a plain `load_state_dict` would then
    restore nothing (https://github.com/huggingface/transformers/issues/43701).

    Raises:
        StateError: Tensor names or shapes differ.
    """
    from tierwise.curriculum.families import quiet_transformers

    with quiet_transformers():
        loaded = type(model).from_pretrained(folder, local_files_only=True, dtype="auto")
    stored = loaded.state_dict()
    live = model.state_dict()
    differing = sorted(
        name
        for name in live.keys() | stored.keys()
        if name not in live or name not in stored or live[name].shape != stored[name].shape
    )
    if differing:
        raise StateError(
            f"{folder} is of another model: {len(differing)} tensors differ, first {differing[0]}"
        )
    for name, tensor in live.items():
        tensor.copy_(stored[name])


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads((path / STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(f"no checkpoint in {path}") from error
    except ValueError as error:
        raise DataError(f"{path / STATE_NAME} is not JSON") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(f"{path} is not a training checkpoint")
    if document["version"] != VERSION:
        raise DataError(f"{path} has format version {document['version']}, known is {VERSION}")
    return document


def _hashes(path: Path) -> dict[str, str]:
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != STATE_NAME)
    return {file.relative_to(path).as_posix(): hash_file(file) for file in files}


def _rng_state() -> dict[str, Any]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def _set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def _pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Return JSON for a tree of containers; its tensors go to `tensors` under dotted names."""
    match value:
        case Tensor():
            # a copy: safetensors refuses tensors that share memory
            tensors[name] = value.detach().cpu().clone().contiguous()
            return {"$tensor": name}
        case dict():
            # keys may be numbers, and their order counts
            items = [[key, _pack(item, tensors, f"{name}.{key}")] for key, item in value.items()]
            return {"$dict": items}
        case list() | tuple():
            items = [_pack(item, tensors, f"{name}.{i}") for i, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        case float() if not math.isfinite(value):
            return {"$float": repr(value)}
        case bool() | int() | float() | str() | None:
            return value
    raise StateError(f"the optimizer state at {name.lstrip('.')} is a {type(value).__name__}")


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$dict": items}:
            return {key: _unpack(item, tensors) for key, item in items}
        case {"$tuple": items}:
            return tuple(_unpack(item, tensors) for item in items)
        case {"$float": text}:
            return float(text)
        case list():
            return [_unpack(item, tensors) for item in value]
    return value
