"""A model on a benchmark: ask, let a judge read where one does, mark, measure, write down.

Every answer and every reply of the judge is in the attempt log, so the same command goes on after
an interruption and asks nothing twice; marks are made anew from the texts. What has no mark is an
error with its class, counted apart: a picture that cannot be shown, a model that failed, a judge
that was not reached or wrote nothing readable. Failures to reach a judge are tried again next time.

Left out: sampled answers; the published numbers are of one answer a question, here the greedy one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierwise.core.errors import DataError, UsageError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import write_whole
from tierwise.curriculum.answerers import Answerer
from tierwise.curriculum.answers import AnswerKind
from tierwise.curriculum.benchmarks.catalogue import Benchmark, JudgeUse
from tierwise.curriculum.benchmarks.items import Item, ItemSet, Mark, UnreadableReplyError
from tierwise.curriculum.benchmarks.measures import ALL, Measure, measures
from tierwise.curriculum.difficulty.attempts import LOG_NAME, Attempt, AttemptLog, Probe
from tierwise.curriculum.difficulty.probes import Desk, Sampling
from tierwise.curriculum.samples import IMAGE_TAG, Sample
from tierwise.curriculum.server import ServerPool
from tierwise.curriculum.training.evaluate import SampleScore
from tierwise.curriculum.verdicts import Judgement, Verdict

PUBLISHED = "published rule"
BY_RULE = "rule-based extraction, not comparable with judged numbers"
SUMMARY_NAME = "summary.json"
ANSWERS_NAME = "answers.jsonl"
_UNREADABLE = "judge_unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkConfig:
    """How a benchmark is run.

    Attributes:
        max_new_tokens: Where an answer is cut.
        batch_size: Questions of one forward pass, or in one round of the judge's requests.
        judge_max_tokens: Where a judge's reply is cut; leave room for one that thinks first.
        num_resamples: Of the bootstrap.
    """

    max_new_tokens: int = 1024
    batch_size: int = 16
    judge_max_tokens: int = 512
    num_resamples: int = 2000

    def __post_init__(self) -> None:
        """Refuse numbers below 1."""
        for name in ("max_new_tokens", "batch_size", "judge_max_tokens", "num_resamples"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """What came out.

    Attributes:
        benchmark: Which.
        scoring: How answers were marked, in words that say what it may be compared with.
        num_items: Questions asked.
        num_skipped: Rows of the files left out.
        errors: Class of error -> questions without a mark.
        num_guessed: Questions whose option the published rule drew at random.
        measures: All questions first.
        scores: One a question, as `evaluate` writes them.
    """

    benchmark: Benchmark
    scoring: str
    num_items: int
    num_skipped: int
    errors: Mapping[str, int]
    num_guessed: int
    measures: tuple[Measure, ...]
    scores: tuple[SampleScore, ...]

    def record(self) -> dict[str, Any]:
        """Return all but the scores of single questions as plain values."""
        record: dict[str, Any] = {
            "benchmark": self.benchmark.name,
            "scoring": self.scoring,
            "questions": self.num_items,
            "rows_skipped": self.num_skipped,
            "without_mark": sum(self.errors.values()),
            "errors": dict(self.errors),
            "guessed": self.num_guessed,
        }
        if self.benchmark.full_size:
            record |= self._count()
        record["measures"] = [asdict(one) for one in self.measures]
        return record

    def _count(self) -> dict[str, Any]:
        """Return the count of right answers, which is the published score of the full set."""
        whole = [one for one in self.measures if one.group == ALL]
        marked = whole[0].num_units if whole else 0
        return {
            "right": round(whole[0].value * marked) if whole else 0,
            "of": self.num_items,
            "is_published_size": self.num_items == self.benchmark.full_size,
        }


def scoring_of(benchmark: Benchmark, judge: ServerPool | None) -> str:
    """Return how answers will be marked.

    Raises:
        UsageError: The metric needs a judge and there is none, or has none and there is one.
    """
    if judge is not None:
        if benchmark.judge is JudgeUse.NONE:
            raise UsageError(f"{benchmark.title} is scored by rule", hint="leave --judge out")
        return (
            f"judged by {judge.model} with tierwise's own prompt: comparable only with numbers of "
            "the same judge and prompt"
        )
    if benchmark.judge is JudgeUse.NEEDED:
        raise UsageError(
            f"{benchmark.title} has no score without a judge model",
            hint="add --judge URL --judge-model NAME",
        )
    return PUBLISHED if benchmark.judge is JudgeUse.NONE else BY_RULE


def run_benchmark(
    answerer: Answerer,
    benchmark: Benchmark,
    found: ItemSet,
    config: BenchmarkConfig,
    *,
    folder: Path,
    seed: int,
    judge: ServerPool | None = None,
    progress: Progress = SILENT,
) -> BenchmarkResult:
    """Return the measures of a model on a benchmark; the log and the answers stay in `folder`.

    Args:
        answerer: The model.
        benchmark: Which.
        found: Its items.
        config: How.
        folder: Holds the attempt log; gets `answers.jsonl` and `summary.json`.
        seed: Of intervals; answers are greedy.
        judge: Servers of a judge model.
        progress: Where to say how far it is.

    Raises:
        UsageError: See `scoring_of`.
    """
    scoring = scoring_of(benchmark, judge)
    items = found.items
    with AttemptLog(folder / LOG_NAME) as log:
        answers = _ask(answerer, items, log, config, progress=progress)
        replies = (
            {} if judge is None else _judge(judge, items, answers, log, config, progress=progress)
        )
    marks: dict[str, Mark] = {}
    errors: dict[str, str] = {}
    for item in items:
        mark = _mark(item, answers[item.sample.id], replies, judged=judge is not None)
        if isinstance(mark, Mark):
            marks[item.sample.id] = mark
        else:
            errors[item.sample.id] = mark
    result = BenchmarkResult(
        benchmark=benchmark,
        scoring=scoring,
        num_items=len(items),
        num_skipped=len(found.skipped),
        errors=dict(sorted(Counter(errors.values()).items())),
        num_guessed=sum(mark.guessed for mark in marks.values()),
        measures=measures(
            items, marks, metric=benchmark.metric, seed=seed, num_resamples=config.num_resamples
        ),
        scores=tuple(_score(item, marks.get(item.sample.id)) for item in items),
    )
    rows = [_row(item, answers[item.sample.id], replies, marks, errors) for item in items]
    write_whole(folder / ANSWERS_NAME, "".join(json.dumps(row) + "\n" for row in rows))
    write_whole(folder / SUMMARY_NAME, json.dumps(result.record(), indent=1) + "\n")
    return result


def _ask(
    answerer: Answerer,
    items: Sequence[Item],
    log: AttemptLog,
    config: BenchmarkConfig,
    *,
    progress: Progress,
) -> dict[str, Attempt]:
    by_id = {item.sample.id: item for item in items}

    def verdict(sample: Sample, text: str) -> Judgement:
        rule = by_id[sample.id].rule
        return _error("not_judged") if rule is None else _judgement(rule(text))

    return _attempts(
        answerer,
        [item.sample for item in items],
        log,
        Sampling(
            temperature=0.0, max_new_tokens=config.max_new_tokens, batch_size=config.batch_size
        ),
        verdict,
        name="asking",
        progress=progress,
    )


def _judge(
    judge: ServerPool,
    items: Sequence[Item],
    answers: Mapping[str, Attempt],
    log: AttemptLog,
    config: BenchmarkConfig,
    *,
    progress: Progress,
) -> dict[str, Attempt]:
    """Return the judge's reply by sample id, for the answers that it has to read."""
    by_id = {item.sample.id: item for item in items}
    prompts = []
    for item in items:
        attempt = answers[item.sample.id]
        if item.judging is None or _failed(attempt):
            continue
        if (prompt := item.judging.ask(attempt.text)) is not None:
            plain = prompt.replace(IMAGE_TAG, "[picture]")
            prompts.append(Sample(id=item.sample.id, question=plain, answer=item.sample.answer))

    def verdict(sample: Sample, reply: str) -> Judgement:
        judging = by_id[sample.id].judging
        assert judging is not None
        try:
            return _judgement(judging.read(answers[sample.id].text, reply))
        except UnreadableReplyError:
            return _error(_UNREADABLE)

    return _attempts(
        judge,
        prompts,
        log,
        Sampling(
            temperature=0.0, max_new_tokens=config.judge_max_tokens, batch_size=config.batch_size
        ),
        verdict,
        name="judging",
        progress=progress,
    )


