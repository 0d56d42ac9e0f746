"""The demo, small: it ends with a report, repeats itself, and survives being killed anywhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_main import tierwise

SMALL = {
    "data.num_pool": 24,
    "data.num_held_out": 16,
    "scoring.num_attempts": 2,
    "training.steps": 3,
    "training.prompts_per_step": 4,
    "training.group_size": 4,
    "training.num_draws": 2,
    "cost.num_draws": 50,
}
SETTINGS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
STEPS = ["0-data", "1-curriculum", "2-offload", "3-archive", "4-tco", "5-report"]
pytestmark = pytest.mark.xdist_group("demo")


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run without what may differ."""
    rows = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole small run."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    done = tierwise("demo", "--seed", "1", "--out", str(folder), *SETTINGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(str(folder / "report.html"))
    return folder


def test_a_run_leaves_what_the_format_page_says(finished: Path) -> None:
    for name in ("config.toml", "record.jsonl", "manifest.json", "report.html", "report.md"):
        assert (finished / name).stat().st_size > 100
    figures = {path.stem for path in (finished / "figures").glob("*.svg")}
    assert figures == {path.stem for path in (finished / "figures").glob("*.csv")}
    assert {"overlap", "archive-map"} <= figures
    assert not list(finished.rglob("*.part"))
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["seed"] == 1
    assert {"torch", "transformers", "tierwise"} <= set(manifest["versions"])


def test_the_record_holds_every_step_and_every_claim(finished: Path) -> None:
    rows = numbers(finished)
    assert [row["step"] for row in rows if row["event"] == "step.done"] == STEPS
    by_name = {row["event"]: row for row in rows}
    assert by_name["offload.compared"]["bits_equal"] is True
    assert by_name["offload.compared"]["grad_norms_equal"] is True
    kept = by_name["archive.read_back"]
    assert kept["num_intact"] == kept["num_files"] >= 50
    assert kept["num_discs"] >= 3
    assert kept["num_parity_discs"] >= 1
    assert len(by_name["tco.compared"]["ranking"]) == 5


def test_the_report_says_what_the_record_says(finished: Path) -> None:
    page = (finished / "report.md").read_text()
    by_name = {row["event"]: row for row in numbers(finished)}
    assert by_name["offload.compared"]["weights_sha256"] in page
    assert f"{by_name['archive.read_back']['num_files']} of" in page
    assert "equal bit for bit" in page


