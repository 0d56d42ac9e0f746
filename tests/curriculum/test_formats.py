from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from tierwise.curriculum.difficulty.attempts import _SCHEMA
from tierwise.curriculum.difficulty.scores import Score
from tierwise.curriculum.samples import ImageFault

DOCS = Path(__file__).parents[2] / "docs" / "formats"


def test_the_schema_of_scores_names_every_column() -> None:
    text = (DOCS / "scores.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert list(json.loads(block)["properties"]) == [field.name for field in fields(Score)]
    for field in fields(Score):
        assert f"`{field.name}`" in text


def test_the_columns_of_the_log_and_the_classes_of_pictures_are_documented() -> None:
    text = (DOCS / "attempts.md").read_text(encoding="utf-8")
    for name in re.findall(r"^  (\w+) +(?:TEXT|INTEGER|REAL)", _SCHEMA, re.MULTILINE):
        assert f"`{name}`" in text or name in ("batch", "owner", "until_seconds")
    samples = (DOCS / "samples.md").read_text(encoding="utf-8")
    assert all(f"`{fault.value}`" in samples for fault in ImageFault)


def test_the_tests_that_the_papers_page_names_are_there() -> None:
    text = (DOCS.parent / "papers.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if "test_" in line and line.startswith("|")]
    assert len(rows) >= 15
    for line in rows:
        names = re.findall(r"`(test_\w+)\.py(?:::(test_\w+))?`|`(test_\w+)`", line)
        module = ""
        for file, first, further in names:
            module = file or module
            (file_of,) = Path(__file__).parent.rglob(f"{module}.py")
            source = file_of.read_text(encoding="utf-8")
            for name in filter(None, (first, further)):
                assert f"def {name}(" in source, f"{module} has no {name}"
