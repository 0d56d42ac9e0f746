"""A stage's steps as TensorBoard event files, beside the record that holds the same numbers.

    {"reward": 0.5, "reward_by_stratum": {"hard": 0.2}} --> reward, reward_by_stratum/hard

A run that goes on opens another file and marks in it the first step it will write, so that a
reader drops what the stopped run had written from there on. Numbers are 32-bit floats there; the
record is exact. Left out: text, pictures, histograms.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tierwise.core.extras import require_extra


class Curves:
    """Event files in a folder; nothing is opened before the first step.

    Args:
        folder: Where they go; `tensorboard --logdir` takes it or any folder above.
        first_step: Whatever earlier files hold from this step on is void.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        require_extra("tensorboard")
        self._folder, self._first_step = folder, first_step
        self._writer: Any = None

    def note(self, step: int, values: Mapping[str, Any], *, time_s: float) -> None:
        """Write a step's numbers and flush them; `time_s` is in seconds since the epoch."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            _wait_for_a_later_name(self._folder)
            make: Any = SummaryWriter
            self._writer = make(str(self._folder), purge_step=self._first_step)
        for tag, value in _scalars(values, ""):
            self._writer.add_scalar(tag, value, step, walltime=time_s)
        self._writer.flush()

    def close(self) -> None:
        """Close the file, if one was opened."""
        if self._writer is not None:
            self._writer.close()


def _scalars(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


def _wait_for_a_later_name(folder: Path) -> None:
    """Return once a new file's name sorts after the others': readers take files in that order."""
    seconds = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    last = max((int(text) for text in seconds if text.isdigit()), default=0)
    if last - time.time() < 1:  # names hold whole seconds; a clock set back is not waited for
        while int(time.time()) <= last:
            time.sleep(0.05)
