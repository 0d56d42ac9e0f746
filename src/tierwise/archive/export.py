"""Copying files out, hashes checked on the way; as a plain tree or as a BagIt bag.

Bytes come from the buffer, or are recalled as for any reader. A file with several names is copied
once for each; a bag holds regular files only, as it has no notion of links. Until all is copied a
file in the target, `.tierwise-export-unfinished`, says what is being exported; the same export run
again goes on there, and keeps what is right already. Left out: OCFL.

Source: RFC 8493 (The BagIt File Packaging Format 1.0).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.disc_names import escape_path
from tierwise.archive.recall import Recaller
from tierwise.archive.store import Store
from tierwise.core.errors import IntegrityError, StateError, UsageError
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import hash_file, whole_file, write_whole

_CHUNK_BYTES = 1 << 20
UNFINISHED = ".tierwise-export-unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was copied out."""

    target: str
    files: int
    bytes: int


def export_files(
    files: Sequence[tuple[bytes, int]],
    target: Path,
    *,
    catalogue: Catalogue,
    store: Store,
    recaller: Recaller,
    bagit: bool,
    others: Sequence[tuple[bytes, bytes | None]] = (),
    progress: Progress = SILENT,
) -> ExportReport:
    """Copy versions to files below a new folder.

    Args:
        files: (path, version) pairs.
        target: The folder; must not exist, be empty, or hold the same export unfinished.
        catalogue: The open catalogue.
        store: The buffer.
        recaller: Brings back what is only on disc.
        bagit: Write a bag.
        others: Folders as (path, None) and symbolic links as (path, target), to make as well.
        progress: Counts files.

    Raises:
        StateError: The target holds something.
        UsageError: A bag cannot have one of the names.
        IntegrityError: Bytes are beyond repair; the message says which. The target is left
            unfinished, without a bag declaration.
    """
    if bagit:
        _check_bag_names(files)
    _claim(target, [catalogue.value("SELECT value FROM meta WHERE key = 'archive_id'"), bagit,
                    *sorted((os.fsdecode(path), version) for path, version in files)])  # fmt: skip
    base = target / "data" if bagit else target
    base.mkdir(parents=True, exist_ok=True)
    for path, link in others:
        _make_other(base / os.fsdecode(path), link)
    lines, num_bytes = [], 0
    with progress.task("export", len(files)) as task:
        for path, version in sorted(files):
            out = base / os.fsdecode(path)
            done = _already(catalogue, version, out)
            if done is None:
                recaller.bring_back(version)
                done = _copy(catalogue, store, version, out)
            size, digest = done
            num_bytes += size
            lines.append(f"{digest}  data/{_bag_name(path)}\n")
            task.advance()
    if bagit:
        _declare(target, "".join(lines), num_bytes, len(files), catalogue.clock())
    (target / UNFINISHED).unlink()
    return ExportReport(target=str(target), files=len(files), bytes=num_bytes)


def _claim(target: Path, what: Sequence[object]) -> None:
    """Take a folder for an export, or the one where the same export was cut off."""
    text = hashlib.sha256(json.dumps(what).encode()).hexdigest() + "\n"
    if target.exists() and any(target.iterdir()):
        found = None
        with contextlib.suppress(OSError):
            found = (target / UNFINISHED).read_text(encoding="ascii", errors="replace")
        if found is None:
            raise StateError(f"{target} is not empty", hint="name a new folder")
        if found != text:
            raise StateError(
                f"{target} holds another export, unfinished, or the archive has changed since",
                hint="remove it or name a new folder",
            )
        for stray in target.rglob(".*.part"):
            stray.unlink()
    write_whole(target / UNFINISHED, text)


def _already(catalogue: Catalogue, version: int, path: Path) -> tuple[int, str] | None:
    """Return size and hash of a version that an earlier run copied whole."""
    expected = catalogue.value("SELECT sha256 FROM versions WHERE version = ?", version)
    if expected is None or not path.is_file() or hash_file(path) != expected:
        return None
    return path.stat().st_size, str(expected)


def _make_other(path: Path, link: bytes | None) -> None:
    if link is None:
        path.mkdir(parents=True, exist_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(os.fsdecode(link))


def _copy(catalogue: Catalogue, store: Store, version: int, path: Path) -> tuple[int, str]:
    """Copy one version and return its size and hash."""
    row = catalogue.one(
        "SELECT v.sha256, CASE WHEN i.version = v.version THEN i.mtime_ns ELSE v.mtime_ns END,"
        " COALESCE(i.mode & 511, 420) FROM versions v LEFT JOIN inodes i USING (ino)"
        " WHERE v.version = ?", version,
    )  # fmt: skip
    assert row is not None
    expected, mtime_ns, mode = row
    digest = hashlib.sha256()
    with whole_file(path) as temporary:
        with store.path(version).open("rb") as source, temporary.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
            size = sink.tell()
        if expected is not None and digest.hexdigest() != expected:
            raise IntegrityError(
                f"the buffer's copy of {path.name} is not what was sealed",
                hint="evict it and export again: tierwise archive evict",
            )
        temporary.chmod(mode)
        os.utime(temporary, ns=(mtime_ns, mtime_ns))
    return size, digest.hexdigest()


def _check_bag_names(files: Sequence[tuple[bytes, int]]) -> None:
    """Refuse names that no bag's manifest can hold: it is text, of UTF-8 (RFC 8493, 2.1.3)."""
    for path, _ in files:
        try:
            path.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{escape_path(path)} is not UTF-8, so it cannot be in a bag",
                hint="rename it, or export without --bagit",
            ) from error


def _bag_name(path: bytes) -> str:
    """Return a path as a manifest writes it: CR, LF and % are percent-encoded (RFC 8493, 2.1.3)."""
    text = os.fsdecode(path)
    for plain, code in (("%", "%25"), ("\n", "%0A"), ("\r", "%0D")):
        text = text.replace(plain, code)
    return text


def _declare(target: Path, manifest: str, num_bytes: int, num_files: int, now_ns: int) -> None:
    """Write the tag files; bagit.txt is last, so that an unfinished export is no bag."""
    day = datetime.datetime.fromtimestamp(now_ns / 1e9, tz=datetime.UTC).date().isoformat()
    tags = {
        "manifest-sha256.txt": os.fsencode(manifest),
        "bag-info.txt": (
            f"Bagging-Date: {day}\nPayload-Oxum: {num_bytes}.{num_files}\n"
            "Bag-Software-Agent: tierwise archive export\n"
        ).encode(),
        "bagit.txt": b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n",
    }
    digests = "".join(
        f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(tags.items())
    )
    write_whole(target / "tagmanifest-sha256.txt", digests)
    for name, data in tags.items():
        write_whole(target / name, data)
