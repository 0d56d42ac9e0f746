"""What scoring has cost and what it still will: attempts and seconds by probe, for a report.

Made of the log and the configuration alone, without the model, so an interrupted run can be looked
at too. What cannot be known before it is asked is projected from the samples that are done: an
adaptive sample's answers and a tree's leaves; with none done, the most there can be.

Left out: money, and attempts that were asked under other settings than the configured ones, which
are spent but save nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tierwise.core.report import Section, Table, Text
from tierwise.curriculum.difficulty.adaptive import deciding
from tierwise.curriculum.difficulty.attempts import AttemptLog, Probe, Spending
from tierwise.curriculum.difficulty.scoring import ScoreConfig
from tierwise.curriculum.samples import Sample

SECTION_TITLE = "Cost of scoring, spent and to be spent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCost:
    """What one probe takes.

    Attributes:
        probe: Which.
        made: Attempts in the log.
        seconds: What they took.
        unfinished: Samples that lack some.
        to_make: Attempts they lack; projected where `projected`.
        projected: Whether that number is a guess from the finished samples.
    """

    probe: Probe
    made: int
    seconds: float
    unfinished: int
    to_make: float
    projected: bool = False

    @property
    def seconds_to_spend(self) -> float | None:
        """Return the seconds to come, or None where nothing was made to tell from."""
        if not self.to_make:
            return 0.0
        return self.to_make * self.seconds / self.made if self.made else None


def costs_of(
    log: AttemptLog,
    samples: Sequence[Sample],
    config: ScoreConfig,
    *,
    model_hash: str,
    seed: int,
    scored: Collection[str] = (),
) -> tuple[ProbeCost, ...]:
    """Return what each configured probe has taken and will take.

    Args:
        log: Of the run.
        samples: What is to be scored.
        config: How.
        model_hash: Of the run.
        seed: The run's seed.
        scored: Ids that have a score: their adaptive answers are all there.
    """
    spent = {
        (one.sample_id, one.probe): one
        for one in log.spending(
            model_hash=model_hash,
            seed=seed,
            permilles=range(1001) if config.mode == "adaptive" else config.permilles,
            num_attempts=None if config.mode == "adaptive" else config.num_attempts,
        )
    }
    wanted = [Probe.GREEDY, Probe.MASKED]
    wanted += [Probe.GREY, Probe.BLIND] if config.blind else []
    wanted += [Probe.TREE] if config.rscore else []
    return tuple(_cost(probe, spent, samples, config, frozenset(scored)) for probe in wanted)


def _cost(
    probe: Probe,
    spent: Mapping[tuple[str, str], Spending],
    samples: Sequence[Sample],
    config: ScoreConfig,
    scored: frozenset[str],
) -> ProbeCost:
    asked = [one for one in samples if one.images or probe not in (Probe.GREY, Probe.BLIND)]
    made = {one.id: spent[one.id, probe.value] for one in asked if (one.id, probe.value) in spent}
    guess = _guess(probe, made, config, scored)
    lacking = {}
    for sample in asked:
        have = made[sample.id].usable if sample.id in made else 0
        exact = _exact(probe, sample, config)
        if exact is not None:
            missing: float = max(0, exact - have)
        else:
            done = sample.id in scored if probe is Probe.MASKED else have > 0
            missing = 0 if done else max(1.0, guess - have)
        if missing:
            lacking[sample.id] = (missing, exact is None)
    return ProbeCost(
        probe=probe,
        made=sum(one.rows for one in made.values()),
        seconds=sum(one.seconds for one in made.values()),
        unfinished=len(lacking),
        to_make=sum(missing for missing, _ in lacking.values()),
        projected=any(projected for _, projected in lacking.values()),
    )


def _exact(probe: Probe, sample: Sample, config: ScoreConfig) -> int | None:
    """Return how many attempts a sample needs, or None where that shows only on the way."""
    if probe is Probe.GREEDY:
        return 1
    if probe is Probe.TREE or (
        probe is Probe.MASKED and sample.images and config.mode == "adaptive"
    ):
        return None
    shares = len(config.permilles) if probe is Probe.MASKED and sample.images else 1
    return shares * config.num_attempts


def _guess(
    probe: Probe, made: Mapping[str, Spending], config: ScoreConfig, scored: frozenset[str]
) -> float:
    """Return the mean attempts of the samples that are done, else the most there can be."""
    done = [
        spending.usable
        for sample_id, spending in made.items()
        if probe is Probe.TREE or sample_id in scored
    ]
    if done:
        return sum(done) / len(done)
    if probe is Probe.TREE:
        return config.tree.num_leaves
    return len(deciding(config.permilles, config.boundary)) * config.adaptive.num_attempts


def cost_section(costs: Sequence[ProbeCost], *, num_samples: int) -> Section:
    """Return the section that says what was spent and what is still to be spent."""
    rows = [
        (
            cost.probe.value,
            f"{cost.made:,}",
            f"{cost.seconds:,.1f}",
            f"{cost.unfinished:,}",
            f"{'about ' if cost.projected else ''}{cost.to_make:,.0f}",
            _seconds(cost.seconds_to_spend),
        )
        for cost in costs
    ]
    ahead = [cost.seconds_to_spend for cost in costs]
    known = [seconds for seconds in ahead if seconds is not None]
    total = (
        "all",
        f"{sum(cost.made for cost in costs):,}",
        f"{sum(cost.seconds for cost in costs):,.1f}",
        f"{max((cost.unfinished for cost in costs), default=0):,}",
        f"{sum(cost.to_make for cost in costs):,.0f}",
        _seconds(sum(known) if len(known) == len(ahead) else None),
    )
    unfinished = max((cost.unfinished for cost in costs), default=0)
    told = (
        f"All {num_samples:,} samples are finished."
        if not unfinished
        else f"At least {unfinished:,} of {num_samples:,} samples are unfinished; "
        "tierwise curriculum score --resume goes on."
    )
    table = Table(
        caption="Attempts and seconds by probe; what is to be spent assumes that attempts take as "
        "long as they did",
        header=("probe", "made", "seconds", "unfinished samples", "to make", "seconds to spend"),
        rows=(*rows, total),
    )
    return Section(title=SECTION_TITLE, blocks=(Text(text=told), table))


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:,.1f}"