def _attempts(
    answerer: Answerer,
    samples: Sequence[Sample],
    log: AttemptLog,
    sampling: Sampling,
    verdict: Callable[[Sample, str], Judgement],
    *,
    name: str,
    progress: Progress,
) -> dict[str, Attempt]:
    """Return one greedy attempt a sample, from the log where it has it."""
    desk = Desk(
        samples={sample.id: sample for sample in samples},
        answerer=answerer,
        log=log,
        sampling=sampling,
        judge=verdict,
        progress=progress,
    )
    keys = [desk.key(sample.id, Probe.GREEDY) for sample in samples]
    desk.run(keys, name=name)
    wanted = set(keys)
    found = (one for one in log.attempts(model_hash=desk.model_hash()) if one.key in wanted)
    return {one.key.sample_id: one for one in found}


def _judgement(mark: Mark) -> Judgement:
    return Judgement(
        verdict=Verdict.RIGHT if mark.score == 1.0 else Verdict.WRONG,
        score=mark.score,
        extracted=mark.extracted,
        kind=AnswerKind.TEXT,
    )


def _error(name: str) -> Judgement:
    return Judgement(
        verdict=Verdict.ERROR, score=0.0, extracted="", kind=AnswerKind.TEXT, error=name
    )


def _failed(attempt: Attempt) -> bool:
    """Return whether there is no answer at all; one that nobody marked yet is one."""
    return attempt.verdict is Verdict.ERROR and attempt.error != "not_judged"


