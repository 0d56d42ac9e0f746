"""Read a disc image without a kernel driver: ISO 9660 + Rock Ridge, and its UDF side apart.

Written from the standards, sharing nothing with the writer, so that it can judge what the writer
made: both trees are walked independently and must agree on names, lengths and places. Every
offset read from the disc is checked, so a damaged structure is a `DataError`, not a crash. Left
out: Joliet, interleaving, UDF above 1.02 (metadata and virtual partitions), multi-session discs.

Source: ECMA-119 8.4, 9.1; IEEE P1282 (SUSP and RRIP 1.09); ECMA-167 3/7.2, 3/10, 4/14.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tierwise.core.errors import DataError

SECTOR_BYTES = 2048
_MAX_DIRECTORY_BYTES = 1 << 30
Pread = Callable[[int, int], bytes]  # (offset, length) -> bytes; shorter only at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class IsoNode:
    """One name found on a disc; `path` is text from the root, extents are (offset, length)."""

    path: str
    mode: int
    uid: int
    gid: int
    size: int
    extents: tuple[tuple[int, int], ...]
    target: str = ""

    @property
    def is_directory(self) -> bool:
        """Return whether this is a directory."""
        return self.mode & 0o170000 == 0o040000

    @property
    def is_file(self) -> bool:
        """Return whether this is a regular file."""
        return self.mode & 0o170000 == 0o100000


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """What the primary volume descriptor says."""

    label: str
    volume_set: str
    application: str
    application_use: str
    size_bytes: int
    root_extent: int
    root_bytes: int


def read_volume(pread: Pread) -> Volume:
    """Return the ISO 9660 primary volume descriptor at sector 16.

    Raises:
        DataError: There is none.
    """
    block = pread(16 * SECTOR_BYTES, SECTOR_BYTES)
    if len(block) < SECTOR_BYTES or block[:7] != b"\x01CD001\x01":
        raise DataError("no ISO 9660 volume descriptor at sector 16")
    sectors, sector_bytes = (
        struct.unpack_from("<I", block, 80)[0],
        struct.unpack_from("<H", block, 128)[0],
    )
    if sector_bytes != SECTOR_BYTES:
        raise DataError(f"the volume's blocks are {sector_bytes} bytes, not {SECTOR_BYTES}")
    root_extent, root_bytes = struct.unpack_from("<I4xI", block, 156 + 2)
    return Volume(
        label=_ascii(block[40:72]),
        volume_set=_ascii(block[190:318]),
        application=_ascii(block[574:702]),
        application_use=_ascii(block[883:1395]),
        size_bytes=sectors * SECTOR_BYTES,
        root_extent=root_extent,
        root_bytes=root_bytes,
    )


def _ascii(field_bytes: bytes) -> str:
    return field_bytes.decode("ascii", errors="replace").rstrip(" \0")


def walk_iso(pread: Pread) -> Iterator[IsoNode]:
    """Yield every node of the Rock Ridge tree, each directory before what it holds.

    Raises:
        DataError: A structure is damaged; the message says where.
    """
    volume = read_volume(pread)
    seen: set[int] = set()
    stack = [("", volume.root_extent, volume.root_bytes)]
    while stack:
        prefix, extent, num_bytes = stack.pop()
        if extent in seen:
            raise DataError(f"directory {prefix or '/'} is listed twice or holds itself")
        seen.add(extent)
        below = []
        for node in _iso_directory(pread, prefix, extent, num_bytes):
            yield node
            if node.is_directory:
                offset, length = node.extents[0]
                below.append((node.path, offset // SECTOR_BYTES, length))
        stack.extend(reversed(below))


@dataclass(slots=True)
class _Susp:
    """Rock Ridge fields gathered from one directory record."""

    name: bytearray = field(default_factory=bytearray)
    target: list[str] = field(default_factory=list)
    partial: bytearray = field(default_factory=bytearray)
    mode: int = 0
    uid: int = 0
    gid: int = 0
    skip: bool = False


def _iso_directory(pread: Pread, prefix: str, extent: int, num_bytes: int) -> Iterator[IsoNode]:
    where = f"directory {prefix or '/'}"
    if not 0 < num_bytes <= _MAX_DIRECTORY_BYTES:
        raise DataError(f"{where} has an impossible length {num_bytes}")
    data = pread(extent * SECTOR_BYTES, num_bytes)
    if len(data) < num_bytes:
        raise DataError(f"{where} lies beyond the end of the disc")
    position, pending = 0, []
    while position < num_bytes:
        length = data[position]
        if length == 0:
            position = (position // SECTOR_BYTES + 1) * SECTOR_BYTES
            continue
        record = data[position : position + length]
        position += length
        if length < 34 or len(record) < length or record[32] + 33 > length:
            raise DataError(f"{where} has a damaged record")
        identifier = record[33 : 33 + record[32]]
        if identifier in (b"\0", b"\1"):
            continue
        start, size = struct.unpack_from("<I4xI", record, 2)
        if struct.unpack_from(">I", record, 6)[0] != start:
            raise DataError(f"{where} has a record whose two byte orders disagree")
        pending.append((start * SECTOR_BYTES, size))
        if record[25] & 0x80:
            continue
        yield _iso_node(pread, where, prefix, record, tuple(pending))
        pending = []


def _iso_node(
    pread: Pread, where: str, prefix: str, record: bytes, extents: tuple[tuple[int, int], ...]
) -> IsoNode:
    susp = _Susp()
    _read_susp(pread, record[33 + record[32] + (record[32] + 1) % 2 :], susp, depth=0)
    if not susp.name:
        raise DataError(f"{where} has a record without a Rock Ridge name")
    name = _utf8(bytes(susp.name), where)
    if "/" in name or name in (".", ".."):
        raise DataError(f"{where} holds the impossible name {name!r}")
    is_directory = bool(record[25] & 2)
    if is_directory != (susp.mode & 0o170000 == 0o040000):
        raise DataError(f"{where}: {name!r} is a directory to one half of its record only")
    return IsoNode(
        path=f"{prefix}/{name}" if prefix else name,
        mode=susp.mode,
        uid=susp.uid,
        gid=susp.gid,
        size=sum(length for _, length in extents),
        extents=extents,
        target=_join_target(susp.target),
    )


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} has a name that is not UTF-8") from error


def _read_susp(pread: Pread, area: bytes, susp: _Susp, *, depth: int) -> None:
    """Gather PX, NM and SL entries, following continuation areas (CE)."""
    position, continuation = 0, None
    while position + 4 <= len(area):
        kind, length = area[position : position + 2], area[position + 2]
        if length < 4 or position + length > len(area):
            break
        body = area[position + 4 : position + length]
        position += length
        if kind == b"PX" and len(body) >= 32:
            susp.mode, susp.uid, susp.gid = struct.unpack_from("<I12xI4xI", body, 0)
        elif kind == b"NM" and body:
            susp.name += body[1:]
        elif kind == b"SL" and body:
            _read_sl(body[1:], susp)
        elif kind == b"CE" and len(body) >= 24:
            continuation = struct.unpack_from("<I4xI4xI", body, 0)
        elif kind == b"ST":
            break
    if continuation is not None:
        if depth > 100:
            raise DataError("a continuation area points to itself")
        block, offset, length = continuation
        more = pread(block * SECTOR_BYTES + offset, min(length, SECTOR_BYTES))
        _read_susp(pread, more, susp, depth=depth + 1)


def _read_sl(components: bytes, susp: _Susp) -> None:
    position = 0
    while position + 2 <= len(components):
        flags, length = components[position], components[position + 1]
        susp.partial += components[position + 2 : position + 2 + length]
        position += 2 + length
        if flags & 1:
            continue
        special = {2: ".", 4: "..", 8: "/"}.get(flags & 0x0E)
        susp.target.append(special if special else susp.partial.decode("utf-8", "replace"))
        susp.partial.clear()


def _join_target(parts: list[str]) -> str:
    if parts and parts[0] == "/":
        return "/" + "/".join(parts[1:])
    return "/".join(parts)


@dataclass(frozen=True, slots=True)
class _Partition:
    start: int


def walk_udf(pread: Pread) -> Iterator[IsoNode]:
    """Yield every directory and file of the UDF tree; modes and owners are left at zero.

    Raises:
        DataError: There is no UDF volume, or a descriptor's tag, CRC or place is wrong.
    """
    partition, root = _udf_root(pread)
    seen: set[int] = set()
    stack = [("", root)]
    while stack:
        prefix, block = stack.pop()
        if block in seen:
            raise DataError(f"UDF directory {prefix or '/'} holds itself")
        seen.add(block)
        below = []
        for name, is_directory, child in _udf_children(pread, partition, block, prefix):
            path = f"{prefix}/{name}" if prefix else name
            if is_directory:
                yield IsoNode(path=path, mode=0o040000, uid=0, gid=0, size=0, extents=())
                below.append((path, child))
            else:
                size, extents = _udf_entry(pread, partition, child, path)
                yield IsoNode(
                    path=path, mode=0o100000, uid=0, gid=0, size=size, extents=tuple(extents)
                )
        stack.extend(reversed(below))


def _descriptor(pread: Pread, block: int, kind: int, what: str, location: int) -> bytes:
    """Return one block that starts with a descriptor tag of the wanted kind, checked."""
    data = pread(block * SECTOR_BYTES, SECTOR_BYTES)
    if len(data) < SECTOR_BYTES:
        raise DataError(f"UDF {what} lies beyond the end of the disc")
    _check_tag(data, kind, what, location)
    return data


def _check_tag(data: bytes, kind: int, what: str, location: int) -> None:
    identifier, _, checksum, _, _, crc, crc_length, place = struct.unpack_from("<HHBBHHHI", data, 0)
    if identifier != kind or place != location:
        raise DataError(f"UDF {what} is not where it should be (block {location})")
    if (sum(data[:16]) - checksum) & 0xFF != checksum:
        raise DataError(f"UDF {what} has a wrong tag checksum")
    if binascii.crc_hqx(data[16 : 16 + crc_length], 0) != crc:
        raise DataError(f"UDF {what} has a wrong CRC")


def _udf_root(pread: Pread) -> tuple[_Partition, int]:
    anchor = _descriptor(pread, 256, 2, "anchor", 256)
    num_bytes, start = struct.unpack_from("<II", anchor, 16)
    partition: _Partition | None = None
    file_set: int | None = None
    for block in range(start, start + min(num_bytes // SECTOR_BYTES, 64)):
        data = pread(block * SECTOR_BYTES, SECTOR_BYTES)
        kind = struct.unpack_from("<H", data, 0)[0] if len(data) == SECTOR_BYTES else 8
        if kind == 5:
            _check_tag(data, 5, "partition descriptor", block)
            partition = _Partition(struct.unpack_from("<I", data, 188)[0])
        elif kind == 6:
            _check_tag(data, 6, "logical volume descriptor", block)
            file_set = struct.unpack_from("<I", data, 248 + 4)[0]
        elif kind == 8:
            break
    if partition is None or file_set is None:
        raise DataError("the UDF volume descriptors are incomplete")
    data = _descriptor(pread, partition.start + file_set, 256, "file set", file_set)
    return partition, struct.unpack_from("<I", data, 400 + 4)[0]


def _udf_entry(
    pread: Pread, partition: _Partition, block: int, what: str
) -> tuple[int, list[tuple[int, int]]]:
    """Return a file entry's length and its extents as (offset, length) on the disc."""
    data = _descriptor(pread, partition.start + block, 261, f"file entry of {what!r}", block)
    size = struct.unpack_from("<Q", data, 56)[0]
    attributes, descriptors = struct.unpack_from("<II", data, 168)
    place = 176 + attributes
    if place + descriptors > SECTOR_BYTES or data[34] & 7:
        raise DataError(f"UDF file entry of {what!r} has allocation this reader cannot follow")
    extents = []
    for position in range(place, place + descriptors, 8):
        length, start = struct.unpack_from("<II", data, position)
        if length >> 30:
            raise DataError(f"UDF file entry of {what!r} has an unrecorded extent")
        if length:
            extents.append(((partition.start + start) * SECTOR_BYTES, length))
    if sum(length for _, length in extents) != size:
        raise DataError(f"UDF file entry of {what!r} has extents that do not add up to its length")
    return size, extents


