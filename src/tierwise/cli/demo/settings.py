"""What the demo does, in numbers: one frozen tree, written into the run as config.toml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tierwise.core.units import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Questions about pictures: `num_pool` to choose from, `num_held_out` to be examined on."""

    num_pool: int = 240
    num_held_out: int = 400

    def __post_init__(self) -> None:
        _at_least(1, self, "num_pool", "num_held_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringSettings:
    """Difficulty: K attempts at each of the paper's ten masked shares (Qi et al., 2026)."""

    num_attempts: int = 10

    def __post_init__(self) -> None:
        _at_least(1, self, "num_attempts")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """GRPO on the chosen strata, and how it is examined and proved.

    Attributes:
        steps: Optimizer steps, done once with the overlapped update and once without.
        prompts_per_step: Questions a step.
        group_size: Answers a question.
        lr: Learning rate, after `warmup_steps`.
        max_grad_norm: Gradient norm to clip to.
        mode: When the second thread updates; see `tierwise.offload.optimizer`.
        num_draws: Sampled answers a held-out question, before and after.
    """

    steps: int = 24
    prompts_per_step: int = 64
    group_size: int = 8
    lr: float = 1e-4
    warmup_steps: int = 4
    max_grad_norm: float = 1.0
    mode: Literal["auto", "speculate", "defer", "barrier"] = "speculate"
    num_draws: int = 4

    def __post_init__(self) -> None:
        _at_least(1, self, "steps", "prompts_per_step", "num_draws")
        _at_least(2, self, "group_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """The disc library: `data_discs` + `parity_discs` a set, discs of `disc_size`.

    Attributes:
        disc_size: As people write it.
        data_discs: Discs of data in an array.
        parity_discs: Discs of parity in it.
        use_mount: Write through a FUSE mount where the system allows one; the same file system
            is called as a library otherwise.
    """

    disc_size: str = "4 MiB"
    data_discs: int = 3
    parity_discs: int = 1
    use_mount: bool = True

    def __post_init__(self) -> None:
        parse_size(self.disc_size)
        _at_least(1, self, "data_discs", "parity_discs")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """What the archive costs, and the same scaled up.

    Attributes:
        preset: Shipped scenario.
        scaled_to: Size of the scaled archive, as people write it.
        num_draws: Monte Carlo draws for the bands.
    """

    preset: str = "modern-2026"
    scaled_to: str = "1 PB"
    num_draws: int = 500

    def __post_init__(self) -> None:
        parse_size(self.scaled_to)
        _at_least(1, self, "num_draws")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """The whole demo."""

    seed: int = 0
    data: DataSettings = field(default_factory=DataSettings)
    scoring: ScoringSettings = field(default_factory=ScoringSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    archive: ArchiveSettings = field(default_factory=ArchiveSettings)
    cost: CostSettings = field(default_factory=CostSettings)


def _at_least(least: int, settings: object, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < least:
            raise ValueError(f"{name} {getattr(settings, name)} is less than {least}")
