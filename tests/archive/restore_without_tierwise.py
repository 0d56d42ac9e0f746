"""Restore one file from disc images, some of them lost, using nothing but Python.

Written from docs/formats/image.md, parity.md and disc-array.md alone; imports nothing of tierwise.
Usage: python restore_without_tierwise.py PATH OUTPUT IMAGE...
PATH is the file's true path in the archive, IMAGE... whatever discs are left of one array.
"""

import hashlib
import json
import re
import struct
import sys
from pathlib import Path

SECTOR = 2048


def files_of(image: bytes) -> dict[str, bytes]:
    """Return path -> bytes of an ISO 9660 + Rock Ridge image."""
    extent, size = struct.unpack_from("<I4xI", image, 16 * SECTOR + 158)
    return dict(walk(image, extent, size, ""))


def walk(image: bytes, extent: int, size: int, prefix: str):  # type: ignore[no-untyped-def]
    """Yield (path, bytes) below one directory; a file's records adjoin."""
    at, end, body = extent * SECTOR, extent * SECTOR + size, b""
    while at < end:
        length = image[at]
        if not length:
            at = (at // SECTOR + 1) * SECTOR
            continue
        start, size = struct.unpack_from("<I4xI", image, at + 2)
        flags, name_length = image[at + 25], image[at + 32]
        identifier = image[at + 33 : at + 33 + name_length]
        area = image[at + 33 + name_length + (name_length + 1) % 2 : at + length]
        at += length
        if identifier in (b"\0", b"\1"):
            continue
        path = prefix + rock_ridge_name(image, area).decode()
        if flags & 2:
            yield from walk(image, start, size, path + "/")
            continue
        body += image[start * SECTOR : start * SECTOR + size]
        if not flags & 128:
            yield path, body
            body = b""


def rock_ridge_name(image: bytes, area: bytes) -> bytes:
    """Return the NM entries' text, following CE."""
    name, at, more = b"", 0, b""
    while at + 4 <= len(area) and area[at + 2] >= 4:
        if area[at : at + 2] == b"NM":
            name += area[at + 5 : at + area[at + 2]]
        if area[at : at + 2] == b"CE":
            block, offset, length = struct.unpack_from("<I4xI4xI", area, at + 4)
            more = image[block * SECTOR + offset : block * SECTOR + offset + length]
        at += area[at + 2]
    return name + (rock_ridge_name(image, more) if more else b"")


EXP = [1]
while len(EXP) < 510:
    EXP.append(EXP[-1] << 1 ^ (0x11D if EXP[-1] & 128 else 0))
LOG = {EXP[i]: i for i in range(255)}


def times(a: int, b: int) -> int:
    return EXP[LOG[a] + LOG[b]] if a and b else 0


def row_of(member: int, k: int) -> list[int]:
    """Return the equation of a member: which multiples of the data discs it is."""
    if member < k:
        return [int(j == member) for j in range(k)]
    if member == k:
        return [1] * k
    x = (0, 2, 4)[member - k - 1]
    return [EXP[255 - LOG[x ^ EXP[255 - j]]] for j in range(k)]


def solve(rows: list[list[int]], values: list[int], length: int) -> list[bytes]:
    """Return the data discs from k equations; a value is a disc's bytes as one integer."""
    scale = [bytes(times(c, b) for b in range(256)) for c in range(256)]

    def multiply(c: int, value: int) -> int:
        return int.from_bytes(value.to_bytes(length, "big").translate(scale[c]), "big")

    for i in range(len(rows)):
        pivot = next(r for r in range(i, len(rows)) if rows[r][i])
        rows[i], rows[pivot], values[i], values[pivot] = (
            rows[pivot],
            rows[i],
            values[pivot],
            values[i],
        )
        inverse = EXP[255 - LOG[rows[i][i]]]
        rows[i], values[i] = [times(inverse, c) for c in rows[i]], multiply(inverse, values[i])
        for r in range(len(rows)):
            if r != i and (c := rows[r][i]):
                rows[r] = [a ^ times(c, b) for a, b in zip(rows[r], rows[i], strict=True)]
                values[r] ^= multiply(c, values[i])
    return [value.to_bytes(length, "big") for value in values]


def all_discs(paths: list[str]) -> list[bytes]:
    """Return every data image of the array, the lost ones computed."""
    found: dict[int, bytes] = {}
    array = None
    for image in (Path(path).read_bytes() for path in paths):
        files = files_of(image)
        place = json.loads(files["CATALOGUE.jsonl"].split(b"\n")[0])["array"]
        note = json.loads(files["ARRAY.json"])
        array = note if note["role"] == "parity" else array
        found[place["index"]] = files["PARITY.bin"][2048:] if note["role"] == "parity" else image
    assert array, "no parity disc is left: read the data discs as they are"
    k, length = array["data_count"], array["stripe_length"]
    members = sorted(found)[:k]
    assert len(members) == k, f"{k} discs are needed, {len(found)} are left"
    values = [int.from_bytes(found[i].ljust(length, b"\0"), "big") for i in members]
    solved = solve([row_of(i, k) for i in members], values, length)
    return [disc[: m["length"]] for disc, m in zip(solved, array["members"], strict=False)]


def main(path: bytes, output: Path, images: list[str]) -> None:
    """Write the newest version of a file, its pieces joined and its hashes checked."""
    pieces: dict[int, dict[int, bytes]] = {}
    for files in map(files_of, all_discs(images)):
        for row in map(json.loads, files["CATALOGUE.jsonl"].splitlines()):
            for name, place in zip(row.get("paths", ()), row.get("disc_paths", ()), strict=False):
                true = re.sub(rb"%(..)", lambda m: bytes.fromhex(m[1].decode()), name.encode())
                if row["record"] == "entry" and row["kind"] == "file" and true == path:
                    assert hashlib.sha256(files[place]).hexdigest() == row["sha256"], place
                    offset = row.get("piece", {"offset": 0})["offset"]
                    pieces.setdefault(row["version"], {})[offset] = files[place]
    newest = pieces[max(pieces)]
    output.write_bytes(b"".join(newest[offset] for offset in sorted(newest)))


if __name__ == "__main__":
    main(sys.argv[1].encode("utf-8", "surrogateescape"), Path(sys.argv[2]), sys.argv[3:])
