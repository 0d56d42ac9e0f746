"""CMAB, measured: the attention on picture and text tokens while the model writes its answer.

What is done with the sums is `balance`; here they are taken. Attention is read while it streams
past: for the duration of one teacher-forced pass the decoder runs on an attention function that
leaves the model's own (fused) attention as it is and asks the fused kernel once more for the rows
of interest, with the token sets as values: four sums a layer and token come out and no attention
map is made, so that, those sums apart, memory grows neither with the layers nor with the length of
the answer. The answer measured is the one that was judged (the released code measures a fresh one).

How heads are combined is not stated in the paper; they are averaged. Left out: visual sinks.

Source: Qi et al., https://arxiv.org/abs/2511.06722, section on cross-modality attention balance.

Shapes: B rows, H heads, Q queries, N keys, P prompt tokens, T generated tokens, L layers, S sets.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tierwise.core.errors import StateError
from tierwise.curriculum.difficulty.balance import Variant, balance_of
from tierwise.curriculum.models import Completions, LocalModel, Prompts, append_tokens
from tierwise.curriculum.samples import Sample

_NAME = "tierwise_streaming"
_CHUNK_ELEMENTS = 1 << 22  # 16 MiB of float32: the most a map takes where no kernel is fused
_IMAGE, _TEXT, _SINK, _QUESTION = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBalance:
    """The attention balance of one answer: rho-bar by variant, over `num_tokens` tokens."""

    ratios: Mapping[Variant, float]
    num_tokens: int


@dataclass(slots=True)
class _Stream:
    """Where sums go while the model runs: (B, T, S) by layer."""

    sets_BSN: Tensor
    first_query: int
    sums: dict[int, Tensor] = field(default_factory=dict)


_STREAM: ContextVar[_Stream | None] = ContextVar("tierwise_attention_stream", default=None)


@torch.no_grad()
def measure_balance(
    model: LocalModel, samples: Sequence[Sample], prompts: Prompts, completions: Completions
) -> list[AttentionBalance]:
    """Return the attention balance of each row's completion, in one pass over the batch.

    Args:
        model: The model that wrote the completions.
        samples: One a row.
        prompts: What the completions answer.
        completions: From `LocalModel.generate`, for instance greedy.

    Raises:
        StateError: This model's attention cannot be read.
    """
    sets_BSP = token_sets(model, samples, prompts)
    prompt_length = prompts.inputs["input_ids"].shape[1]
    inputs = append_tokens(  # the last token predicts nothing
        prompts, completions.token_ids_BT[:, :-1], completions.lengths_B
    ).inputs
    length = inputs["input_ids"].shape[1]
    sets_BSN = torch.nn.functional.pad(sets_BSP, (0, length - prompt_length)).float()
    stream = _Stream(sets_BSN=sets_BSN, first_query=prompt_length - 1)
    settings: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.model.forward).parameters:
        settings["logits_to_keep"] = 1  # they are not looked at: (B, N, vocabulary) saved
    with _streaming(model), _into(stream):
        model.model(**inputs, **settings)
    num_layers = text_config(model).num_hidden_layers
    if sorted(stream.sums) != list(range(num_layers)):
        raise StateError(
            f"the attention of {len(stream.sums)} of {num_layers} layers could be read",
            hint="attention balance needs a model whose every layer attends; leave it out "
            "(cmab = false)",
        )
    sums_LBTS = torch.stack([stream.sums[layer] for layer in range(num_layers)]).double()
    sizes_BS = sets_BSP.sum(2).double()
    return [
        _balances(sums_LBTS[:, row, : int(length)], sizes_BS[row])
        for row, length in enumerate(completions.lengths_B)
    ]


def _balances(sums_LTS: Tensor, sizes_S: Tensor) -> AttentionBalance:
    image_LT = sums_LTS[:, :, _IMAGE]
    texts = {
        Variant.SUM: sums_LTS[:, :, _TEXT],
        Variant.MEAN: sums_LTS[:, :, _TEXT] * (sizes_S[_IMAGE] / sizes_S[_TEXT]),
        Variant.SINK_MASKED: sums_LTS[:, :, _TEXT] - sums_LTS[:, :, _SINK],
        Variant.QUESTION_ONLY: sums_LTS[:, :, _QUESTION],
    }
    ratios = {
        variant: balance_of(image_LT.tolist(), text_LT.tolist())
        for variant, text_LT in texts.items()
    }
    return AttentionBalance(ratios=ratios, num_tokens=sums_LTS.shape[1])


def token_sets(model: LocalModel, samples: Sequence[Sample], prompts: Prompts) -> Tensor:
    """Return (B, S, P) which prompt tokens are image, text, sink and question."""
    input_ids_BP = prompts.inputs["input_ids"]
    real_BP = prompts.inputs["attention_mask"].bool()
    images = torch.tensor(model.image_token_ids(), device=input_ids_BP.device)
    image_BP = torch.isin(input_ids_BP, images) & real_BP
    text_BP = real_BP & ~image_BP
    sink_BP = text_BP & (real_BP.cumsum(1) == 1)
    question_BP = torch.zeros_like(text_BP)
    for row, (sample, text) in enumerate(zip(samples, prompts.texts, strict=True)):
        marks = _question_marks(model, sample, text, images.tolist())
        places = text_BP[row].nonzero()[:, 0]
        used = min(len(marks), len(places))  # aligned from the end: extras stand by the picture
        if used:
            tail = torch.tensor(marks[len(marks) - used :], device=text_BP.device)
            question_BP[row, places[len(places) - used :]] = tail
    return torch.stack([image_BP, text_BP, sink_BP, question_BP], dim=1)


def _question_marks(
    model: LocalModel, sample: Sample, prompt: str, image_ids: Sequence[int]
) -> list[bool]:
    """Return for each text token of a prompt whether it is the question's.

    The question is what differs between the prompt and the same prompt with no question.
    """
    empty = model.prompt_text("<image>" * len(sample.images), num_images=len(sample.images))
    ids, bare = (
        [
            token
            for token in model.tokenizer(text, add_special_tokens=False)["input_ids"]
            if token not in image_ids
        ]
        for text in (prompt, empty)
    )
    before = 0
    while before < min(len(ids), len(bare)) and ids[before] == bare[before]:
        before += 1
    after = 0
    while after < min(len(ids), len(bare)) - before and ids[-1 - after] == bare[-1 - after]:
        after += 1
    return [before <= place < len(ids) - after for place in range(len(ids))]


def text_config(model: LocalModel) -> Any:
    """Return the configuration of the model's decoder."""
    config = model.model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@contextlib.contextmanager
