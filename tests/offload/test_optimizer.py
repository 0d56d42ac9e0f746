"""The optimizer as a torch optimizer: state dicts, schedulers, scalers, and what it refuses."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.small_models import Gpt, gpt_loss
from tierwise.core.errors import DataError, StateError, TrainingError, UsageError
from tierwise.offload import OffloadAdamW, fingerprint, verify_bits
from tierwise.offload.memory import host_bytes
from tierwise.offload.queue import Task
from tierwise.offload.verify import differing_bits


def make(**options: Any) -> tuple[nn.Module, OffloadAdamW]:
    torch.manual_seed(0)
    model = Gpt()
    return model, OffloadAdamW(model, 1e-2, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        gpt_loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def test_state_dicts_go_both_ways_between_torch_and_here() -> None:
    model, ours = make()
    train(model, ours, range(5))
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters(), 1.0, fused=True)
    theirs.load_state_dict(ours.state_dict())
    train(twin, theirs, range(5, 9))
    train(model, ours, range(5, 9))
    assert fingerprint(model) == fingerprint(twin)
    _, back = make()
    fresh = copy.deepcopy(twin)
    again = OffloadAdamW(fresh, 1.0)
    again.load_state_dict(theirs.state_dict())
    train(fresh, again, range(9, 12))
    train(twin, theirs, range(9, 12))
    assert fingerprint(fresh) == fingerprint(twin)
    assert differing_bits(again.state_dict()["state"], theirs.state_dict()["state"]) == {}
    for optimizer in (ours, back, again):
        optimizer.close()


def test_a_saved_state_dict_is_not_touched_by_later_steps() -> None:
    model, ours = make()
    train(model, ours, range(2))
    saved = ours.state_dict()
    before = fingerprint(saved["state"])
    train(model, ours, range(2, 5))
    assert fingerprint(saved["state"]) == before
    ours.close()


@pytest.mark.parametrize("mode", ["speculate", "defer"])
def test_between_backward_and_step_only_committed_state_is_seen(mode: Any) -> None:
    model, ours = make(mode=mode)
    train(model, ours, range(3))
    weights, state = fingerprint(model), fingerprint(ours.state_dict()["state"])
    gpt_loss(model, 3).backward()  # type: ignore[no-untyped-call]
    assert (fingerprint(model), fingerprint(ours.state_dict()["state"])) == (weights, state)
    ours.zero_grad()
    ours.step()  # no gradients: nothing happens
    assert (fingerprint(model), fingerprint(ours.state_dict()["state"])) == (weights, state)
    ours.close()


def test_an_exception_in_backward_leaves_everything_as_it_was() -> None:
    model, ours = make(mode="speculate")
    train(model, ours, range(2))
    before = fingerprint(model)

    def explode(grad: torch.Tensor) -> None:
        raise RuntimeError("boom")

    handle = model.layers[0].norm1.weight.register_hook(explode)  # type: ignore[union-attr,index]
    with pytest.raises(RuntimeError, match="boom"):
        gpt_loss(model, 2).backward()  # type: ignore[no-untyped-call]
    handle.remove()
    ours.zero_grad()
    assert fingerprint(model) == before
    train(model, ours, range(2, 5))
    other, reference = make(mode="barrier")
    train(other, reference, range(5))
    assert fingerprint(model) == fingerprint(other)
    ours.close()
    reference.close()


def test_schedulers_drive_it() -> None:
    def run(kind: type[torch.optim.Optimizer], **options: Any) -> str:
        torch.manual_seed(0)
        model = Gpt()
        optimizer = kind(model.parameters(), lr=1e-2, **options)  # type: ignore[call-arg]
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12)
        for step in range(10):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
        return fingerprint(model)

    assert run(OffloadAdamW) == run(torch.optim.AdamW, fused=True)


@pytest.mark.parametrize("mode", ["speculate", "defer"])
def test_grad_scaler_skips_and_unscales(mode: Any) -> None:
    def run(offloaded: bool) -> tuple[str, str, list[dict[str, Any]]]:
        torch.manual_seed(0)
        model = Gpt()
        optimizer: torch.optim.Optimizer = (
            OffloadAdamW(model, 1e-2, max_grad_norm=2.0, mode=mode)
            if offloaded
            else torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        seen = []
        for step in range(12):
            scaler.scale(gpt_loss(model, step)).backward()  # type: ignore[no-untyped-call]
            if step in (5, 6, 10):  # 6 and 10 are left to step()
                first = next(model.parameters()).grad
                assert first is not None
                first[0, 0] = float("inf" if step < 10 else "nan")
            if not offloaded or step % 2:  # ours may leave it to step()
                scaler.unscale_(optimizer)
            if not offloaded:
                nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.state_dict())
            optimizer.zero_grad()
        if isinstance(optimizer, OffloadAdamW):
            assert (optimizer.counts.steps, optimizer.counts.skipped) == (9, 3)
        return fingerprint(model), fingerprint(optimizer.state_dict()["state"]), seen

    # torch's own fused AdamW would unscale inside its kernel; here it is unscaled before
    ours, theirs = run(True), run(False)
    assert ours == theirs
    scales = [state["scale"] for state in theirs[2]]
    assert any(after > before for before, after in itertools.pairwise(scales))
    assert any(after < before for before, after in itertools.pairwise(scales))


def test_weights_loaded_after_construction_are_the_ones_trained() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        donor = Gpt().to(dtype)
        weights = {name: tensor.clone() for name, tensor in donor.state_dict().items()}
        torch.manual_seed(1)
        model = Gpt().to(dtype)
        ours = OffloadAdamW(model, 1e-2)
        train(model, ours, range(1))
        model.load_state_dict(weights)
        ours.load_state_dict(OffloadAdamW(Gpt().to(dtype), 1e-2).state_dict())
        train(model, ours, range(4))
        straight = OffloadAdamW(donor, 1e-2)
        train(donor, straight, range(4))
        assert fingerprint(model) == fingerprint(donor)


def test_gradients_changed_by_hand_are_the_ones_used() -> None:
    def run(offloaded: bool) -> str:
        torch.manual_seed(0)
        model = Gpt()
        optimizer: torch.optim.Optimizer = (
            OffloadAdamW(model, 1e-2, mode="speculate")
            if offloaded
            else torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        )
        for step in range(6):
            gpt_loss(model, step).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if step == 3:
                model.head.weight.grad = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return fingerprint(model)

    assert run(True) == run(False)


def test_parameters_unfrozen_or_added_later() -> None:
    def run(offloaded: bool) -> str:
        torch.manual_seed(0)
        model, more = Gpt(), nn.Linear(37, 37)
        model.head.weight.requires_grad_(False)
        optimizer: torch.optim.Optimizer = (
            OffloadAdamW(model, 1e-2)
            if offloaded
            else torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        )
        train(model, optimizer, range(3))
        model.head.weight.requires_grad_(True)
        optimizer.add_param_group({"params": list(more.parameters()), "lr": 1e-3})
        for step in range(3, 8):
            loss = gpt_loss(model, step) + more(torch.ones(37)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return fingerprint(model) + fingerprint(more)

    assert run(True) == run(False)


def test_accumulation_is_learned_and_can_be_told() -> None:
    model, ours = make(mode="speculate")
    for _ in range(3):
        for part in range(3):
            gpt_loss(model, part).backward()  # type: ignore[no-untyped-call]
        ours.step()
        ours.zero_grad()
    learned = ours.counts.kept
    assert learned == 3 * len(ours._slots)
    for _ in range(2):
        with ours.accumulate():
            gpt_loss(model, 0).backward()  # type: ignore[no-untyped-call]
            assert all(slot.ticket is None for slot in ours._slots.values())
        gpt_loss(model, 1).backward()  # type: ignore[no-untyped-call]
        ours.step()
        ours.zero_grad()
    assert ours.counts.kept == 5 * len(ours._slots)
    ours.close()


def test_auto_stops_proposing_when_most_steps_are_clipped_and_begins_again() -> None:
    model, ours = make(mode="auto", max_grad_norm=1e-3)
    train(model, ours, range(4))
    assert ours.counts.clipped == 4
    stopped = ours._shadow.wanted
    assert not stopped
    ours.max_grad_norm = 1e9
    train(model, ours, range(4, 24))
    assert ours._shadow.wanted
    assert ours.counts.kept > 0
    ours.close()


def test_proposals_end_when_the_norm_is_already_too_large() -> None:
    model, ours = make(mode="speculate", max_grad_norm=1e-6)
    gpt_loss(model, 0).backward()  # type: ignore[no-untyped-call]
    assert ours._shadow.stopped
    assert sum(slot.ticket is not None for slot in ours._slots.values()) < len(ours._slots) / 2
    ours.step()
    ours.close()


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_non_finite_gradients(nonfinite: Any) -> None:
    model, ours = make(mode="speculate", nonfinite=nonfinite)
    train(model, ours, range(2))
    before = fingerprint(model), fingerprint(ours.state_dict()["state"])
    gpt_loss(model, 2).backward()  # type: ignore[no-untyped-call]
    model.head.weight.grad[3, 3] = float("nan")  # type: ignore[operator,union-attr,index]
    if nonfinite == "raise":
        with pytest.raises(TrainingError, match="not finite"):
            ours.step()
    else:
        ours.step()
        assert ours.counts.skipped == 1
    assert (fingerprint(model), fingerprint(ours.state_dict()["state"])) == before
    ours.zero_grad()
    train(model, ours, range(3, 5))
    assert ours.counts.steps == 4
    ours.close()


def test_gradients_that_are_consumed_cannot_be_used() -> None:
    model, ours = make(release_grads=True, mode="speculate", max_grad_norm=1.0)
    gpt_loss(model, 0).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(StateError, match="already consumed") as caught:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert "max_grad_norm" in (caught.value.hint or "")
    with pytest.raises(StateError, match="already consumed"):
        gpt_loss(model, 1).backward()  # type: ignore[no-untyped-call]
    ours.zero_grad()
    with ours.accumulate():
        gpt_loss(model, 0).backward()  # type: ignore[no-untyped-call]
    gpt_loss(model, 1).backward()  # type: ignore[no-untyped-call]
    ours.step()
    assert ours.counts.steps == 1
    ours.close()


def test_writing_a_gradient_that_is_still_being_read_is_an_error() -> None:
    held = threading.Event()
    model, ours = make(mode="defer")
    train(model, ours, range(1))
    gpt_loss(model, 1).backward()  # type: ignore[no-untyped-call]

    def hold(task: Task) -> None:
        held.wait(10)

    ours._queue.before = hold
    ours.step()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(2)
    held.set()
    with pytest.raises(TrainingError, match="changed after step"):
        ours.synchronize()
    ours.close()


def flat_parameter() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(3))
    param._fsdp_flattened = True  # type: ignore[attr-defined] # as FSDP 1 marks its own
    return param


BAD_CALLS: dict[str, tuple[Any, str]] = {
    "lr": (lambda: OffloadAdamW(Gpt(), -1.0), "lr -1.0 is negative"),
    "betas": (lambda: OffloadAdamW(Gpt(), betas=(1.0, 0.9)), "betas"),
    "eps": (lambda: OffloadAdamW(Gpt(), eps=-1e-8), "eps"),
    "weight decay": (lambda: OffloadAdamW(Gpt(), weight_decay=-1.0), "weight_decay"),
    "norm": (lambda: OffloadAdamW(Gpt(), max_grad_norm=0.0), "max_grad_norm 0.0 is not > 0"),
    "mode": (lambda: OffloadAdamW(Gpt(), mode="fast"), "mode 'fast' is not known"),  # type: ignore[arg-type]
    "chunk": (lambda: OffloadAdamW(Gpt(), chunk_elements=100), "not a multiple of 64"),
    "threads": (lambda: OffloadAdamW(Gpt(), num_threads=0), "num_threads 0"),
    "complex": (
        lambda: OffloadAdamW([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]),
        "is complex",
    ),
    "fp16": (lambda: OffloadAdamW(Gpt().half()), "float16; weights must be fp32 or bf16"),
    "view": (
        lambda: OffloadAdamW([nn.Parameter(torch.zeros(4, 4)[:, :2])]),
        "a view with gaps",
    ),
    "fsdp": (lambda: OffloadAdamW([flat_parameter()]), "piece of FSDP's flat parameter"),
    "empty": (lambda: OffloadAdamW([]), "empty parameter list"),
    "memory": (lambda: OffloadAdamW(Gpt(), host_budget_bytes=1000), "more than there is"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_are_one_sentence(name: str) -> None:
    call, message = BAD_CALLS[name]
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_parameter_in_two_groups_is_refused() -> None:
    p = nn.Parameter(torch.zeros(3))
    groups: list[dict[str, Any]] = [{"params": [p]}, {"params": [p], "lr": 1.0}]
    with pytest.raises(UsageError, match="more than one parameter group"):
        OffloadAdamW(groups)


def test_closures_and_sparse_gradients_are_refused() -> None:
    _, ours = make()
    with pytest.raises(UsageError, match="no closure"):
        ours.step(lambda: 0.0)
    embedding = nn.Embedding(5, 4, sparse=True)
    sparse = OffloadAdamW(embedding)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match="sparse") as caught:
        sparse.step()
    assert caught.value.hint == "make the embedding with sparse=False"
    ours.close()
    sparse.close()


def test_a_checkpoint_of_another_model_changes_nothing() -> None:
    model, ours = make()
    train(model, ours, range(2))
    before = fingerprint(ours.state_dict()["state"])
    wider = Gpt(width=36)
    other = OffloadAdamW(wider)
    train(wider, other, range(1))
    with pytest.raises(DataError, match="another model: parameter 0 is"):
        ours.load_state_dict(other.state_dict())
    deeper = OffloadAdamW(Gpt(layers=4))
    with pytest.raises(DataError, match="another model: groups of"):
        ours.load_state_dict(deeper.state_dict())
    assert fingerprint(ours.state_dict()["state"]) == before
    for optimizer in (ours, other, deeper):
        optimizer.close()


def test_too_little_memory_for_shadows_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tierwise.offload"):
        budget = host_bytes(list(Gpt().parameters()), shadow=True, direct=True) - 1
        model, ours = make(host_budget_bytes=budget, mode="speculate")
        train(model, ours, range(3))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "updates wait for the norm" in caplog.text
    assert ours.counts.kept == 0
    ours.close()


def test_closing_ends_threads_and_hooks_and_forgets_the_model() -> None:
    model, ours = make()
    train(model, ours, range(2))
    assert any(thread.name.startswith("tierwise-offload") for thread in threading.enumerate())
    ours.close()
    ours.close()
    assert not any(t.name.startswith("tierwise-offload") for t in threading.enumerate())
    gpt_loss(model, 0).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(StateError, match="closed"):
        ours.step()
    assert len(ours.state_dict()["state"]) > 0


def test_an_optimizer_that_is_dropped_ends_its_threads() -> None:
    model, ours = make()
    train(model, ours, range(1))
    reference = weakref.ref(ours)
    del ours
    gc.collect()
    assert reference() is None
    assert not any(t.name.startswith("tierwise-offload") for t in threading.enumerate())


def test_verify_bits_sees_a_difference() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        calls.append(number)
        # the two runs are not given the same data: the fault must be found
        return gpt_loss(model, number + (len(calls) > 3))

    calls: list[int] = []
    report = verify_bits(Gpt, loss, steps=3, seed=0)
    assert not report.equal
    assert report.differing
    assert report.ours_sha256 != report.theirs_sha256
    honest = verify_bits(Gpt, gpt_loss, steps=3, seed=0)
    assert honest.equal
    assert honest.ours_sha256 == honest.theirs_sha256
    assert honest.num_elements > 3 * sum(p.numel() for p in Gpt().parameters())


def test_a_copied_or_pickled_model_is_free_of_the_optimizer() -> None:
    model, ours = make(overlap_forward=True)
    train(model, ours, range(3))
    ours.synchronize()  # with overlap_forward the last step's weights may still be on their way
    twin = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    before = fingerprint(model)
    for other in (twin, loaded):
        assert fingerprint(other) == before
        reference = torch.optim.AdamW(other.parameters(), 1e-2, fused=True)
        train(other, reference, range(3))
        assert fingerprint(model) == before
    ours.close()
