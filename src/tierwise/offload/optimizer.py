"""`OffloadAdamW`: AdamW whose update runs on the host during backward, with torch's bits.

```
 backward        hooks: gradient ready -> proposal into shadow memory        (shadow.py)
 step()          norm -> nothing clipped or changed?  keep the proposals: swap banks
                         else: update the committed state with the true coefficient
                 -> new weights go to the device, lowest block first
 next forward    with overlap_forward: each block waits for its own weights only
```

It is used as torch.optim.AdamW is, and does what `clip_grad_norm_` followed by
`AdamW(fused=True)` does, bit for bit; for bf16 weights it does what those do to an fp32 copy of
weights and gradients. Modes say when the host works: `speculate` during backward, `defer` after
the norm is known while the next forward runs, `barrier` inside `step()`; `auto` makes proposals
while fewer than half of the recent steps were clipped.

Left out: amsgrad, maximize, closures, sparse gradients, fp16 weights, several devices. A write
through `.data` (of a parameter or gradient) is invisible to torch's version counters: made
between backward and step, it is not seen here either. With a GradScaler, or in a process group of
several, gradients are not final when they are ready: nothing overlaps backward then.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tierwise.core.errors import DataError, TrainingError, UsageError
from tierwise.offload import kernel
from tierwise.offload.blocks import Block, blocks_of
from tierwise.offload.checkpoint import check_state, clear_slot, fill_slot, state_of
from tierwise.offload.checks import (
    check_arguments,
    check_gradient,
    check_group,
    check_norm,
    check_parameter,
)
from tierwise.offload.clip import clip_coefficient, clip_order, gradient_norms, unscale
from tierwise.offload.consumed import ConsumedGradient
from tierwise.offload.delivery import Delivery
from tierwise.offload.lane import check_one_device, choose_lane
from tierwise.offload.memory import Slot, allocate_state, room_for_shadows
from tierwise.offload.queue import UpdateQueue
from tierwise.offload.resident import allocate_resident, update_resident
from tierwise.offload.shadow import Shadow, Updater, numbers_for
from tierwise.offload.trace import Trace
from tierwise.offload.watch import watch_gradient, watch_model

logger = logging.getLogger("tierwise.offload")

Mode = Literal["auto", "speculate", "defer", "barrier"]
Nonfinite = Literal["propagate", "skip", "raise"]
_CLIP_HISTORY = 16  # steps `auto` looks back on


@dataclass(slots=True, kw_only=True)
class Counts:
    """What became of the steps and of the parameters' proposals.

    Attributes:
        steps: Steps taken.
        clipped: Steps whose gradients were scaled down.
        skipped: Steps not taken because the norm was not finite.
        kept: Proposals that became the new state.
        redone: Parameters updated after the norm was known.
    """

    steps: int = 0
    clipped: int = 0
    skipped: int = 0
    kept: int = 0
    redone: int = 0


class OffloadAdamW(Optimizer):
    """AdamW on the host, overlapped with backward; drop-in for `torch.optim.AdamW`.

    Args:
        params: A model, or parameters, or groups of parameters as for any torch optimizer.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Clip gradients to this global 2-norm, as `clip_grad_norm_` over the model's
            parameters (in the model's order, or the groups' without a model); None: never.
        mode: When the host works: see the module.
        model: The model, where `params` are groups: gives the blocks and the order of the norm.
        overlap_forward: Let `step()` return while weights are still on their way, and make each
            block's forward wait for its own. Between `step()` and the next forward, weights are
            then to be read through `model.state_dict()` or after `synchronize()`. None: only in
            mode `defer`.
        nonfinite: What a NaN or infinite gradient does: `propagate` into the weights as in torch,
            `skip` the step, or `raise` TrainingError (the state is untouched).
        resident_elements: About so many parameters at the start of the forward order are updated
            where they are trained, not on the host (see `tierwise offload plan`).
        host_budget_bytes: Host memory for optimizer state; None: what is free. Too little for
            shadows means `defer` or `barrier`.
        release_grads: Free each gradient as soon as it is on the host. Then only the last backward
            of a step may run outside `accumulate()`, and gradients cannot be touched by hand.
        num_threads: Host threads.
        chunk_elements: Parameters a task updates; a multiple of 64.
        trace: Notes what runs where and when.

    Raises:
        UsageError: An argument makes no sense, or a parameter cannot be updated on the host.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        mode: Mode = "auto",
        model: nn.Module | None = None,
        overlap_forward: bool | None = None,
        nonfinite: Nonfinite = "propagate",
        resident_elements: int = 0,
        host_budget_bytes: int | None = None,
        release_grads: bool = False,
        num_threads: int = 1,
        chunk_elements: int = 1 << 18,
        trace: Trace | None = None,
    ) -> None:
        if isinstance(params, nn.Module):
            model, params = params, list(params.parameters())
        check_arguments(
            max_grad_norm=max_grad_norm,
            mode=mode,
            chunk_elements=chunk_elements,
            num_threads=num_threads,
        )
        self.mode: Mode = mode
        self.counts = Counts()
        self.trace = trace
        self._model, self._nonfinite, self._release = model, nonfinite, release_grads
        self._overlap_forward = mode == "defer" if overlap_forward is None else overlap_forward
        self._resident_left, self._budget = resident_elements, host_budget_bytes
        self._slots: dict[nn.Parameter, Slot] = {}
        self._norm: Tensor | None = None
        self._step_supports_amp_scaling = True  # a GradScaler then says that it is there
        self._scaled = False
        self._seen = True  # the forward of some block before the last step
        self._clipped: deque[bool] = deque(maxlen=_CLIP_HISTORY)
        self._fired: dict[Block, None] = {}  # forward order, as seen
        self._gated: set[Block] = set()  # blocks whose forward has run since the last step
        self._handles: list[Any] = []
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
            "differentiable": False, "fused": True, "decoupled_weight_decay": True,
        }  # fmt: skip
        self._ready = False
        try:
            super().__init__(params, defaults)
        except ValueError as error:
            raise UsageError(str(error)) from error
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._lane = choose_lane(trained)
        self._queue = UpdateQueue(num_threads)
        width = kernel.torch_width()
        if any(p.dtype == torch.bfloat16 for p in trained):
            kernel.warm_up(bf16=True)
        self._updater = Updater(lane=self._lane, width=width, chunk=chunk_elements, trace=trace)
        self._delivery = Delivery(self._lane, self._queue, self._updater, trace)
        self._shadow = Shadow(
            self._updater,
            self._queue,
            want_norms=False,
            norm_limit=None,
            release=release_grads,
        )
        self.max_grad_norm = max_grad_norm
        self._ready = True
        self._adopt(trained)
        if model is not None:
            blocks = {slot.block: None for slot in self._slots.values()}
            self._handles += watch_model(
                model,
                list(blocks),
                before=self._before_forward,
                settle=self.synchronize,
                overlap_forward=self._overlap_forward,
                gate=self._delivery.gate,
                trace=trace,
                mark=self._shadow.mark,
            )
        self._shadow.wanted = self._speculates()
        weakref.finalize(self, _close, self._queue, self._handles)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to be updated from the next step on.

        Raises:
            UsageError: They cannot be updated as the group asks; nothing was added.
        """
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if self._ready:
            try:
                self.synchronize()
                self._adopt([p for p in self.param_groups[-1]["params"] if p.requires_grad])
            except BaseException:
                self.param_groups.pop()
                raise

    def _adopt(self, params: Sequence[nn.Parameter]) -> None:
        """Give parameters their blocks, host memory and hooks."""
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for number, param in enumerate(params):
            check_parameter(param, f"parameter {number} {tuple(param.shape)}")
        check_one_device([*self._slots, *params])
        new, added = set(params), []
        for block in blocks_of(self._model, params):
            slots = [Slot(p, groups[p], block) for p in block.parameters if p in new]
            for slot in slots:
                slot.resident = slot.elements <= self._resident_left
                self._resident_left -= slot.elements if slot.resident else 0
            added += slots
        moved = [slot for slot in added if not slot.resident]
        shadow = self._room_for_shadows([slot.param for slot in moved])
        keep = self._release or not self._lane.shares_memory
        allocate_state(moved, self._lane, shadow=shadow, keep_grads=keep)
        allocate_resident([slot for slot in added if slot.resident])
        for slot in added:
            self._slots[slot.param] = slot
            self._handles.append(watch_gradient(slot, self._shadow))

    def _room_for_shadows(self, params: Sequence[nn.Parameter]) -> bool:
        if self.mode not in ("auto", "speculate"):
            return False
        return room_for_shadows(params, direct=self._lane.shares_memory, budget=self._budget)

    def _before_forward(self, block: Block) -> None:
        """Make a block's forward wait for its weights."""
        self._gated.add(block)
        self._fired.setdefault(block)
        if self._delivery.pending:
            self._delivery.arrive(block)

    def _learn_order(self) -> None:
        """Rank blocks as the first step's forward met them; blocks it did not meet come last."""
        others = sorted(
            {slot.block for slot in self._slots.values()} - set(self._fired),
            key=lambda block: block.rank,
        )
        for rank, block in enumerate([*self._fired, *others]):
            block.rank = rank

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one step with the gradients in `p.grad`.

        Raises:
            UsageError: A closure is passed, or a gradient is sparse; nothing was done.
            TrainingError: The norm is not finite and `nonfinite` is `raise`; nothing was done.
            StateError: The host's thread has failed.
        """
        if closure is not None:
            raise UsageError(
                "OffloadAdamW takes no closure: updates begin before it could run again"
            )
        self._queue.check()
        self._shadow.flush()
        slots = self._slots_with_gradients()
        self._delivery.arrive_all()
        if self._unscale(slots):
            self._end_step()
            return
        coefficient = self._clip_coefficient()
        if coefficient is None:
            self.counts.skipped += 1
            self._end_step()
            return
        keep = [s for s in slots if coefficient == 1.0 and self._holds(s)]
        self._wait_for(keep)
        self._queue.cancel(wait=True)  # stale proposals must not write beside the update
        kept = {s for s in keep if s.ticket is not None and not s.ticket.dropped}
        self._advance(slots, kept, coefficient)
        self.counts.steps += 1
        self.counts.clipped += coefficient != 1.0
        self.counts.kept += len(kept)
        self.counts.redone += len(slots) - len(kept)
        if self.max_grad_norm is not None:
            self._clipped.append(coefficient != 1.0)
        self._end_step()

    def _slots_with_gradients(self) -> list[Slot]:
        """Return the slots to update, in the order of the groups."""
        slots = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param not in self._slots:  # frozen when the optimizer was made
                    self._adopt([param])
                slot = self._slots[param]
                check_gradient(slot)
                slot.group = group
                slots.append(slot)
        return slots

    def _unscale(self, slots: Sequence[Slot]) -> bool:
        """Undo a GradScaler's scale where it has not; return whether it found an infinity.

        Its `unscale_` does not raise version counters: with a scaler, nothing noted during
        backward can be trusted, and nothing more is noted from now on.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            return False
        if not self._scaled:
            self._scaled = True
            logger.warning("with a GradScaler, updates wait for step()")
        self._shadow.discard()
        for slot in slots:
            slot.forget()
        if float(found_inf):
            self.counts.skipped += 1
            return True
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            unscale([slot.param for slot in slots], scale)
        return False

    def _clip_coefficient(self) -> float | None:
        """Return what gradients are multiplied by; None if the step is to be skipped."""
        if self.max_grad_norm is None and self._nonfinite == "propagate":
            return 1.0
        norms = self._norms()
        if not norms:
            self._norm = torch.tensor(0.0)
            return 1.0
        self._norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._nonfinite != "propagate" and not torch.isfinite(self._norm):
            if self._nonfinite == "raise":
                self._end_step()
                raise TrainingError("the gradient norm is not finite; the weights are untouched")
            return None
        if self.max_grad_norm is None:
            return 1.0
        return clip_coefficient(self._norm, self.max_grad_norm)

    def _norms(self) -> list[Tensor]:
        params = clip_order(self._model, self.param_groups)
        return gradient_norms(params, self._slots, self._lane)

    def _holds(self, slot: Slot) -> bool:
        """Say whether a proposal is what the step would compute now, if nothing is clipped."""
        return (
            slot.ticket is not None
            and slot.grad_is_current()
            and slot.param_seen == slot.stamp()
            and slot.numbers == numbers_for(slot)
        )

    def _wait_for(self, slots: Sequence[Slot]) -> None:
        tickets = {slot.ticket: None for slot in slots if slot.ticket is not None}
        if any(ticket.remaining for ticket in tickets):
            start = self.trace.clock() if self.trace else 0
            self._queue.finish(tickets)
            if self.trace:
                self.trace.add("device", "wait", "proposals", start)
        self._queue.check()

    def _advance(self, slots: Sequence[Slot], kept: set[Slot], coefficient: float) -> None:
        """Commit the step, and wait for weights that may not be late."""
        if self.counts.steps == 0:
            self._learn_order()
        self._check_forward_seen(slots)
        try:
            blocks = self._commit(slots, kept, coefficient)
        except BaseException as error:  # Ctrl-C: some parameters are a step ahead of others
            self._queue.fail(error)
            raise
        for block in blocks:
            if not (self._overlap_forward and block in self._gated):
                self._delivery.arrive(block)

    def _commit(
        self, slots: Sequence[Slot], kept: set[Slot], coefficient: float
    ) -> Sequence[Block]:
        """Keep proposals, start the other updates, and send new weights on their way."""
        for slot in slots:
            if slot in kept:
                slot.bank = 1 - slot.bank
            else:
                slot.refresh_master()
                slot.numbers = numbers_for(slot)
        moved = [(slot, slot in kept) for slot in slots if not slot.resident]
        blocks = self._delivery.start(moved, coefficient)
        self._update_resident([slot for slot in slots if slot.resident], coefficient)
        for slot in slots:
            slot.step += 1
            slot.step_tensor.fill_(slot.step)
            self.state[slot.param] = state_of(slot)
        return blocks

    def _check_forward_seen(self, slots: Sequence[Slot]) -> None:
        """Say once if gradients came of a backward without any block's forward."""
        ran = any(slot.block.module is not None and slot.hits for slot in slots)
        if self._seen and ran and not self._gated:
            self._seen = False
            logger.warning(
                "no block's forward was seen (is the whole model compiled?): step() waits for all "
                "weights; compile block by block to overlap them"
            )

    def _update_resident(self, slots: Sequence[Slot], coefficient: float) -> None:
        start = self.trace.clock() if self.trace else 0
        update_resident(slots, coefficient)
        if self.trace and slots:
            self.trace.add("device", "update", "resident", start)

    def _end_step(self) -> None:
        self._queue.cancel(wait=True)
        for slot in self._slots.values():
            slot.forget()
            slot.hits = 0
        self._gated.clear()
        self._shadow.stepped()
        self._shadow.wanted = self._speculates()
        if self.trace:
            self.trace.step += 1
            self._shadow.mark(self.trace.clock())

    def _speculates(self) -> bool:
        """Decide on proposals for the next step."""
        self._shadow.final_when_ready = not self._scaled
        if self.mode == "auto" and self._clipped:
            return 2 * sum(self._clipped) < len(self._clipped)
        return self.mode in ("auto", "speculate")

    @property
    def max_grad_norm(self) -> float | None:
        """What the global 2-norm of the gradients is clipped to; None: never. May be changed."""
        return self._shadow.norm_limit

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        check_norm(value)
        self._shadow.norm_limit = value
        self._shadow.want_norms = value is not None or self._nonfinite != "propagate"

    @property
    def grad_norm(self) -> float | None:
        """The global gradient norm of the last step before clipping; None if never computed."""
        return None if self._norm is None else float(self._norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, and the proposals made from them if no step was made."""
        self._shadow.discard()
        for slot in self._slots.values():
            slot.forget()
            slot.hits = 0
            if isinstance(slot.param.grad, ConsumedGradient):
                slot.param.grad = None
        self._shadow.rounds = 0
        if not set_to_none:
            self._delivery.arrive_all()
        super().zero_grad(set_to_none=set_to_none)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Say that the backwards inside are not the last before the step; saves wasted work."""
        self._shadow.told()
        self._shadow.accumulating = True
        try:
            yield
        finally:
            self._shadow.accumulating = False

    def ask_whether_last(self, is_last: Callable[[], bool]) -> None:
        """Let somebody who knows say whether the backward at work is the last before the step."""
        self._shadow.ask_last = is_last

    @torch.no_grad()
    def clip_on_step(self, max_norm: float) -> Tensor:
        """Set `max_grad_norm`, from the coming step on; return the norm, gradients untouched.

        Takes the place of `clip_grad_norm_(model.parameters(), max_norm)` in a given loop.
        """
        self.max_grad_norm = float(max_norm)
        self._shadow.flush()
        norms = self._norms()
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)

    def synchronize(self) -> None:
        """Return when all weights are what the last step made them; raise what went wrong."""
        self._delivery.arrive_all()
        self._queue.check()

    def close(self) -> None:
        """Finish, end the threads and remove the hooks; only `state_dict` can be used after.

        Raises:
            StateError: The host's thread has failed, and nobody has been told yet.
        """
        try:
            if not self._queue.reported:
                self._delivery.arrive_all()
        finally:
            _close(self._queue, self._handles)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the committed state, in torch.optim.AdamW's format.

        bf16 parameters have one entry more, `master`: the fp32 weights.
        """
        self._delivery.arrive_all()
        if self._queue.torn:
            self._queue.check()
        state: dict[str, Any] = super().state_dict()
        state["state"] = {
            index: {key: value.clone() for key, value in entry.items()}
            for index, entry in state["state"].items()
        }
        return state

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: threads and slabs have no copy."""
        raise UsageError(
            "an OffloadAdamW cannot be copied or pickled",
            hint="load its state_dict() into an OffloadAdamW of the other model",
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of an OffloadAdamW or a torch.optim.AdamW.

        Raises:
            DataError: It belongs to another model; nothing was changed.
        """
        self.synchronize()
        self._shadow.discard()
        params = [p for group in self.param_groups for p in group["params"]]
        if not {"state", "param_groups"} <= state_dict.keys():
            raise DataError("this is not an optimizer's state dict: no state, no param_groups")
        state, groups = state_dict["state"], state_dict["param_groups"]
        check_state(state, groups, [len(g["params"]) for g in self.param_groups], params)
        super().load_state_dict({"state": {}, "param_groups": groups})
        for slot in self._slots.values():
            clear_slot(slot)
        indices = [index for group in groups for index in group["params"]]
        for index, param in zip(indices, params, strict=True):
            if index in state:
                if param not in self._slots:
                    self._adopt([param])
                fill_slot(self._slots[param], state[index])
                self.state[param] = state_of(self._slots[param])
        owners = {p: group for group in self.param_groups for p in group["params"]}
        for slot in self._slots.values():
            slot.group = owners[slot.param]


def _close(queue: UpdateQueue, handles: list[Any]) -> None:
    queue.close()
    for handle in handles:
        handle.remove()
    handles.clear()