def _into(stream: _Stream) -> Iterator[None]:
    token = _STREAM.set(stream)
    try:
        yield
    finally:
        _STREAM.reset(token)


@contextlib.contextmanager
def _streaming(model: LocalModel) -> Iterator[None]:
    """Run the decoder on the streaming attention inside the block, then on its own again.

    Raises:
        StateError: The model does not let its attention be exchanged.
    """
    _register()
    network, config = model.model, text_config(model)
    before = config._attn_implementation
    name = next(
        (name for name in network.config.sub_configs if getattr(network.config, name) is config), ""
    )
    network.set_attn_implementation({name: _NAME})
    try:
        if config._attn_implementation != _NAME:
            raise StateError(
                f"{type(network).__name__} does not let its attention be read",
                hint="attention balance needs a model on transformers' attention interface; "
                "leave it out (cmab = false)",
            )
        yield
    finally:
        network.set_attn_implementation({name: before})


def _register() -> None:
    """Make the streaming attention known to transformers; doing it again changes nothing."""
    import transformers
    from transformers.masking_utils import sdpa_mask

    kit: Any = transformers
    kit.AttentionInterface.register(_NAME, _streaming_attention)
    kit.AttentionMaskInterface.register(_NAME, sdpa_mask)


def _streaming_attention(  # noqa: PLR0917 - transformers calls it by position
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return what fused attention returns, having sent the sums of interest to the stream."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    stream = _STREAM.get()
    if stream is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise StateError(f"{type(module).__name__} does not say which layer it is")
        stream.sums[layer] = _sums(stream, query, key, attention_mask, scale)
    output: Any = sdpa_attention_forward
    result, _ = output(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    assert isinstance(result, Tensor)
    return result, None


def _sums(stream: _Stream, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return (B, T, S): attention of the queries from `first_query` on each set, heads averaged.

    A set's sum is what attention returns for values that are 1 in the set and 0 elsewhere, so the
    fused kernel, which keeps no map, takes it. The values are padded to the keys' width, without
    which some kernels fall back to a map; the chunks bound that.
    """
    batch, heads, num_queries, width = query.shape
    groups, num_keys = key.shape[1], key.shape[2]
    num_sets = stream.sets_BSN.shape[1]
    rows = max(1, _CHUNK_ELEMENTS // (batch * heads * num_keys))
    wide_key = key.float()
    values = torch.nn.functional.pad(stream.sets_BSN.mT[:, None], (0, max(0, width - num_sets)))
    values = values.expand(batch, groups, *values.shape[2:])
    pieces = []
    for start in range(stream.first_query, num_queries, rows):
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start : start + rows].float(),
            wide_key,
            values,
            attn_mask=_mask_of(mask, query, start=start, rows=rows, num_keys=num_keys),
            scale=scale,
            enable_gqa=groups != heads,
        )
        pieces.append(attended[..., :num_sets].mean(dim=1))
    return torch.cat(pieces, dim=1)


def _mask_of(mask: Tensor | None, query: Tensor, *, start: int, rows: int, num_keys: int) -> Tensor:
    """Return which keys the queries from `start` on see, or what is added to their scores."""
    if mask is not None:
        part = mask[:, :, start : start + rows]
        return part if part.dtype == torch.bool else part.float()
    num_queries = query.shape[2]  # without a mask, fused attention is plainly causal
    places = torch.arange(start, min(start + rows, num_queries), device=query.device)[:, None]
    return torch.arange(num_keys, device=query.device)[None] <= places + num_keys - num_queries
