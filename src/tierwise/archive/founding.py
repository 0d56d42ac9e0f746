"""Beginning an archive: its folder is claimed, then filled, then declared to be one.

The claim is a file, `init.unfinished`, made first and removed last. An init that was cut off in
between is begun anew by the next one, in any folder that holds the claim and nothing of anybody:
no content, no written disc, no file that an init does not make. Left out: what fills the folder,
which is `vault.Archive.init`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tierwise.archive.config import CONFIG_NAME
from tierwise.core.errors import StateError
from tierwise.core.records import write_whole

UNFINISHED = "init.unfinished"
_PARTS = ("metadata", "buffer")
_BLANK_LIBRARY = {"geometry.json", "state.json", "state.lock"}
_NOTE = "tierwise archive init has begun here and not ended; run it again.\n"


def claim(root: Path, library: str) -> None:
    """Claim a folder for a new archive, clearing what an init left that was cut off.

    Args:
        root: A folder that does not exist, is empty, or was claimed and not finished.
        library: Its disc library: a name in `root`, or the absolute path of another folder.

    Raises:
        StateError: There is an archive, or something else, already.
    """
    outside = Path(library) if Path(library).is_absolute() else None
    if (root / CONFIG_NAME).exists():
        raise StateError(f"{root} holds an archive already", hint="name another folder")
    if root.exists() and any(root.iterdir()):
        if not _is_unfinished(root, library):
            raise StateError(f"{root} holds something else already", hint="name another folder")
        for name in _PARTS if outside is not None else (*_PARTS, library):
            shutil.rmtree(root / name, ignore_errors=True)
    if outside is not None:
        _claim_library(outside, root)
    root.mkdir(parents=True, exist_ok=True)
    write_whole(root / UNFINISHED, _NOTE)


def declare_finished(root: Path) -> None:
    """Remove the claim: the archive's configuration is written."""
    (root / UNFINISHED).unlink(missing_ok=True)


def _is_unfinished(root: Path, library: str) -> bool:
    if not (root / UNFINISHED).is_file():
        return False
    files = (path for path in root.rglob("*") if not path.is_dir())
    return all(_init_makes(path.relative_to(root), library) for path in files)


def _claim_library(library: Path, root: Path) -> None:
    """Return if a folder beside the archive's can become its library.

    What an init left there that was cut off, a library without a disc, is removed file by file.

    Raises:
        StateError: It holds something else, or the archive.
    """
    if library.resolve() in (root.resolve(), *root.resolve().parents):
        raise StateError(f"{library} would hold the archive itself", hint="name another folder")
    if not library.exists():
        return
    found = list(library.iterdir())
    if (root / UNFINISHED).exists() and {path.name for path in found} <= _BLANK_LIBRARY:
        for path in found:
            path.unlink()
    elif found:
        raise StateError(f"{library} is not empty", hint="name a new folder for the library")


def _init_makes(path: Path, library: str) -> bool:
    """Return whether init makes a file of that path; never a content nor a disc.

    >>> [_init_makes(Path(p), "library") for p in ("metadata/catalogue.db", "buffer/files/00/1")]
    [True, False]
    """
    folder, name = path.parent.as_posix(), path.name
    if folder == ".":
        return name == UNFINISHED or (name.startswith(f".{CONFIG_NAME}.") and ".part" in name)
    return folder == library or (
        folder == "metadata" and name.startswith(("catalogue.db", "foreparts.db"))
    )
