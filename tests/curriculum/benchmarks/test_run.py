"""A model on each layout for real, a judge over HTTP, what goes wrong, and going on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.curriculum.benchmarks.small_files import (
    Scripted,
    hallusion_row,
    judging,
    mathvista_row,
    put_picture,
    write_hallusion,
    write_json,
    write_mathvista,
    write_parquet,
)
from tierwise.cli.main import run as tierwise
from tierwise.core.errors import DataError, MissingFileError, UsageError
from tierwise.curriculum.answerers import LocalAnswerer
from tierwise.curriculum.benchmarks.catalogue import (
    BENCHMARKS,
    benchmark_named,
    find_benchmark,
    holds_benchmark,
    read_items,
)
from tierwise.curriculum.benchmarks.run import (
    BY_RULE,
    BenchmarkConfig,
    BenchmarkResult,
    run_benchmark,
)
from tierwise.curriculum.difficulty.attempts import LOG_NAME, AttemptLog
from tierwise.curriculum.models import LocalModel
from tierwise.curriculum.samples import Sample
from tierwise.curriculum.server import ServerPool
from tierwise.curriculum.tiny import tasks
from tierwise.curriculum.training.evaluate import read_scores

QUICK = BenchmarkConfig(max_new_tokens=8, num_resamples=200)
NUM_DRAWN = 12


def drawn(folder: Path) -> list[Any]:
    """Questions that the shipped model can answer, their pictures as `NUMBER.png`."""
    made = list(tasks.draw_samples(NUM_DRAWN, seed=31, split="held_out"))
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(made):
        one.image.save(folder / f"{number}.png")
    return made


def mathvista(folder: Path) -> Path:
    rows = {}
    for number, one in enumerate(drawn(folder / "images")):
        rows[str(number)] = mathvista_row(
            str(number), question=one.question, image=f"images/{number}.png", choices=None,
            question_type="free_form", answer_type="integer", answer=one.answer,
        )  # fmt: skip
    write_json(folder / "query.json", {key: row["question"] for key, row in rows.items()})
    return write_json(folder / "testmini.json", rows)


def mmvet(folder: Path) -> Path:
    rows = {
        f"v1_{number}": {
            "imagename": f"{number}.png", "question": one.question, "answer": one.answer,
            "imagesource": "ours", "capability": ["rec", "math"] if number % 2 else ["ocr"],
        }
        for number, one in enumerate(drawn(folder / "images"))
    }  # fmt: skip
    return write_json(folder / "mm-vet.json", rows)


def ocrbench(folder: Path) -> Path:
    rows = [
        {
            "dataset_name": "ORAND", "id": number, "image_path": f"ORAND/{number}.png",
            "question": one.question, "answers": one.answer, "type": "Digit String Recognition",
        }
        for number, one in enumerate(drawn(folder / "OCRBench_Images" / "ORAND"))
    ]  # fmt: skip
    return write_json(folder / "OCRBench.json", rows)


def hallusion(folder: Path) -> Path:
    rows = []
    for number, one in enumerate(drawn(folder / "hallusion_bench" / "VD" / "math")):
        rows.append(
            hallusion_row(
                f"VD_math_1_{number}_0_0",
                question=one.question,
                gt_answer="1",
                filename=f"./VD/math/{number}.png",
            )
        )
    rows.append(hallusion_row("VS_chart_0_0_0_0", question="how many circles are there ?"))
    return write_json(folder / "HallusionBench.json", rows)


def mmmu(folder: Path) -> Path:
    rows = []
    for number, one in enumerate(drawn(folder / "drawn")):
        picture = {"bytes": (folder / "drawn" / f"{number}.png").read_bytes(), "path": None}
        row: dict[str, Any] = {
            "id": f"validation_Math_{number}", "question": f"<image 1> {one.question}",
            "options": "[]", "answer": one.answer, "question_type": "open",
            "image_1": picture, "image_2": None,
        }  # fmt: skip
        if number == 0:
            row |= {"question": f"<image 1><image 2> {one.question}", "image_2": picture}
        if number == 1:
            row |= {
                "question_type": "multiple-choice", "options": f"['{one.answer}', 'other']",
                "answer": "A",
            }  # fmt: skip
        rows.append(row)
    return write_parquet(folder / "Math" / "validation-00000-of-00001.parquet", rows)


def mmstar(folder: Path) -> Path:
    rows = [
        {
            "index": number, "question": one.question, "answer": "A", "category": "math",
            "l2_category": "geometry",
            "image": (folder / "drawn" / f"{number}.png").read_bytes(),
        }
        for number, one in enumerate(drawn(folder / "drawn"))
    ]  # fmt: skip
    return write_parquet(folder / "mmstar.parquet", rows)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "mathvista": mathvista, "mmvet": mmvet, "ocrbench": ocrbench, "hallusionbench": hallusion,
    "mmmu": mmmu, "mmstar": mmstar,
}  # fmt: skip


def run(answerer: Any, data: Path, out: Path, **settings: Any) -> BenchmarkResult:
    benchmark, files = find_benchmark(data)
    found = read_items(benchmark, data, files, pictures_folder=out / "pictures")
    return run_benchmark(answerer, benchmark, found, QUICK, folder=out, seed=0, **settings)


def rows_in(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", list(WRITERS))
def test_the_shipped_model_answers_each_layout(name: str, tmp_path: Path, tiny: LocalModel) -> None:
    data = WRITERS[name](tmp_path / "data")
    assert find_benchmark(data)[0].name == name  # by its fields
    with judging(lambda prompt: "0.5") as server:
        judge = server.pool if name == "mmvet" else None
        result = run(LocalAnswerer(tiny), data, tmp_path / "out", judge=judge)
    assert result.benchmark.name == name
    assert (result.errors, result.num_skipped) == ({}, 0)
    rows = rows_in(tmp_path / "out")
    assert len(rows) == result.num_items == NUM_DRAWN + (name == "hallusionbench")
    assert all(row["answer"] for row in rows)
    whole = next(one for one in result.measures if one.metric == BENCHMARKS[name].metric)
    assert whole.value == pytest.approx(sum(row["score"] for row in rows) / len(rows))
    assert 0.0 <= whole.low <= whole.value <= whole.high <= 1.0
    if name == "ocrbench":  # counted here by hand, from the texts of a model that knows some
        right = sum(row["gold"].lower() in row["answer"].lower() for row in rows)
        assert right > 0
        record = result.record()
        assert (record["right"], record["of"]) == (right, NUM_DRAWN)
        assert not record["is_published_size"]
    if name == "mathvista":
        assert result.scoring == BY_RULE
        assert whole.value > 0.3


def test_mmvet_is_graded_by_a_judge_and_goes_on(tmp_path: Path) -> None:
    data = mmvet(tmp_path)
    model = Scripted({f"v1_{number}": f"answer {number}" for number in range(NUM_DRAWN)})
    failing = True

    def grade(prompt: str) -> str | int:
        answer = int(re.findall(r"answer (\d+)", prompt)[-1])
        if answer == 3 and failing:
            return 503
        return "excellent" if answer == 5 else f"{answer / 20}"

    with judging(grade) as server:
        result = run(model, data, tmp_path / "out", judge=server.pool)
        assert result.errors == {"judge_unreadable": 1, "server_503": 1}
        known = [number / 20 for number in range(NUM_DRAWN) if number not in (3, 5)]
        found = {one.group: one for one in result.measures}
        assert found["all"].value == pytest.approx(sum(known) / len(known))
        assert (found["all"].num_units, found["all"].num_unmarked) == (10, 2)
        assert found["capability:ocr"].value == pytest.approx(sum((0, 2, 4, 6, 8, 10)) / 120)
        assert found["integration:math+rec"].num_unmarked == 2
        assert "judged by judge" in result.scoring
        asked = len(server.prompts)
        failing = False
        again = run(model, data, tmp_path / "out", judge=server.pool)
        # what was not reached is asked again, what was read or could not be read is not
        assert len(server.prompts) == asked + 1
        assert again.errors == {"judge_unreadable": 1}
        assert server.keys[0] == "Bearer sk-secret"
    assert model.num_asked == NUM_DRAWN
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert written
    assert not any(b"sk-secret" in path.read_bytes() for path in written)
    assert "sk-secret" not in repr(server.pool)
    scores = [row["score"] for row in rows_in(tmp_path / "out")]
    assert scores[5] is None
    assert scores[7] == 0.35


def test_a_judge_reads_only_what_the_rule_cannot(tmp_path: Path) -> None:
    data = write_mathvista(tmp_path, *(mathvista_row(str(number)) for number in range(3)))
    texts = {"0": "5", "1": "One, two, ... it goes round five times.", "2": "I see three."}

    def extract(prompt: str) -> str:
        return "B" if "five" in prompt.split("[response]")[1] else "none"

    with judging(extract) as server:
        judged = run(Scripted(texts), data, tmp_path / "out", judge=server.pool)
        assert len(server.prompts) == 2
    assert [row.greedy for row in judged.scores] == [1.0, 1.0, 0.0]
    by_rule = run(Scripted(texts), data, tmp_path / "out")
    assert [row.greedy for row in by_rule.scores] == [1.0, 0.0, 0.0]
    assert by_rule.scoring == BY_RULE
    assert judged.scoring != BY_RULE


def test_the_shipped_model_is_no_judge_and_that_is_an_error(
    tmp_path: Path, tiny: LocalModel
) -> None:
    from tierwise.curriculum.answerers import Request

    data = write_hallusion(tmp_path, [hallusion_row("VD_illusion_1_0_0_0")])

    def say(prompt: str) -> str:
        sample = Sample(id="x", question="how many circles are there ?", answer="1")
        asked = Request(sample=sample, images=None, seed=0)
        (reply,) = LocalAnswerer(tiny).answer([asked], temperature=0.0, max_new_tokens=8)
        return reply.text

    with judging(say) as server:
        model = Scripted({"VD_illusion_0_0_0": "Yes."})
        result = run(model, data, tmp_path / "out", judge=server.pool)
    assert result.errors == {"judge_unreadable": 1}
    assert result.measures == ()


def test_a_picture_or_model_that_fails_is_no_wrong_answer(tmp_path: Path) -> None:
    data = write_mathvista(tmp_path, *(mathvista_row(str(number)) for number in range(3)))
    (tmp_path / "images" / "1.jpg").write_bytes(b"no picture")
    model = Scripted({"0": "5", "1": "5", "2": "error:model_failed:RuntimeError"})
    result = run(model, data, tmp_path / "out")
    assert result.errors == {"image_unreadable": 1, "model_failed:RuntimeError": 1}
    assert (result.measures[0].value, result.measures[0].num_units) == (1.0, 1)
    put_picture(tmp_path / "images" / "1.jpg")
    mended = run(model, data, tmp_path / "out")
    assert "image_unreadable" not in mended.errors


def test_a_stopped_run_asks_nothing_twice(tmp_path: Path) -> None:
    data = write_mathvista(tmp_path, *(mathvista_row(str(number)) for number in range(40)))

    class Stopping(Scripted):
        def answer(self, requests: Any, **settings: Any) -> Any:
            if self.num_asked >= 16 and not self.resumed:
                raise KeyboardInterrupt
            return super().answer(requests, **settings)

        resumed = False

    model = Stopping({str(number): "5" for number in range(40)})
    with pytest.raises(KeyboardInterrupt):
        run(model, data, tmp_path / "out")
    model.resumed = True
    result = run(model, data, tmp_path / "out")
    assert model.num_asked == 40
    assert result.measures[0].value == 1.0
    with AttemptLog(tmp_path / "out" / LOG_NAME) as log:
        assert log.totals()["attempts"] == 40


def test_which_benchmark_it_is(tmp_path: Path) -> None:
    assert benchmark_named("MM-Vet") is BENCHMARKS["mmvet"]
    with pytest.raises(UsageError, match="MathVista, MM-Vet, OCRBench, HallusionBench, MMMU, MMS"):
        benchmark_named("MMBench")
    with pytest.raises(MissingFileError, match="no file or folder"):
        find_benchmark(tmp_path / "nothing.json")
    other = write_json(tmp_path / "other.json", [{"question": "?", "answer": "1"}])
    with pytest.raises(DataError, match="not recognised as any of MathVista, MM-Vet"):
        find_benchmark(other)
    with pytest.raises(DataError, match="does not hold any of MathVista"):
        find_benchmark(tmp_path)
    mathvista(tmp_path)
    ocrbench(tmp_path)
    with pytest.raises(UsageError, match="holds MathVista, OCRBench"):
        find_benchmark(tmp_path)
    assert find_benchmark(tmp_path, "OCRBench")[0].name == "ocrbench"
    assert holds_benchmark(tmp_path)
    assert not holds_benchmark(tmp_path / "samples.jsonl")
    assert not holds_benchmark(tmp_path / "images")
    verl = write_parquet(tmp_path / "train.parquet", [{"prompt": [{"role": "user"}]}])
    assert not holds_benchmark(verl)


@pytest.mark.parametrize(
    "name", ["../secret.png", "/etc/hostname", "a/../../secret.png", "x\0.png", "link.png"]
)
def test_a_picture_cannot_lie_outside_its_folder(name: str, tmp_path: Path) -> None:
    data = mmvet(tmp_path / "data")
    put_picture(tmp_path / "secret.png")
    (tmp_path / "data" / "images" / "link.png").symlink_to(tmp_path / "secret.png")
    rows = json.loads(data.read_text())
    rows["v1_0"]["imagename"] = name
    write_json(data, rows)
    with pytest.raises(
        DataError, match=r"key 'v1_0': (.* leads out of|a picture has no file name)"
    ):
        run(Scripted({}), data, tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("HallusionBench.json", b"[{", "HallusionBench.json:1: not JSON"),
        ("HallusionBench.json", b"\xff\xfe", "not UTF-8"),
        ("HallusionBench.json", b"3", "neither an object nor a list"),
        ("HallusionBench.json", b"[3]", "row 1: not a JSON object"),
        ("HallusionBench.json", b"[]", "holds no usable sample"),
        ("mmstar.parquet", b"PAR1 not", "not a Parquet file"),
        ("MMStar.tsv", b"index\tquestion\n1\n", "MMStar.tsv:2: not as many cells"),
        ("MMStar.tsv", b"index\timage\n1\t@@@\n" , "MMStar.tsv:2: no answer"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_sentence(
    file: str, content: bytes, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.write_bytes(content)
    name = "hallusionbench" if path.suffix == ".json" else "mmstar"
    benchmark, files = find_benchmark(path, name)
    with pytest.raises(DataError, match=sentence):
        read_items(benchmark, path, files, pictures_folder=tmp_path / "pictures")


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ocrbench(tmp_path / "data")
    out = str(tmp_path / "before.jsonl")
    quick = ["--set", "max_new_tokens=8", "--set", "num_resamples=100"]
    command = ["curriculum", "eval", "tiny", str(data), *quick]
    assert tierwise([*command, "--out", out, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["benchmark"], record["scoring"]) == ("ocrbench", "published rule")
    assert record["questions"] == len(read_scores(Path(out))) == NUM_DRAWN
    assert {one["group"] for one in record["measures"]} == {
        "all", "part:Text Recognition", "type:Digit String Recognition",
    }  # fmt: skip
    after = str(tmp_path / "after.jsonl")
    assert tierwise([*command, "--out", after, "--against", out]) == 0
    said = capsys.readouterr().out
    assert f"OCRBench: {NUM_DRAWN} questions, published rule" in said
    assert f"score {record['right']} of {NUM_DRAWN} (the published score is of 1000)" in said
    assert "change all greedy  +0.0000 [+0.0000, +0.0000] no difference seen" in said


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--benchmark", "MMBench"], 2, "no benchmark 'MMBench': there are MathVista, MM-Vet"),
        (["--benchmark", "mmvet"], 2, "MM-Vet has no score without a judge model"),
        (["--judge", "http://x"], 2, "--judge and --judge-model go together"),
        (["--judge", "http://x", "--judge-model", "j"], 2, "OCRBench is scored by rule"),
        (["--set", "batch_size=0"], 4, "batch_size must be 1 or more"),
        (["--set", "num_draws=4"], 4, "num_draws"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    arguments: list[str],
    code: int,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = ocrbench(tmp_path / "data")
    out = tmp_path / "out" / "scores.jsonl"
    command = ["curriculum", "eval", "tiny", str(data), "--out", str(out), *arguments]
    assert tierwise(command) == code
    assert sentence in capsys.readouterr().err
    assert not out.parent.exists()


def test_scores_made_otherwise_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_mathvista(tmp_path, mathvista_row("1"))
    before = tmp_path / "before.jsonl"
    with judging(lambda prompt: "B") as server:
        judge = ["--judge", server.url, "--judge-model", "judge"]
        quick = ["--set", "max_new_tokens=4"]
        command = ["curriculum", "eval", "tiny", str(data), *quick]
        assert tierwise([*command, "--out", str(before), *judge]) == 0
        assert "judged by judge" in capsys.readouterr().out
        after = [*command, "--out", str(tmp_path / "after.jsonl"), "--against", str(before)]
        assert tierwise(after) == 2
        assert "scored otherwise" in capsys.readouterr().err
        assert tierwise([*after, *judge]) == 0


def test_a_pool_keeps_its_key_to_itself() -> None:
    pool = ServerPool(endpoints=("http://x",), model="m", api_key="sk-secret")
    assert "sk-secret" not in f"{pool}{pool!r}"
