"""What a run leaves behind: config.toml, record.jsonl, manifest.json; and whole-file writes.

Every event is one JSON line. Whatever may differ between two runs of the same config and seed
(clock times, durations, host facts) lives under the key `timing`, so that the rest of the file
is the same byte for byte. Left out: metrics servers; a record is a file. See
docs/formats/run.md.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tierwise.core.errors import DataError, MissingFileError, StorageFullError

RECORD_NAME = "record.jsonl"


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader sees the old content or all of the new, never a part.

    Raises:
        StorageFullError: No space; the old file is untouched.
    """
    payload = data.encode("utf-8") if isinstance(data, str) else data
    with whole_file(path) as temporary:
        temporary.write_bytes(payload)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on a clean exit it is synced and renamed to `path`.

    On any exception the temporary file is removed and `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    short = os.fsdecode(os.fsencode(path.name)[:200])  # a name may have 255 bytes, not more
    temporary = path.with_name(f".{short}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(f"no space left while writing {path}") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each non-blank line of a JSON Lines file.

    Raises:
        MissingFileError: The file does not exist.
        DataError: A line is not one JSON object; the message names file and line.
    """
    try:
        stream = path.open(encoding="utf-8")
    except FileNotFoundError as error:
        raise MissingFileError(f"no file {path}") from error
    with stream:
        number = 0
        try:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise DataError(f"{path}:{number}: not a JSON object")
                    yield number, row
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON: {error.msg}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number + 1}: not UTF-8 text") from error


class RunRecord:
    """The event log of one run, appended line by line and synced, so a crash loses no event.

    Args:
        folder: The run's directory; made if absent. Events go to `record.jsonl` in it.
        clock: Returns seconds since the epoch; only ever seen under `timing`.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RECORD_NAME
        self._clock = clock

    def event(
        self, name: str, *, timing: Mapping[str, float | str] | None = None, **values: object
    ) -> None:
        """Append one event; `values` must be the same for the same config and seed."""
        stamp = datetime.datetime.fromtimestamp(self._clock(), tz=datetime.UTC)
        when = {"time": stamp.isoformat(timespec="milliseconds"), **(timing or {})}
        line = json.dumps({"event": name, **values, "timing": when}, allow_nan=False)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode("utf-8") + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def events(self) -> list[dict[str, Any]]:
        """Return the events so far; a torn last line (a crash while writing) is left out."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def truncate(self, num_events: int) -> None:
        """Keep the first `num_events` events, for a run that resumes before later ones."""
        lines = [json.dumps(event) + "\n" for event in self.events()[:num_events]]
        write_whole(self.path, "".join(lines))


def write_manifest(
    folder: Path,
    *,
    seed: int,
    versions: Mapping[str, str],
    commit: str | None,
    inputs: Mapping[str, str],
) -> None:
    """Write `manifest.json`: what ran, from which commit, on what, with which seed and inputs.

    Args:
        folder: The run's directory.
        seed: The run's seed.
        versions: Package name -> version.
        commit: The source commit, or None outside a checkout.
        inputs: Name -> SHA-256 of each input.
    """
    manifest = {
        "seed": seed,
        "commit": commit,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "device": "cpu",
        "versions": dict(sorted(versions.items())),
        "inputs_sha256": dict(sorted(inputs.items())),
    }
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
