"""Many completions of a prompt, and their log probabilities, with the prompt computed once.

    prompts (P) --one pass--> cache (P) --select by prompt_B--> cache (B) -> tokens -> rollouts
                                   `-- with gradient ------------------> log probabilities

A group of G completions shares its prompt, image included, and a prompt is much longer than an
answer; running it once and selecting its keys and values for every completion costs a fraction
of B whole passes, in sampling and in training alike (the gradient flows through the cache). Every
row draws from its own seed, so a rollout does not depend on its neighbours' draws.

Models whose positions are not those of a plain cache (three-dimensional rotary positions, as in the
Qwen-VL families) are run row by row, whatever `share_prompts` says. Left out: pictures cut into
tiles whose number differs from picture to picture.

Shapes: P prompts, B rollouts, Q prompt tokens, T completion tokens, V vocabulary.
`prompt_B` holds each rollout's prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierwise.core.errors import UsageError
from tierwise.curriculum.keyed import keyed_uniform
from tierwise.curriculum.models import LocalModel, Prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Completions of some prompts.

    Attributes:
        prompts: P prompts, left-padded.
        prompt_B: The prompt of each rollout, 0 to P-1, ascending.
        token_ids_BT: The tokens; after a row's end they are padding.
        mask_BT: True for a row's tokens, its end token included.
        logprob_BT: Of each token when it was drawn; 0 on padding; no gradient.
        finished_B: Whether a row ended by itself.
        texts: Decoded, without special tokens.
    """

    prompts: Prompts
    prompt_B: Tensor
    token_ids_BT: Tensor
    mask_BT: Tensor
    logprob_BT: Tensor
    finished_B: Tensor
    texts: tuple[str, ...]


@torch.no_grad()
def sample_rollouts(
    model: LocalModel,
    prompts: Prompts,
    prompt_B: Tensor,
    *,
    seeds: Sequence[int],
    temperature: float,
    max_new_tokens: int,
    share_prompts: bool = True,
) -> Rollouts:
    """Return one completion for each entry of `prompt_B`, drawn at the temperature.

    Args:
        model: The model.
        prompts: P encoded prompts.
        prompt_B: Which prompt each completion answers, ascending.
        seeds: One a completion.
        temperature: 0 is greedy, and needs no seeds.
        max_new_tokens: Where a completion is cut.
        share_prompts: Run each prompt once; False runs it once a completion.
    """
    if not (share_prompts and can_share_prompts(model)):
        return _sample_rows(
            model,
            prompts,
            prompt_B,
            seeds=seeds,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
        )
    ends = torch.tensor(model.end_token_ids(), device=prompt_B.device)
    keys = np.asarray([seed % 2**64 for seed in seeds], dtype=np.uint64)
    size, pad = len(prompt_B), int(model.tokenizer.pad_token_id)
    token_ids_BT = prompt_B.new_full((size, max_new_tokens), pad)
    logprob_BT = torch.zeros(size, max_new_tokens, device=prompt_B.device)
    length_B, finished_B = torch.zeros_like(prompt_B), torch.zeros_like(prompt_B, dtype=torch.bool)
    logits_PV, cache = _run_prompts(model, prompts)
    cache.batch_select_indices(prompt_B)
    mask_BN = prompts.inputs["attention_mask"][prompt_B]
    logits_BV, row_B = logits_PV[prompt_B], torch.arange(size, device=prompt_B.device)
    for step in range(max_new_tokens):  # rows that have ended leave the batch
        logprobs_BV = _log_softmax(model, logits_BV, temperature or 1.0)
        if temperature > 0:
            uniform_B = torch.from_numpy(keyed_uniform(keys[row_B.cpu().numpy()], step))
            token_B = _choose(logprobs_BV, uniform_B.to(logits_BV.device))
        else:
            token_B = logprobs_BV.argmax(dim=1)
        token_ids_BT[row_B, step] = token_B
        logprob_BT[row_B, step] = logprobs_BV.gather(1, token_B[:, None])[:, 0]
        length_B[row_B] += 1
        going_B = ~torch.isin(token_B, ends)
        finished_B[row_B[~going_B]] = True
        if step == max_new_tokens - 1 or not going_B.any():
            break
        row_B, mask_BN = row_B[going_B], mask_BN[going_B]
        cache.batch_select_indices(going_B.nonzero()[:, 0])
        mask_BN = torch.cat([mask_BN, mask_BN.new_ones(len(row_B), 1)], dim=1)
        logits_BV = model.model(
            input_ids=token_B[going_B][:, None],
            attention_mask=mask_BN,
            use_cache=True,
            **{_cache_name(model): cache},
        ).logits[:, -1]
    longest = int(length_B.max())
    mask_BT = torch.arange(longest, device=prompt_B.device) < length_B[:, None]
    token_ids_BT = token_ids_BT[:, :longest]
    return Rollouts(
        prompts=prompts,
        prompt_B=prompt_B,
        token_ids_BT=token_ids_BT,
        mask_BT=mask_BT,
        logprob_BT=logprob_BT[:, :longest],
        finished_B=finished_B,
        texts=_decode(model, token_ids_BT, mask_BT),
    )