def _udf_children(
    pread: Pread, partition: _Partition, block: int, prefix: str
) -> Iterator[tuple[str, bool, int]]:
    what = prefix or "/"
    size, extents = _udf_entry(pread, partition, block, what)
    if size > _MAX_DIRECTORY_BYTES:
        raise DataError(f"UDF directory {what} has an impossible length {size}")
    data = b"".join(pread(offset, length) for offset, length in extents)
    position = 0
    while position + 38 <= len(data):
        flags, name_length = data[position + 18], data[position + 19]
        child = struct.unpack_from("<I", data, position + 24)[0]
        use_length = struct.unpack_from("<H", data, position + 36)[0]
        total = (38 + name_length + use_length + 3) // 4 * 4
        record = data[position : position + total]
        tag_place = struct.unpack_from("<I", record, 12)[0]
        _check_tag(record, 257, f"file identifier in {what}", tag_place)
        raw = record[38 + use_length : 38 + use_length + name_length]
        position += total
        if flags & 8 or flags & 4:
            continue
        yield _osta(raw, what), bool(flags & 2), child


def _osta(raw: bytes, what: str) -> str:
    """Return OSTA compressed Unicode as text (UDF 2.1.1)."""
    if raw[:1] == b"\x08":
        return raw[1:].decode("latin-1")
    if raw[:1] == b"\x10":
        try:
            return raw[1:].decode("utf-16-be")
        except UnicodeDecodeError as error:
            raise DataError(f"UDF directory {what} has a damaged name") from error
    raise DataError(f"UDF directory {what} has a name in an unknown encoding")
