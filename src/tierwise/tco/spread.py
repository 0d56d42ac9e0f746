"""How sure one can be: draws -> bands, probability of being cheapest, tornado, Sobol indices.

Every uncertain input is drawn from a stream of its own, seeded by the run's seed and the
input's key, so a draw does not depend on which media are compared nor in which order, and all
strategies see the same world. Inputs that move together (prices of flash and disk in 2025-26)
share a factor through a Gaussian copula; drawn independently they would understate the risk.
Left out: fitting distributions to data; the ranges are the facts' low and high.

Legend: T years, S samples.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tierwise.core.errors import UsageError
from tierwise.core.facts import Distribution
from tierwise.core.progress import SILENT, Progress
from tierwise.tco.facts import FactSet
from tierwise.tco.inputs import Array, InputRange, Inputs
from tierwise.tco.model import run_strategy, total_flow
from tierwise.tco.scenario import Scenario, Strategy
from tierwise.tco.value import present_values

# samples run together: rows of this length stay in a core's cache
CHUNK_SAMPLES = 1024
MAX_SAMPLES = 1_000_000
PERCENTILES = (5.0, 50.0, 95.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A Monte Carlo over all strategies.

    Attributes:
        samples: Number of draws.
        seed: Seed of the draws.
        total_usd: Strategy -> present value of each sample (S).
        bands_usd: Strategy -> cumulative present value at each year, shape (T, 3): p5, p50, p95.
        p_cheapest: Strategy -> share of samples in which it costs least; ties are shared.
    """

    samples: int
    seed: int
    total_usd: Mapping[str, Array]
    bands_usd: Mapping[str, Array]
    p_cheapest: Mapping[str, float]

    def percentiles(self, strategy: str) -> tuple[float, float, float]:
        """Return (p5, p50, p95) of a strategy's present value."""
        low, middle, high = np.percentile(self.total_usd[strategy], PERCENTILES)
        return float(low), float(middle), float(high)


def draw_inputs(scenario: Scenario, inputs: Inputs, *, samples: int, seed: int) -> dict[str, Array]:
    """Return a column of draws for every uncertain input."""
    check_draws(samples, seed)
    uncertain = inputs.uncertain()
    normals = {key: _stream(seed, key).standard_normal(samples) for key in uncertain}
    for correlation in scenario.correlations:
        keys = [key for key in correlation.keys if key in uncertain]
        shared = _stream(seed, "+".join(correlation.keys)).standard_normal(samples)
        for key in keys:
            normals[key] = (
                math.sqrt(correlation.rho) * shared
                + math.sqrt(1.0 - correlation.rho) * normals[key]
            )
    return {key: _quantile(uncertain[key], _normal_cdf(z)) for key, z in normals.items()}


def check_draws(samples: int, seed: int) -> None:
    """Return if so many samples can be drawn from a seed.

    Raises:
        UsageError: They cannot.
    """
    if not 1 <= samples <= MAX_SAMPLES:
        raise UsageError(
            f"{samples} samples cannot be drawn", hint=f"take 1 to {MAX_SAMPLES:,}, or 0 for none"
        )
    if seed < 0:
        raise UsageError(f"a seed must not be negative, as {seed} is")