def completion_logprobs(
    model: LocalModel, rollouts: Rollouts, *, temperature: float, share_prompts: bool = True
) -> Tensor:
    """Return logprob_BT of the rollouts' tokens under the model as it is now, with gradient.

    The distribution is the one they were drawn from: temperature applied, image tokens excluded.
    Padding gets values without meaning.

    Args:
        model: The model.
        rollouts: The completions.
        temperature: That of the draw.
        share_prompts: Run each prompt once; False runs it once a completion.
    """
    prompts, prompt_B = rollouts.prompts, rollouts.prompt_B
    token_ids_BT, length = rollouts.token_ids_BT, rollouts.token_ids_BT.shape[1]
    mask_BN = prompts.inputs["attention_mask"][prompt_B]
    mask_BN = torch.cat([mask_BN, rollouts.mask_BT.to(mask_BN.dtype)], dim=1)
    if share_prompts and can_share_prompts(model):
        logits_PV, cache = _run_prompts(model, prompts)
        logits_BTV = logits_PV[prompt_B][:, None]
        if length > 1:
            cache.batch_select_indices(prompt_B)
            later_BTV = model.model(
                input_ids=token_ids_BT[:, :-1],
                attention_mask=mask_BN[:, :-1],
                use_cache=True,
                **{_cache_name(model): cache},
            ).logits
            logits_BTV = torch.cat([logits_BTV, later_BTV], dim=1)
    else:
        rows = dict(repeat_prompts(prompts, prompt_B).inputs)
        rows["input_ids"] = torch.cat([rows["input_ids"], token_ids_BT], dim=1)
        rows["attention_mask"] = mask_BN
        _extend_token_types(rows, length)
        logits_BTV = model.model(**rows, use_cache=False, logits_to_keep=length + 1).logits[:, :-1]
    logprobs_BTV = _log_softmax(model, logits_BTV, temperature)
    return logprobs_BTV.gather(2, token_ids_BT[:, :, None])[:, :, 0]


def can_share_prompts(model: LocalModel) -> bool:
    """Return False for models that place tokens in three dimensions, which a cache alone loses."""
    text = model.model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return "mrope_section" not in rope


def select_prompts(rollouts: Rollouts, keep_P: Tensor) -> Rollouts:
    """Return the rollouts of the prompts marked True, renumbered; the others' tensors are gone."""
    kept = keep_P.nonzero()[:, 0]
    keep_B = keep_P[rollouts.prompt_B]
    place_P = torch.cumsum(keep_P.long(), dim=0) - 1
    longest = int(rollouts.mask_BT[keep_B].sum(dim=1).max()) if bool(keep_B.any()) else 0
    return Rollouts(
        prompts=repeat_prompts(rollouts.prompts, kept),
        prompt_B=place_P[rollouts.prompt_B[keep_B]],
        token_ids_BT=rollouts.token_ids_BT[keep_B, :longest],
        mask_BT=rollouts.mask_BT[keep_B, :longest],
        logprob_BT=rollouts.logprob_BT[keep_B, :longest],
        finished_B=rollouts.finished_B[keep_B],
        texts=tuple(t for t, keep in zip(rollouts.texts, keep_B.tolist(), strict=True) if keep),
    )


