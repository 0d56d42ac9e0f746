"""Which images make up an array, as every parity disc of it says: values and their JSON.

Members 0 to k-1 are data images, k to k+m-1 parity images. The map gives each one's identity,
exact length and SHA-256 (of a parity image: of its PARITY.bin, as the image holds the map). Left
out: the code itself, which is `erasure`, and files, which the slices describe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tierwise.core.errors import DataError

CODE_NAME = "tierwise-gf256-0x11d-cauchy-1"
CHECKSUM_BLOCK_BYTES = 65536
MAX_MEMBERS = 255
MAX_PARITY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMember:
    """One image of an array.

    Args:
        index: 0 to k-1 for data, k to k+m-1 for parity.
        role: What it holds.
        image_id: 32 hex digits, as in the image's own slice.
        label: The volume's name.
        sequence: The image's number in its archive.
        length: Bytes of the whole image; of a parity image, the stripe's.
        sha256: Of the whole image; of a parity image, of its `PARITY.bin`.
    """

    index: int
    role: Literal["data", "parity"]
    image_id: str
    label: str
    sequence: int
    length: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMap:
    """An array: `data_count` images zero-extended to `stripe_length`, and their parity.

    `checksums_sha256` is that of CHECKSUMS.bin, `created_ns` the time stamped on the parity images.
    """

    array_id: str
    archive_id: str
    created_ns: int
    data_count: int
    parity_count: int
    stripe_length: int
    checksums_sha256: str
    members: tuple[ArrayMember, ...]
    block_size: int = CHECKSUM_BLOCK_BYTES
    code: str = CODE_NAME

    def to_json(self) -> dict[str, Any]:
        """Return the map as JSON values."""
        return {"role": "parity", **asdict(self), "members": [asdict(m) for m in self.members]}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ArrayMap:
        """Return the map from JSON values.

        Raises:
            DataError: Malformed, contradictory, or in a code this program does not know.
        """
        try:
            members = tuple(ArrayMember(**member) for member in row["members"])
            array = cls(
                array_id=str(row["array_id"]),
                archive_id=str(row["archive_id"]),
                created_ns=int(row["created_ns"]),
                checksums_sha256=str(row["checksums_sha256"]),
                data_count=int(row["data_count"]),
                parity_count=int(row["parity_count"]),
                stripe_length=int(row["stripe_length"]),
                members=members,
                block_size=int(row["block_size"]),
                code=str(row["code"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the array map is malformed: {error}") from error
        if array.code != CODE_NAME:
            raise DataError(f"the array's code {array.code!r} is not known to this program")
        count = array.data_count + array.parity_count
        if [m.index for m in members] != list(range(count)) or not array.block_size > 0:
            raise DataError("the array map does not list its members in order")
        return array

    @property
    def num_blocks(self) -> int:
        """Return how many blocks the stripe has; the last may be shorter."""
        return -(-self.stripe_length // self.block_size)

    def member(self, index: int) -> ArrayMember:
        """Return a member by index."""
        return self.members[index]

    def encode(self) -> bytes:
        """Return the map as the content of ARRAY.json."""
        return json.dumps(self.to_json(), indent=1).encode("ascii") + b"\n"


def decode_array_map(data: bytes) -> ArrayMap | None:
    """Return the map in an ARRAY.json, or None where the disc is not a parity disc.

    Raises:
        DataError: Not JSON, or a malformed map.
    """
    try:
        row = json.loads(data)
    except ValueError as error:
        raise DataError("ARRAY.json is not JSON") from error
    if not isinstance(row, dict) or row.get("role") != "parity":
        return None
    return ArrayMap.from_json(row)
