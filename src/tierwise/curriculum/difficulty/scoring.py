"""Ask what is missing, then score: samples + model + configuration -> `Scores`.

`score` asks whatever the attempt log of its folder does not hold yet and then derives every score
from the log alone, so that a killed run goes on where it stopped and ends with the same table.
Left out: agreement between runs (see `agreement`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time
from typing import Literal

from tierwise.core.config import dump_config
from tierwise.core.errors import ConfigError, DataError, UsageError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import write_whole
from tierwise.curriculum.answerers import Answerer, LocalAnswerer
from tierwise.curriculum.difficulty import balance, pism
from tierwise.curriculum.difficulty.adaptive import Adaptive, ask_adaptively, difficulty_from_few
from tierwise.curriculum.difficulty.attempts import LOG_NAME, Attempt, AttemptKey, AttemptLog, Probe
from tierwise.curriculum.difficulty.balance import Variant
from tierwise.curriculum.difficulty.fit import corrected_tau, monotone_threshold
from tierwise.curriculum.difficulty.passrate import Tally, wilson_interval
from tierwise.curriculum.difficulty.pism import Boundary, Stratum
from tierwise.curriculum.difficulty.probes import Desk, Masking, Sampling
from tierwise.curriculum.difficulty.rscore import Tree, r_score, rscore_strata
from tierwise.curriculum.difficulty.scores import (
    CONFIG_NAME,
    SCORES_NAME,
    Score,
    Scores,
    write_scores,
)
from tierwise.curriculum.difficulty.trees import ask_trees, leaves_of
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, SampleSet, content_hash
from tierwise.curriculum.server import Serving
from tierwise.curriculum.verdicts import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreConfig:
    """What to ask and how to read it. Defaults are the paper's.

    Attributes:
        num_attempts: K, repetitions at each masked share.
        permilles: Masked shares in 1/1000; the first must be 0.
        tau: Pass rate below which the model has failed.
        boundary: Whether lambda* = 0.7 is easy ("text") or medium ("table").
        mode: The whole "grid", or "adaptive": fewer answers, the same strata; not the paper's.
        adaptive: When the adaptive mode stops.
        blind: Ask without the picture and with a grey one too, K times each.
        cmab: Measure the attention balance of the greedy answer; local models only.
        cmab_variant: Which variant decides the CMAB stratum.
        rscore: Sample a reasoning tree of each question; local models only, not the paper's.
        tree: The tree's shape, and the edits that its score allows.
        sampling: Temperature, token limit, batch size.
        masking: Kind and colour of the mask.
        server: How servers are asked, where there are any.
    """

    num_attempts: int = pism.PAPER_ATTEMPTS
    permilles: tuple[int, ...] = pism.PAPER_PERMILLES
    tau: float = pism.PAPER_TAU
    boundary: Boundary = Boundary.TEXT
    mode: Literal["grid", "adaptive"] = "grid"
    adaptive: Adaptive = field(default_factory=Adaptive)
    blind: bool = True
    cmab: bool = True
    cmab_variant: Variant = Variant.SUM
    rscore: bool = False
    tree: Tree = field(default_factory=Tree)
    sampling: Sampling = field(default_factory=Sampling)
    masking: Masking = field(default_factory=Masking)
    server: Serving = field(default_factory=Serving)

    def check(self) -> None:
        """Return if the values make sense.

        Raises:
            ConfigError: They do not.
        """
        ordered = tuple(sorted(set(self.permilles)))
        if not ordered or ordered != self.permilles or ordered[0] != 0 or ordered[-1] > 1000:
            raise ConfigError("permilles must rise from 0 to at most 1000, each once")
        if self.num_attempts < 1 or not 0 < self.tau < 1:
            raise ConfigError("num_attempts must be 1 or more and tau between 0 and 1")
        if self.sampling.batch_size < 1 or self.sampling.max_new_tokens < 1:
            raise ConfigError("batch_size and max_new_tokens must be 1 or more")
        if self.masking.patch_side < 1:
            raise ConfigError("masking.patch_side must be 1 or more")
        if self.adaptive.step < 1 or self.adaptive.num_attempts < 1:
            raise ConfigError("adaptive.step and adaptive.num_attempts must be 1 or more")
        if not 0.25 < self.adaptive.confidence < 1:
            raise ConfigError("adaptive.confidence must be between 0.25 and 1")
        if self.rscore:
            self._check_tree()
        if not 0 <= self.sampling.temperature < float("inf"):
            raise ConfigError("temperature must be 0 or more")

    def _check_tree(self) -> None:
        tree = self.tree
        if tree.branches < 2 or min(tree.depth, tree.interval, tree.edits) < 1:
            raise ConfigError("tree needs 2 branches, and a depth, interval and edits of 1 or more")
        if (tree.depth - 1) * tree.interval >= self.sampling.max_new_tokens:
            raise ConfigError(
                f"a tree that branches {tree.depth} times, every {tree.interval} tokens, does not "
                f"fit into {self.sampling.max_new_tokens} new tokens",
                hint="lower tree.interval or tree.depth, or raise sampling.max_new_tokens",
            )


def score(
    samples: SampleSet | Sequence[Sample],
    model: LocalModel | Answerer,
    *,
    config: ScoreConfig,
    folder: Path,
    seed: int,
    progress: Progress = SILENT,
    clock: Callable[[], float] = time,
) -> Scores:
    """Return the scores of samples under a model, and write them to `folder`/scores.parquet.

    Resumable: attempts are kept in `folder`/attempts.sqlite as they come, the configuration beside
    them in config.toml, and only what is missing is asked. Several processes may score the same
    data into the same folder at once.

    Args:
        samples: What to score.
        model: A local model, or anything else that answers.
        config: What to ask.
        folder: Where the log and the table go.
        seed: Of every mask and every sampled token.
        progress: Where it says how far it is.
        clock: Seconds since the epoch, shared by the processes that share the folder.

    Raises:
        ConfigError: The configuration makes no sense.
        UsageError: CMAB or a tree was asked of something that is not a local model.
        StateError: CMAB was asked and the model's attention cannot be read.
    """
    config.check()
    items = tuple(samples.samples if isinstance(samples, SampleSet) else samples)
    by_id = {sample.id: sample for sample in items}
    if len(by_id) != len(items):
        raise DataError("two samples have the same id")
    answerer = LocalAnswerer(model) if isinstance(model, LocalModel) else model
    if config.cmab and not isinstance(answerer, LocalAnswerer):
        raise UsageError(
            "attention balance needs a local model: a server does not return attention",
            hint="set cmab = false",
        )
    if config.rscore and not isinstance(answerer, LocalAnswerer):
        raise UsageError(
            "a reasoning tree needs a local model: a server continues no beginning of an answer",
            hint="set rscore = false",
        )
    with AttemptLog(folder / LOG_NAME) as log:
        write_whole(folder / CONFIG_NAME, dump_config(config))
        desk = Desk(
            samples=by_id,
            answerer=answerer,
            log=log,
            sampling=config.sampling,
            masking=config.masking,
            tree=config.tree,
            seed=seed,
            progress=progress,
            clock=clock,
        )
        planned = _ask_all(desk, items, config)
        scores = scores_from_log(desk, items, config, planned)
    write_scores(scores, folder / SCORES_NAME)
    return scores


def _ask_all(desk: Desk, items: Sequence[Sample], config: ScoreConfig) -> set[AttemptKey]:
    """Ask every probe; return the keys that the scores are to be derived from."""
    planned: list[AttemptKey] = []
    greedy = [desk.key(sample.id, Probe.GREEDY) for sample in items]
    desk.run(greedy, name="greedy answers", balance=config.cmab)
    planned += greedy
    if config.mode == "adaptive":
        planned += ask_adaptively(
            desk,
            [sample for sample in items if sample.images],
            permilles=config.permilles,
            tau=config.tau,
            boundary=config.boundary,
            rule=config.adaptive,
        )
    grid = [
        desk.key(sample.id, Probe.MASKED, permille=permille, k=k)
        for sample in items
        if config.mode == "grid" or not sample.images
        for permille in (config.permilles if sample.images else (0,))
        for k in range(config.num_attempts)
    ]
    desk.run(grid, name="masked answers")
    planned += grid
    for probe in (Probe.GREY, Probe.BLIND) if config.blind else ():
        keys = [
            desk.key(sample.id, probe, k=k)
            for sample in items
            if sample.images
            for k in range(config.num_attempts)
        ]
        desk.run(keys, name=f"{probe.value} answers")
        planned += keys
    if config.rscore:
        planned += ask_trees(desk, [sample.id for sample in items])
    return set(planned)


def scores_from_log(
    desk: Desk, items: Sequence[Sample], config: ScoreConfig, planned: set[AttemptKey]
) -> Scores:
    """Return the scores that the log's rows of the planned keys give."""
    model_hash = desk.model_hash()
    attempts: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in desk.log.attempts(model_hash=model_hash):
        key = attempt.key
        if key.probe == Probe.TREE.value:
            key = replace(key, k=0)  # leaf 0 stands for the tree
        if key in planned:
            attempts[attempt.key.sample_id].append(attempt)
    balances: dict[str, dict[str, float | None]] = defaultdict(dict)
    for row in desk.log.balances(model_hash=model_hash):
        if row.prompt_hash == desk.prompt_hash(row.sample_id, greedy=True, masked=False):
            balances[row.sample_id][row.variant] = row.ratio
    rows = [_score(sample, attempts[sample.id], balances[sample.id], config) for sample in items]
    return Scores(
        rows=_with_quantiles(rows, config),
        model_hash=model_hash,
        seed=desk.seed,
        spent=desk.log.totals(),
        contents={one.id: content_hash(one.question, one.answer, one.images) for one in items},
    )


