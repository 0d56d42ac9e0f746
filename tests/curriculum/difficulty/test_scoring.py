from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tierwise.core.config import dump_config, parse_config
from tierwise.core.errors import ConfigError, DataError, MissingFileError, UsageError
from tierwise.curriculum.answerers import Reply, Request
from tierwise.curriculum.difficulty.adaptive import Adaptive
from tierwise.curriculum.difficulty.attempts import LOG_NAME, Attempt, AttemptLog
from tierwise.curriculum.difficulty.masks import MaskKind, draw_mask
from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.difficulty.probes import Masking, Sampling, mask_seed
from tierwise.curriculum.difficulty.scores import SCORES_NAME, Scores, read_scores
from tierwise.curriculum.difficulty.scoring import ScoreConfig, score
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample, SampleSet, read_samples
from tierwise.curriculum.tiny import build, tasks

QUICK = ScoreConfig(
    num_attempts=2,
    permilles=(0, 300, 900),
    sampling=Sampling(batch_size=32, max_new_tokens=8),
)


class Oracle:
    """Answers 1 while one pixel of the picture can be seen, 0 when it is masked; counts calls."""

    def __init__(self, row: int = 3, column: int = 5) -> None:
        self.row, self.column = row, column
        self.asked: list[Request] = []

    def model_hash(self) -> str:
        return "oracle"

    def prompt_hash(self) -> str:
        return "plain"

    def answer(
        self, requests: Sequence[Request], *, temperature: float, max_new_tokens: int
    ) -> list[Reply]:
        self.asked += requests
        return [Reply(text=self.text(request), num_tokens=1) for request in requests]

    def text(self, request: Request) -> str:
        if request.images is None:
            return "I see nothing"
        pixels = np.asarray(request.images[0])
        return "1" if pixels[self.row, self.column].max() == 255 else "0"


