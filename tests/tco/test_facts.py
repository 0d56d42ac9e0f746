"""Every shipped number has a source, a range that holds it, and a model that can use it."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tierwise.core.errors import ConfigError, DataError, MissingFileError
from tierwise.core.facts import FactKind, load_facts
from tierwise.tco.facts import MediumKind, all_fact_files, load_fact_set
from tierwise.tco.inputs import CLOUD_NAMES, DRIVE_NAMES, SITE_KEYS, resolve_inputs
from tierwise.tco.scenario import Scenario

URL = re.compile(r"https?://[\w.-]+\.\w+")
FILES = list(all_fact_files())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_can_be_traced(path: Path) -> None:
    facts = load_facts(path)
    assert facts
    for fact in facts.values():
        estimated = fact.source.startswith("our estimate, because ")
        assert URL.search(fact.source) or estimated, f"{fact.key}: {fact.source}"
        assert "not recorded" not in fact.source
        if estimated:
            assert fact.kind is FactKind.ESTIMATE, fact.key
            assert len(fact.source) > len("our estimate, because ") + 15, fact.key


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_row_whose_source_is_removed_is_refused(path: Path, tmp_path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    rows[len(rows) // 2]["source"] = ""
    broken = tmp_path / path.name
    with broken.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(DataError, match="has no source"):
        load_facts(broken)


def test_every_medium_has_all_it_needs() -> None:
    facts = load_fact_set()
    for medium in facts.media.values():
        if medium.kind is MediumKind.ANNOUNCED:
            assert medium.why_disabled
            continue
        names = CLOUD_NAMES if medium.kind is MediumKind.CLOUD else DRIVE_NAMES
        for name in names:
            assert facts.find(medium.name, name).unit
    for key in SITE_KEYS:
        assert key in facts.facts


def test_no_shipped_fact_is_left_unused() -> None:
    facts = load_fact_set()
    used = set(SITE_KEYS)
    for medium in facts.media.values():
        used |= {f"{medium.name}.{name}" for name in (*DRIVE_NAMES, *CLOUD_NAMES)}
    assert set(facts.facts) <= used


def test_a_child_medium_inherits_what_it_does_not_say() -> None:
    facts = load_fact_set()
    assert facts.find("lto9", "capacity").value == 18
    assert facts.find("lto9", "slot_price") is facts.find("tape", "slot_price")
    with pytest.raises(DataError, match=r"no fact lto9\.colour"):
        facts.find("lto9", "colour")


def test_an_unknown_medium_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load_fact_set().medium("optcal")
    assert caught.value.hint == "did you mean optical?"


def test_a_missing_facts_file_is_said() -> None:
    with pytest.raises(MissingFileError, match="no facts file"):
        load_fact_set((Path("nowhere.csv"),))


def test_money_is_of_one_year_or_converted() -> None:
    facts = load_fact_set()
    fact = facts.facts["site.build_kw"]
    assert fact.currency_year == 2025
    value, low, high = facts.in_year(fact, 2026)
    scale = facts.price_index[2026] / facts.price_index[2025]
    assert (value, low, high) == pytest.approx(
        (fact.value * scale, fact.low * scale, fact.high * scale)
    )
    assert facts.in_year(facts.facts["power.pue"], 2026)[0] == facts.facts["power.pue"].value


def test_the_cost_model_loads_no_torch_and_no_drawing() -> None:
    code = (
        "import sys, tierwise.tco.compare, tierwise.tco.solve, tierwise.tco.explain; "
        "print([m for m in ('torch', 'matplotlib', 'pyarrow', 'starlette') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_facts_file_that_is_no_table_is_said(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"key,value\n\xff\xfe,1\n")
    for name in ("bytes.csv", "."):
        with pytest.raises(DataError, match="is not a CSV file in UTF-8"):
            load_fact_set((tmp_path / name,))


@pytest.mark.parametrize(
    ("cells", "what"),
    [("5,0,9,USD/TB,2026,loguniform", "start above 0"), ("5,1,inf,USD/TB,2026,", "not a finite")],
)
def test_a_range_that_cannot_be_drawn_is_refused(tmp_path: Path, cells: str, what: str) -> None:
    path = tmp_path / "facts.csv"
    header = "key,value,low,high,unit,currency_year,distribution,source,retrieved,kind,note"
    path.write_text(f"{header}\ntape.price,{cells},our estimate,2026-01-01,estimate,\n")
    with pytest.raises(ConfigError, match=what):
        resolve_inputs(Scenario(media=("tape",), facts_files=(str(path),)))
