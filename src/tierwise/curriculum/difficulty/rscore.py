r"""The reasoning-tree score: what a few edits of the model's choices could gain on a question.

A question's answers are sampled as a tree: k continuations of the prompt, k of each of those after
every `interval` tokens, down to `depth`. ACC is the share of right leaves. Editing a node means
keeping one of its continuations c and dropping the others:

    R(n) = max over c of ACC[leaves \ L(n) u L(c)] - ACC[leaves]
    R(q) = max over at most M nodes, none inside what another drops, of the sum of R(n)

A high score means that few edits help much (structurally simple), a low one that none does. Note
that a question always answered right has nothing to gain and scores 0, like one never answered
right; `rscore_strata` tells the two apart.

Departures: leaves whose verdict is an error are left out; the root (the first choice) may be edited
like any node; among equally good continuations of a node the one that leaves more to gain below it
is kept. The released code picks greedily on the tree as edited so far and never edits the root or
the nodes above leaves; here the sum of the definition is maximised exactly, by dynamic programming.
How trees are sampled is `trees`. Left out: the paper's schedule of loss weights.

Source: Wang, Hao, Luo, Wei, Shu, Liu, Lin, Dong and Chen, "Scheduling Your LLM Reinforcement
Learning with Reasoning Trees", ICLR 2026, https://arxiv.org/abs/2510.24832.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tierwise.curriculum.difficulty.pism import Stratum

Path = tuple[int, ...]
"""A leaf's way from the root: which continuation was taken at each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """How trees are sampled and edited. Defaults: the paper's.

    Attributes:
        branches: k, continuations of each node.
        depth: d, levels; k ** d leaves at most.
        interval: l, tokens between branchings.
        edits: M, nodes that may be edited.
    """

    branches: int = 4
    depth: int = 4
    interval: int = 200
    edits: int = 4

    @property
    def num_leaves(self) -> int:
        """Return the most leaves a tree can have."""
        return int(self.branches**self.depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    right: int
    total: int
    children: tuple[_Node, ...] = ()


def r_score(leaves: Mapping[Path, bool], *, edits: int) -> float | None:
    """Return R(q) of a tree, or None without a leaf.

    Args:
        leaves: Whether each judged leaf is right; no path is the beginning of another.
        edits: M, the most nodes edited.

    >>> r_score({(0, 0): False, (0, 1): True, (1, 0): False, (1, 1): False}, edits=1)
    0.25
    """
    if not leaves:
        return None
    root = _grown(leaves, 0)
    return float(_best(root, root, edits)[edits])


def _grown(leaves: Mapping[Path, bool], level: int) -> _Node:
    """Return the node above leaves that share their first `level` steps."""
    below: dict[int, dict[Path, bool]] = {}
    for path, right in leaves.items():
        if len(path) == level:
            return _Node(right=int(right), total=1)
        below.setdefault(path[level], {})[path] = right
    children = tuple(_grown(below[step], level + 1) for step in sorted(below))
    return _Node(
        right=sum(child.right for child in children),
        total=sum(child.total for child in children),
        children=children,
    )


def _best(node: _Node, root: _Node, edits: int) -> list[Fraction]:
    """Return the largest sum of gains in a node's subtree, by the number of edits allowed."""
    if not node.children:
        return [Fraction(0)] * (edits + 1)
    below = [_best(child, root, edits) for child in node.children]
    best = below[0]
    for other in below[1:]:
        best = _merged(best, other)
    gains = [_gain(node, child, root) for child in node.children]
    top = max(gains)
    for gain, kept in zip(gains, below, strict=True):
        if gain == top:
            edited = [Fraction(0)] + [top + sum_ for sum_ in kept[:-1]]
            best = [max(pair) for pair in zip(best, edited, strict=True)]
    return best


def _merged(first: Sequence[Fraction], second: Sequence[Fraction]) -> list[Fraction]:
    """Return the best of sharing edits between two subtrees, by the number of edits."""
    return [
        max(first[place] + second[edits - place] for place in range(edits + 1))
        for edits in range(len(first))
    ]


def _gain(node: _Node, child: _Node, root: _Node) -> Fraction:
    """Return what keeping one child of a node does to the share of right leaves."""
    right = root.right - node.right + child.right
    return Fraction(right, root.total - node.total + child.total) - Fraction(root.right, root.total)


def rscore_strata(
    scores: Sequence[float | None], rates: Sequence[float | None]
) -> tuple[Stratum, ...]:
    """Return a stratum a sample: thirds by r-score, highest first, ties together; ours.

    Never right is unsolved, always right is easy, and neither takes part in the thirds.

    Args:
        scores: r-scores; None where there is none, which is an error.
        rates: Share of right leaves of each tree.

    >>> [one.value for one in rscore_strata([0.3, 0.2, 0.1, 0.0, None], [0.5, 0.5, 0.5, 0.0, None])]
    ['easy', 'medium', 'hard', 'unsolved', 'error']
    """
    ranked = sorted(
        score
        for score, rate in zip(scores, rates, strict=True)
        if score is not None and rate is not None and 0 < rate < 1
    )

    def stratum(score: float | None, rate: float | None) -> Stratum:
        if score is None or rate is None:
            return Stratum.ERROR
        if rate in (0.0, 1.0):
            return Stratum.EASY if rate else Stratum.UNSOLVED
        above = sum(other > score for other in ranked)
        return (Stratum.EASY, Stratum.MEDIUM, Stratum.HARD)[3 * above // len(ranked)]

    return tuple(stratum(score, rate) for score, rate in zip(scores, rates, strict=True))
