"""What differs between model families when transformers loads them without torchvision.

`AutoProcessor` is right where it works. The processors of the Qwen-VL families insist on a video
processor, which needs torchvision, and then come back as a bare tokenizer; `QwenProcessor` is the
image half of them. Left out: video, and families whose weights are not in transformers' own form
(remote code is never run).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tierwise.core.errors import DataError

_QWEN = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})


class QwenProcessor:
    """Tokenizer, image processor and chat template of a Qwen-VL model, without video.

    Args:
        tokenizer: Must know `<|image_pad|>`.
        image_processor: Cuts a picture into patches and says how many.
        chat_template: Jinja text, or None for the tokenizer's.
    """

    image_token = "<|image_pad|>"

    def __init__(self, tokenizer: Any, image_processor: Any, chat_template: str | None) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.chat_template = chat_template or tokenizer.chat_template

    def apply_chat_template(
        self, messages: Sequence[Any], *, add_generation_prompt: bool = False
    ) -> str:
        """Return messages as prompt text."""
        text = self.tokenizer.apply_chat_template(
            list(messages),
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    def __call__(
        self,
        *,
        text: Sequence[str],
        images: Sequence[Sequence[Any]] | None = None,
        return_tensors: str = "pt",
        padding: bool = True,
    ) -> dict[str, torch.Tensor]:
        """Return model inputs; each image token of a prompt becomes one a merged patch."""
        pictures = [picture for row in images or () for picture in row]
        extra: dict[str, torch.Tensor] = {}
        counts: list[int] = []
        if pictures:
            patches = self.image_processor(images=pictures, return_tensors=return_tensors)
            extra = {name: patches[name] for name in ("pixel_values", "image_grid_thw")}
            merged = self.image_processor.merge_size**2
            counts = [int(grid.prod()) // merged for grid in extra["image_grid_thw"]]
        left = iter(counts)
        expanded = []
        for prompt in text:
            first, *rest = prompt.split(self.image_token)
            expanded.append(first + "".join(self.image_token * next(left) + part for part in rest))
        batch = self.tokenizer(expanded, return_tensors=return_tensors, padding=padding)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        image_id = self.tokenizer.convert_tokens_to_ids(self.image_token)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == image_id).to(torch.int64)
        return {**inputs, **extra}


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

    kit: Any = transformers
    try:
        config = kit.AutoConfig.from_pretrained(folder_or_id, local_files_only=local_only)
        if config.model_type in _QWEN:
            return _load_qwen(kit, folder_or_id, local_only=local_only)
        processor = kit.AutoProcessor.from_pretrained(folder_or_id, local_files_only=local_only)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder_or_id} has no processor that can be loaded: {reason}") from error
    if not hasattr(processor, "image_processor"):
        raise DataError(f"{folder_or_id} has a tokenizer but no image processor")
    return processor


def _load_qwen(kit: Any, folder_or_id: str, *, local_only: bool) -> QwenProcessor:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images: Any = Qwen2VLImageProcessorPil
    return QwenProcessor(
        kit.AutoTokenizer.from_pretrained(folder_or_id, local_files_only=local_only),
        images.from_pretrained(folder_or_id, local_files_only=local_only),
        None,
    )