def tally(attempts: Sequence[Attempt]) -> Tally:
    """Return the counts of right, judged and failed attempts."""
    verdicts = [attempt.verdict for attempt in attempts]
    errors = verdicts.count(Verdict.ERROR)
    return Tally(right=verdicts.count(Verdict.RIGHT), judged=len(verdicts) - errors, errors=errors)


def curve_of(attempts: Sequence[Attempt]) -> dict[int, Tally]:
    """Return masked share in 1/1000 -> counts, of a sample's masked attempts."""
    by_permille: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if attempt.key.probe == Probe.MASKED.value:
            by_permille[attempt.key.mask_permille].append(attempt)
    return {permille: tally(found) for permille, found in sorted(by_permille.items())}


def _score(
    sample: Sample,
    attempts: Sequence[Attempt],
    ratios: Mapping[str, float | None],
    config: ScoreConfig,
) -> Score:
    curve = curve_of(attempts)
    whole = curve.get(0, Tally(right=0, judged=0))
    low, high = wilson_interval(whole.right, whole.judged)
    of_probe = {
        probe: tally([one for one in attempts if one.key.probe == probe.value]) for probe in Probe
    }
    blind = [of_probe[Probe.GREY], of_probe[Probe.BLIND]]
    found = _difficulty(sample, curve, config)
    monotone = monotone_threshold(curve, tau=config.tau)
    floor = of_probe[Probe.GREY]
    corrected = monotone_threshold(curve, tau=corrected_tau(config.tau, floor))
    errors = sorted(one.error for one in attempts if one.error)
    greedy = of_probe[Probe.GREEDY]
    leaves = leaves_of(attempts, config.tree)
    variant = ratios.get(config.cmab_variant.value)
    return Score(
        id=sample.id,
        task=sample.task,
        pass_rate=whole.rate,
        pass_low=low,
        pass_high=high,
        num_judged=whole.judged,
        grey_rate=blind[0].rate,
        blind_rate=blind[1].rate,
        blind_answerable=any(
            one.judged and wilson_interval(one.right, one.judged)[0] >= config.tau for one in blind
        ),
        lambda_star=None if found.star_permille is None else found.star_permille / 1000,
        lambda_low=found.low_permille / 1000,
        lambda_high=found.high_permille / 1000,
        pism_stratum=found.stratum,
        pism_stratum_text=_relabel(found, Boundary.TEXT),
        pism_stratum_table=_relabel(found, Boundary.TABLE),
        lambda_monotone=None if monotone is None else monotone / 1000,
        lambda_corrected=None if corrected is None else corrected / 1000,
        pism_stratum_corrected=_corrected_stratum(found, corrected, config),
        stratum_confidence=found.confidence,
        curve_rates=tuple(one.rate for one in curve.values()),
        curve_permilles=tuple(curve),
        greedy_right=bool(greedy.right) if greedy.judged else None,
        cmab_sum=ratios.get("sum"),
        cmab_mean=ratios.get("mean"),
        cmab_sink_masked=ratios.get("sink_masked"),
        cmab_question_only=ratios.get("question_only"),
        cmab_stratum=balance.stratum_of(variant, right=bool(greedy.right))
        if greedy.judged
        else Stratum.ERROR,
        cmab_quantile_stratum=Stratum.ERROR,
        r_score=r_score(leaves, edits=config.tree.edits),
        tree_rate=of_probe[Probe.TREE].rate,
        tree_leaves=len(leaves),
        num_attempts=len(attempts),
        num_errors=len(errors),
        error=max(errors, key=errors.count) if errors else "",
    )


