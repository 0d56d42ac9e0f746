"""Restore one file from disc images, some of them lost, using nothing but Python.

Written from docs/formats/image.md, parity.md and disc-array.md alone; imports nothing of tierwise.
Usage: python restore_without_tierwise.py PATH-IN-ARCHIVE OUTPUT IMAGES-LEFT-OF-ONE-ARRAY...
"""
# mypy: ignore-errors

import hashlib
import json
import struct
import sys
from pathlib import Path
from urllib.parse import unquote_to_bytes

EXP = [1]  # the powers of 2 in GF(2^8)
while len(EXP) < 510:
    EXP.append(EXP[-1] << 1 ^ (0x11D if EXP[-1] & 128 else 0))
LOG = {EXP[i]: i for i in range(255)}


def walk(image, at, end, below=b""):
    """Yield (path, bytes) of all files in an ISO 9660 folder; the records of a file adjoin."""
    body = b""
    while at < end:
        if not (length := image[at]):  # the rest of this sector is empty
            at = (at // 2048 + 1) * 2048
            continue
        record, at = image[at : at + length], at + length
        start, size = struct.unpack_from("<I4xI", record, 2)
        entry = record.find(b"NM")  # Rock Ridge's name; a long one goes on elsewhere
        path = below + record[entry + 5 : entry + record[entry + 2]]
        if not record[25] & 2:
            body += image[start * 2048 : start * 2048 + size]
            if not record[25] & 128:
                yield path, body
                body = b""
        elif record[33] > 1:  # neither the folder itself nor the one above
            yield from walk(image, start * 2048, start * 2048 + size, path + b"/")


def files_of(image):
    """Return the files on a disc by path, right for short names, and by their SHA-256."""
    start, size = struct.unpack_from("<I4xI", image, 16 * 2048 + 158)
    files = list(walk(image, start * 2048, start * 2048 + size))
    return dict(files) | {hashlib.sha256(body).hexdigest(): body for _, body in files}


def row_of(member, k):
    """Return which multiples of the k data discs a member is the sum of."""
    if member <= k:
        return bytes(member in (j, k) for j in range(k))
    return bytes(EXP[255 - LOG[(0, 2, 4)[member - k - 1] ^ EXP[255 - j]]] for j in range(k))


def plus(a, c, b):
    """Return a + c * b, byte by byte."""
    b = b.translate(bytes(EXP[LOG[c] + LOG[x]] if c and x else 0 for x in range(256)))
    return (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).to_bytes(len(a), "big")


def solve(rows):
    """Return the data discs from k equations (coefficients, then the disc), by elimination."""
    for i in range(len(rows)):
        pivot = next(r for r in range(i, len(rows)) if rows[r][0][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [plus(bytes(len(part)), EXP[255 - LOG[rows[i][0][i]]], part) for part in rows[i]]
        for row in (row for row in rows if row is not rows[i]):
            row[:] = [plus(a, row[0][i], b) for a, b in zip(row, rows[i], strict=True)]
    return [disc for _, disc in rows]


def all_discs(images):
    """Return every data image of the array, the lost ones computed."""
    found, array = {}, None
    for image in images:
        files = files_of(image)
        place = json.loads(files[b"CATALOGUE.jsonl"].split(b"\n")[0])["array"]
        found[place["index"]] = files.get(b"PARITY.bin", bytes(2048) + image)[2048:]
        array = json.loads(files[b"ARRAY.json"]) if b"PARITY.bin" in files else array
    assert array, "no parity disc is left: read the data discs as they are"
    k, length = array["data_count"], array["stripe_length"]
    assert len(found) >= k, f"{k} discs are needed, {len(found)} are left"
    discs = solve([[row_of(i, k), found[i].ljust(length, b"\0")] for i in sorted(found)[:k]])
    return [disc[: m["length"]] for disc, m in zip(discs, array["members"], strict=False)]


def main(path, output, images):
    """Write the newest version of a file, its pieces found by their hashes and joined."""
    versions = {}
    for files in map(files_of, all_discs(Path(image).read_bytes() for image in images)):
        for row in map(json.loads, files[b"CATALOGUE.jsonl"].splitlines()):
            if row.get("kind") == "file" and path in map(unquote_to_bytes, row["paths"]):
                offset = row.get("piece", {"offset": 0})["offset"]
                versions.setdefault(row["version"], {})[offset] = files[row["sha256"]]
    newest = versions[max(versions)]
    Path(output).write_bytes(b"".join(newest[offset] for offset in sorted(newest)))


if __name__ == "__main__":
    main(sys.argv[1].encode("utf-8", "surrogateescape"), sys.argv[2], sys.argv[3:])
