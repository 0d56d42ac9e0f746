from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierwise.curriculum.difficulty.pism import Stratum
from tierwise.curriculum.difficulty.rscore import Path, Tree, r_score, rscore_strata


def leaves_from(text: str, branches: int, depth: int) -> dict[Path, bool]:
    """Leaves of a full tree from a row of 1 and 0."""
    paths = product(range(branches), repeat=depth)
    return {path: mark == "1" for path, mark in zip(paths, text, strict=True)}


def test_a_tree_by_hand() -> None:
    """Nine leaves, 3 right. Keeping the first third: 2/3; its best leaf beside the rest: 2/7."""
    leaves = leaves_from("110" + "001" + "000", branches=3, depth=2)
    # root keeps child 0: 2/3 - 3/9 = 1/3
    # node 0 keeps a right leaf: (3 - 2 + 1) / (9 - 3 + 1) - 1/3 = 2/7 - 1/3 < 0
    # node 1 keeps its right leaf: (3 - 1 + 1) / 7 - 1/3 = 2/21
    # node 2 keeps any: 3/7 - 1/3 = 2/21
    assert r_score(leaves, edits=0) == 0
    assert r_score(leaves, edits=1) == pytest.approx(1 / 3)
    # the root drops nodes 1 and 2, and editing node 0 loses: no second edit helps
    assert r_score(leaves, edits=4) == pytest.approx(1 / 3)
    flat = leaves_from("001" + "010" + "100", branches=3, depth=2)
    # the root gains nothing; each node: (3 - 1 + 1) / 7 - 1/3 = 2/21, and none is in another's way
    assert [r_score(flat, edits=m) for m in range(5)] == pytest.approx(
        [0, 2 / 21, 4 / 21, 6 / 21, 6 / 21]
    )


def test_branches_that_ended_early_are_leaves_like_others() -> None:
    leaves = {(0,): True, (1, 0): False, (1, 1): False}
    # the root keeps the ended branch: 1 - 1/3; node 1 keeps either: 1/2 - 1/3, but it is dropped
    assert r_score(leaves, edits=2) == pytest.approx(2 / 3)
    assert r_score({(0,): True}, edits=3) == 0
    assert r_score({}, edits=3) is None


def test_nothing_to_gain_is_zero_for_the_always_right_and_the_never_right() -> None:
    for marks in ("1111", "0000"):
        assert r_score(leaves_from(marks, 2, 2), edits=4) == 0
    assert rscore_strata([0.0, 0.0], [1.0, 0.0]) == (Stratum.EASY, Stratum.UNSOLVED)


def inner_nodes(leaves: Mapping[Path, bool]) -> set[Path]:
    return {path[:level] for path in leaves for level in range(len(path))}


def gain(leaves: Mapping[Path, bool], node: Path, child: int) -> float:
    size = len(node)
    kept = [
        right
        for path, right in leaves.items()
        if path[:size] != node or path[: size + 1] == (*node, child)
    ]
    return sum(kept) / len(kept) - sum(leaves.values()) / len(leaves)


def best_edits(leaves: Mapping[Path, bool], node: Path) -> list[tuple[Path, int, float]]:
    size = len(node)
    children = {path[size] for path in leaves if len(path) > size and path[:size] == node}
    gains = {child: gain(leaves, node, child) for child in children}
    top = max(gains.values())
    return [(node, child, value) for child, value in gains.items() if value > top - 1e-12]


def in_the_way(edit: tuple[Path, int, float], other: tuple[Path, int, float]) -> bool:
    """Whether `other`'s node lies in what `edit` drops."""
    node, child, _ = edit
    size = len(node)
    inside = len(other[0]) > size and other[0][:size] == node
    return inside and other[0][size] != child


def all_choices(leaves: Mapping[Path, bool], edits: int) -> Iterator[float]:
    yield 0.0
    nodes = sorted(inner_nodes(leaves))
    for number in range(1, edits + 1):
        for chosen in combinations(nodes, number):
            for edit in product(*(best_edits(leaves, node) for node in chosen)):
                if not any(in_the_way(one, two) for one in edit for two in edit):
                    yield sum(value for _, _, value in edit)


@st.composite
def trees(draw: st.DrawFn) -> dict[Path, bool]:
    """Trees of uneven shape."""
    leaves: dict[Path, bool] = {}

    def grow(path: Path) -> None:
        if len(path) == 3 or (path and draw(st.booleans())):
            leaves[path] = draw(st.booleans())
            return
        for step in range(draw(st.integers(1, 3 - len(path) // 2))):
            grow((*path, step))

    grow(())
    return leaves


@given(trees(), st.integers(0, 3))
def test_dynamic_programming_finds_what_trying_everything_finds(
    leaves: dict[Path, bool], edits: int
) -> None:
    assert r_score(leaves, edits=edits) == pytest.approx(max(all_choices(leaves, edits)))


def test_strata_are_thirds_and_ties_stay_together() -> None:
    scores: Sequence[float | None] = [0.1, 0.1, 0.1, 0.1, 0.5, 0.9]
    strata = rscore_strata(scores, [0.5] * 6)
    assert [one.value for one in strata] == ["medium"] * 4 + ["easy"] * 2
    assert rscore_strata([None], [None]) == (Stratum.ERROR,)


def test_the_paper_s_tree() -> None:
    tree = Tree()
    assert (tree.branches, tree.depth, tree.interval, tree.edits) == (4, 4, 200, 4)
    assert tree.num_leaves == 256
