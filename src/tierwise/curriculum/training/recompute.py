"""Activations made again in backward instead of kept: less memory for about a third more work.

The layers are those that transformers marks as fit for it; this switches them for the passes that
are trained and leaves the rest of the model in evaluation mode (transformers' own switch works in
training mode only, which would also turn on drop-out). A layer made again cannot share a prompt's
cache, so such passes run a prompt once a completion. Left out: keeping activations in host memory.

Source: T. Chen et al., "Training deep nets with sublinear memory cost", 2016,
https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tierwise.core.errors import ConfigError


@contextmanager
def recomputing(model: Any, *, enabled: bool) -> Iterator[None]:
    """Run forward and backward in the block with the layers' activations made again.

    Args:
        model: A transformers model in evaluation mode.
        enabled: False changes nothing.

    Raises:
        ConfigError: The model has no layers that can.
    """
    if not enabled:
        yield
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"{type(model).__name__} cannot recompute its layers",
            hint="set gradient_checkpointing = false",
        )
    _switch(model, on=True)
    layers = [one for one in model.modules() if getattr(one, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True  # of the layer itself, not of the drop-out inside
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        _switch(model, on=False)


def _switch(model: Any, *, on: bool) -> None:
    """Turn the recomputation of a transformers model on or off, under either of its names."""
    # renamed within transformers 5; the old name then warns
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if on:
        settings = {f"{kind}_checkpointing_kwargs": {"use_reentrant": False}}
        getattr(model, f"{kind}_checkpointing_enable")(**settings)
    else:
        getattr(model, f"{kind}_checkpointing_disable")()
