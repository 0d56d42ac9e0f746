"""What programs do to model, gradients and optimizer between calls: torch's bits, or a sentence."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tierwise.core.errors import DataError, StateError, UsageError
from tierwise.offload import OffloadAdamW, fingerprint
from tierwise.offload.blocks import split_blocks
from tierwise.offload.queue import Ticket
from tierwise.offload.verify import differing_bits


class HeadFirst(nn.Module):
    """Tied weights whose owner by registration, the head, is the last to run."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(30, 37, bias=False)
        self.middle = nn.Linear(30, 30)
        self.embedding = nn.Embedding(37, 30)
        self.embedding.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.embedding(tokens)))
        return logits


def words_loss(model: nn.Module, number: int) -> Tensor:
    tokens = torch.randint(0, 37, (8,), generator=torch.Generator().manual_seed(number))
    return functional.cross_entropy(model(tokens), tokens.roll(1))


def two_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 21), nn.Linear(21, 20)).to(dtype)


def rows_loss(model: nn.Module, number: int) -> Tensor:
    rows = torch.randn(4, 20, generator=torch.Generator().manual_seed(number))
    weights = next(model.parameters())
    result: Tensor = model(rows.to(weights.dtype)).float().square().mean()
    return result


def wait_for(event: threading.Event) -> None:
    event.wait(10)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range,
    loss: Callable[[nn.Module, int], Tensor] = rows_loss,
) -> None:  # fmt: skip
    for step in steps:
        loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def test_tied_weights_are_waited_for_by_whichever_module_runs_first() -> None:
    assert [len(block.sharers) for block in split_blocks(HeadFirst())] == [1, 0]
    prints = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = HeadFirst()
        optimizer: torch.optim.Optimizer
        if offloaded:
            optimizer = OffloadAdamW(model, 1e-2, mode="defer")
            optimizer._queue.before = lambda task: time.sleep(0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        train(model, optimizer, range(4), words_loss)
        prints.append(fingerprint(model))
    assert prints[0] == prints[1]


def test_weights_that_share_storage_keep_their_fp32_masters() -> None:
    def masters(shared: bool) -> dict[str, Tensor]:
        model = two_layers(torch.bfloat16)
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        start = 0
        for layer in model:
            for name, param in list(layer.named_parameters()):
                view = flat[start : start + param.numel()].view_as(param)
                setattr(layer, name, nn.Parameter(view if shared else view.clone()))
                start += param.numel()
        ours = OffloadAdamW(model, 1e-4)
        # blocks arrive one after the other: the later raises the version of the earlier
        ours._queue.before = lambda task: None if task.speculative else time.sleep(0.005)
        train(model, ours, range(10))
        ours.close()
        return {str(index): e["master"] for index, e in ours.state_dict()["state"].items()}

    assert differing_bits(masters(shared=True), masters(shared=False)) == {}


@pytest.mark.parametrize("weights_last", [False, True])
def test_bf16_weights_and_state_are_loaded_in_either_order(weights_last: bool) -> None:
    model = two_layers(torch.bfloat16)
    ours = OffloadAdamW(model, 1e-4)
    train(model, ours, range(5))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = ours.state_dict()
    train(model, ours, range(5, 10))
    fresh = two_layers(torch.bfloat16)
    again = OffloadAdamW(fresh, 1.0)
    train(fresh, again, range(1))
    if weights_last:
        again.load_state_dict(state)
        fresh.load_state_dict(weights)
    else:
        fresh.load_state_dict(weights)
        again.load_state_dict(state)
    train(fresh, again, range(5, 10))
    assert differing_bits(again.state_dict()["state"], ours.state_dict()["state"]) == {}
    ours.close()
    again.close()


def double(model: nn.Module) -> None:
    model.double()


def other_layout(model: nn.Module) -> None:
    for param in model.parameters():
        if param.dim() > 1:
            param.data = param.data.t().contiguous().t()


@pytest.mark.parametrize("change", [double, other_layout])
@pytest.mark.parametrize("mode", ["speculate", "barrier"])
def test_a_model_converted_after_construction_is_refused(
    change: Callable[[nn.Module], None], mode: Any
) -> None:
    model = two_layers()
    ours = OffloadAdamW(model, mode=mode)
    train(model, ours, range(2))
    state = fingerprint(ours.state_dict()["state"])
    change(model)
    weights = fingerprint(model)
    rows_loss(model, 2).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(UsageError, match="has changed since the optimizer was made"):
        ours.step()
    assert (fingerprint(model), fingerprint(ours.state_dict()["state"])) == (weights, state)
    ours.close()


def test_weights_replaced_while_the_host_reads_them() -> None:
    prints = []
    for offloaded in (False, True):
        model = two_layers()
        optimizer: torch.optim.Optimizer
        if offloaded:
            optimizer = OffloadAdamW(model, 1e-2, mode="speculate")
            optimizer._queue.before = lambda task: time.sleep(0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        for step in range(4):
            rows_loss(model, step).backward()  # type: ignore[no-untyped-call]
            for param in model.parameters():
                param.data = param.data * 0.5
            optimizer.step()
            optimizer.zero_grad()
        prints.append(fingerprint(model))
    assert prints[0] == prints[1]


def test_a_gradient_of_another_type_is_refused() -> None:
    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    ours = OffloadAdamW([param])
    param.grad = torch.full((64,), 0.5)
    with pytest.raises(UsageError, match=r"gradient is torch\.float32, its parameter"):
        ours.step()
    assert torch.equal(param, torch.ones(64, dtype=torch.bfloat16))
    ours.close()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"maximize": True}, "maximize"),
        ({"lr": -1.0}, "lr -1.0 is negative"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
    ids=str,
)
def test_a_group_that_asks_for_something_else_is_refused(extra: Any, message: str) -> None:
    added = nn.Parameter(torch.ones(3))
    with pytest.raises(UsageError, match=message):
        OffloadAdamW([{"params": [added], **extra}])
    ours = OffloadAdamW(two_layers())
    with pytest.raises(UsageError, match=message):
        ours.add_param_group({"params": [added], **extra})
    with pytest.raises(UsageError, match="complex"):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.complex64))]})
    with pytest.raises(UsageError, match="several devices"):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(3, device="meta"))]})
    assert len(ours.param_groups) == 1
    with pytest.raises(UsageError, match=r"max_grad_norm -1\.0"):
        ours.max_grad_norm = -1.0
    assert ours.max_grad_norm is None
    ours.close()