def _stream(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _normal_cdf(z: Array) -> Array:
    from scipy.special import ndtr

    return np.asarray(ndtr(z), dtype=np.float64)


def _quantile(item: InputRange, u: Array) -> Array:
    """Return the inverse distribution function of an input at probabilities `u`."""
    low, high, mode = item.low, item.high, item.value
    match item.distribution:
        case Distribution.LOG_UNIFORM:
            drawn: Array = low * (high / low) ** u
            return drawn
        case Distribution.TRIANGULAR:
            mode = min(max(mode, low), high)
            split = (mode - low) / (high - low)
            rising = low + np.sqrt(u * (high - low) * (mode - low))
            falling = high - np.sqrt((1.0 - u) * (high - low) * (high - mode))
            chosen: Array = np.where(u < split, rising, falling)
            return chosen
        case Distribution.UNIFORM:
            return low + (high - low) * u
        case Distribution.FIXED:
            return np.full_like(u, mode)


def present_totals(
    scenario: Scenario,
    strategy: Strategy,
    inputs: Inputs,
    columns: Mapping[str, Array],
    facts: FactSet | None = None,
) -> Array:
    """Return the present value of a strategy in every sample (S)."""
    total_S: Array = _accumulate(scenario, strategy, inputs, columns, facts)[-1]
    return total_S


def _accumulate(
    scenario: Scenario,
    strategy: Strategy,
    inputs: Inputs,
    columns: Mapping[str, Array],
    facts: FactSet | None,
) -> Array:
    """Return the cumulative present value by year and sample, chunk by chunk."""
    samples = max((len(column) for column in columns.values()), default=1)
    parts = []
    for start in range(0, samples, CHUNK_SAMPLES):
        chunk = {
            key: column if len(column) == 1 else column[start : start + CHUNK_SAMPLES]
            for key, column in columns.items()
        }
        point = inputs.point(chunk)
        size = min(CHUNK_SAMPLES, samples - start)
        with np.errstate(over="ignore", invalid="ignore"):  # present_values refuses the result
            runs = run_strategy(scenario, strategy, point, facts)
            flow_TS = total_flow(runs, (scenario.horizon_years, size))
        parts.append(np.cumsum(present_values(flow_TS, scenario.finance, point), axis=0))
    return np.concatenate(parts, axis=1)


def monte_carlo(
    scenario: Scenario,
    inputs: Inputs,
    *,
    samples: int,
    seed: int,
    facts: FactSet | None = None,
    progress: Progress = SILENT,
) -> Spread:
    """Return the spread of every strategy's cost over the uncertain inputs.

    Args:
        scenario: What is compared.
        inputs: Its resolved inputs.
        samples: Number of draws.
        seed: Seed; the same seed gives the same numbers whatever media are compared.
        facts: Fact set of the media.
        progress: Told of each strategy.
    """
    columns = draw_inputs(scenario, inputs, samples=samples, seed=seed)
    totals: dict[str, Array] = {}
    bands: dict[str, Array] = {}
    with progress.task("drawing costs", len(scenario.plans)) as task:
        for strategy in scenario.plans:
            cumulative_TS = _accumulate(scenario, strategy, inputs, columns, facts)
            if cumulative_TS.shape[1] == 1 and samples > 1:  # nothing it uses is uncertain
                cumulative_TS = np.repeat(cumulative_TS, samples, axis=1)
            totals[strategy.name] = cumulative_TS[-1]
            bands[strategy.name] = np.percentile(cumulative_TS, PERCENTILES, axis=1).T
            task.advance()
    return Spread(
        samples=samples,
        seed=seed,
        total_usd=totals,
        bands_usd=bands,
        p_cheapest=probability_cheapest(totals),
    )


def probability_cheapest(totals: Mapping[str, Array]) -> dict[str, float]:
    """Return the share of samples in which each strategy costs least; ties are shared equally."""
    stack = np.stack([totals[name] for name in totals])
    wins = stack == stack.min(axis=0)
    shares = (wins / wins.sum(axis=0)).mean(axis=1)
    return {name: float(share) for name, share in zip(totals, shares, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TornadoBar:
    """One input at its low and high, all others at their value."""

    key: str
    low: float
    high: float
    at_low: float
    at_high: float

    @property
    def swing(self) -> float:
        """Return how far the result moves."""
        return abs(self.at_high - self.at_low)


def tornado(
    scenario: Scenario,
    inputs: Inputs,
    strategy: Strategy,
    *,
    against: Strategy | None = None,
    facts: FactSet | None = None,
) -> list[TornadoBar]:
    """Return the inputs by how far they move a cost, or the log of a cost ratio.

    Args:
        scenario: What is compared.
        inputs: Its resolved inputs.
        strategy: Whose present value in USD is looked at.
        against: If given, ln(strategy / against) is looked at instead.
        facts: Fact set of the media.
    """
    uncertain = inputs.uncertain()
    keys = list(uncertain)
    columns = {}
    for place, key in enumerate(keys):
        column = np.full(2 * len(keys), uncertain[key].value)
        column[2 * place : 2 * place + 2] = uncertain[key].low, uncertain[key].high
        columns[key] = column
    result = _result(scenario, inputs, columns, (strategy, against), facts)
    bars = [
        TornadoBar(
            key=key,
            low=uncertain[key].low,
            high=uncertain[key].high,
            at_low=float(result[2 * place]),
            at_high=float(result[2 * place + 1]),
        )
        for place, key in enumerate(keys)
    ]
    return sorted((bar for bar in bars if bar.swing > 0), key=lambda bar: (-bar.swing, bar.key))


def _result(
    scenario: Scenario,
    inputs: Inputs,
    columns: Mapping[str, Array],
    pair: tuple[Strategy, Strategy | None],
    facts: FactSet | None,
) -> Array:
    total = present_totals(scenario, pair[0], inputs, columns, facts)
    if pair[1] is None:
        return total
    if pair[0] == pair[1]:
        raise UsageError(f"{pair[0].name} against itself has nothing to explain")
    other = present_totals(scenario, pair[1], inputs, columns, facts)
    if not (total > 0).all() or not (other > 0).all():
        raise UsageError(f"{pair[0].name} or {pair[1].name} costs nothing, so they have no ratio")
    ratio: Array = np.log(total / other)
    return ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class SobolIndex:
    """Share of the variance that an input explains alone, and with all it acts with."""

    key: str
    first: float
    total: float


def sobol(
    scenario: Scenario,
    inputs: Inputs,
    strategy: Strategy,
    *,
    against: Strategy | None = None,
    base_samples: int = 256,
    seed: int = 0,
    facts: FactSet | None = None,
) -> list[SobolIndex]:
    """Return Sobol indices of a cost (or log cost ratio), the largest total first.

    Inputs are drawn independently here: the decomposition has no meaning otherwise. Inputs that
    no tier of the strategies uses are left out.

    Args:
        scenario: What is compared.
        inputs: Its resolved inputs.
        strategy: Whose present value is looked at.
        against: If given, ln(strategy / against) is looked at instead.
        base_samples: N of Saltelli's scheme, a power of two; N * (inputs + 2) runs are made.
        seed: Seed of the scrambled Sobol sequence.
        facts: Fact set of the media.

    Raises:
        UsageError: N is not a power of two.

    Source: A. Saltelli et al., Comput. Phys. Commun. 181 (2010) 259-270, by
    scipy.stats.sobol_indices.
    """
    from scipy.stats import sobol_indices

    if base_samples < 2 or base_samples & (base_samples - 1):
        raise UsageError(
            f"Sobol indices need a power of two as base_samples, not {base_samples}",
            hint=f"take {1 << max(base_samples, 2).bit_length()}",
        )
    check_draws(base_samples, seed)
    used = {tier.medium for plan in (strategy, against) if plan for tier in plan.tiers}
    media = {tier.medium for plan in scenario.plans for tier in plan.tiers}
    uncertain = {
        key: item
        for key, item in inputs.uncertain().items()
        if key.partition(".")[0] in used or key.partition(".")[0] not in media
    }
    keys = list(uncertain)

    def evaluate(unit: Array) -> Array:
        columns = {key: _quantile(uncertain[key], unit[place]) for place, key in enumerate(keys)}
        return _result(scenario, inputs, columns, (strategy, against), facts)[None, :]

    result = sobol_indices(
        func=evaluate, n=base_samples, dists=[_unit_uniform() for _ in keys],
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    first, total = np.ravel(result.first_order), np.ravel(result.total_order)
    indices = [
        SobolIndex(key=key, first=float(first[place]), total=float(total[place]))
        for place, key in enumerate(keys)
    ]
    return sorted(indices, key=lambda index: (-index.total, index.key))


def _unit_uniform() -> object:
    from scipy.stats import uniform

    return uniform(loc=0.0, scale=1.0)
