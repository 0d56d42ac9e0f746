"""Run pjdfstest on a real mount and count what it says, skipped and to-do apart.

    python tests/archive/fuse/run_pjdfstest.py DIR [--subject vault] [--only chmod,rename]

DIR is a built checkout of https://github.com/pjd/pjdfstest (`autoreconf -ifs && ./configure &&
make`), which stays outside this repository. Needs root and perl's `prove`. Subjects: `vault`, or
the mirror with `backing`, `cached` or `direct` files.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tierwise.archive.fuse import MountOptions, mounted_process
from tierwise.archive.fuse.mirror import InputOutput, Mirror
from tierwise.archive.operations import Operations
from tierwise.archive.vault import Archive, mountable

_LINE = re.compile(r"^(?P<not>not )?ok \d+(?:.*?# (?P<directive>SKIP|TODO))?", re.IGNORECASE)


def count(output: str) -> Counter[str]:
    """Return how many lines of TAP passed, failed, were skipped, or are to-do."""
    found: Counter[str] = Counter()
    for line in output.splitlines():
        if match := _LINE.match(line):
            outcome = "failed" if match["not"] else "passed"
            directive = (match["directive"] or "").lower()
            found[f"{directive} {outcome}".strip()] += 1
    return found


def subject_factory(subject: str, base: Path) -> Callable[[], Operations]:
    """Return what makes the file system to test, in a server's process."""
    if subject == "vault":
        root = base / "vault"
        with Archive.init(root, archive_id="f" * 32, disc_size_bytes=1 << 30, library_slots=20):
            return partial(mountable, root)
    (base / "source").mkdir()
    return partial(Mirror, base / "source", InputOutput(subject))


def run(suite: Path, subject: str, only: list[str]) -> tuple[Counter[str], str]:
    """Return the counts and the whole output of the suite on a mount."""
    with tempfile.TemporaryDirectory(prefix="tierwise-pjd-") as name:
        base = Path(name)
        base.chmod(0o755)
        (base / "mount").mkdir()
        options = MountOptions(name="pjd")
        factory = subject_factory(subject, base)
        with mounted_process(factory, base / "mount", options=options) as mount:
            (mount.path / "work").mkdir()
            paths = [suite / "tests" / part for part in only] or [suite / "tests"]
            done = subprocess.run(
                ["prove", "-v", "-r", *map(str, paths)],
                cwd=mount.path / "work",
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
    return count(done.stdout), done.stdout + done.stderr


def main() -> int:
    """Run, print the counts and every failure; return 1 if there was one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--subject", default="vault", choices=["vault", *InputOutput])
    parser.add_argument("--only", default="", help="folders of tests, by commas")
    arguments = parser.parse_args()
    only = [part for part in arguments.only.split(",") if part]
    counts, output = run(arguments.suite.resolve(), arguments.subject, only)
    test = ""
    for line in output.splitlines():
        if line.rstrip().endswith(" .. ") or ".t .." in line:
            test = line.split(" ..")[0]
        match = _LINE.match(line)
        if match and match["not"] and not match["directive"]:
            sys.stdout.write(f"{test}: {line}\n")
    sys.stdout.write(f"{arguments.subject}: {dict(sorted(counts.items()))}\n")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
