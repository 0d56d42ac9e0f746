"""The same training twice, apart: torch's clip and fused AdamW, and OffloadAdamW."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.offload.small_models import CASES
from tierwise.offload import OffloadAdamW
from tierwise.offload.verify import differing_bits

NEVER, ALWAYS, SOMETIMES = "never", "always", "sometimes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens in a training, as far as the result may depend on it."""

    case: str = "gpt"
    clip: str = SOMETIMES
    accumulation: int = 1
    two_groups: bool = False
    frozen: bool = False
    skipped: bool = False  # two steps are thrown away by zero_grad()
    late_lr: bool = False  # the learning rate changes between backward and step
    poisoned: float | None = None  # a gradient element of one late step
    resumed: int | None = None  # saved and loaded after this step
    bf16: bool = False
    steps: int = 20


def max_norm(scenario: Scenario) -> float | None:
    values = {NEVER: 1e9, ALWAYS: 1e-2, SOMETIMES: CASES[scenario.case].sometimes, "off": None}
    return values[scenario.clip]


def make_model(scenario: Scenario) -> nn.Module:
    torch.manual_seed(3)
    model = CASES[scenario.case].make()
    if scenario.frozen:
        for number, param in enumerate(model.parameters()):
            param.requires_grad_(number % 3 != 1)
    return model.bfloat16() if scenario.bf16 else model


def make_groups(params: list[nn.Parameter], scenario: Scenario) -> list[dict[str, Any]]:
    if not scenario.two_groups:
        return [{"params": params}]
    wide = [p for p in params if p.dim() > 1]
    thin = [p for p in params if p.dim() <= 1]
    return [
        {"params": wide, "lr": 3e-3, "weight_decay": 0.2},
        {"params": thin, "lr": 1e-2, "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]


class Reference:
    """torch: fp32 copies of bf16 weights, clip_grad_norm_, AdamW(fused=True)."""

    def __init__(self, model: nn.Module, scenario: Scenario) -> None:
        self.model, self.scenario = model, scenario
        self.params = list(model.parameters())
        self.masters = self.params
        if scenario.bf16:
            self.masters = [
                nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in self.params
            ]
        groups = make_groups(self.masters, scenario)
        self.optimizer = torch.optim.AdamW(groups, lr=5e-3, weight_decay=0.1, fused=True)

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def step(self) -> float:
        if self.scenario.bf16:
            for master, param in zip(self.masters, self.params, strict=True):
                master.grad = None if param.grad is None else param.grad.float()
        limit, norm = max_norm(self.scenario), 0.0
        if limit is not None:
            norm = float(nn.utils.clip_grad_norm_(self.masters, limit))
        self.optimizer.step()
        if self.scenario.bf16:
            with torch.no_grad():
                for master, param in zip(self.masters, self.params, strict=True):
                    param.copy_(master)
        return norm

    def close(self) -> None:
        pass


class Ours:
    """OffloadAdamW over the model."""

    def __init__(self, model: nn.Module, scenario: Scenario, options: dict[str, Any]) -> None:
        self.model = model
        groups = make_groups(list(model.parameters()), scenario)
        self.optimizer = OffloadAdamW(
            groups, lr=5e-3, weight_decay=0.1, max_grad_norm=max_norm(scenario), model=model,
            **options,
        )  # fmt: skip

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> float:
        self.optimizer.step()
        return self.optimizer.grad_norm or 0.0

    def close(self) -> None:
        self.optimizer.close()


def play(scenario: Scenario, build: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """Train through the scenario and return everything that must be the same."""
    case, model = CASES[scenario.case], make_model(scenario)
    side = build(model)
    norms: list[float] = []
    for step in range(scenario.steps):
        side.optimizer.param_groups[0]["lr"] *= 0.97
        for part in range(scenario.accumulation):
            case.loss(model, step * scenario.accumulation + part).backward()  # type: ignore[no-untyped-call]
        if scenario.poisoned is not None and step == scenario.steps - 3:
            first = next(p for p in model.parameters() if p.grad is not None)
            assert first.grad is not None
            first.grad.view(-1)[5] = scenario.poisoned
        if scenario.skipped and step % 8 == 3:
            side.zero_grad()
            continue
        if scenario.late_lr and step % 3 == 1:
            side.optimizer.param_groups[-1]["lr"] *= 0.9
        norms.append(side.step())
        side.zero_grad()
        if scenario.resumed == step:
            weights = copy.deepcopy(model.state_dict())
            state = copy.deepcopy(side.optimizer.state_dict())
            side.close()
            model = make_model(scenario)
            side = build(model)
            model.load_state_dict(weights)  # after the optimizer was made
            side.optimizer.load_state_dict(state)
            if isinstance(side, Reference) and scenario.bf16:
                raise NotImplementedError
    state = side.optimizer.state_dict()["state"]
    result = {f"weights/{k}": v.clone() for k, v in model.state_dict().items()}
    for index, entry in state.items():
        result |= {f"state/{index}/{key}": entry[key] for key in ("step", "exp_avg", "exp_avg_sq")}
    result["norms"] = torch.tensor(norms)
    side.close()
    return result


@functools.cache
def reference(scenario: Scenario) -> dict[str, Tensor]:
    # resuming changes nothing in torch, which is the point: compare with the run that went on
    plain = dataclasses.replace(scenario, resumed=None)
    return play(plain, lambda model: Reference(model, plain))


def assert_same_bits(scenario: Scenario, **options: Any) -> None:
    ours = play(scenario, lambda model: Ours(model, scenario, options))
    assert differing_bits(ours, reference(scenario)) == {}
