"""Will this model train on that card, and how fast? A configuration -> the plan in words.

Left out: choosing the batch; ask again with another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierwise.core.errors import ConfigError
from tierwise.core.units import format_size, parse_size
from tierwise.offload.plan import Memory, Plan, Schedule, make_plan
from tierwise.offload.simulate import simulate
from tierwise.offload.workload import (
    Batch,
    Machine,
    Unit,
    activation_bytes,
    check_machine,
    count_units,
    decoder_named,
    machine_named,
    read_profile,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What is asked (docs/offload.md has every key).

    Attributes:
        model: A name of the facts file, a Hugging Face config.json (or its folder), or a measured
            profile (a .csv).
        machine: A name of the facts file.
        schedule: `speculate`, `defer` or `barrier`, as in `tierwise.offload.plan`.
        tokens: Tokens a step, all micro-batches together.
        sequence_tokens: Tokens a sequence.
        micro_batch_tokens: Tokens on the device at once.
        checkpointing: Recompute activations in backward.
        resident_parameters: Keep so many on the device, not the best number.
        device_memory: Another size than the machine's, like "24 GB".
        host_memory: Another size than the machine's.
        device_flop_s: Another rate than the machine's; so are the two below.
        link_bytes_s: Each way.
        host_parameters_s: Updates a second.
        chunk_parameters: The host's unit of work, at most; small models are cut finer.
    """

    model: str = "qwen2.5-7b"
    machine: str = "h100-80gb"
    schedule: Schedule = "speculate"
    tokens: int = 8192
    sequence_tokens: int = 4096
    micro_batch_tokens: int = 4096
    checkpointing: bool = True
    resident_parameters: int | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    device_flop_s: float | None = None
    link_bytes_s: float | None = None
    host_parameters_s: float | None = None
    chunk_parameters: int = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The plan, and its steps in virtual time.

    Attributes:
        config: What was asked.
        machine: As asked for, overrides applied.
        units: The model in forward order.
        plan: Placement and bound.
        step_s: Predicted time of a step.
        sequential_s: The same step with every update after backward and nothing resident.
    """

    config: PlanConfig
    machine: Machine
    units: tuple[Unit, ...]
    plan: Plan
    step_s: float
    sequential_s: float

    @property
    def gap(self) -> float:
        """How far the predicted step is above the bound, as a share of it."""
        return self.step_s / self.plan.bound_s - 1.0


def answer(config: PlanConfig) -> Answer:
    """Return the best placement for what is asked, and what a step of it takes.

    Raises:
        UsageError: It does not fit (says how much is missing), or a name is not known.
        ConfigError: A value makes no sense.
        MissingFileError, DataError: A profile or config.json cannot be read.
    """
    for name in ("tokens", "sequence_tokens", "micro_batch_tokens", "chunk_parameters"):
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name} {getattr(config, name)} is not positive")
    if config.resident_parameters is not None and config.resident_parameters < 0:
        raise ConfigError(f"resident_parameters {config.resident_parameters} is negative")
    machine = _machine(config)
    units, activations = _units(config, machine)
    plan = make_plan(
        units,
        schedule=config.schedule,
        device_memory_bytes=machine.device_memory_bytes,
        host_memory_bytes=machine.host_memory_bytes,
        activation_bytes=activations,
        resident_parameters=config.resident_parameters,
    )
    total = sum(unit.parameters for unit in units)
    chunk = min(float(config.chunk_parameters), max(64.0, total / 500))
    step = simulate(units, plan.shares, plan.schedule, chunk_parameters=chunk).period_s
    nothing = [0.0] * len(units)
    sequential = simulate(units, nothing, "sequential", chunk_parameters=chunk).period_s
    return Answer(
        config=config,
        machine=machine,
        units=tuple(units),
        plan=plan,
        step_s=step,
        sequential_s=sequential,
    )


def _machine(config: PlanConfig) -> Machine:
    machine = machine_named(config.machine)
    changes: dict[str, float] = {
        key: value
        for key in ("device_flop_s", "link_bytes_s", "host_parameters_s")
        if (value := getattr(config, key)) is not None
    }
    for key in ("device_memory", "host_memory"):
        if (text := getattr(config, key)) is not None:
            changes[f"{key}_bytes"] = float(parse_size(text))
    machine = dataclasses.replace(machine, **changes)
    check_machine(machine)
    return machine


def _units(config: PlanConfig, machine: Machine) -> tuple[list[Unit], float]:
    if config.model.endswith(".csv"):
        return read_profile(Path(config.model), machine), 0.0
    model = decoder_named(config.model)
    batch = Batch(
        tokens=config.tokens,
        sequence_tokens=config.sequence_tokens,
        micro_batch_tokens=min(config.micro_batch_tokens, config.tokens),
        checkpointing=config.checkpointing,
    )
    return count_units(model, machine, batch), activation_bytes(model, batch)


def as_record(found: Answer) -> dict[str, Any]:
    """Return the answer as one JSON object."""
    plan = found.plan
    return {
        "fits": True,
        "model": found.config.model,
        "machine": found.config.machine,
        "parameters": sum(unit.parameters for unit in found.units),
        "schedule": plan.schedule,
        "step_s": found.step_s,
        "bound_s": plan.bound_s,
        "gap": found.gap,
        "device_s": plan.device_s,
        "sequential_s": found.sequential_s,
        "tokens_s": found.config.tokens / found.step_s,
        "stall_s": dict(plan.stalls),
        "resident_parameters": plan.resident_parameters,
        "no_stall_parameters": plan.no_stall_parameters,
        "device_bytes": dataclasses.asdict(plan.device) | {"total": plan.device.total},
        "host_bytes": dataclasses.asdict(plan.host) | {"total": plan.host.total},
        "units": [
            {**dataclasses.asdict(unit), "resident_share": share}
            for unit, share in zip(found.units, plan.shares, strict=True)
        ],
    }


def as_text(found: Answer) -> str:
    """Return the answer in a few lines."""
    plan, config = found.plan, found.config
    total = sum(unit.parameters for unit in found.units)
    gap = f"{max(found.gap, 0.0):.2%}"
    lines = [
        f"{config.model} ({_count(total)} parameters) trains on {config.machine}: "
        f"{_seconds(found.step_s)} a step",
        "",
    ]
    if not config.model.endswith(".csv"):
        lines[0] += f", {config.tokens / found.step_s:,.0f} tokens a second"
    if plan.schedule != config.schedule:
        lines += [f"  the host has no room for shadow state: {plan.schedule}", ""]
    rows = [
        ("step", f"{_seconds(found.step_s)} ({plan.schedule})"),
        ("no schedule beats", f"{_seconds(plan.bound_s)}; the plan is {gap} above"),
        ("device alone", _seconds(plan.device_s)),
        ("all after backward", f"{_seconds(found.sequential_s)} "
         f"({found.sequential_s / found.step_s:.2f} x)"),
        ("stays on device", _residents(found.units, plan)),
        ("no stall from", f"{_count(plan.no_stall_parameters)} resident parameters on"),
        ("device memory", _memory(plan.device, found.machine.device_memory_bytes)),
        ("host memory", _memory(plan.host, found.machine.host_memory_bytes)),
    ]  # fmt: skip
    lines += [f"  {label:<19} {value}" for label, value in rows]
    if not config.model.endswith(".csv"):
        lines += ["", "  times are counted, not measured: profile the model for better ones"]
    return "\n".join(lines)


def _count(number: float) -> str:
    """Return a number of parameters with B, M or K."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def _residents(units: Sequence[Unit], plan: Plan) -> str:
    kept = [(unit, share) for unit, share in zip(units, plan.shares, strict=True) if share > 0]
    if not kept or not plan.resident_parameters:
        return "nothing"
    last, share = kept[-1]
    edge = last.name if share == 1.0 else f"{share:.0%} of {last.name}"
    first = kept[0][0].name
    names = edge if len(kept) == 1 else f"{first} to {edge}"
    return f"{_count(plan.resident_parameters)} parameters: {names}"


def _memory(memory: Memory, available: float) -> str:
    parts = [
        f"{name} {format_size(value)}"
        for name, value in dataclasses.asdict(memory).items()
        if value
    ]
    return f"{format_size(memory.total)} of {format_size(available)}: {', '.join(parts)}"
