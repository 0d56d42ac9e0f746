"""Does everything agree? `fsck` compares catalogue and buffer, `verify` reads every byte.

Neither changes anything; `scrub` and `repair` do. Left out: the discs' own structure, which
`discs.check_disc` knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.shelf import Shelf
from tierwise.archive.store import Store
from tierwise.core.progress import SILENT, Progress
from tierwise.core.records import hash_file

_QUESTIONS = (
    (
        "name {0} leads to no inode",
        "SELECT name FROM names WHERE ino NOT IN (SELECT ino FROM inodes)",
    ),
    (
        "inode {0} has {1} names and says {2}",
        "SELECT i.ino, (SELECT COUNT(*) FROM names n WHERE n.ino = i.ino), nlink FROM inodes i"
        " WHERE mode & 61440 <> 16384 AND nlink <> (SELECT COUNT(*) FROM names n"
        " WHERE n.ino = i.ino)",
    ),
    (
        "folder {0} says {1} links",
        "SELECT i.ino, nlink FROM inodes i WHERE mode & 61440 = 16384 AND nlink > 0 AND nlink <>"
        " 2 + (SELECT COUNT(*) FROM names n JOIN inodes c ON c.ino = n.ino WHERE n.parent = i.ino"
        " AND c.mode & 61440 = 16384)",
    ),
    (
        "version {0} is neither in the buffer nor on an image",
        "SELECT version FROM versions v WHERE resident = 0 AND size > COALESCE((SELECT SUM(length)"
        " FROM extents e WHERE e.version = v.version), 0)",
    ),
    (
        "image {0} is sealed and nowhere",
        "SELECT label FROM images WHERE state = 'sealed' AND buffered = 0",
    ),
    (
        "image {0} has no good disc and no copy in the buffer",
        "SELECT label FROM images i WHERE state = 'burned' AND buffered = 0 AND NOT EXISTS"
        " (SELECT 1 FROM discs d WHERE d.image = i.image AND d.state = 'good')",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """How much was read, and what was not as it should be."""

    files: int
    images: int
    discs: int
    problems: tuple[str, ...]


def fsck(catalogue: Catalogue, store: Store, *, progress: Progress = SILENT) -> list[str]:
    """Return one sentence for each thing that does not fit; reads no bytes.

    Args:
        catalogue: The open catalogue.
        store: The buffer.
        progress: Counts questions to the catalogue and files in the buffer.
    """
    problems: list[str] = []
    resident = catalogue.all("SELECT version, size, open FROM versions WHERE resident > 0")
    with progress.task("fsck", len(_QUESTIONS) + len(resident)) as task:
        for text, sql in _QUESTIONS:
            problems += [text.format(*row) for row in catalogue.all(sql)]
            task.advance()
        for version, size, is_open in resident:
            problems += _check_resident(store, version, size, is_open=bool(is_open))
            task.advance()
    for (label,) in catalogue.all("SELECT label FROM images WHERE buffered = 1"):
        if not store.image_path(label).exists():
            problems.append(f"image {label} is not in the buffer")
    return problems


def _check_resident(store: Store, version: int, size: int, *, is_open: bool) -> list[str]:
    try:
        found = store.path(version).stat().st_size
    except FileNotFoundError:
        return [f"version {version} has no file in the buffer"]
    if found != size and not is_open:
        return [f"version {version} has {found} bytes in the buffer, not {size}"]
    return []


def verify(
    catalogue: Catalogue, store: Store, shelf: Shelf, *, progress: Progress = SILENT
) -> VerifyReport:
    """Read every sealed buffer copy, buffered image and disc, and compare hashes."""
    files = catalogue.all(
        "SELECT version, sha256 FROM versions WHERE resident > 0 AND sha256 IS NOT NULL"
        " AND state IN ('sealed', 'burned')"
    )
    images = catalogue.all("SELECT label, sha256 FROM images WHERE buffered = 1")
    discs = catalogue.all(
        "SELECT slot, label, size, sha256 FROM discs JOIN images USING (image)"
        " WHERE discs.state <> 'lost' ORDER BY slot"
    )
    problems = list(fsck(catalogue, store))
    with progress.task("verify", len(files) + len(images) + len(discs)) as task:
        for version, sha256 in files:
            path = store.path(version)
            if path.exists() and hash_file(path) != sha256:
                problems.append(f"version {version} is damaged in the buffer")
            task.advance()
        for label, sha256 in images:
            path = store.image_path(label)
            if path.exists() and hash_file(path) != sha256:
                problems.append(f"image {label} is damaged in the buffer")
            task.advance()
        for slot, label, size, sha256 in discs:
            fault = shelf.fault(slot, label, size, sha256)
            if fault:
                problems.append(f"disc {label} in slot {slot}: {fault}")
            task.advance()
    return VerifyReport(
        files=len(files), images=len(images), discs=len(discs), problems=tuple(problems)
    )
