"""The verbs print what the library says, as text, JSON and CSV, and refuse bad input in words."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tierwise.cli.main import run

FAST = ["--samples", "20", "--set", "horizon_years=12"]


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run(["tco", *args])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_compare_as_text_json_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = call(capsys, "compare", *FAST)
    assert code == 0
    assert "cheapest in" in text
    assert "running + migration" in text
    code, text, _ = call(capsys, "compare", "--json", *FAST)
    result = json.loads(text)
    assert {s["name"] for s in result["strategies"]} == {"ssd", "hdd", "tape", "optical", "cloud"}
    first = result["strategies"][0]
    assert first["p5_usd"] <= first["p50_usd"] <= first["p95_usd"]
    assert sum(first["by_category_usd"].values()) == pytest.approx(first["cash_usd"])
    code, text, _ = call(capsys, "compare", "--csv", *FAST)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["name"] for row in rows} == {"ssd", "hdd", "tape", "optical", "cloud"}
    assert float(rows[0]["endowment_usd"]) == pytest.approx(first["endowment_usd"])


def test_compare_a_scenario_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nmedia = ["hdd"]\nhorizon_years = 3\n[data]\nsize = "1 PB"\n')
    code, text, _ = call(capsys, "compare", str(path), "--samples", "0", "--json")
    assert code == 0
    assert [s["name"] for s in json.loads(text)["strategies"]] == ["hdd"]


def test_what_is_refused_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for wrong in (["--samples", "-1"], ["--set", "data.growth=9"], ["--set", 'media=["tpae"]']):
        code, _, err = call(capsys, "run", "--out", str(tmp_path / "out"), *wrong)
        assert code in (2, 4), err
        assert not (tmp_path / "out").exists()


def test_run_writes_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text, _ = call(capsys, "run", "--out", str(tmp_path / "a"), *FAST)
    assert code == 0
    assert Path(text.strip()) == tmp_path / "a" / "report.html"
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"config.toml", "record.jsonl", "manifest.json", "ledger.csv", "report.html"} <= names
    call(capsys, "run", "--out", str(tmp_path / "b"), *FAST)
    events = []
    for name in ("a", "b"):
        event = json.loads((tmp_path / name / "record.jsonl").read_text())
        event.pop("timing")
        events.append(event)
    assert events[0] == events[1]


def test_explain_prints_the_share_as_defects_go(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = call(capsys, "explain", "precursor-2017")
    assert code == 0
    assert "487.9" in text
    assert "96.5 %" in text
    code, text, _ = call(capsys, "explain", "dshr", "--json")
    assert round(json.loads(text)["steps"][0]["usd_per_tb"], 2) == 324.88


def test_anyone_can_switch_a_defect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('model = "precursor"\nmigration_usd_tb = 50.0\n[defects]\nkwh_unit = false\n')
    _, text, _ = call(capsys, "explain", str(mine), "--json")
    from_file = json.loads(text)["steps"][0]
    _, text, _ = call(
        capsys, "explain", "precursor-2017", "--set", "migration_usd_tb=50.0",
        "--set", "defects.kwh_unit=false", "--json",
    )  # fmt: skip
    steps = json.loads(text)["steps"]
    assert steps[0] == from_file
    assert steps[0]["change"] == "as given"
    assert steps[0]["total"] == steps[1]["total"]  # that defect was off already
    code, _, err = call(capsys, "explain", "precursor-2017", "--set", "defects.kwh=false")
    assert code == 4
    assert "kwh_unit" in err


def test_explain_inputs_and_changes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text, _ = call(capsys, "explain", "--strategy", "tape", "--against", "optical", "--json")
    assert code == 0
    assert json.loads(text)["tornado"][0]["key"] == "migration.price"
    code, text, _ = call(capsys, "explain", "--strategy", "tape", "--sobol", "8", "--json")
    assert {"key", "first", "total"} == set(json.loads(text)["sobol"][0])
    other = tmp_path / "other.toml"
    other.write_text('name = "other"\n[data]\ncopies = 2.0\n')
    code, text, _ = call(
        capsys, "explain", "modern-2026", str(other), "--strategy", "tape", "--json"
    )
    fall = json.loads(text)
    total = sum(step["change_usd"] for step in fall["steps"])
    assert fall["start_usd"] + total == pytest.approx(fall["end_usd"])


def test_sweep_and_map(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text, _ = call(
        capsys, "sweep", "--vary", "migration.price=1:100:5", "--log", "--json",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0
    result = json.loads(text)
    assert len(result["total_usd"]["tape"]) == 5
    assert (tmp_path / "sweep.svg").exists()
    code, text, _ = call(
        capsys, "sweep", "--vary", "migration.price=5:200:4", "--vary", "tape.decline=0:0.1:3",
        "--json", "--out", str(tmp_path),
    )  # fmt: skip
    result = json.loads(text)
    assert [row[0] for row in result["winner"]] == ["tape"] * 3
    assert [row[-1] for row in result["winner"]] == ["optical"] * 3
    header = (tmp_path / "winner-map.csv").read_text().splitlines()[0]
    assert header == "migration.price,tape.decline,winner,runner_up_over_winner"


def test_breakeven(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = call(
        capsys, "breakeven", "migration.price", "tape", "optical", "--range", "1:600", "--csv"
    )
    assert code == 0
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["from", "to", "cheaper"]
    assert [row[2] for row in rows[1:]] == ["tape", "optical"]


def test_facts_list_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = call(capsys, "facts", "--json")
    assert code == 0
    found = json.loads(text)
    assert len(found["facts"]) > 300
    assert all(row["source"] for row in found["facts"])
    assert set(found["announced"]) == {"silica", "cerabyte", "dna"}
    _, text, _ = call(capsys, "facts", "silica")
    assert "cannot be costed" in text


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = call(capsys, "presets", "--json")
    assert code == 0
    assert {p["name"] for p in json.loads(text)["presets"]} == {
        "modern-2026", "precursor-2017", "dshr",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "code", "what"),
    [
        (["compare", "nowhere.toml"], 6, "no configuration file nowhere.toml"),
        (["compare", "--preset", "moden"], 4, "no preset 'moden'"),
        (["compare", "--set", "horzon_years=3"], 4, "unknown key horzon_years"),
        (["compare", "--set", "horizon_years=0"], 4, "horizon_years must be 1 to 300"),
        (["compare", "--set", "data.size=1 XB"], 4, "not a size"),
        (["compare", "--set", "overrides.power.pue=0.5"], 4, "power.pue = 0.5 must be at least 1"),
        (["compare", "--set", "overrides.hdd.decline=1"], 4, "below 1"),
        (["compare", "--set", 'media=["silica"]'], 4, "silica cannot be costed"),
        (["compare", "--set", "data.inventory=gone.json"], 6, "no inventory"),
        (["compare", "--samples", "x"], 2, "'x' is not a valid integer"),
        (["compare", "x.toml", "--preset", "modern-2026"], 2, "not both"),
        (["sweep", "--vary", "tape.price"], 2, "not a range"),
        (["sweep", "--vary", "tape.price=5:1"], 2, "not below"),
        (["breakeven", "tape.price", "tape", "disc", "--range", "1:2"], 2, "no strategy 'disc'"),
        (["explain", "modern-2026", "--sobol", "3"], 2, "power of two"),
        (["explain", "modern-2026", "--sobol", "4", "--seed", "-1"], 2, "seed"),
        (["explain", "../presets/dshr"], 4, "no preset"),
        (["explain", "dshr", "--strategy", "tape"], 2, "model of its own"),
        (["explain", "modern-2026", "dshr", "--against", "tape"], 2, "not two"),
        (["explain", "dshr", "--set", "replication=-1"], 4, "must be above 0"),
        (["explain", "precursor-2017", "--set", "decline=nan"], 4, "below 1"),
        (["compare", "--samples", "-1"], 2, "cannot be drawn"),
        (["compare", "--samples", "9", "--seed", "-1"], 2, "seed"),
        (["run", "--out", __file__], 2, "is a file"),
        (["sweep", "--vary", "tape.price=1:inf"], 2, "has no end"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, what: str
) -> None:
    found, out, err = call(capsys, *args)
    assert found == code, err
    assert what in err
    assert out == ""
    assert "Traceback" not in err
