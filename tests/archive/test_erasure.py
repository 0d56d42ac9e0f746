"""The code over GF(2^8): any m of k + m, the same bits from every codec."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierwise.archive.erasure import (
    Bytes,
    Codec,
    Matrix,
    NumpyCodec,
    best_codec,
    gf_invert,
    gf_multiply,
    invert_matrix,
    isal_codec,
    multiply_matrices,
    parity_matrix,
    recovery_matrix,
)
from tierwise.core.errors import UsageError


def slow_product(a: int, b: int) -> int:
    """Multiply as polynomials, bit by bit: the definition."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


def reference(matrix: Matrix, blocks: list[Bytes]) -> list[Bytes]:
    """Multiply by 256-entry tables, one coefficient at a time."""
    rows = []
    for row in matrix:
        total = np.zeros_like(blocks[0])
        for factor, block in zip(row, blocks, strict=True):
            table = np.array([slow_product(factor, value) for value in range(256)], np.uint8)
            total ^= table[block]
        rows.append(total)
    return rows


def test_field_is_the_documented_one() -> None:
    for a in range(256):
        for b in range(256):
            assert gf_multiply(a, b) == slow_product(a, b)
    assert all(gf_multiply(a, gf_invert(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        gf_invert(0)


def test_first_rows_are_raid_6() -> None:
    matrix = parity_matrix(200, 2)
    assert set(matrix[0]) == {1}
    value, powers = 1, []
    for _ in range(200):
        powers.append(value)
        value = slow_product(value, 2)
    assert list(matrix[1]) == powers


def test_every_small_submatrix_is_regular_at_full_size() -> None:
    """All 1 x 1 and 2 x 2 minors for k = 251, m = 4; larger ones in samples."""
    matrix = parity_matrix(251, 4)
    assert all(value for row in matrix for value in row)
    for r, s in itertools.combinations(range(4), 2):
        ratios = {gf_multiply(a, gf_invert(b)) for a, b in zip(matrix[r], matrix[s], strict=True)}
        assert len(ratios) == 251
    generator = random.Random(1)
    for size in (3, 4):
        for _ in range(1500):
            rows = generator.sample(range(4), size)
            columns = generator.sample(range(251), size)
            invert_matrix(tuple(tuple(matrix[r][c] for c in columns) for r in rows))


def test_every_loss_of_a_small_array_is_solvable() -> None:
    for survivors in itertools.combinations(range(11), 7):
        lost = tuple(index for index in range(7) if index not in survivors)
        if lost:
            recovery_matrix(7, 4, survivors, lost)


def test_inverse() -> None:
    matrix = parity_matrix(4, 4)
    identity = tuple(tuple(int(i == j) for j in range(4)) for i in range(4))
    assert multiply_matrices(matrix, invert_matrix(matrix)) == identity
    with pytest.raises(ZeroDivisionError):
        invert_matrix(((1, 1), (1, 1)))


def codecs() -> list[Codec]:
    isal = isal_codec()
    return [NumpyCodec()] if isal is None else [NumpyCodec(), isal]


@settings(max_examples=40, deadline=None)
@given(
    data_count=st.integers(1, 12),
    parity_count=st.integers(1, 4),
    words=st.integers(1, 9000),
    seed=st.integers(0, 2**32),
)
def test_codecs_give_the_same_bits_and_recover(
    data_count: int, parity_count: int, words: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    size = words * 8
    blocks = [generator.integers(0, 256, size, dtype=np.uint8) for _ in range(data_count)]
    matrix = parity_matrix(data_count, parity_count)
    expected = reference(matrix, blocks)
    lost = sorted(
        generator.choice(
            data_count + parity_count, min(parity_count, data_count), replace=False
        ).tolist()
    )
    survivors = [i for i in range(data_count + parity_count) if i not in lost][:data_count]
    for codec in codecs():
        rows = [np.full(size, 7, np.uint8) for _ in range(parity_count)]
        codec.multiply(matrix, blocks, rows)
        assert all(np.array_equal(a, b) for a, b in zip(rows, expected, strict=True))
        members = [*blocks, *rows]
        back = [np.empty(size, np.uint8) for _ in lost]
        codec.multiply(
            recovery_matrix(data_count, parity_count, tuple(survivors), tuple(lost)),
            [members[i] for i in survivors],
            back,
        )
        assert all(np.array_equal(a, members[i]) for a, i in zip(back, lost, strict=True))


def test_widest_array_in_both_codecs() -> None:
    generator = np.random.default_rng(3)
    blocks = [generator.integers(0, 256, 800, dtype=np.uint8) for _ in range(251)]
    expected = reference(parity_matrix(251, 4), blocks)
    for codec in codecs():
        rows = [np.empty(800, np.uint8) for _ in range(4)]
        codec.multiply(parity_matrix(251, 4), blocks, rows)
        assert all(np.array_equal(a, b) for a, b in zip(rows, expected, strict=True))


def test_best_codec_is_the_library_where_it_is_installed() -> None:
    assert best_codec().name == ("numpy" if isal_codec() is None else "isal")


@pytest.mark.parametrize(("k", "m"), [(0, 1), (1, 5), (252, 4), (1, -1)])
def test_impossible_arrays(k: int, m: int) -> None:
    with pytest.raises(UsageError):
        parity_matrix(k, m)
