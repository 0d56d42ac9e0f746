"""The examples and configurations run, and the documentation's table is what the model says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tierwise.tco.compare import compare
from tierwise.tco.explain import explain_precursor
from tierwise.tco.precursor import MEDIA
from tierwise.tco.scenario import load_preset, load_scenario
from tierwise.tco.solve import break_even

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/tco_*.py")), ids=lambda p: p.stem)
def test_examples_run(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, check=True
    )
    assert "tape" in done.stdout


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/tco-*.toml")), ids=lambda p: p.stem)
def test_configurations_run(path: Path) -> None:
    result = compare(load_scenario(path), samples=20, seed=1)
    assert all(item.endowment_usd > 0 for item in result.strategies)


def test_the_scenario_in_the_documentation_is_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs/formats/scenario.md").read_text(encoding="utf-8")
    block = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    path = tmp_path / "scenario.toml"
    # the document's disc purchase stops at once; spares would be refused
    path.write_text(block[1] + "\n[overrides.optical]\nafr = 0.0\n", encoding="utf-8")
    scenario = load_scenario(path)
    names = {item.name for item in compare(scenario, samples=0).strategies}
    assert names == {"tape", "optical then tape", "disk in front of tape"}


def test_the_documented_table_is_current() -> None:
    text = (ROOT / "docs/tco.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.count("|") == 10 and " % |" in line
    ]
    lines = explain_precursor()
    assert len(rows) == 8
    for row, line in zip(rows, lines, strict=False):
        totals = [f"{line.total_usd[name] / 1e6:,.1f}" for name in MEDIA]
        shares = [f"{100 * (line.migration_share[name] or 0):.1f} %" for name in MEDIA]
        assert row[1:] == totals + shares, line.change


def test_the_documented_claims_are_current() -> None:
    text = (ROOT / "docs/tco.md").read_text(encoding="utf-8")
    scenario = load_preset("modern-2026")
    found = break_even(scenario, "migration.price", "tape", "optical", low=1, high=600)
    (price,) = found.crossings
    assert f"about\n{price:.0f} dollars" in text or f"about {price:.0f} dollars" in text
    result = compare(scenario, samples=500, seed=0)
    shares = {item.name: item.migration_share for item in result.strategies}
    assert max((share["A"] or 0) for share in shares.values()) < 0.17
    above = {name for name, share in shares.items() if (share["C"] or 0) > 0.96}
    assert above == {"ssd", "tape"}
    assert result.spread is not None
    assert round(result.spread.p_cheapest["tape"], 1) >= 0.9


def test_the_claims_in_the_readme_are_current() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    lines = {line.change: line.migration_share for line in explain_precursor()}
    assert min((s or 0) for s in lines["energy: a W-year is 8.76 kWh"].values()) > 0.96
    cheap = sorted(100 * (s or 0) for s in lines["+ migration at 20 a TB"].values())
    assert f"it is {cheap[0]:.0f}-{cheap[-1]:.0f} %" in text
    library = 100 * (lines["+ a tape library of 1,000 slots"]["tape"] or 0)
    assert f"but over {int(library)} % again for tape" in text
    for price, best in ((36, "tape"), (38, "optical"), (45, "optical"), (600, "optical")):
        scenario = load_preset("modern-2026", [f"overrides.migration.price={price}"])
        assert compare(scenario, samples=0).ranking[0].name == best
    assert "until moving a TB costs about $37, and optical" in text
