"""Make BENCHMARKS.md from the result files; `--check` says whether it is up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
INTRODUCTION = """\
# Benchmarks

Made by `bench/to_markdown.py` from the files in bench/results; do not edit. Each table comes
from one run of one script on one machine; compare ratios, not times. The load average beside
the date says how quiet the machine was.
"""


def render() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if "rows" not in result or "subject" not in result:
            continue
        parts.append(_table(path, result))
    return "\n".join(parts)


def _table(path: Path, result: dict[str, object]) -> str:
    versions = result["versions"]
    assert isinstance(versions, dict)
    rows = result["rows"]
    assert isinstance(rows, list)
    lines = [
        f"## {result['subject']}",
        "",
        f"{result['machine']}, {result['date']}, load {result['load_1min']}, commit "
        f"{str(result['commit'])[:10]}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; file bench/results/{path.name}",
        "",
        "| figure | median | unit | min | max | n | note |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    lines += [
        f"| {row['name']} | {row['median']:.4g} | {row['unit']} | {row['low']:.4g} "
        f"| {row['high']:.4g} | {row['num_runs']} | {row['note']} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or with `--check` compare it; return the exit code."""
    page = ROOT / "BENCHMARKS.md"
    if "--check" in sys.argv[1:]:
        current = page.read_text() if page.exists() else ""
        if current != render():
            print("BENCHMARKS.md is stale; run: python bench/to_markdown.py")
            return 1
        return 0
    page.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