def _difficulty(sample: Sample, curve: Mapping[int, Tally], config: ScoreConfig) -> pism.Difficulty:
    if not sample.images:  # nothing to mask: PISM says nothing, which is not "easy"
        return pism.difficulty({}, tau=config.tau, boundary=config.boundary)
    if config.mode == "adaptive":
        return difficulty_from_few(
            curve,
            permilles=config.permilles,
            tau=config.tau,
            boundary=config.boundary,
            num_attempts=config.adaptive.num_attempts,
        )
    return pism.difficulty(curve, tau=config.tau, boundary=config.boundary)


def _relabel(found: pism.Difficulty, boundary: Boundary) -> Stratum:
    if found.stratum is Stratum.ERROR:
        return Stratum.ERROR
    return pism.stratum_of(found.star_permille, boundary=boundary)


def _corrected_stratum(
    found: pism.Difficulty, corrected: int | None, config: ScoreConfig
) -> Stratum:
    if found.stratum is Stratum.ERROR:
        return Stratum.ERROR
    return pism.stratum_of(corrected, boundary=config.boundary)


def _with_quantiles(rows: Sequence[Score], config: ScoreConfig) -> tuple[Score, ...]:
    ratios = [getattr(row, f"cmab_{config.cmab_variant.value}") for row in rows]
    strata = balance.quantile_strata(ratios, [bool(row.greedy_right) for row in rows])
    trees = rscore_strata([row.r_score for row in rows], [row.tree_rate for row in rows])
    return tuple(
        replace(row, cmab_quantile_stratum=stratum, rscore_stratum=tree)
        for row, stratum, tree in zip(rows, strata, trees, strict=True)
    )
