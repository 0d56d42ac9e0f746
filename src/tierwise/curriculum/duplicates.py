"""Which samples are the same, or show nearly the same picture.

Exact: the same question, answer and picture bytes. Near: the same question (case and blanks
apart) over pictures whose difference hashes differ in at most 8 of 256 bits and whose colours, in
8 x 8 cells, differ by at most 24 of 255; a shrunk or re-encoded copy is found, a crop is not. The
colours are there because drawings on an even ground have hashes of almost only zeros. Left out:
paraphrased questions, which need a text model.

Source: the difference hash is N. Krawetz's, "Kind of Like That", 2013,
https://www.hackerfactor.com/blog/index.php?/archives/529-Kind-of-Like-That.html
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierwise.curriculum.samples import BadImageError, Sample, content_hash, load_image

if TYPE_CHECKING:
    from PIL import Image

NEAR_BITS = 8
"""Most bits of 256 in which near duplicates' hashes differ; our choice."""


NEAR_COLOUR = 24
"""Most levels of 255 by which a cell's colour differs between near duplicates; our choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """A picture's difference hash, and the colours of its 8 x 8 cells."""

    bits: int
    cells: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicates:
    """Groups of ids, each in the data set's order; a sample is in at most one group of each."""

    exact: tuple[tuple[str, ...], ...]
    near: tuple[tuple[str, ...], ...]


def find_duplicates(samples: Sequence[Sample], *, near_bits: int = NEAR_BITS) -> Duplicates:
    """Return exact duplicates, and near ones that are not exact.

    Args:
        samples: The data set; a picture that cannot be read has no near duplicates.
        near_bits: Most differing bits of a near duplicate.
    """
    exact: dict[str, list[str]] = defaultdict(list)
    by_question: dict[str, list[tuple[str, tuple[Fingerprint, ...]]]] = defaultdict(list)
    for sample in samples:
        exact[content_hash(sample.question, sample.answer, sample.images)].append(sample.id)
        try:
            prints = tuple(fingerprint(load_image(path)) for path in sample.images)
        except BadImageError:
            continue
        if prints:
            question = " ".join(sample.question.casefold().split())
            by_question[question].append((sample.id, prints))
    groups = tuple(tuple(group) for group in exact.values() if len(group) > 1)
    known = {frozenset(group) for group in groups}
    near = tuple(
        group
        for members in by_question.values()
        for group in _near_groups(members, near_bits)
        if frozenset(group) not in known
    )
    return Duplicates(exact=groups, near=near)


def _near_groups(
    members: Sequence[tuple[str, tuple[Fingerprint, ...]]], near_bits: int
) -> list[tuple[str, ...]]:
    """Return connected groups of near pictures among samples that ask the same."""
    parent = list(range(len(members)))

    def root(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    for place, (_, prints) in enumerate(members):
        for other in range(place):
            if near(prints, members[other][1], near_bits):
                parent[root(place)] = root(other)
    groups: dict[int, list[str]] = defaultdict(list)
    for place, (identity, _) in enumerate(members):
        groups[root(place)].append(identity)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def near(first: Sequence[Fingerprint], second: Sequence[Fingerprint], near_bits: int) -> bool:
    """Return whether two lists of pictures are as long and pairwise near."""
    return len(first) == len(second) and all(
        (one.bits ^ other.bits).bit_count() <= near_bits
        and all(abs(a - b) <= NEAR_COLOUR for a, b in zip(one.cells, other.cells, strict=True))
        for one, other in zip(first, second, strict=True)
    )


def fingerprint(picture: Image.Image) -> Fingerprint:
    """Return what tells whether a picture nearly is another."""
    from PIL import Image

    cells = picture.convert("RGB").resize((8, 8), Image.Resampling.BOX)
    return Fingerprint(bits=difference_hash(picture), cells=cells.tobytes())


def difference_hash(picture: object) -> int:
    """Return 256 bits: whether each of 16 x 16 grey cells is lighter than its right neighbour.

    Args:
        picture: A Pillow image.
    """
    import numpy as np
    from PIL import Image

    assert isinstance(picture, Image.Image)
    small = picture.convert("L").resize((17, 16), Image.Resampling.BOX)
    cells = np.asarray(small, dtype=np.int16)
    bits = (cells[:, :-1] > cells[:, 1:]).reshape(-1)
    return int("".join("1" if bit else "0" for bit in bits), 2)
