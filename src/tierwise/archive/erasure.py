r"""One erasure code over GF(2^8): k data blocks + up to 4 parity blocks, any k of them suffice.

The field is polynomials over GF(2) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d). Parity row r of
column j (data block j, from 0) is

```
row 0   1                      exclusive or
row 1   2^j                    with row 0: RAID-6's P and Q
row 2   1 / (2 + 2^-j)
row 3   1 / (4 + 2^-j)
```

That is an extended Cauchy matrix: with y_j = 2^-j, row 0 has its x at infinity and rows 1 to 3 have
x = 0, 2 and 4, so row r is 1 / (x_r + y_j). The x are distinct from each other and from every y_j
for j <= 252, and so every square submatrix is regular: any m lost blocks are recovered. One matrix
serves all m, so parity can be read by what is known of RAID-6 when m <= 2.

Two codecs give the same bits: Intel's ISA-L through ctypes where it is installed, and numpy.
Left out: finding errors whose place is not known; checksums do that (`parity`).

Source: Plank & Ding, "Note: Correction to the 1997 Tutorial on Reed-Solomon Coding", 2005
(https://web.eecs.utk.edu/~jplank/plank/papers/CS-03-504.html) for why Vandermonde rows below an
identity are not enough; Blomer et al., "An XOR-Based Erasure-Resilient Coding Scheme", ICSI
TR-95-048, 1995 (Cauchy); H. P. Anvin, "The mathematics of RAID-6"
(https://www.kernel.org/pub/linux/kernel/people/hpa/raid6.pdf) for P, Q and doubling many bytes in
a word.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierwise.core.errors import UsageError

Bytes = npt.NDArray[np.uint8]
Matrix = tuple[tuple[int, ...], ...]

MAX_PARITY = 4
MAX_MEMBERS = 255
_POLYNOMIAL = 0x11D
_CHUNK_BYTES = 32768  # nine such buffers stay in a second-level cache


def _tables() -> tuple[list[int], list[int]]:
    powers, logarithms, value = [0] * 510, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value = value << 1 ^ (_POLYNOMIAL if value & 0x80 else 0)
    return powers, logarithms


_POWERS, _LOGARITHMS = _tables()


def gf_multiply(a: int, b: int) -> int:
    """Return the product of two field elements.

    >>> gf_multiply(2, 0x80), gf_multiply(0, 7)
    (29, 0)
    """
    return _POWERS[_LOGARITHMS[a] + _LOGARITHMS[b]] if a and b else 0


def gf_invert(a: int) -> int:
    """Return the inverse of a field element.

    >>> gf_multiply(7, gf_invert(7))
    1

    Raises:
        ZeroDivisionError: The element is zero.
    """
    if a == 0:
        raise ZeroDivisionError("0 has no inverse")
    return _POWERS[255 - _LOGARITHMS[a]]


def coefficient(row: int, column: int) -> int:
    """Return the parity matrix's element.

    >>> [coefficient(1, j) for j in range(9)]
    [1, 2, 4, 8, 16, 32, 64, 128, 29]
    """
    if row == 0:
        return 1
    x = (0, 2, 4)[row - 1]
    return gf_invert(x ^ _POWERS[255 - column % 255])


@functools.cache
def parity_matrix(data_count: int, parity_count: int) -> Matrix:
    """Return the m x k matrix from data blocks to parity blocks.

    Raises:
        UsageError: k < 1, m outside 0-4, or k + m above 255.
    """
    if data_count < 1 or not 0 <= parity_count <= MAX_PARITY:
        raise UsageError(
            f"an array of {data_count} + {parity_count} is not possible",
            hint=f"take at least one data disc and at most {MAX_PARITY} parity discs",
        )
    if data_count + parity_count > MAX_MEMBERS:
        raise UsageError(f"an array has at most {MAX_MEMBERS} discs")
    return tuple(
        tuple(coefficient(row, column) for column in range(data_count))
        for row in range(parity_count)
    )


def invert_matrix(matrix: Matrix) -> Matrix:
    """Return the inverse of a regular square matrix, by Gauss-Jordan elimination.

    Raises:
        ZeroDivisionError: The matrix is singular.
    """
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((r for r in range(column, size) if rows[r][column]), None)
        if pivot is None:
            raise ZeroDivisionError("the matrix is singular")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = gf_invert(rows[column][column])
        rows[column] = [gf_multiply(scale, value) for value in rows[column]]
        for other in range(size):
            factor = rows[other][column]
            if other != column and factor:
                rows[other] = [
                    value ^ gf_multiply(factor, lead)
                    for value, lead in zip(rows[other], rows[column], strict=True)
                ]
    return tuple(tuple(row[size:]) for row in rows)


def multiply_matrices(left: Matrix, right: Matrix) -> Matrix:
    """Return the product of two matrices."""
    columns = list(zip(*right, strict=True))
    return tuple(
        tuple(
            functools.reduce(
                int.__xor__, (gf_multiply(a, b) for a, b in zip(row, column, strict=True)), 0
            )
            for column in columns
        )
        for row in left
    )


@functools.lru_cache(maxsize=4096)
def recovery_matrix(
    data_count: int, parity_count: int, survivors: tuple[int, ...], wanted: tuple[int, ...]
) -> Matrix:
    """Return the matrix from k surviving members' blocks to the wanted members' blocks.

    Args:
        data_count: k.
        parity_count: m.
        survivors: k member indices (data 0 to k-1, parity k to k+m-1).
        wanted: Member indices to compute.
    """
    parity = parity_matrix(data_count, parity_count)

    def generator(index: int) -> tuple[int, ...]:
        if index >= data_count:
            return parity[index - data_count]
        return tuple(int(column == index) for column in range(data_count))

    inverse = invert_matrix(tuple(generator(index) for index in survivors))
    return multiply_matrices(tuple(generator(index) for index in wanted), inverse)


class Codec(Protocol):
    """Multiplies a matrix by blocks of bytes."""

    name: str

    def multiply(self, matrix: Matrix, blocks: Sequence[Bytes], out: Sequence[Bytes]) -> None:
        """Set `out[r]` to the sum over j of `matrix[r][j] * blocks[j]`.

        Args:
            matrix: r x j.
            blocks: j contiguous arrays of one length, a multiple of 8.
            out: r arrays of that length, apart from the blocks.
        """


class NumpyCodec:
    """Bit planes: XOR the blocks that have a coefficient bit, double all bytes, next bit."""

    name = "numpy"

    def multiply(self, matrix: Matrix, blocks: Sequence[Bytes], out: Sequence[Bytes]) -> None:
        """Set `out[r]` to the sum over j of `matrix[r][j] * blocks[j]`."""
        length = len(out[0]) if out else 0
        carry = np.empty(_CHUNK_BYTES, np.uint8)
        for start in range(0, length, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, length)
            words = [block[start:stop].view(np.uint64) for block in blocks]
            for row, result in zip(matrix, out, strict=True):
                _multiply_row(row, words, result[start:stop], carry[: stop - start])


def _multiply_row(
    row: Sequence[int], words: Sequence[npt.NDArray[np.uint64]], result: Bytes, carry: Bytes
) -> None:
    """Evaluate one row over one chunk by Horner's rule over the coefficients' bits.

    Doubling a byte is an addition to itself and, where its top bit was set (where it is negative
    as a signed byte), an exclusive or with 0x1d: four passes that numpy vectorises.
    """
    total = result.view(np.uint64)
    total[:] = 0
    highest = max((value.bit_length() for value in row), default=0)
    for bit in range(highest - 1, -1, -1):
        if bit != highest - 1:
            np.less(result.view(np.int8), 0, out=carry.view(np.bool_))
            np.multiply(carry, _REDUCTION, out=carry)
            np.add(result, result, out=result)
            np.bitwise_xor(result, carry, out=result)
        for value, block in zip(row, words, strict=True):
            if value >> bit & 1:
                np.bitwise_xor(total, block, out=total)


_REDUCTION = np.uint8(_POLYNOMIAL & 0xFF)


class IsalCodec:
    """Intel's Intelligent Storage Acceleration Library, called through ctypes."""

    name = "isal"

    def __init__(self, library: Any) -> None:
        self._library = library
        self._tables: dict[Matrix, Any] = {}

    def multiply(self, matrix: Matrix, blocks: Sequence[Bytes], out: Sequence[Bytes]) -> None:
        """Set `out[r]` to the sum over j of `matrix[r][j] * blocks[j]`."""
        if not out:
            return
        columns, rows = len(blocks), len(out)
        pointers = ctypes.c_void_p * columns
        results = ctypes.c_void_p * rows
        self._library.ec_encode_data(
            ctypes.c_int(len(out[0])), ctypes.c_int(columns), ctypes.c_int(rows),
            self._expand(matrix), pointers(*(block.ctypes.data for block in blocks)),
            results(*(row.ctypes.data for row in out)),
        )  # fmt: skip

    def _expand(self, matrix: Matrix) -> Any:
        """Return the library's 32-byte tables of each coefficient."""
        tables = self._tables.get(matrix)
        if tables is None:
            rows, columns = len(matrix), len(matrix[0])
            flat = bytes(value for row in matrix for value in row)
            tables = ctypes.create_string_buffer(32 * rows * columns)
            self._library.ec_init_tables(ctypes.c_int(columns), ctypes.c_int(rows), flat, tables)
            if len(self._tables) > 1024:
                self._tables.clear()
            self._tables[matrix] = tables
        return tables


@functools.cache
def isal_codec() -> IsalCodec | None:
    """Return the ISA-L codec, or None where the library is not installed (Debian: libisal2)."""
    name = ctypes.util.find_library("isal") or "libisal.so.2"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    if not hasattr(library, "ec_encode_data"):
        return None
    library.ec_encode_data.restype = None
    library.ec_init_tables.restype = None
    return IsalCodec(library)


def best_codec() -> Codec:
    """Return the fastest codec that is installed; both give the same bits."""
    return isal_codec() or NumpyCodec()