def test_states_of_other_optimizers_are_refused() -> None:
    model = two_layers()
    ours = OffloadAdamW(model)
    other = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, other, range(1))
    with pytest.raises(DataError, match="not AdamW's: parameter 0 has no step, exp_avg"):
        ours.load_state_dict(other.state_dict())
    with pytest.raises(DataError, match="not an optimizer's state dict"):
        ours.load_state_dict({"model": {}})
    ours.close()


def test_state_and_gradients_of_frozen_parameters_are_taken() -> None:
    model = two_layers()
    reference = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, reference, range(2))
    twin = copy.deepcopy(model)
    model[0].requires_grad_(False)
    twin[0].requires_grad_(False)
    ours = OffloadAdamW(twin)
    ours.load_state_dict(reference.state_dict())
    assert not twin[0].weight.requires_grad
    for each, optimizer in ((model, reference), (twin, ours)):
        train(each, optimizer, range(2, 4))
        layer = each.get_submodule("0")
        assert isinstance(layer, nn.Linear)
        layer.weight.grad = torch.ones(21, 20)  # by hand, though it is frozen
        optimizer.step()
        layer.requires_grad_(True)
        train(each, optimizer, range(4, 6))
    assert fingerprint(twin) == fingerprint(model)
    assert differing_bits(ours.state_dict()["state"], reference.state_dict()["state"]) == {}
    ours.close()