def repeat_prompts(prompts: Prompts, prompt_B: Tensor) -> Prompts:
    """Return the prompts in the order and number of `prompt_B`, each with its own pictures.

    Tensors with one entry a prompt are indexed; those that hold all pictures one after another, or
    all their patches (the Qwen-VL families), are cut by prompt.

    Raises:
        UsageError: It cannot be told which part of a tensor belongs to which prompt.
    """
    chosen = prompt_B.tolist()
    counts = prompts.num_images or (1,) * len(prompts.texts)
    selected = {}
    for name, value in prompts.inputs.items():
        if _has_a_row_a_prompt(name, value, prompts):
            selected[name] = value[prompt_B]
            continue
        pieces = torch.split(value, _lengths_by_prompt(name, value, prompts, counts))
        picked = torch.cat([pieces[i] for i in chosen])
        if len(picked):  # else none of them has a picture
            selected[name] = picked
    return Prompts(
        inputs=selected,
        texts=tuple(prompts.texts[i] for i in chosen),
        num_images=tuple(counts[i] for i in chosen),
    )


def _has_a_row_a_prompt(name: str, value: Tensor, prompts: Prompts) -> bool:
    tokens = prompts.inputs["input_ids"].shape
    # pictures nested by prompt (SmolVLM) have one dimension more than pictures in a row
    nested = value.ndim == 5 or name == "pixel_attention_mask"
    return value.shape[:2] == tokens or (nested and value.shape[0] == tokens[0])


def _lengths_by_prompt(
    name: str, value: Tensor, prompts: Prompts, counts: Sequence[int]
) -> list[int]:
    """Return how many entries of a tensor of pictures or patches each prompt has."""
    grid = prompts.inputs.get("image_grid_thw")
    if value.shape[0] == sum(counts):
        each = [1] * sum(counts)
    elif grid is not None and value.shape[0] == int(grid.prod(dim=1).sum()):
        each = grid.prod(dim=1).tolist()
    elif sum(counts) and value.shape[0] % sum(counts) == 0:
        each = [value.shape[0] // sum(counts)] * sum(counts)  # tiles, as many for every picture
    else:
        raise UsageError(
            f"{name} has {value.shape[0]} entries for {sum(counts)} pictures",
            hint="set the processor to cut every picture into as many tiles",
        )
    left = iter(each)
    return [sum(next(left) for _ in range(count)) for count in counts]


def _run_prompts(model: LocalModel, prompts: Prompts) -> tuple[Tensor, Any]:
    """Return the logits after each prompt, (P, V), and the cache of keys and values."""
    output = model.model(**prompts.inputs, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1], getattr(output, _cache_name(model))


def _cache_name(model: LocalModel) -> str:
    """Return what this version of transformers calls the cache."""
    known = inspect.signature(type(model.model).forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def _log_softmax(model: LocalModel, logits: Tensor, temperature: float) -> Tensor:
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    banned[list(model.image_token_ids())] = True
    return torch.log_softmax(logits.float().masked_fill(banned, -torch.inf) / temperature, dim=-1)


def _choose(logprobs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the token whose interval of the cumulative distribution holds each uniform number."""
    cumulative_BV = logprobs_BV.double().exp().cumsum(dim=1)
    target_B = uniform_B * cumulative_BV[:, -1]
    token_B = torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]
    return token_B.clamp(max=logprobs_BV.shape[1] - 1)


def _sample_rows(
    model: LocalModel,
    prompts: Prompts,
    prompt_B: Tensor,
    *,
    seeds: Sequence[int],
    temperature: float,
    max_new_tokens: int,
) -> Rollouts:
    made = model.generate(
        repeat_prompts(prompts, prompt_B),
        seeds=seeds,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
    )
    # clones: tensors made in inference mode cannot take part in a gradient
    length_B, longest = made.lengths_B.clone(), int(made.lengths_B.max())
    return Rollouts(
        prompts=prompts,
        prompt_B=prompt_B,
        token_ids_BT=made.token_ids_BT[:, :longest].clone(),
        mask_BT=torch.arange(longest, device=prompt_B.device) < length_B[:, None],
        logprob_BT=made.logprobs_BT[:, :longest].clone(),
        finished_B=made.finished_B.clone(),
        texts=made.texts,
    )


def _extend_token_types(rows: dict[str, Tensor], length: int) -> None:
    """Mark completion tokens as text (0) where a family marks the kind of every token."""
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in rows:
            kinds = rows[name]
            rows[name] = torch.cat([kinds, kinds.new_zeros(kinds.shape[0], length)], dim=1)


def _decode(model: LocalModel, token_ids_BT: Tensor, mask_BT: Tensor) -> tuple[str, ...]:
    rows = [row[keep].tolist() for row, keep in zip(token_ids_BT, mask_BT, strict=True)]
    texts = model.tokenizer.batch_decode(rows, skip_special_tokens=True)
    return tuple(text.strip() for text in texts)