def test_the_same_seed_gives_the_same_numbers_with_and_without_a_mount(
    finished: Path, tmp_path: Path
) -> None:
    done = tierwise(
        "demo", "--seed", "1", "--out", str(tmp_path / "b"), *SETTINGS,
        "--set", "archive.use_mount=false", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"] == str(tmp_path / "b" / "report.html")
    assert all(json.loads(line) for line in done.stderr.splitlines())
    here, there = numbers(finished), numbers(tmp_path / "b")
    for rows in (here, there):
        for row in rows:
            row.pop("written_through", None)
    assert here == there


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_a_mount_refused_when_tried_becomes_library_calls(finished: Path, tmp_path: Path) -> None:
    """Root in a user namespace of its own has the capability, but not over these mounts."""
    namespace = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no user namespaces here")
    out = str(tmp_path / "b")
    command = [sys.executable, "-m", "tierwise", "demo", "--seed", "1", "--out", out]
    done = subprocess.run(
        [*namespace, *command, *SETTINGS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "not mounted, called as a library: the kernel refuses" in done.stderr
    here, there = numbers(finished), numbers(tmp_path / "b")
    for row in (*here, *there):
        row.pop("written_through", None)
    assert here == there


def run_and_kill(folder: Path, when: str, number: int) -> None:
    """Start a run and send a signal once its record or folders show that a step has begun."""
    command = [sys.executable, "-m", "tierwise", "demo", "--seed", "1", "--out", str(folder)]
    child = subprocess.Popen(
        [*command, *SETTINGS], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not (folder / when).exists():
        assert child.poll() is None, child.stderr and child.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(child.pid, number) if number == signal.SIGKILL else child.send_signal(number)
    _, error = child.communicate(timeout=120)
    if number != signal.SIGKILL:
        assert child.returncode == 130, error
        assert "tierwise: interrupted" in error
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("when", "number"),
    [
        ("2-offload/overlapped/record.jsonl", signal.SIGKILL),
        ("3-archive/mount", signal.SIGINT),
        pytest.param("0-data", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("0-data", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("1-curriculum/attempts.sqlite", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("1-curriculum/attempts.sqlite", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("2-offload/examined-before.jsonl", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("2-offload/plain", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("3-archive/mount", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("3-archive/vault/library", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("2-offload/examined-before.jsonl", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("4-tco", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("4-tco", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("5-report", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("5-report", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_killed_anywhere_it_goes_on_to_the_same_numbers(
    finished: Path, tmp_path: Path, when: str, number: int
) -> None:
    folder = tmp_path / "run"
    run_and_kill(folder, when, number)
    done = tierwise("demo", "--seed", "1", "--out", str(folder), *SETTINGS)
    assert done.returncode == 0, done.stderr
    assert numbers(folder) == numbers(finished)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--set", "sead=1"], 4, "unknown key sead"),
        (["--set", "archive.disc_size=huge"], 4, "'huge' is not a size"),
        (["--set", "training.mode=fast"], 4, "training.mode"),
        (["--config", "/no/such.toml"], 6, "no configuration file /no/such.toml"),
        (["--out", "/dev/null"], 2, "/dev/null is not a folder"),
        (["--out", "/etc"], 2, "is not empty and holds no run"),
        (["--seed", "-1"], 2, "-1 is not in the range"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    arguments: list[str], code: int, sentence: str, tmp_path: Path
) -> None:
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "run")]
    done = tierwise("demo", *arguments, *out)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("module", "extra", "verb"),
    [
        ("torch", "curriculum", ["demo"]),
        ("numba", "offload", ["demo"]),
        ("matplotlib", "report", ["demo"]),
        ("pycdlib", "archive", ["demo"]),
        ("transformers", "curriculum", ["curriculum", "score", "x.jsonl", "--model", "tiny"]),
        ("pycdlib", "archive", ["archive", "init"]),
        ("scipy", "tco", ["tco", "compare"]),
    ],
)
def test_a_missing_extra_is_one_sentence_with_the_pip_line(
    module: str, extra: str, verb: list[str], tmp_path: Path
) -> None:
    where = {"demo": ["--out"], "curriculum": ["--out"], "archive": []}.get(verb[0])
    target = [] if where is None else [*where, str(tmp_path / "run")]
    code = (
        f"import sys\nsys.modules[{module!r}] = None\nfrom tierwise.cli.main import run\n"
        f"sys.exit(run({[*verb, *target]!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines() == [
        f"tierwise: tierwise {extra} needs {module}, which is not installed",
        f"  pip install 'tierwise[{extra}]'",
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size_kib", [450, 3_000, 30_000])
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(
    size_kib: int, tmp_path: Path
) -> None:
    """A real file system that is too small: for the attempts, a checkpoint, the archive."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", small],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode != 0:
        pytest.skip("only root may mount a small file system")
    settings = [*SETTINGS, "--set", "data.num_pool=60"]
    try:
        done = tierwise("demo", "--seed", "1", "--out", str(small / "run"), *settings)
        assert done.returncode == 7, done.stderr
        assert done.stderr.splitlines()[-2].startswith("tierwise: no space left")
        subprocess.run(["mount", "-o", "remount,size=400m", small], check=True)
        again = tierwise("demo", "--seed", "1", "--out", str(small / "run"), *settings)
        assert again.returncode == 0, again.stderr
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)
