"""The documents and the note on every disc say what the discs really hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tierwise.archive.discs import DiscFault, find_place, open_image
from tierwise.archive.erasure import coefficient

FORMATS = Path(__file__).parents[3] / "docs" / "formats"


def read(path: Path, name: str) -> bytes:
    with open_image(path) as (pread, _):
        place = find_place(pread, name)
        assert place is not None
        return pread(*place)


def document(name: str) -> str:
    return (FORMATS / name).read_text(encoding="utf-8")


def test_every_field_of_a_slice_is_documented(exhibit: Any) -> None:
    rows = [json.loads(line) for line in read(exhibit.paths[0], "CATALOGUE.jsonl").splitlines()]
    fields = {key for row in rows if row["record"] in ("image", "entry", "end") for key in row}
    named = set(re.findall(r"`([a-z_0-9]+)`", document("image.md")))
    named |= set(re.findall(r'"([a-z_]+)":', document("image.md")))
    assert fields - named == set()
    note = read(exhibit.paths[0], "FORMAT.txt").decode("ascii")
    entry = next(row for row in rows if row["record"] == "entry" and "piece" in row)
    assert [key for key in (*entry, *entry["piece"]) if key not in note] == []


def test_every_field_of_an_array_is_documented(exhibit: Any) -> None:
    data, parity = (json.loads(read(exhibit.paths[i], "ARRAY.json")) for i in (0, 3))
    named = set(re.findall(r"`([a-z_0-9]+)`", document("disc-array.md")))
    assert {*data, *parity, *parity["members"][0]} - named == set()
    assert parity["code"] in document("disc-array.md")


def test_every_fault_is_documented() -> None:
    text = document("image.md")
    assert [fault for fault in DiscFault if f"| `{fault}` |" not in text] == []


def test_the_coefficients_printed_are_those_computed() -> None:
    rows = re.findall(r"^\| ([0-3]) \| ((?:[0-9a-f]{2} \| ){11}[0-9a-f]{2}) \|$",
                      document("parity.md"), re.MULTILINE)  # fmt: skip
    assert len(rows) == 4
    for row, cells in rows:
        printed = [int(cell, 16) for cell in cells.split(" | ")]
        assert printed == [coefficient(int(row), column) for column in range(12)]


def test_all_files_on_a_disc_are_documented(exhibit: Any) -> None:
    for path in (exhibit.paths[0], exhibit.paths[3]):
        manifest = read(path, "MANIFEST.sha256").decode("utf-8")
        names = {line[66:] for line in manifest.splitlines() if not line[66:].startswith("data/")}
        note = read(path, "FORMAT.txt").decode("ascii")
        assert [name for name in names if name not in note] == []
        assert [name for name in names if f"`{name}`" not in document("image.md")] == []
