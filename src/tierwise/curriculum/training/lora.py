"""Low-rank adapters: train two thin matrices beside each linear layer instead of the layer.

    model --attach--> the same model, its weights frozen, an adapter beside them --train--> adapter
      ^                                                                                       |
      +------------------------------------ merge <-------------------------------------------+

The layers are peft's; what is added is what a run needs: first values that depend on the seed
alone, drop-out in the passes that are trained only, and a merged model that needs no peft. Each
stage has an adapter of its own, merged when the stage is done: the model without the adapter is
then what the stage began with, which is what KL is measured from.

Left out: quantised base weights, other kinds of adapters, several adapters at a time.

Source: E. Hu et al., "LoRA", 2021, https://arxiv.org/abs/2106.09685 (section 4.1).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierwise.core.errors import ConfigError, StateError
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.models import LocalModel

ADAPTER_NAME = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """An adapter.

    Attributes:
        rank: Inner width of each pair of matrices.
        alpha: Their product is scaled by alpha / rank.
        dropout: Of what enters the adapter, in the passes that are trained; sampling, the KL
            reference and evaluation have none.
        target_modules: Ends of the names of the layers that get one; `all-linear` is every linear
            layer but the output layer, the vision tower included.

    Source: all linear layers: T. Dettmers et al., "QLoRA", 2023, https://arxiv.org/abs/2305.14314
    (section 4). Rank 16 and a scale of 1 are our choice.
    """

    rank: int = 16
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = (ALL_LINEAR,)

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise ConfigError("lora.rank must be 1 or more, lora.alpha above 0")
        if not 0 <= self.dropout < 1:
            raise ConfigError("lora.dropout must be 0 or more and below 1")
        if not self.target_modules:
            raise ConfigError(
                "lora.target_modules is empty", hint=f'leave it out for "{ALL_LINEAR}"'
            )


def attach_adapter(
    model: LocalModel, config: LoraConfig, *, seed: int, exclude: Sequence[str] = ()
) -> None:
    """Freeze a model's weights and put an adapter beside them, in place; it changes nothing yet.

    Args:
        model: The model; `model.adapter` is set.
        config: The adapter.
        seed: Draws its first values; the global generator is left as it was.
        exclude: Layers with one of these parts in their name get none.

    Raises:
        ConfigError: A target is the name of no linear layer, or nothing is left to train.
        StateError: The model has one already.
    """
    if model.adapter is not None:
        raise StateError("the model has an adapter already", hint="merge it first")
    import peft

    from tierwise.curriculum.families import quiet_transformers

    kit: Any = peft
    names = [name for name, _ in model.model.named_modules()]
    targets = config.target_modules
    if targets != (ALL_LINEAR,):
        for target in targets:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                raise ConfigError(
                    f"lora.target_modules: no layer is called {target!r}",
                    hint=f"such as {', '.join(_linear_names(model.model)[:9])}",
                )
    parts = "|".join(re.escape(part) for part in exclude)
    settings = kit.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
        exclude_modules=f".*({parts}).*" if parts else None,
    )
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.default_generator.manual_seed(key_seed("adapter", seed) % 2**63)
            model.adapter = kit.get_peft_model(model.model, settings)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"lora: no adapter can be put into this model: {reason}") from error
    model.model.eval()


def merge_adapter(model: LocalModel) -> None:
    """Add what the adapter has learnt to the weights and take it away, in place.

    The weights stay frozen (`requires_grad` is False).
    """
    if model.adapter is not None:
        model.adapter.merge_and_unload(progressbar=False)
        model.adapter = None
        if hasattr(model.model, "peft_config"):
            del model.model.peft_config  # else the next one would warn of a second adapter


@contextmanager
def without_adapter(model: LocalModel) -> Iterator[None]:
    """Run the block with the model as it was before the adapter came."""
    with model.adapter.disable_adapter():
        yield


@contextmanager
def adapter_dropout(model: LocalModel) -> Iterator[None]:
    """Run the block with the adapter's drop-out on; nothing else leaves evaluation mode."""
    layers = [] if model.adapter is None else [
        module
        for name, module in model.model.named_modules()
        if "lora_dropout" in name and isinstance(module, torch.nn.Dropout)
    ]  # fmt: skip
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()


def adapter_settings(adapter: Any) -> dict[str, float]:
    """Return what of an adapter's configuration its tensors do not show, to tell runs apart."""
    (config,) = adapter.peft_config.values()
    return {"rank": config.r, "alpha": config.lora_alpha, "dropout": config.lora_dropout}


def save_adapter(adapter: Any, folder: Path) -> None:
    """Write an adapter in peft's own layout, so that `PeftModel.from_pretrained` reads it."""
    # "auto" would ask the hub whether the vocabulary of the starting model was another
    adapter.save_pretrained(folder, save_embedding_layers=False)


@torch.no_grad()
def load_adapter(adapter: Any, folder: Path) -> None:
    """Copy a saved adapter's tensors into a live one of the same shape, all or none.

    Raises:
        StateError: Tensor names or shapes differ.
    """
    import peft
    from safetensors.torch import load_file

    kit: Any = peft
    stored = load_file(folder / ADAPTER_NAME)
    live = kit.get_peft_model_state_dict(adapter, save_embedding_layers=False)
    differing = sorted(
        name
        for name in live.keys() | stored.keys()
        if name not in live or name not in stored or live[name].shape != stored[name].shape
    )
    if differing:
        raise StateError(
            f"{folder} is another adapter: {len(differing)} tensors differ, first {differing[0]}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the base weights are not in the file
        kit.set_peft_model_state_dict(adapter, stored)


def _linear_names(module: torch.nn.Module) -> list[str]:
    found = [name for name, one in module.named_modules() if isinstance(one, torch.nn.Linear)]
    return sorted({name.rsplit(".", 1)[-1] for name in found})
