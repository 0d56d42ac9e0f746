"""One row a sample: pass rates, PISM, CMAB, and how sure each is; kept as scores.parquet.

The columns are in docs/formats/scores.md. How a row comes about is `scoring`. Nothing here needs
a model, so that selection and reports start at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from tierwise.core.errors import DataError, MissingFileError
from tierwise.core.records import whole_file
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.samples import Sample, content_hash

SCORES_NAME = "scores.parquet"
CONFIG_NAME = "config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What is known about one sample under one model; see docs/formats/scores.md.

    Attributes:
        id: The sample's id.
        task: The sample's task.
        pass_rate: Share of right answers with the picture unmasked; None when none was judged.
        pass_low: Lower end of its 95 % Wilson interval.
        pass_high: Upper end of it.
        num_judged: Judged answers at masked share 0.
        grey_rate: Pass rate with a uniform grey picture, or None.
        blind_rate: Pass rate with no picture, or None.
        blind_answerable: Whether a blind rate's interval lies above chance: its lower end is at
            or above tau.
        lambda_star: PISM's failure threshold in [0, 1]; None when it never fails, or on error.
        lambda_low: It is at least this in 95 % of repetitions; 1 stands for never.
        lambda_high: It is at most this in 95 % of repetitions; 1 stands for never.
        pism_stratum: By the chosen boundary.
        pism_stratum_text: By the paper's text.
        pism_stratum_table: By the paper's Table A.
        lambda_monotone: The failure threshold of a monotone fit; None when it never fails.
        lambda_corrected: The same with tau corrected for guessing, by the grey pass rate.
        pism_stratum_corrected: The stratum that lambda_corrected gives.
        stratum_confidence: Probability that a repetition gives the same stratum.
        curve_rates: P_c at each masked share, None where none was judged.
        curve_permilles: The masked shares, in 1/1000.
        greedy_right: Whether the greedy answer is right; None when not asked or an error.
        cmab_sum: rho-bar as in the paper's equation; None when not measured.
        cmab_mean: rho-bar with means per token, as in its figure and code.
        cmab_sink_masked: rho-bar without the prompt's first token.
        cmab_question_only: rho-bar against the question's own tokens.
        cmab_stratum: By the paper's limits, of the chosen variant.
        cmab_quantile_stratum: By quantiles, of the chosen variant.
        r_score: Reasoning-tree score; None when not measured or no leaf was judged.
        tree_rate: Share of right leaves of its reasoning tree, or None.
        tree_leaves: Judged leaves.
        rscore_stratum: By thirds of the r-score.
        num_attempts: Attempts spent on the sample.
        num_errors: How many of them are errors.
        error: Class of the commonest error, or "".
    """

    id: str
    task: str
    pass_rate: float | None
    pass_low: float
    pass_high: float
    num_judged: int
    grey_rate: float | None
    blind_rate: float | None
    blind_answerable: bool
    lambda_star: float | None
    lambda_low: float
    lambda_high: float
    pism_stratum: Stratum
    pism_stratum_text: Stratum
    pism_stratum_table: Stratum
    lambda_monotone: float | None
    lambda_corrected: float | None
    pism_stratum_corrected: Stratum
    stratum_confidence: float
    curve_rates: tuple[float | None, ...]
    curve_permilles: tuple[int, ...]
    greedy_right: bool | None
    cmab_sum: float | None
    cmab_mean: float | None
    cmab_sink_masked: float | None
    cmab_question_only: float | None
    cmab_stratum: Stratum
    cmab_quantile_stratum: Stratum
    r_score: float | None = None
    tree_rate: float | None = None
    tree_leaves: int = 0
    rscore_stratum: Stratum = Stratum.ERROR
    num_attempts: int
    num_errors: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of a data set under a model, in the data set's order.

    Attributes:
        rows: One a sample.
        contents: Sample id -> hash of the question, answer and pictures that were scored; empty
            in files written before it was kept.
        model_hash: The model's weights.
        seed: The run's seed.
        spent: Attempts, errors, tokens and seconds in the log, all runs together.
    """

    rows: tuple[Score, ...]
    model_hash: str
    seed: int
    spent: Mapping[str, float]
    contents: Mapping[str, str] = field(default_factory=dict)

    def refuse_changed(self, samples: Iterable[Sample]) -> None:
        """Return if the samples are still what was scored; those without a score do not count.

        Raises:
            DataError: Questions, answers or pictures have changed since.
        """
        changed = [
            sample.id
            for sample in samples
            if sample.id in self.contents
            and content_hash(sample.question, sample.answer, sample.images)
            != self.contents[sample.id]
        ]
        if changed:
            raise DataError(
                f"{len(changed)} samples have changed since they were scored, such as "
                f"{changed[0]!r}",
                hint="score the data again, or put back the question, answer or picture",
            )


def write_scores(scores: Scores, path: Path) -> None:
    """Write scores as a Parquet file, whole or not at all; same rows, same bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = {
        name.name: [_plain(getattr(row, name.name)) for row in scores.rows]
        for name in fields(Score)
    }
    table = pa.table(columns, schema=_arrow_schema()).replace_schema_metadata(
        {
            "tierwise.model_hash": scores.model_hash,
            "tierwise.seed": str(scores.seed),
            "tierwise.contents": json.dumps(dict(scores.contents)),
        }
    )
    with whole_file(path) as temporary:
        parquet.write_table(table, temporary, compression="zstd")


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return value.value if isinstance(value, Stratum) else value


def _arrow_schema() -> object:
    import pyarrow as pa

    kinds = {
        "str": pa.string(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "int": pa.int32(),
        "bool": pa.bool_(),
        "bool | None": pa.bool_(),
        "Stratum": pa.string(),
        "tuple[float | None, ...]": pa.list_(pa.float64()),
        "tuple[int, ...]": pa.list_(pa.int32()),
    }
    return pa.schema([(name.name, kinds[str(name.type)]) for name in fields(Score)])


def read_scores(path: Path) -> Scores:
    """Return the scores of a Parquet file written by `write_scores`; `spent` is not in it.

    Raises:
        DataError: Not a scores file, or one with other columns.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except FileNotFoundError as error:
        raise MissingFileError(f"no scores {path}", hint="run tierwise curriculum score") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a Parquet file") from error
    if table.schema.names != [name.name for name in fields(Score)]:
        raise DataError(f"{path} has other columns than docs/formats/scores.md says")
    metadata = table.schema.metadata or {}
    return Scores(
        rows=tuple(_row_of(row) for row in table.to_pylist()),
        model_hash=metadata.get(b"tierwise.model_hash", b"").decode(),
        seed=int(metadata.get(b"tierwise.seed", b"0")),
        spent={},
        contents=json.loads(metadata.get(b"tierwise.contents", b"{}")),
    )


def _row_of(row: dict[str, object]) -> Score:
    for name in fields(Score):
        if str(name.type) == "Stratum":
            row[name.name] = Stratum(str(row[name.name]))
        elif str(name.type).startswith("tuple"):
            row[name.name] = tuple(row[name.name])  # type: ignore[arg-type]
    return Score(**row)  # type: ignore[arg-type]


def as_dict(scored: Score) -> dict[str, object]:
    """Return a score as plain values for JSON."""
    return {name: _plain(value) for name, value in asdict(scored).items()}
