"""The slice of the catalogue: what goes onto a disc comes back, or is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierwise.archive.disc_slice import (
    ArrayPosition,
    ImageIdentity,
    NodeKind,
    SealEntry,
    decode_manifest,
    decode_slice,
    encode_manifest,
    encode_slice,
)
from tierwise.core.errors import DataError, UsageError

IDENTITY = ImageIdentity(archive_id="0a" * 16, image_id="1b" * 16, label="L_1", sequence=7)
names = st.binary(min_size=1, max_size=30).filter(lambda b: b"/" not in b and b"\0" not in b)
paths = st.lists(names, min_size=1, max_size=3).map(b"/".join)
big = st.integers(-(2**63), 2**63 - 1)
small = st.integers(0, 2**32 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def entries(draw: st.DrawFn) -> SealEntry:
    kind = draw(st.sampled_from(NodeKind))
    is_file = kind is NodeKind.FILE
    size = draw(st.integers(0, 2**50)) if is_file else draw(small)
    count = draw(st.integers(1, 4)) if is_file else 1
    offset = draw(st.integers(0, size)) if is_file and count > 1 else 0
    return SealEntry(
        paths=tuple(draw(st.lists(paths, min_size=1, max_size=3))),
        kind=kind,
        inode=draw(st.integers(1, 2**64 - 1)),
        mode=draw(st.integers(0, 0o7777)),
        uid=draw(small),
        gid=draw(small),
        mtime_ns=draw(big),
        atime_ns=draw(big),
        ctime_ns=draw(big),
        rdev=draw(small),
        size=size,
        length=size - offset if is_file else None,
        sha256=draw(st.text("0123456789abcdef", min_size=64, max_size=64)) if is_file else None,
        target=draw(paths) if kind is NodeKind.SYMLINK else b"",
        version=draw(st.integers(1, 2**31)),
        piece_index=draw(st.integers(0, count - 1)),
        piece_count=count,
        piece_offset=offset,
        xattrs=draw(st.dictionaries(names, st.binary(max_size=20), max_size=3)),
        extra=draw(st.dictionaries(st.text(max_size=9), json_values, max_size=3)),
    )


positions = st.none() | st.builds(
    ArrayPosition,
    array_id=st.just("2c" * 16),
    index=st.integers(0, 5),
    data_count=st.integers(5, 9),
    parity_count=st.integers(1, 4),
    siblings=st.lists(st.tuples(st.just("3d" * 16), st.integers(0, 2**50)), max_size=2).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(
    held=st.lists(entries(), max_size=5),
    array=positions,
    created_ns=big,
    records=st.lists(
        st.fixed_dictionaries({"record": st.just("inode"), "x": json_values}), max_size=3
    ),
)
def test_what_goes_onto_a_disc_comes_back(
    held: list[SealEntry],
    array: ArrayPosition | None,
    created_ns: int,
    records: list[dict[str, Any]],
) -> None:
    placed = [(entry, tuple(f"data/{i}" for i in range(len(entry.paths)))) for entry in held]
    data = encode_slice(
        identity=IDENTITY, created_ns=created_ns, array=array, entries=placed, records=records
    )
    found = decode_slice(data)
    assert found.entries == tuple(held)
    assert found.disc_paths == tuple(places for _, places in placed)
    assert found.records == tuple(records)
    assert (found.identity, found.array, found.created_ns) == (IDENTITY, array, created_ns)
    assert data.isascii()


def test_an_incomplete_or_newer_slice_is_refused() -> None:
    whole = encode_slice(
        identity=IDENTITY, created_ns=1, array=None, entries=(), records=[{"record": "inode"}]
    )
    lines = whole.splitlines(keepends=True)
    head = json.loads(lines[0])
    for broken in (
        b"",
        b"".join(lines[:-1]),
        b"".join([lines[0], lines[2]]),
        b"".join(lines[1:]),
        whole[:-8],
        b"[1]\n" + whole,
        whole.replace(b'"label":"L_1"', b'"label":"l 1"'),
        json.dumps({**head, "format": 2}).encode() + b"\n" + b"".join(lines[1:]),
        json.dumps({**head, "created_ns": None}).encode() + b"\n" + b"".join(lines[1:]),
    ):
        with pytest.raises(DataError):
            decode_slice(broken)


@settings(deadline=None)
@given(digests=st.dictionaries(names.map(lambda b: f"data/{b.hex()} é"), st.just("ab" * 32)))
def test_manifest(digests: dict[str, str]) -> None:
    if digests:
        assert decode_manifest(encode_manifest(digests)) == digests


def test_a_malformed_manifest_is_refused() -> None:
    for text in (b"", b"zz  a\n", b"ab" * 32 + b"  a", b"ab" * 32 + b" a\n"):
        with pytest.raises(DataError):
            decode_manifest(text)


def test_positions_outside_their_array_are_refused() -> None:
    with pytest.raises(UsageError):
        ArrayPosition(array_id="2c" * 16, index=3, data_count=2, parity_count=1)
