from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tierwise.cli.main import run
from tierwise.curriculum.tiny import tasks

QUICK = [
    "--set", "num_attempts=1", "--set", "permilles=[0, 500]", "--set", "sampling.max_new_tokens=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tasks.write_dataset(folder, num_samples=12, seed=9, split="held_out")
    return folder / "samples.jsonl"


def test_score_select_report(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "scores")
    score = ["curriculum", "score", str(data), "--model", "tiny", "--out", out, "--json", *QUICK]
    assert run(score) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["samples"], result["errors"]) == (12, 0)
    assert sum(result[name] for name in ("easy", "medium", "hard", "unsolved")) == 12

    assert run(score) == 10
    assert "holds attempts already" in capsys.readouterr().err
    assert run([*score, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    plain = [one for one in score if one not in QUICK]  # goes on with what was asked, too
    settings = (tmp_path / "scores" / "config.toml").read_text()
    assert run([*plain, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert (tmp_path / "scores" / "config.toml").read_text() == settings

    arm = tmp_path / "all.jsonl"
    select = ["curriculum", "select", str(data), "--scores", out, "--arm", "all"]
    assert run([*select, "--out", str(arm), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 12
    assert len(arm.read_text().splitlines()) == 12

    page = tmp_path / "page"
    assert run(["curriculum", "report", str(data), "--scores", out, "--out", str(page)]) == 0
    assert (page / "report.html").is_file()


def test_a_score_says_which_error_was_the_commonest(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in data.read_text().splitlines()[:4]]
    for row, name in zip(rows, ("gone.png", "gone.png", "bad.png", ""), strict=True):
        row["images"] = [name or str(data.parent / row["images"][0])]
    (tmp_path / "bad.png").write_text("no picture")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    score = ["curriculum", "score", str(tmp_path / "rows.jsonl"), "--model", "tiny", "--json"]
    assert run([*score, "--out", str(tmp_path / "scores"), *QUICK]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["commonest_error"], result["without_stratum"]) == ("image_missing", 3)


def test_the_report_holds_everything_and_serves_an_unfinished_run_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierwise.curriculum.difficulty.probes import Desk

    tasks.write_dataset(tmp_path, num_samples=24, seed=9, split="held_out")
    data = tmp_path / "samples.jsonl"
    lines = data.read_text().splitlines()
    again = json.dumps({**json.loads(lines[0]), "id": "again"})
    data.write_text("\n".join([*lines, again]) + "\n")
    out = str(tmp_path / "scores")
    score = ["curriculum", "score", str(data), "--model", "tiny", "--out", out, *QUICK,
             "--set", "num_attempts=8", "--set", "rscore=true", "--set", "tree.depth=2",
             "--set", "tree.branches=2", "--set", "tree.interval=2"]  # fmt: skip
    report = ["curriculum", "report", str(data), "--scores", out, "--out", str(tmp_path / "page")]

    work = Desk.work

    def interrupted(self: Desk, keys: object, *, name: str, **rest: object) -> None:
        if name == "blind answers":
            raise KeyboardInterrupt
        work(self, keys, name=name, **rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Desk, "work", interrupted)
        assert run(score) == 130
    assert run(report) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    assert "25 of 25 samples are unfinished" in page
    assert re.search(r"<td>blind</td><td>0</td><td>0.0</td><td>25</td><td>200</td>", page)
    assert re.search(r"<td>masked</td><td>400</td><td>[\d.]+</td><td>0</td><td>0</td>", page)
    assert "judged 0 wrongly" in page

    assert run([*score, "--resume"]) == 0
    assert run(report) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    assert "All 25 samples are finished." in page
    titles = re.findall(r"<h2[^>]*>([^<]+)</h2>", page)
    assert titles == [
        "Curriculum: how hard is each sample for this model",
        "Cost of scoring, spent and to be spent",
        "Answered blind, and there twice",
        "Audit of the reward",
    ]
    for said in (
        "masked as where the model stops answering",  # pictures at lambda*
        "samples are answered without looking",
        "groups of exact duplicates: 1; groups",
        "group 1, exact: again",
        "Mean pass rate",  # P_c curves
        "Reasoning trees",
        "Agreement between readings",
        "Probes tried and judged wrongly",
    ):
        assert said in page, said
    assert page.count("data:image/png;base64,") >= 4
    assert page.count("data:image/svg+xml") == 2
    capsys.readouterr()


def test_an_interrupted_score_says_how_to_go_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierwise.curriculum.models import LocalModel

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = str(tmp_path / "scores")
    score = ["curriculum", "score", str(data), "--model", "tiny", "--out", out, *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr(LocalModel, "generate", stop)
        assert run(score) == 130
    said = capsys.readouterr().err.splitlines()[-2:]
    assert said == ["tierwise: interrupted", "  run it again with --resume to go on"]
    assert run([*score, "--resume"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["score", "nothing.jsonl", "--model", "tiny"], 6, "no file nothing.jsonl"),
        (["score", "DATA", "--model", "nothing"], 6, "no model folder nothing"),
        (["score", "DATA", "--model", "tiny", "--set", "num_atempts=1"], 4, "num_atempts"),
        (["score", "DATA", "--model", "tiny", "--config", "no.toml"], 6, "no configuration file"),
        (["score", "DATA", "--model", "tiny", "--set", "tau=2.0"], 4, "tau between 0 and 1"),
        (["select", "DATA", "--scores", "nothing"], 6, "no scores"),
        (["select", "DATA", "--scores", "x", "--arm", "best"], 2, "'best' is not one of"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    filled = [str(data) if one == "DATA" else one for one in arguments]
    out = tmp_path / "out"
    assert run(["curriculum", *filled, "--out", str(out)]) == code
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert not out.exists()


def test_audit_reward(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["curriculum", "audit-reward", str(data), "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert ours["wrong"] == 0
    assert run(["curriculum", "audit-reward", str(data), "--reward", "operator:eq"]) == 0
    text = capsys.readouterr().out  # operator.eq takes two arguments: every probe raises
    assert "raises" in text
    assert run(["curriculum", "audit-reward", str(data), "--reward", "nowhere:reward"]) == 2
    assert "no callable 'nowhere:reward'" in capsys.readouterr().err


def test_a_reward_lies_in_the_folder_where_the_command_is_given(data: Path, tmp_path: Path) -> None:
    """As the installed command runs: it does not have that folder on its path by itself."""
    (tmp_path / "my_module.py").write_text(
        "def my_reward(gold, completion, task):\n"
        "    return float('nan') if gold == '3' else float(gold in completion)\n"
    )
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    tierwise = str(Path(sys.executable).with_name("tierwise"))
    command = [tierwise, "curriculum", "audit-reward", str(data)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}

    def audit(reward: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--json", "--reward", reward],
            cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = audit("my_module:my_reward")
    assert (done.returncode, done.stderr) == (0, "")
    kinds = {one["kind"]: one["score"] for one in json.loads(done.stdout)["examples"]}
    assert kinds["wrong scored right"] == 1.0
    assert kinds["gives no score"] is None
    for reward, reason in (
        ("my_module:no_reward", "no attribute 'no_reward'"),
        ("broken:reward", "nothing_of_this_name"),
        ("my_module", "no callable 'my_module'"),
    ):
        done = audit(reward)
        assert done.returncode == 2
        assert reason in json.loads(done.stderr)["error"]
