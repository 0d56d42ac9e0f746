"""The error tree, and the exit code each leaf gives the command line.

```
TierwiseError            1   root; carries exit_code and hint
|- UsageError            2   (ValueError)        an argument that makes no sense
|- MissingExtraError     3   (ImportError)       an optional dependency is not installed
|- ConfigError           4   (ValueError)        TOML: syntax, unknown key, wrong type, out of range
|- DataError             5   (ValueError)        a data file is malformed: JSONL, CSV, image, disc
|- MissingFileError      6   (FileNotFoundError) a named file or folder is not there
|- StorageFullError      7   (OSError)           no space left where something had to be written
|- AccessError           8   (PermissionError)   the system refuses: file modes, FUSE
|- IntegrityError        9   (RuntimeError)      bytes differ from their hash, beyond repair
|- StateError           10   (RuntimeError)      right request, wrong moment: locked, sealed
`- TrainingError        11   (RuntimeError)      training cannot go on: NaN loss, empty stratum
```

130 is an interrupted run (Ctrl-C, SIGTERM) and 70 a defect of tierwise itself; neither is raised
from here. Each leaf also inherits the standard class it refines, so library callers can catch
what they already know. Left out: warnings, which go through `warnings` and `logging`.
"""

from __future__ import annotations

import errno
from typing import ClassVar

EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 70


class TierwiseError(Exception):
    """Something a user can act on, said in one sentence.

    Args:
        message: One sentence: what is wrong and where (file, line, key).
        hint: What to do about it, or None.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the sentence, without the hint."""
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the hint when an error crosses a process boundary."""
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[TierwiseError], message: str, hint: str | None) -> TierwiseError:
    return kind(message, hint=hint)


class UsageError(TierwiseError, ValueError):
    """Raised when an argument or a combination of arguments makes no sense; nothing was done."""

    exit_code = 2


class MissingExtraError(TierwiseError, ImportError):
    """Raised when a capability's optional dependencies are absent; nothing was done."""

    exit_code = 3


class ConfigError(TierwiseError, ValueError):
    """Raised while reading a configuration, before anything is written."""

    exit_code = 4


class DataError(TierwiseError, ValueError):
    """Raised for a malformed row, image or disc; readers that can skip rows say so."""

    exit_code = 5


class MissingFileError(TierwiseError, FileNotFoundError):
    """Raised when a named file or folder does not exist; nothing was done."""

    exit_code = 6


class StorageFullError(TierwiseError, OSError):
    """Raised when a write found no space; the target is as it was, the run can be resumed."""

    exit_code = 7

    def __init__(
        self, message: str, *, hint: str | None = "free some space and run it again"
    ) -> None:
        super().__init__(message, hint=hint)
        self.errno = errno.ENOSPC  # for callers that only know OSError, such as a file system


class AccessError(TierwiseError, PermissionError):
    """Raised when the system refuses an operation; nothing was done."""

    exit_code = 8


class IntegrityError(TierwiseError, RuntimeError):
    """Raised when bytes are not what their hash says and no redundancy is left to mend them."""

    exit_code = 9


class StateError(TierwiseError, RuntimeError):
    """Raised for a request that the present state forbids; try again after the named change."""

    exit_code = 10


class TrainingError(TierwiseError, RuntimeError):
    """Raised when training cannot go on; the last good checkpoint is kept."""

    exit_code = 11
