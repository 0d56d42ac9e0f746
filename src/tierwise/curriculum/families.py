"""What differs between model families when transformers loads them without torchvision.

`AutoProcessor` is right for most. Left out: families whose weights are not in transformers' own
form (remote code is never run).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from tierwise.core.errors import DataError


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own bars and messages off the terminal while a model is loaded."""
    from transformers import utils

    logging: Any = utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_processor(folder_or_id: str, *, local_only: bool) -> Any:
    """Return the processor of a model: its tokenizer, image processor and chat template.

    Raises:
        DataError: There is none, or it is a bare tokenizer.
    """
    import transformers

    auto: Any = transformers.AutoProcessor
    try:
        processor = auto.from_pretrained(folder_or_id, local_files_only=local_only)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder_or_id} has no processor that can be loaded: {reason}") from error
    if not hasattr(processor, "image_processor"):
        raise DataError(f"{folder_or_id} has a tokenizer but no image processor")
    return processor
