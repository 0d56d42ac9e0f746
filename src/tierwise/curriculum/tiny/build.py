"""Builds the tiny vision-language model, and loads the one that ships with the package.

The model is a standard LLaVA (CLIP vision tower, two-layer projector, Qwen2 decoder) made
small, so that everything which works on it works on a large one: ``from_pretrained``,
``generate`` with a KV cache, eager attention maps, chat template, processor.

    image 48x48 -> patches -> CLIP encoder -> projector -+
                                                         +-> Qwen2 decoder -> "3 + 5 = 8"
    question -> word tokens ------------------------------+

Left out: anything trained (see ``train``), and torchvision, which the ordinary image
processors of transformers want; the PIL one is used.

Source: H. Liu et al., "Visual Instruction Tuning", 2023, https://arxiv.org/abs/2304.08485,
for the shape of the model. Departure: trained from scratch as a whole, no frozen parts.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from tierwise.core.errors import MissingFileError
from tierwise.core.records import write_whole
from tierwise.curriculum.tiny import tasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import (
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

CARD_NAME = "model_card.json"

PAD, UNKNOWN, END, USER, ANSWER, IMAGE = "<pad>", "<unk>", "<eos>", "<user>", "<ans>", "<image>"
SPECIAL_TOKENS = (PAD, UNKNOWN, END, USER, ANSWER, IMAGE)

# A user turn is <user>, its parts in the order given, <ans>; an answer is closed by <eos>.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<eos>' }}"
    "{% else %}{{ '<user>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if not loop.last %}{{ '<ans>' }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<ans>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Sizes of the tiny model; the defaults are those of the shipped weights."""

    image_side: int = tasks.IMAGE_SIDE
    patch_side: int = 12
    vision_width: int = 128
    vision_layers: int = 2
    vision_heads: int = 4
    width: int = 96
    layers: int = 4
    heads: int = 4
    mlp_width: int = 288
    max_positions: int = 512
    initial_std: float = 0.05


def vocabulary() -> tuple[str, ...]:
    """Return every word the model knows, special tokens first, then 0-18."""
    numbers = (str(number) for number in range(tasks.MAX_ANSWER + 1))
    shapes = (*tasks.SHAPES, "shape", *(f"{shape}s" for shape in (*tasks.SHAPES, "shape")))
    words = (
        *("how", "many", "are", "there", "?", "what", "is", "the", "left", "right", "larger"),
        *("digit", "digits", "sum", "of", "value", "bar", "highest", "minus"),
        *("note", "says", ":", "+", "-", "="),
    )
    return (*SPECIAL_TOKENS, *numbers, *words, *tasks.COLOURS, *shapes, *tasks.BAR_NAMES)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer: lower-cased, split at blanks and around punctuation."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: place for place, word in enumerate(vocabulary())}
    core: Any = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        model_max_length=TinyConfig().max_positions,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


def build_processor(config: TinyConfig) -> LlavaProcessor:
    """Return the processor: image to a square in [-1, 1], question to word tokens."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    side = {"height": config.image_side, "width": config.image_side}
    images = CLIPImageProcessorPil(
        size=side,
        do_center_crop=False,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    make: Any = LlavaProcessor
    processor: LlavaProcessor = make(
        image_processor=images,
        tokenizer=build_tokenizer(),
        patch_size=config.patch_side,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )
    return processor


def num_image_tokens(config: TinyConfig) -> int:
    """Return how many tokens one image takes in the prompt."""
    return (config.image_side // config.patch_side) ** 2


def build_model(config: TinyConfig, *, seed: int) -> LlavaForConditionalGeneration:
    """Return an untrained model in fp32; the same seed gives the same weights."""
    from transformers import (
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        Qwen2Config,
    )

    token_id = {word: place for place, word in enumerate(vocabulary())}
    vision = CLIPVisionConfig(
        hidden_size=config.vision_width,
        intermediate_size=2 * config.vision_width,
        num_hidden_layers=config.vision_layers,
        num_attention_heads=config.vision_heads,
        image_size=config.image_side,
        patch_size=config.patch_side,
        projection_dim=config.vision_width,
    )
    text = Qwen2Config(
        vocab_size=len(token_id),
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.max_positions,
        initializer_range=config.initial_std,
        tie_word_embeddings=True,
        pad_token_id=token_id[PAD],
        eos_token_id=token_id[END],
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=token_id[IMAGE],
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
            image_seq_length=num_image_tokens(config),
            tie_word_embeddings=True,
        )
    )
    return model


def prompt(question: str) -> str:
    """Return the prompt of one question about one image, as the chat template writes it.

    >>> prompt("what is the left digit ?")
    '<user><image>what is the left digit ?<ans>'
    """
    return f"{USER}{IMAGE}{question}{ANSWER}"


def tiny_model_path() -> Path:
    """Return the folder of the shipped model: weights, processor, tokenizer, model card."""
    return Path(str(files("tierwise.curriculum.tiny"))) / "weights"


def load_tiny(
    folder: str | Path | None = None,
) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """Return (model in evaluation mode, processor) from a folder, without network.

    Args:
        folder: A folder written by ``save_tiny`` or ``save_pretrained``; the shipped one by
            default.

    Raises:
        MissingFileError: The folder holds no model.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    models: Any = AutoModelForImageTextToText
    processors: Any = AutoProcessor
    path = Path(folder) if folder is not None else tiny_model_path()
    if not (path / "config.json").is_file():
        raise MissingFileError(
            f"no model in {path}", hint="run make model, or name a folder that holds one"
        )
    with _no_bars():
        model = models.from_pretrained(path, local_files_only=True).eval()
        processor = processors.from_pretrained(path, local_files_only=True)
    return model, processor


def save_tiny(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    folder: Path,
    card: Mapping[str, object],
) -> None:
    """Write model, processor and ``model_card.json`` into a folder, each file whole.

    Everything is written beside the folder first, so a run that fails leaves it as it was;
    other files in the folder stay. The card comes last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        with _no_bars():
            model.save_pretrained(name)
            processor.save_pretrained(name)
        for path in sorted(Path(name).iterdir()):
            path.chmod(0o644)
            path.replace(folder / path.name)
    write_whole(folder / CARD_NAME, json.dumps(card, indent=2, sort_keys=True) + "\n")


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the terminal, and leave its setting as it was."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
