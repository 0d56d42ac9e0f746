"""What every bench shares: repeated timing of alternatives in turn, and the result file.

A bench compares alternatives inside one run, in turn (A B A B ...), so that a drifting machine
hurts both alike; it reports ratios. `write_results` puts them in
`bench/results/SUBJECT_MACHINE_YYYY-MM.json`, from which `bench/to_markdown.py` makes
BENCHMARKS.md. Left out: pass or fail; a bench never judges.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure: the median of `num_runs` with its range."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    num_runs: int
    note: str = ""


def time_in_turn(
    alternatives: Mapping[str, Callable[[], object]], *, num_runs: int = 7, num_warmups: int = 1
) -> dict[str, list[float]]:
    """Return the wall seconds of each alternative, measured in turn `num_runs` times."""
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for run in range(num_warmups + num_runs):
        for name, function in alternatives.items():
            start = time.perf_counter()
            function()
            if run >= num_warmups:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def row_of(name: str, values: Sequence[float], *, unit: str, note: str = "") -> Row:
    """Return the row of a list of measured values."""
    return Row(
        name=name,
        unit=unit,
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        num_runs=len(values),
        note=note,
    )


def ratio_row(name: str, over: Sequence[float], under: Sequence[float], note: str = "") -> Row:
    """Return the row of run-by-run ratios `over / under` of two alternatives timed in turn."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return row_of(name, ratios, unit="ratio", note=note)


def machine_name() -> str:
    """Return what identifies this kind of machine: architecture, cores, processor family."""
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    words = "".join(c if c.isalnum() else "-" for c in model.lower()).strip("-")
    return f"{platform.machine()}-{os.cpu_count()}cores-{words}"


def write_results(
    subject: str, rows: Sequence[Row], *, config: Mapping[str, object], packages: Sequence[str]
) -> Path:
    """Print the rows and write them with versions, commit, date and load; return the path."""
    now = datetime.datetime.now(tz=datetime.UTC)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "subject": subject,
        "date": now.date().isoformat(),
        "machine": machine_name(),
        "load_1min": round(os.getloadavg()[0], 2),
        "commit": commit,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "config": dict(config),
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{subject}_{machine_name()}_{now:%Y-%m}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    for row in rows:
        print(f"{row.name:<56} {row.median:>10.4g} {row.unit:<10} [{row.low:.4g}, {row.high:.4g}]")
    return path
