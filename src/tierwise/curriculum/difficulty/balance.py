"""CMAB: does the model look at the picture or read the text while it writes its answer.

For each generated token t and decoder layer l, S_img and S_txt are the sums of the attention on
the picture's tokens and on the input's text tokens, rho(l, t) = S_img / S_txt. Layers 2 ... L-1
are joined by a geometric mean with epsilon, tokens by an arithmetic mean. `cmab` takes the sums.

Variants, because the paper contradicts itself: its equation has sums (`sum`), the caption of its
Figure 2 and its code have means per token (`mean`), which differs by the factor text tokens /
image tokens. `sink_masked` leaves out the prompt's first token, where models park idle attention;
`question_only` counts the question's own tokens, without the chat template; both with sums.

Source: Qi et al., https://arxiv.org/abs/2511.06722, section on cross-modality attention balance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from tierwise.core.errors import UsageError
from tierwise.curriculum.difficulty.pism import Stratum

EPSILON = 1e-8


class Variant(StrEnum):
    """Which attention is put into proportion."""

    SUM = "sum"
    MEAN = "mean"
    SINK_MASKED = "sink_masked"
    QUESTION_ONLY = "question_only"


def balance_of(
    image_LT: Sequence[Sequence[float]],
    text_LT: Sequence[Sequence[float]],
    *,
    epsilon: float = EPSILON,
) -> float:
    """Return rho-bar: a geometric mean over the inner layers, then a mean over tokens.

    Args:
        image_LT: Attention on image tokens, by layer (all of them) and generated token.
        text_LT: Attention on text tokens, the same shape.
        epsilon: Added to each ratio before the logarithm.

    Raises:
        UsageError: Fewer than three layers, or no token.

    >>> round(balance_of([[9.0], [2.0], [9.0]], [[1.0], [1.0], [1.0]]), 6)
    2.0
    """
    inner = list(zip(image_LT, text_LT, strict=True))[1:-1]
    if not inner or not inner[0][0]:
        raise UsageError("an attention balance needs three layers and one generated token")
    num_tokens = len(inner[0][0])
    total = 0.0
    for token in range(num_tokens):
        logs = [
            math.log(image[token] / text[token] + epsilon) if text[token] > 0 else math.inf
            for image, text in inner
        ]
        total += math.exp(sum(logs) / len(logs))
    return total / num_tokens


def stratum_of(ratio: float | None, *, right: bool) -> Stratum:
    """Return the paper's stratum of an attention balance.

    >>> [stratum_of(ratio, right=True).value for ratio in (0.05, 0.1, 0.4, 1.6, 1.7, 1.95)]
    ['easy', 'medium', 'hard', 'hard', 'medium', 'easy']
    """
    if ratio is None or math.isnan(ratio):
        return Stratum.ERROR
    if not right:
        return Stratum.UNSOLVED
    if ratio < 0.1 or ratio > 1.9:
        return Stratum.EASY
    return Stratum.HARD if 0.4 <= ratio <= 1.6 else Stratum.MEDIUM


def quantile_strata(ratios: Sequence[float | None], right: Sequence[bool]) -> tuple[Stratum, ...]:
    """Return strata by thirds of the distance from the median balance, instead of fixed limits.

    The paper's limits mean nothing on another model or resolution (a different number of image
    tokens moves every ratio), so here the third of the solved samples whose balance is nearest to
    their median, in logarithms, is hard, and the farthest third easy. Our own rule.
    """
    solved = sorted(
        math.log(ratio)
        for ratio, good in zip(ratios, right, strict=True)
        if good and ratio is not None and ratio > 0 and math.isfinite(ratio)
    )
    if not solved:
        return tuple(stratum_of(ratio, right=False) for ratio in ratios)
    middle = solved[len(solved) // 2]
    distances = sorted(abs(value - middle) for value in solved)
    near, far = distances[(len(distances) - 1) // 3], distances[2 * (len(distances) - 1) // 3]

    def one(ratio: float | None, good: bool) -> Stratum:
        if ratio is None or math.isnan(ratio):
            return Stratum.ERROR
        if not good:
            return Stratum.UNSOLVED
        distance = abs(math.log(ratio) - middle) if 0 < ratio < math.inf else math.inf
        if distance <= near:
            return Stratum.HARD
        return Stratum.MEDIUM if distance <= far else Stratum.EASY

    return tuple(one(ratio, good) for ratio, good in zip(ratios, right, strict=True))
