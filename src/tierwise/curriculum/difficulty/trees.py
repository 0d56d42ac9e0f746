"""Reasoning trees, sampled: every node of a level is continued in one batch, leaves are judged.

A leaf is a row of the attempt log like any other answer. Its `k` is its place among the leaves of
the full tree, its path in base `branches`; a branch that ended early has the place of the first
leaf that would have grown from it, and its depth follows from its number of tokens. A sample's
leaves are written in one transaction, so that leaf 0 being there says that the tree is.

Every segment has a seed of its own, from the sample, its path and the run's seed. Only a local
model can be asked: the chat protocol of servers continues no beginning, still less one of a given
number of tokens. Left out: keeping the key-value cache from level to level, so each level reads
its prompts again.

Source: Wang et al., https://arxiv.org/abs/2510.24832, tree construction.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tierwise.curriculum.answerers import LocalAnswerer, Reply, Request
from tierwise.curriculum.difficulty.attempts import Attempt, AttemptKey, Probe
from tierwise.curriculum.difficulty.probes import Asked, Desk, Sampling
from tierwise.curriculum.difficulty.rscore import Path, Tree
from tierwise.curriculum.keyed import key_seed
from tierwise.curriculum.models import LocalModel, append_tokens
from tierwise.curriculum.samples import BadImageError
from tierwise.curriculum.verdicts import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branch:
    """A node, or a leaf once it is `finished` or at the last level."""

    owner: int
    path: Path
    token_ids: tuple[int, ...] = ()
    finished: bool = False


def ask_trees(desk: Desk, sample_ids: Sequence[str]) -> list[AttemptKey]:
    """Ask what the log lacks of each sample's tree; return the key of each tree's first leaf."""
    keys = [desk.key(sample_id, Probe.TREE) for sample_id in sample_ids]
    desk.work(
        keys,
        name="reasoning trees",
        size=max(1, desk.sampling.batch_size // desk.tree.num_leaves),
        ask=partial(_ask, desk),
    )
    return keys


def _ask(desk: Desk, keys: Sequence[AttemptKey]) -> Asked:
    assert isinstance(desk.answerer, LocalAnswerer)
    started = time.monotonic()
    requests: dict[AttemptKey, Request] = {}
    replies: dict[AttemptKey, Reply] = {}
    for key in keys:
        try:
            requests[key] = desk.request(key)
        except BadImageError as error:
            replies[key] = Reply(text="", error=error.fault.value)
    for blind in (False, True):
        part = {key: one for key, one in requests.items() if (one.images is None) == blind}
        for key, found in zip(part, _trees(desk, list(part.values())), strict=True):
            replies |= {replace(key, k=k): reply for k, reply in found.items()}
    seconds = (time.monotonic() - started) / max(1, len(replies))
    return [desk.judged(key, reply, seconds) for key, reply in replies.items()], []


def _trees(desk: Desk, requests: Sequence[Request]) -> list[Mapping[int, Reply]]:
    """Return the leaves of each request by their place; a batch that fails is halved."""
    assert isinstance(desk.answerer, LocalAnswerer)
    if not requests:
        return []
    try:
        leaves = grow(desk.answerer.model, requests, desk.tree, desk.sampling)
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        if len(requests) == 1:
            return [{0: Reply(text="", error=f"model_failed:{type(error).__name__}")}]
        middle = len(requests) // 2
        return [*_trees(desk, requests[:middle]), *_trees(desk, requests[middle:])]
    return [{place_of(path, desk.tree): reply for path, reply in one.items()} for one in leaves]


def grow(
    model: LocalModel, requests: Sequence[Request], tree: Tree, sampling: Sampling
) -> list[dict[Path, Reply]]:
    """Return the leaves of each request's tree, by path.

    Args:
        model: Who answers.
        requests: All of them show pictures, or none does; their seeds decide every token.
        tree: The tree's shape.
        sampling: Temperature, where an answer is cut, rows asked at once.
    """
    nodes = [_Branch(owner=owner, path=()) for owner in range(len(requests))]
    leaves: list[_Branch] = []
    for level in range(tree.depth):
        last = level == tree.depth - 1
        rest = sampling.max_new_tokens - level * tree.interval
        wanted = [
            replace(node, path=(*node.path, step))
            for node in nodes
            for step in range(tree.branches)
        ]
        grown = [
            branch
            for start in range(0, len(wanted), sampling.batch_size)
            for branch in _continued(
                model,
                requests,
                wanted[start : start + sampling.batch_size],
                temperature=sampling.temperature,
                num_tokens=rest if last else tree.interval,
            )
        ]
        leaves += [branch for branch in grown if branch.finished or last]
        nodes = [branch for branch in grown if not branch.finished]
        if not nodes:
            break
    found: list[dict[Path, Reply]] = [{} for _ in requests]
    for leaf in sorted(leaves, key=lambda leaf: leaf.path):
        text = model.tokenizer.decode(list(leaf.token_ids), skip_special_tokens=True)
        found[leaf.owner][leaf.path] = Reply(
            text=text.strip(), num_tokens=len(leaf.token_ids), finished=leaf.finished
        )
    return found


def _continued(
    model: LocalModel,
    requests: Sequence[Request],
    branches: Sequence[_Branch],
    *,
    temperature: float,
    num_tokens: int,
) -> Iterator[_Branch]:
    """Yield each branch with up to `num_tokens` more tokens; all are equally long so far."""
    owners = [requests[branch.owner] for branch in branches]
    blind = owners[0].images is None
    prompts = model.encode(
        [owner.sample for owner in owners],
        None if blind else [owner.images or () for owner in owners],
    )
    before_BT = torch.tensor([branch.token_ids for branch in branches], device=model.device)
    if before_BT.numel():
        lengths_B = torch.full((len(branches),), before_BT.shape[1], device=model.device)
        prompts = append_tokens(prompts, before_BT, lengths_B)
    done = model.generate(
        prompts,
        seeds=[
            key_seed("tree", owner.seed, *branch.path)
            for owner, branch in zip(owners, branches, strict=True)
        ],
        temperature=temperature,
        max_new_tokens=num_tokens,
    )
    for row, branch in enumerate(branches):
        new = done.token_ids_BT[row, : int(done.lengths_B[row])].tolist()
        yield replace(
            branch, token_ids=(*branch.token_ids, *new), finished=bool(done.finished_B[row])
        )


def place_of(path: Path, tree: Tree) -> int:
    """Return a leaf's place among the leaves of the full tree.

    >>> place_of((1, 0, 1), Tree(branches=2, depth=3)), place_of((1,), Tree(branches=2, depth=3))
    (5, 4)
    """
    place = 0
    for level in range(tree.depth):
        place = place * tree.branches + (path[level] if level < len(path) else 0)
    return place


def path_of(place: int, num_tokens: int, tree: Tree) -> Path:
    """Return the path of the leaf at a place, which ended after `num_tokens` tokens.

    >>> path_of(4, 7, Tree(branches=2, depth=3, interval=10))
    (1,)
    """
    steps: list[int] = []
    for _ in range(tree.depth):
        place, step = divmod(place, tree.branches)
        steps.insert(0, step)
    levels = min(tree.depth, max(1, -(-num_tokens // tree.interval)))
    return tuple(steps[:levels])


def leaves_of(attempts: Sequence[Attempt], tree: Tree) -> dict[Path, bool]:
    """Return path -> whether it is right, of a sample's attempts; errors are left out."""
    return {
        path_of(one.key.k, one.num_tokens, tree): one.verdict is Verdict.RIGHT
        for one in attempts
        if one.key.probe == Probe.TREE.value and one.verdict is not Verdict.ERROR
    }