class Counting(Oracle):
    """Answers 1 while at most a given share of the picture is black."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def text(self, request: Request) -> str:
        if request.images is None:
            return "0"
        pixels = np.asarray(request.images[0])
        return "1" if (pixels.max(axis=2) == 0).mean() <= self.share + 1e-9 else "0"


def test_pism_on_an_oracle_that_looks_at_one_pixel(plain_sample: Sample, tmp_path: Path) -> None:
    """The curve must be exactly what the masks say about that pixel, drawn again by hand."""
    samples = [replace(plain_sample, id=f"s{number}") for number in range(20)]
    config = ScoreConfig(cmab=False)
    found = score(samples, Oracle(), config=config, folder=tmp_path, seed=4)
    for row in found.rows:
        seen = []
        for permille in config.permilles:
            rights = 0
            for k in range(10):
                rng = np.random.default_rng(mask_seed(row.id, permille=permille, k=k, seed=4))
                mask = draw_mask(
                    10, 10, permille=permille, rng=rng, kind=MaskKind.PIXEL, patch_side=1
                )
                rights += not (permille and mask[3, 5])
            seen.append(rights / 10)
        assert row.curve_rates == pytest.approx(seen)
        failing = [
            share / 1000 for share, rate in zip(range(0, 1000, 100), seen, strict=True) if rate == 0
        ]
        assert row.lambda_star == (failing[0] if failing else None)
    assert len({row.lambda_star for row in found.rows}) > 2
    rates = [[rate or 0.0 for rate in row.curve_rates] for row in found.rows]
    mean = np.mean(rates, axis=0)
    assert mean == pytest.approx(1 - np.arange(10) / 10, abs=0.12)  # a pixel is hidden with lambda


@pytest.mark.parametrize(
    ("share", "star", "stratum"),
    [
        (-1.0, 0.0, Stratum.UNSOLVED),
        (0.0, 0.1, Stratum.HARD),
        (0.3, 0.4, Stratum.HARD),
        (0.4, 0.5, Stratum.MEDIUM),
        (0.5, 0.6, Stratum.MEDIUM),
        (0.6, 0.7, Stratum.EASY),
        (0.8, 0.9, Stratum.EASY),
        (0.9, None, Stratum.EASY),
    ],
)
def test_pism_on_an_oracle_with_a_known_threshold(
    plain_sample: Sample, tmp_path: Path, share: float, star: float | None, stratum: Stratum
) -> None:
    found = score(
        [plain_sample], Counting(share), config=ScoreConfig(cmab=False), folder=tmp_path, seed=0
    )
    (row,) = found.rows
    assert (row.lambda_star, row.pism_stratum) == (star, stratum)
    assert row.pism_stratum_table is (Stratum.MEDIUM if star == 0.7 else stratum)
    assert row.grey_rate == (0.0 if share < 0 else 1.0)
    assert row.blind_rate == 0.0
    assert row.lambda_monotone == star  # these curves fall already
    # a grey picture is not black, so the oracle "guesses" it: nothing is above guessing
    assert row.lambda_corrected == (0.0 if share < 0 else star)


def test_tau_corrected_for_guessing_sees_a_failure_that_guesses_hide(
    plain_sample: Sample, tmp_path: Path
) -> None:
    class Guessing(Oracle):
        def text(self, request: Request) -> str:
            return "1" if request.seed % 4 == 0 else super().text(request)

    samples = [replace(plain_sample, id=f"g{number}") for number in range(10)]
    config = ScoreConfig(cmab=False, num_attempts=40)
    found = score(samples, Guessing(), config=config, folder=tmp_path, seed=0)
    assert all(row.lambda_star is None for row in found.rows)  # a quarter is guessed
    corrected = [row.lambda_corrected for row in found.rows if row.lambda_corrected is not None]
    assert len(corrected) >= 5  # at 0.9 a tenth of the masks show the pixel: 0.1 above guessing
    assert min(corrected) >= 0.5


def rows_of(folder: Path) -> list[Attempt]:
    with AttemptLog(folder / LOG_NAME) as log:
        return [replace(row, seconds=0.0) for row in log.attempts()]


def same(first: Scores, second: Scores) -> bool:
    return first.rows == second.rows


def test_every_probe_on_the_tiny_model(
    tiny: LocalModel, held_out: SampleSet, tmp_path: Path
) -> None:
    found = score(held_out, tiny, config=QUICK, folder=tmp_path, seed=1)
    assert [row.id for row in found.rows] == [sample.id for sample in held_out.samples]
    assert found.spent["attempts"] == 40 * (2 * 3 + 2 + 2 + 1)
    assert found.spent["errors"] == 0
    rates = [row.pass_rate for row in found.rows if row.pass_rate is not None]
    blind = [row.grey_rate for row in found.rows if row.grey_rate is not None]
    assert np.mean(rates) > np.mean(blind) + 0.2  # looking helps
    for row in found.rows:
        assert row.cmab_sum is not None
        assert row.cmab_sum > 0
        assert row.cmab_sink_masked is not None
        assert row.cmab_sink_masked > row.cmab_sum
        assert (row.cmab_stratum is Stratum.UNSOLVED) == (not row.greedy_right)
    assert read_scores(tmp_path / SCORES_NAME).rows == found.rows
    again = score(held_out, tiny, config=QUICK, folder=tmp_path, seed=1)
    assert same(found, again)
    assert again.spent == found.spent  # nothing was paid twice
    with AttemptLog(tmp_path / LOG_NAME) as log:
        greedy = [one for one in log.attempts() if one.key.probe == "greedy"]
        assert {one.key.seed for one in greedy} == {0}


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(
    tiny: LocalModel, held_out: SampleSet, tmp_path: Path
) -> None:
    few = held_out.samples[:12]
    quick = replace(QUICK, blind=False, cmab=False)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        score(few, tiny, config=quick, folder=tmp_path / name, seed=seed)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    assert (tmp_path / "a" / SCORES_NAME).read_bytes() == (
        tmp_path / "b" / SCORES_NAME
    ).read_bytes()
    texts = [[row.text for row in rows_of(tmp_path / name)] for name in "ac"]
    assert texts[0] != texts[1]


def _score_in_a_process(data: Path, folder: Path) -> None:
    score(
        read_samples(data),
        LocalModel.load(build.tiny_model_path()),
        config=QUICK,
        folder=folder,
        seed=1,
    )


@pytest.mark.parametrize("num_kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_and_resumed_equals_an_uninterrupted_one(
    tiny: LocalModel, held_out: SampleSet, tmp_path: Path, num_kills: int
) -> None:
    whole = score(held_out, tiny, config=QUICK, folder=tmp_path / "whole", seed=1)
    data = Path(str(held_out.samples[0].images[0])).parents[1] / "samples.jsonl"
    context = multiprocessing.get_context("spawn")
    rng = np.random.default_rng()  # a random moment: any must do
    for _ in range(num_kills):
        process = context.Process(
            target=_score_in_a_process, args=(data, tmp_path / "killed"), daemon=True
        )
        process.start()
        deadline = time.monotonic() + 90
        before = _num_rows(tmp_path / "killed")
        while process.is_alive() and _num_rows(tmp_path / "killed") <= before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(float(rng.random()) * 0.3)
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    resumed = score(held_out, tiny, config=QUICK, folder=tmp_path / "killed", seed=1)
    assert same(whole, resumed)
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "killed")
    assert (tmp_path / "whole" / SCORES_NAME).read_bytes() == (
        tmp_path / "killed" / SCORES_NAME
    ).read_bytes()


def _num_rows(folder: Path) -> int:
    if not (folder / LOG_NAME).exists():
        return 0
    with AttemptLog(folder / LOG_NAME) as log:
        return int(log.totals()["attempts"])


THOUSAND = ScoreConfig(num_attempts=1, sampling=Sampling(batch_size=256, max_new_tokens=8))


def _score_in_both_modes(data: Path, folder: Path) -> tuple[Scores, Scores]:
    samples, model = read_samples(data), LocalModel.load(build.tiny_model_path())
    quick = replace(THOUSAND, mode="adaptive", adaptive=Adaptive(num_attempts=10))
    grid, adaptive = (
        score(samples, model, config=config, folder=folder, seed=1) for config in (THOUSAND, quick)
    )
    return grid, adaptive


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_samples_killed_at_a_random_moment_and_resumed(tmp_path: Path) -> None:
    data = tasks.write_dataset(tmp_path / "data", num_samples=1000, seed=6, split="held_out")
    whole = _score_in_both_modes(data, tmp_path / "whole")
    total = _num_rows(tmp_path / "whole")
    assert total >= 1000 * (10 + 1 + 1 + 1)  # grid, grey, blind, greedy; adaptive adds its own
    enough = int(np.random.default_rng().integers(1, total - 1000))
    process = multiprocessing.get_context("spawn").Process(
        target=_score_in_both_modes, args=(data, tmp_path / "killed"), daemon=True
    )
    process.start()
    while process.is_alive() and _num_rows(tmp_path / "killed") < enough:
        time.sleep(0.2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    kept = _num_rows(tmp_path / "killed")
    assert 0 < kept < total
    resumed = _score_in_both_modes(data, tmp_path / "killed")
    assert all(same(first, second) for first, second in zip(whole, resumed, strict=True))
    assert len(resumed[0].rows) == 1000
    for row in resumed[0].rows:
        assert row.pass_rate is not None
        assert row.blind_rate is not None
        ratios = (row.cmab_sum, row.cmab_mean, row.cmab_sink_masked, row.cmab_question_only)
        assert all(ratio is not None and ratio > 0 for ratio in ratios)
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "killed")


@pytest.mark.slow
def test_two_processes_share_the_work(held_out: SampleSet, tmp_path: Path) -> None:
    data = Path(str(held_out.samples[0].images[0])).parents[1] / "samples.jsonl"
    context = multiprocessing.get_context("spawn")
    both = [
        context.Process(target=_score_in_a_process, args=(data, tmp_path / "shared"), daemon=True)
        for _ in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    rows = rows_of(tmp_path / "shared")
    assert max(Counter(row.key for row in rows).values()) == 1
    assert len(rows) == 40 * 11


def test_a_bad_picture_is_its_row_s_error_and_the_run_goes_on(
    plain_sample: Sample, tmp_path: Path
) -> None:
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n")
    samples = [
        plain_sample,
        replace(plain_sample, id="missing", images=(tmp_path / "nothing.png",)),
        replace(plain_sample, id="cut", images=(tmp_path / "cut.png",)),
        replace(plain_sample, id="text", images=()),
    ]
    oracle = Oracle()
    found = score(samples, oracle, config=ScoreConfig(cmab=False), folder=tmp_path / "out", seed=0)
    white, missing, cut, text = found.rows
    assert white.num_errors == 0
    assert (missing.error, missing.pism_stratum) == ("image_missing", Stratum.ERROR)
    assert (cut.error, cut.pass_rate, cut.greedy_right) == ("image_unreadable", None, None)
    assert missing.cmab_stratum is Stratum.ERROR
    assert (text.pism_stratum, text.pass_rate) == (Stratum.ERROR, 0.0)  # nothing to mask
    assert {request.sample.id for request in oracle.asked} == {"white", "text"}


class Failing(Oracle):
    def answer(
        self, requests: Sequence[Request], *, temperature: float, max_new_tokens: int
    ) -> list[Reply]:
        return [Reply(text="", error="server_500") for _ in requests]


def test_an_answerer_that_fails_makes_errors_not_wrong_answers(
    plain_sample: Sample, tmp_path: Path
) -> None:
    found = score(
        [plain_sample], Failing(), config=ScoreConfig(cmab=False), folder=tmp_path, seed=0
    )
    (row,) = found.rows
    assert (row.pism_stratum, row.error, row.num_errors) == (Stratum.ERROR, "server_500", 121)
    assert (row.pass_rate, row.pass_low, row.pass_high) == (None, 0.0, 1.0)


def test_one_row_that_breaks_the_model_fails_alone(
    tiny: LocalModel, held_out: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = held_out.samples[:6]
    encode = tiny.encode

    def picky(rows: Sequence[Sample], images: Sequence[Sequence[Image.Image]] | None) -> object:
        if any(row.id == samples[2].id for row in rows):
            raise RuntimeError("too large")
        return encode(rows, images)

    monkeypatch.setattr(tiny, "encode", picky)
    quick = replace(QUICK, cmab=False, blind=False)
    found = score(samples, tiny, config=quick, folder=tmp_path, seed=0)
    assert [row.error for row in found.rows] == ["", "", "model_failed:RuntimeError", "", "", ""]


def test_a_changed_question_picture_or_setting_is_asked_again(
    plain_sample: Sample, tmp_path: Path
) -> None:
    config = ScoreConfig(cmab=False, blind=False, num_attempts=1, permilles=(0, 500))

    def asked(sample: Sample, settings: ScoreConfig = config) -> int:
        oracle = Oracle()
        score([sample], oracle, config=settings, folder=tmp_path, seed=0)
        return len(oracle.asked)

    assert asked(plain_sample) == 3
    assert asked(plain_sample) == 0
    assert asked(replace(plain_sample, question="is it black ?")) == 3
    assert asked(plain_sample, replace(config, masking=Masking(kind=MaskKind.BLOCK))) == 1
    assert asked(plain_sample, replace(config, num_attempts=2)) == 2
    Image.new("RGB", (10, 10), (255, 255, 254)).save(str(plain_sample.images[0]))
    assert asked(plain_sample) == 3


def test_attention_of_a_server_is_refused(plain_sample: Sample, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a local model"):
        score([plain_sample], Oracle(), config=ScoreConfig(), folder=tmp_path, seed=0)


@pytest.mark.parametrize(
    "text",
    [
        "num_attempts = 0",
        "tau = 1.0",
        "permilles = [100, 200]",
        "permilles = [0, 200, 100]",
        "sampling.temperature = -1.0",
        "sampling.batch_size = 0",
        "masking.patch_side = 0",
    ],
)
def test_settings_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_config(ScoreConfig, text).check()


def test_settings_survive_toml_and_default_to_the_paper() -> None:
    config = ScoreConfig(masking=Masking(kind=MaskKind.PATCH, patch_side=8), tau=0.2)
    assert parse_config(ScoreConfig, dump_config(config)) == config
    paper = ScoreConfig()
    assert (paper.num_attempts, paper.tau, len(paper.permilles)) == (10, 0.1, 10)


def test_files_that_are_no_scores_and_ids_that_repeat(plain_sample: Sample, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no scores"):
        read_scores(tmp_path / "none.parquet")
    (tmp_path / "text").write_text("no parquet")
    with pytest.raises(DataError, match="not a Parquet file"):
        read_scores(tmp_path / "text")
    with pytest.raises(DataError, match="same id"):
        score(
            [plain_sample, plain_sample],
            Oracle(),
            config=ScoreConfig(cmab=False),
            folder=tmp_path,
            seed=0,
        )


def test_another_right_answer_is_asked_and_judged_again(
    plain_sample: Sample, tmp_path: Path
) -> None:
    samples = [replace(plain_sample, id=f"s{number}") for number in range(3)]
    config = ScoreConfig(cmab=False, blind=False, num_attempts=1, permilles=(0, 500))
    first = score(samples, Counting(0.0), config=config, folder=tmp_path, seed=0)
    assert [row.pass_rate for row in first.rows] == [1.0, 1.0, 1.0]
    changed = [samples[0], replace(samples[1], answer="7"), samples[2]]
    oracle = Counting(0.0)
    again = score(changed, oracle, config=config, folder=tmp_path, seed=0)
    assert [row.pass_rate for row in again.rows] == [1.0, 0.0, 1.0]
    assert {request.sample.id for request in oracle.asked} == {"s1"}
    with pytest.raises(
        DataError, match="1 samples have changed since they were scored, such as 's"
    ):
        again.refuse_changed(samples)
    again.refuse_changed(changed)
