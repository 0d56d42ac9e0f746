"""What differs between model families when transformers loads them without torchvision.

`AutoProcessor` is right where it works. The processors of the Qwen-VL families, of InternVL and of
SmolVLM insist on a video processor, which needs torchvision, and then fail or come back as a bare
tokenizer; `PictureProcessor` is the image half of them. Left out: video, and families whose weights
are not in transformers' own form (remote code is never run).
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tierwise.core.errors import DataError

_QWEN = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})


class PictureProcessor:
    """Tokenizer, image processor and chat template of a model, without video.

    Args:
        tokenizer: Must know `image_token`.
        image_processor: Makes pixel values of pictures.
        image_token: What stands for a picture in the chat template.
        expand: Image processor's output -> the text that each picture's token becomes.
        keep: Which of the image processor's outputs the model takes.
        token_types: Whether the model wants to be told which tokens are image tokens.
        nested: Whether the image processor takes a list of pictures a prompt.
        settings: Further arguments of the image processor.
    """

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        *,
        image_token: str,
        expand: Callable[[Mapping[str, Any]], list[str]],
        keep: Sequence[str],
        token_types: bool,
        nested: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.chat_template = tokenizer.chat_template
        self._image_token = image_token
        self._expand, self._keep, self._token_types = expand, keep, token_types
        self._nested, self._settings = nested, dict(settings or {})

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what `load_processor` reads: tokenizer, chat template and image processor."""
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)

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
        """Return model inputs; each picture's token becomes as many as the picture takes."""
        pictures = [picture for row in images or () for picture in row]
        extra: dict[str, torch.Tensor] = {}
        pieces: list[str] = []
        if pictures:
            patches = self.image_processor(
                images=[[picture] for picture in pictures] if self._nested else pictures,
                return_tensors=return_tensors,
                **self._settings,
            )
            extra = {name: patches[name] for name in self._keep}
            pieces = self._expand(patches)
        left = iter(pieces)
        expanded = []
        for prompt in text:
            first, *rest = prompt.split(self._image_token)
            expanded.append(first + "".join(next(left) + part for part in rest))
        batch = self.tokenizer(expanded, return_tensors=return_tensors, padding=padding)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        if self._token_types:
            image_id = self.tokenizer.convert_tokens_to_ids(self._image_token)
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
        if config.model_type == "internvl":
            return _load_internvl(kit, folder_or_id, config, local_only=local_only)
        if config.model_type == "smolvlm":
            return _load_smolvlm(kit, folder_or_id, config, local_only=local_only)
        processor = kit.AutoProcessor.from_pretrained(folder_or_id, local_files_only=local_only)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder_or_id} has no processor that can be loaded: {reason}") from error
    if not hasattr(processor, "image_processor"):
        raise DataError(f"{folder_or_id} has a tokenizer but no image processor")
    return processor


def _load_qwen(kit: Any, folder_or_id: str, *, local_only: bool) -> PictureProcessor:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image_kind: Any = Qwen2VLImageProcessorPil
    images = image_kind.from_pretrained(folder_or_id, local_files_only=local_only)
    token = "<|image_pad|>"

    def expand(patches: Mapping[str, Any]) -> list[str]:
        merged = images.merge_size**2
        return [token * (int(grid.prod()) // merged) for grid in patches["image_grid_thw"]]

    return PictureProcessor(
        _load_tokenizer(kit, folder_or_id, local_only=local_only),
        images,
        image_token=token,
        expand=expand,
        keep=("pixel_values", "image_grid_thw"),
        token_types=True,
    )


def _load_internvl(
    kit: Any, folder_or_id: str, config: Any, *, local_only: bool
) -> PictureProcessor:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    image_kind: Any = GotOcr2ImageProcessorPil
    tokenizer = _load_tokenizer(kit, folder_or_id, local_only=local_only)
    token = tokenizer.convert_ids_to_tokens(config.image_token_id)

    def expand(patches: Mapping[str, Any]) -> list[str]:
        start, end = "<img>", "</img>"
        each = token * config.image_seq_length
        return [f"{start}{each * int(number)}{end}" for number in patches["num_patches"]]

    return PictureProcessor(
        tokenizer,
        image_kind.from_pretrained(folder_or_id, local_files_only=local_only),
        image_token=token,
        expand=expand,
        keep=("pixel_values",),
        token_types=False,
    )


def _load_smolvlm(
    kit: Any, folder_or_id: str, config: Any, *, local_only: bool
) -> PictureProcessor:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    image_kind: Any = SmolVLMImageProcessorPil
    tokenizer = _load_tokenizer(kit, folder_or_id, local_only=local_only)
    token = tokenizer.convert_ids_to_tokens(config.image_token_id)
    vision = config.vision_config
    each = token * ((vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2)
    around = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
    whole = getattr(tokenizer, "global_image_token", "<global-img>")

    def expand(patches: Mapping[str, Any]) -> list[str]:
        pieces = []
        for (rows,), (columns,) in zip(patches["rows"], patches["cols"], strict=True):
            tiles = [
                "".join(
                    f"{around}<row_{row + 1}_col_{column + 1}>{each}"
                    for column in range(int(columns))
                )
                for row in range(int(rows))
            ]
            lead = "".join(f"{line}\n" for line in tiles) + "\n" if tiles else ""
            pieces.append(f"{lead}{around}{whole}{each}{around}")
        return pieces

    return PictureProcessor(
        tokenizer,
        image_kind.from_pretrained(folder_or_id, local_files_only=local_only),
        image_token=token,
        expand=expand,
        keep=("pixel_values", "pixel_attention_mask"),
        token_types=False,
        nested=True,
        settings={"return_row_col_info": True},
    )


def _load_tokenizer(kit: Any, folder_or_id: str, *, local_only: bool) -> Any:
    """Return a tokenizer, with the chat template that older folders keep in a file of its own."""
    from transformers.utils.hub import cached_file

    tokenizer = kit.AutoTokenizer.from_pretrained(folder_or_id, local_files_only=local_only)
    if tokenizer.chat_template is None:
        older: Any = cached_file
        found = older(
            folder_or_id,
            "chat_template.json",
            local_files_only=local_only,
            _raise_exceptions_for_missing_entries=False,
        )
        if found is not None:
            text = Path(found).read_text(encoding="utf-8")
            tokenizer.chat_template = json.loads(text)["chat_template"]
    return tokenizer