def test_it_is_not_copied_or_pickled() -> None:
    ours = OffloadAdamW(two_layers())
    for duplicate in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            duplicate(ours)
    ours.close()


def test_consumed_gradients_can_be_zeroed() -> None:
    model = two_layers()
    ours = OffloadAdamW(model, release_grads=True, mode="speculate")
    rows_loss(model, 0).backward()  # type: ignore[no-untyped-call]
    ours.zero_grad(set_to_none=False)
    train(model, ours, range(3))
    twin = two_layers()
    train(twin, torch.optim.AdamW(twin.parameters(), fused=True), range(3))
    assert fingerprint(model) == fingerprint(twin)
    ours.close()


def test_shapes_without_elements_or_dimensions() -> None:
    def run(offloaded: bool) -> dict[str, Any]:
        params = [
            nn.Parameter(torch.zeros(0, 4)),
            nn.Parameter(torch.tensor(2.0)),
            nn.Parameter(torch.arange(12.0).view(3, 4).t()),
            nn.Parameter(torch.ones(1, 5)),
        ]
        optimizer: torch.optim.Optimizer = (
            OffloadAdamW(params, 0.1, max_grad_norm=1.0, mode="speculate")
            if offloaded
            else torch.optim.AdamW(params, 0.1, weight_decay=1e-2, fused=True)
        )
        for step in range(6):
            torch.manual_seed(step)
            sum((p * torch.randn(p.shape)).sum() for p in params).backward()  # type: ignore[union-attr]
            if step == 3:
                params[2].grad = torch.randn(8, 6)[::2, ::2]  # not as the parameter lies
                if not offloaded:  # torch's fused kernel on the CPU pairs wrong elements then
                    params[2].grad = torch.empty_like(params[2]).copy_(params[2].grad)
            if not offloaded:
                nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights = {str(i): p.detach() for i, p in enumerate(params)}
        return {"weights": weights, "state": optimizer.state_dict()["state"]}

    ours, theirs = run(True), run(False)
    assert ours["state"].keys() == theirs["state"].keys()
    assert differing_bits(ours, theirs) == {}


def test_negative_zero_is_a_difference() -> None:
    zeros, negative = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    assert differing_bits({"a": zeros}, {"a": negative}) == {"/a": 1}
    nan = torch.tensor([float("nan")])
    assert differing_bits({"a": nan}, {"a": -nan}) == {}


def test_ctrl_c_while_step_waits_leaves_a_whole_step() -> None:
    model = two_layers()
    ours = OffloadAdamW(model, 1e-2, mode="barrier")
    train(model, ours, range(2))
    rows_loss(model, 2).backward()  # type: ignore[no-untyped-call]
    finish, release = ours._queue.finish, threading.Event()

    def interrupted(tickets: Iterable[Ticket]) -> None:
        ours._queue.finish = finish  # type: ignore[method-assign]
        raise KeyboardInterrupt

    ours._queue.finish = interrupted  # type: ignore[method-assign]
    ours._queue.before = lambda task: wait_for(release)
    with pytest.raises(KeyboardInterrupt):
        ours.step()
    timer = threading.Timer(0.1, release.set)
    timer.start()
    state = ours.state_dict()
    twin = two_layers()
    reference = torch.optim.AdamW(twin.parameters(), 1e-2, fused=True)
    train(twin, reference, range(3))
    assert differing_bits(state["state"], reference.state_dict()["state"]) == {}
    ours.zero_grad()
    train(model, ours, range(3, 5))
    train(twin, reference, range(3, 5))
    assert fingerprint(model) == fingerprint(twin)
    ours.close()


def test_ctrl_c_amid_the_commit_is_said_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_layers()
    ours = OffloadAdamW(model, mode="speculate")
    train(model, ours, range(2))
    rows_loss(model, 2).backward()  # type: ignore[no-untyped-call]

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ours._delivery, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.step()
    with pytest.raises(StateError, match=r"KeyboardInterrupt.*torn"):
        ours.state_dict()
    ours.close()