def _mark(
    item: Item, answer: Attempt, replies: Mapping[str, Attempt], *, judged: bool
) -> Mark | str:
    """Return the mark of an item, or the class of the error instead."""
    if _failed(answer):
        return answer.error
    if judged and item.judging is not None:
        reply = replies.get(item.sample.id)
        if reply is None:  # the judge's rule needs no judge for this answer
            assert item.rule is not None
            return item.rule(answer.text)
        if reply.verdict is Verdict.ERROR:
            return reply.error
        return item.judging.read(answer.text, reply.text)
    assert item.rule is not None
    return item.rule(answer.text)


def _score(item: Item, mark: Mark | None) -> SampleScore:
    return SampleScore(
        id=item.sample.id,
        task=item.sample.task,
        stratum="",
        greedy=math.nan if mark is None else mark.score,
        sampled=(),
    )


def _row(
    item: Item,
    answer: Attempt,
    replies: Mapping[str, Attempt],
    marks: Mapping[str, Mark],
    errors: Mapping[str, str],
) -> dict[str, Any]:
    mark = marks.get(item.sample.id)
    reply = replies.get(item.sample.id)
    return {
        "id": item.sample.id,
        "groups": list(item.groups),
        "question": item.sample.question,
        "gold": item.sample.answer,
        "answer": answer.text,
        "finished": answer.finished,
        "judge_reply": None if reply is None else reply.text,
        "extracted": "" if mark is None else mark.extracted,
        "guessed": mark is not None and mark.guessed,
        "score": None if mark is None else mark.score,
        "error": errors.get(item.sample.id, ""),
    }


def refuse_unlike(against: Path, scoring: str) -> None:
    """Return if scores were made the same way, as far as the folder beside them says.

    Raises:
        DataError: That folder's summary cannot be read.
        UsageError: They were marked in another way.
    """
    summary = work_folder(against) / SUMMARY_NAME
    if not summary.is_file():
        return
    try:
        before = str(json.loads(summary.read_text(encoding="utf-8"))["scoring"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{summary} is not the summary of an evaluation") from error
    if before != scoring:
        raise UsageError(
            f"{against} was scored otherwise ({before}), a difference would mean nothing"
        )


def work_folder(out: Path) -> Path:
    """Return the folder beside a file of scores that holds log, answers and pictures."""
    return out.with_name(f"{out.stem}.eval")
