"""Checkpoints are whole or not there, hold every bit, and refuse what does not fit."""

from __future__ import annotations

import copy
import errno
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tierwise.core.errors import (
    DataError,
    IntegrityError,
    MissingFileError,
    StateError,
    StorageFullError,
)
from tierwise.curriculum.tiny import build
from tierwise.curriculum.training import checkpoint
from tierwise.curriculum.training.checkpoint import (
    TrainState,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
)


@functools.cache
def _untrained(width: int) -> Any:
    torch.set_num_threads(1)
    small = build.TinyConfig(
        vision_width=16, vision_layers=1, vision_heads=2, width=width, layers=1, heads=2,
        mlp_width=24,
    )  # fmt: skip
    return build.build_model(small, seed=0)


def made(width: int = 16) -> tuple[Any, torch.optim.Optimizer]:
    """Return a small model and an optimizer that has taken two steps."""
    model = copy.deepcopy(_untrained(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def state(step: int = 3) -> TrainState:
    return TrainState(
        step=step, position=17, identity={"seed": "1"}, config={"steps": 9}, counters={"updates": 3}
    )


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_bits(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=True)
        return type(one) is type(other) and all(same_bits(a, b) for a, b in pairs)
    return bool(one == other)


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = made()
    path = save_checkpoint(tmp_path, state(), model=model, optimizer=optimizer)
    expected_draw = torch.rand(3)
    other, other_optimizer = made()
    before = dict(other.named_parameters())
    assert not same_bits(dict(model.state_dict()), dict(other.state_dict()))
    assert load_checkpoint(path, model=other, optimizer=other_optimizer) == state()
    assert same_bits(dict(model.state_dict()), dict(other.state_dict()))
    assert same_bits(optimizer.state_dict(), other_optimizer.state_dict())
    assert torch.equal(torch.rand(3), expected_draw)
    assert all(before[name] is parameter for name, parameter in other.named_parameters())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5)
        | st.floats(allow_nan=False)
        | st.builds(lambda n: torch.arange(n).float(), st.integers(0, 4)),
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
        | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    )
)  # fmt: skip
def test_any_tree_of_an_optimizer_survives_packing(tree: Any) -> None:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(checkpoint._pack(tree, tensors, "x"), allow_nan=False)
    assert same_bits(checkpoint._unpack(json.loads(text), tensors), tree)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    model, optimizer = made()
    for step in (1, 2, 3, 10):
        save_checkpoint(tmp_path, state(step), model=model, optimizer=optimizer, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000003", "step-000010"]
    assert read_state(list_checkpoints(tmp_path)[-1]).step == 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_the_old_ones_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    model, optimizer = made()
    save_checkpoint(tmp_path, state(1), model=model, optimizer=optimizer)

    def full(*_: object) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(StorageFullError if code == errno.ENOSPC else OSError):
        save_checkpoint(tmp_path, state(2), model=model, optimizer=optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_what_a_killed_write_left_is_not_a_checkpoint_and_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".step-000002.0badcafe.part").mkdir()
    (tmp_path / "step-000005").mkdir()
    assert list_checkpoints(tmp_path) == []
    model, optimizer = made()
    save_checkpoint(tmp_path, state(1), model=model, optimizer=optimizer)
    assert not list(tmp_path.glob(".step*"))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    model, optimizer = made()
    save_checkpoint(tmp_path, state(4), model=model, optimizer=optimizer)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    path = save_checkpoint(tmp_path, state(4), model=model, optimizer=optimizer)
    other, other_optimizer = made()
    load_checkpoint(path, model=other, optimizer=other_optimizer)
    assert not other.lm_head.weight.any()


@pytest.mark.parametrize("victim", ["optimizer.safetensors", "model/model.safetensors"])
@pytest.mark.parametrize("fault", ["flip", "gone"])
def test_a_damaged_file_is_found_before_anything_is_loaded(
    tmp_path: Path, victim: str, fault: str
) -> None:
    model, optimizer = made()
    path = save_checkpoint(tmp_path, state(), model=model, optimizer=optimizer)
    file = path / victim
    if fault == "flip":
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    other, other_optimizer = made()
    before = copy.deepcopy(dict(other.state_dict()))
    with pytest.raises(IntegrityError, match=victim):
        load_checkpoint(path, model=other, optimizer=other_optimizer)
    assert same_bits(dict(other.state_dict()), before)


def test_another_model_is_refused_not_half_loaded(tmp_path: Path) -> None:
    model, optimizer = made(16)
    path = save_checkpoint(tmp_path, state(), model=model, optimizer=optimizer)
    other, other_optimizer = made(32)
    before = copy.deepcopy(dict(other.state_dict()))
    with pytest.raises(StateError, match="another model"):
        load_checkpoint(path, model=other, optimizer=other_optimizer)
    assert same_bits(dict(other.state_dict()), before)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no checkpoint"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="not a training checkpoint"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text('{"format": "tierwise-checkpoint", "version": 99}')
    with pytest.raises(DataError, match="version 99"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        read_state(tmp_path)
    with pytest.raises(StateError, match="is a set"):
        checkpoint._pack({"state": {1, 2}}, {}, "optimizer")
