"""Running out of memory, told alike on a GPU and on the CPU, and the one smaller try after it.

torch raises `OutOfMemoryError` for a GPU, and a plain `RuntimeError` of its allocator for the CPU.
Left out: a process that the system kills for its memory, which nothing inside it can catch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tierwise.core.errors import TrainingError

_CPU_ALLOCATOR = "DefaultCPUAllocator"


@contextmanager
def memory_told() -> Iterator[None]:
    """Run the block; memory that is not there is `torch.OutOfMemoryError`, wherever it was."""
    try:
        yield
    except MemoryError as error:
        raise torch.OutOfMemoryError("out of memory") from error
    except RuntimeError as error:
        if _CPU_ALLOCATOR not in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise torch.OutOfMemoryError("out of memory on the CPU") from error


def half_a_pass(size: int, *, halved_before: bool, unit: str, cause: Exception, hint: str) -> int:
    """Return half of what a pass held when there was no room for it; once a run.

    Args:
        size: How many it held.
        halved_before: Whether this is the second time.
        unit: What it held, such as `prompts`.
        cause: What torch raised.
        hint: What to set smaller.

    Raises:
        TrainingError: It is the second time, or one cannot be halved.
    """
    if halved_before or size == 1:
        raise TrainingError(f"out of memory with {size} {unit} a pass", hint=hint) from cause
    return size // 2
