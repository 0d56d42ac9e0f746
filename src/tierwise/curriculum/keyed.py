"""Random choices that depend on a key alone: names -> seeds -> numbers -> tokens.

A row's next token is a function of its own seed, its step and its logits, never of the batch it
happens to be in. Left out: top-p, top-k and penalties.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # Source: SplitMix64, Steele et al., OOPSLA 2014
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class KeyedChoice:
    """Chooses each row's next token by its own random number, inside transformers' `generate`.

    It is a logits processor that leaves one token possible; greedy decoding then takes it.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        temperature: float,
        banned: tuple[int, ...],
        prompt_length: int,
    ) -> None:
        self._seeds = np.asarray([seed % 2**64 for seed in seeds], dtype=np.uint64)
        self._temperature = temperature
        self._banned = list(banned)
        self._prompt_length = prompt_length
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return (B, V) scores that leave each row its chosen token, and note its probability."""
        logits_BV = scores.float()
        logits_BV[:, self._banned] = float("-inf")
        if self._temperature > 0:
            logprobs_BV = torch.log_softmax(logits_BV / self._temperature, dim=1)
            uniform_B = keyed_uniform(self._seeds, input_ids.shape[1] - self._prompt_length)
            choice_B = _inverse_choice(logprobs_BV, torch.from_numpy(uniform_B))
        else:
            logprobs_BV = torch.log_softmax(logits_BV, dim=1)
            choice_B = logprobs_BV.argmax(dim=1)
        self.logprobs.append(logprobs_BV.gather(1, choice_B[:, None])[:, 0])
        chosen_BV = torch.full_like(scores, float("-inf"))
        return chosen_BV.scatter_(1, choice_B[:, None], 0.0)


def _inverse_choice(logprobs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the token whose interval of the cumulative distribution holds each uniform number."""
    cumulative_BV = logprobs_BV.double().exp().cumsum(dim=1)
    target_B1 = (uniform_B.to(cumulative_BV.device) * cumulative_BV[:, -1])[:, None]
    return torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0].clamp(
        max=logprobs_BV.shape[1] - 1
    )


def keyed_uniform(seeds: np.ndarray[Any, np.dtype[np.uint64]], step: int) -> np.ndarray[Any, Any]:
    """Return one number in [0, 1) a seed, a pure function of (seed, step).

    Args:
        seeds: (B,) uint64.
        step: Position of the token being chosen, from 0.

    Source: the SplitMix64 finaliser applied to seed and step, G. Steele, D. Lea and C. Flood,
    "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        state = _finalise(seeds + _GOLDEN)
        state = _finalise(state + _GOLDEN * np.uint64(step + 1))
    uniform: np.ndarray[Any, Any] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


def _finalise(
    state: np.ndarray[Any, np.dtype[np.uint64]],
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    return state ^ (state >> np.uint64(31))


def key_seed(*parts: str | int | float) -> int:
    """Return a 63-bit seed that depends on the parts alone, the same on every machine.

    >>> key_seed("a", 1, 0.5) == key_seed("a", 1, 0.5), key_seed("a", 1) == key_seed("a", 2)
    (True, False)
    """
    text = "\x1f".join(f"{type(part).__name__}:{part!r}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
