"""Plan of files -> ISO 9660 level 3 + Rock Ridge image with a UDF bridge, the same bytes each time.

pycdlib lays the volume out. It stamps every structure with the wall clock and a random volume
set name; for the length of one image its modules are lent a clock (each node's own mtime, UTC)
and a fixed generator, so that the same plan gives the same image. Owners and permissions are set
on its records, which its interface leaves at root's. Symbolic links stand on the Rock Ridge side
only: 7-Zip's UDF reader refuses a whole volume for one of them. Left out: Joliet, boot records,
devices and sub-second times, which live in the catalogue slice.

Source: ECMA-119 (ISO 9660), IEEE P1282 (Rock Ridge 1.09), ECMA-167 and OSTA UDF 1.02.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import gmtime, strftime, strptime
from typing import Any, BinaryIO

from tierwise.archive.disc_slice import (
    APPLICATION,
    CHECKSUM_OFFSET,
    CHECKSUM_PREFIX,
    ImageChecksum,
)
from tierwise.core.errors import IntegrityError

SECTOR_BYTES = 2048
_LATEST_S = 4_102_444_800  # 2100-01-01: the directory record's one-byte year ends in 2155
_COPY_BYTES = 1 << 20


class NodeShape(StrEnum):
    """What a name on a disc can be."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNode:
    """One name on a disc; `path` is its text from the volume's root, without a leading slash.

    `source` holds a file's bytes from `source_offset` on; `link_to` names the path of another
    file of the plan whose bytes are shared.
    """

    path: str
    shape: NodeShape
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_s: int = 0
    length: int = 0
    source: Path | bytes = b""
    source_offset: int = 0
    link_to: str | None = None
    target: str = ""
    num_links: int = 1


_cached_gmtime = functools.lru_cache(maxsize=4096)(gmtime)  # one node's time is asked for often


class _LentClock:
    """Stands in for the `time` module inside pycdlib: a settable now, and no time zone."""

    def __init__(self, now_s: int) -> None:
        self.now_s = now_s

    def time(self) -> float:
        return float(self.now_s)

    localtime = staticmethod(_cached_gmtime)
    gmtime = staticmethod(_cached_gmtime)
    strftime = staticmethod(strftime)
    strptime = staticmethod(strptime)


class _LentRandom:
    """Stands in for the `random` module inside pycdlib: the volume set's bits are given."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def getrandbits(self, count: int) -> int:
        return self._bits & ((1 << count) - 1)


_LOAN = threading.Lock()


@contextlib.contextmanager
def _lend(clock: _LentClock, bits: int) -> Iterator[None]:
    """Replace the clock and generator of pycdlib's modules; one image at a time in a process."""
    from pycdlib import dates, headervd, pycdlib, udf, utils

    modules: list[Any] = [dates, headervd, pycdlib, udf, utils]
    with _LOAN:
        before = [(module, name, getattr(module, name)) for module in modules
                  for name in ("time", "random") if hasattr(module, name)]  # fmt: skip
        try:
            for module, name, _ in before:
                setattr(module, name, clock if name == "time" else _LentRandom(bits))
            yield
        finally:
            for module, name, original in before:
                setattr(module, name, original)


def write_iso(
    nodes: Sequence[PlanNode],
    stream: BinaryIO,
    *,
    label: str,
    volume_set: str,
    created_s: int,
    bits: int,
    check_size: Callable[[int], None],
    advance: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the image to `stream` and return its size in bytes.

    Args:
        nodes: Directories before what they hold; links after the file they share.
        stream: An empty, seekable binary file.
        label: The volume's name, 1-30 of `A-Z0-9_`.
        volume_set: The volume set's name in the ISO descriptor.
        created_s: Seconds since the epoch, stamped on the volume.
        bits: What makes the UDF volume set's name unique.
        check_size: Called with the exact size before the first byte is written; may raise.
        advance: Called with the number of bytes written since the last call.
    """
    import pycdlib

    clock = _LentClock(_clamp(created_s))
    with _lend(clock, bits):
        image = pycdlib.PyCdlib()
        image.new(
            interchange_level=3, rock_ridge="1.09", udf="2.60", vol_ident=label,
            vol_set_ident=volume_set, sys_ident="LINUX", app_ident_str=APPLICATION,
            app_use=f"{CHECKSUM_PREFIX}00000000",
        )  # fmt: skip
        builder = _Builder(image, clock)
        try:
            builder.add_all(nodes)
            clock.now_s = _clamp(created_s)
            image.force_consistency()
            size = image.pvd.space_size * SECTOR_BYTES
            check_size(size)
            done = 0

            def progress(so_far: int, _total: int, _opaque: object) -> None:
                nonlocal done
                advance(so_far - done)
                done = so_far

            image.write_fp(stream, blocksize=_COPY_BYTES, progress_cb=progress)
        finally:
            image.close()
            builder.close_sources()
    _write_checksum(stream)
    return int(size)


def _write_checksum(stream: BinaryIO) -> None:
    """Put the image's CRC-32 into its volume descriptor, so that any damage shows by itself."""
    checksum = ImageChecksum()
    stream.seek(0)
    while block := stream.read(_COPY_BYTES):
        checksum.update(block)
    stream.seek(CHECKSUM_OFFSET)
    stream.write(checksum.digits().encode("ascii"))


def _clamp(seconds: int) -> int:
    return min(max(seconds, 0), _LATEST_S)


class _Window(io.RawIOBase):
    """A part of a file, open only while it is read: an image may hold a million of them."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        super().__init__()
        self._path, self._offset, self._left = path, offset, length
        self._stream: BinaryIO | None = None

    def seek(self, offset: int, whence: int = 0) -> int:
        """Open the file at the window's start; pycdlib seeks to 0 before it reads."""
        self._stream = self._path.open("rb", buffering=0)
        self._stream.seek(self._offset + offset)
        return offset

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        super().close()

    def read(self, size: int = -1) -> bytes:
        if self._stream is None:
            return b""
        data = bytearray()
        while len(data) < min(size, self._left):
            block = self._stream.read(min(size, self._left) - len(data))
            if not block:
                self._stream.close()
                raise IntegrityError(f"{self._path} became shorter while it was sealed")
            data += block
        self._left -= len(data)
        if not self._left:
            self._stream.close()
            self._stream = None
        return bytes(data)


class _AllowsDepth:
    """Looks like an enhanced volume descriptor, which is what lifts pycdlib's depth rule."""

    def copy_sizes(self, _descriptor: object) -> None:
        pass


@contextlib.contextmanager
def _deep_paths(image: Any) -> Iterator[None]:
    """Let a directory stay below the eighth level instead of moving to `/rr_moved`.

    ECMA-119 6.8.2.1 stops at eight levels; Linux, BSD, libarchive, 7-Zip and xorriso read deeper
    ones, and a moved directory loses its path in readers that ignore Rock Ridge's CL and PL.
    """
    image.enhanced_vd = _AllowsDepth()
    try:
        yield
    finally:
        image.enhanced_vd = None


class _Builder:
    """Adds a plan's nodes to one pycdlib image, keeping the ISO path behind each text path."""

    def __init__(self, image: Any, clock: _LentClock) -> None:
        self._image, self._clock = image, clock
        self._iso_paths: dict[str, str] = {"": ""}
        self._count = 0
        self._windows: list[_Window] = []

    def close_sources(self) -> None:
        """Close what is still open of the files: one, when writing was cut off in its middle."""
        for window in self._windows:
            window.close()

    def add_all(self, nodes: Sequence[PlanNode]) -> None:
        for node in nodes:
            self._clock.now_s = _clamp(node.mtime_s)
            self._add(node)
        self._image.force_consistency()  # once: a look-up lays the volume out again if need be
        for node in nodes:
            self._own(node)

    def _add(self, node: PlanNode) -> None:
        parent, _, name = node.path.rpartition("/")
        iso_path = f"{self._iso_paths[parent]}/{self._iso_name(node)}"
        udf_path = f"/{node.path}"
        image = self._image
        self._iso_paths[node.path] = iso_path
        if node.shape is NodeShape.DIRECTORY:
            with _deep_paths(image):
                image.add_directory(
                    iso_path, rr_name=name, file_mode=0o040000 | node.mode, udf_path=udf_path
                )
        elif node.shape is NodeShape.SYMLINK:
            image.add_symlink(symlink_path=iso_path, rr_symlink_name=name, rr_path=node.target)
        elif node.link_to is not None:
            old = self._iso_paths[node.link_to]
            image.add_hard_link(iso_old_path=old, iso_new_path=iso_path, rr_name=name)
            image.add_hard_link(udf_old_path=f"/{node.link_to}", udf_new_path=udf_path)
        else:
            self._add_file(node, iso_path, name, udf_path)

    def _add_file(self, node: PlanNode, iso_path: str, name: str, udf_path: str) -> None:
        if isinstance(node.source, bytes):
            source: Any = io.BytesIO(node.source)
        else:
            source = _Window(node.source, node.source_offset, node.length)
            self._windows.append(source)
        self._image.add_fp(
            source, node.length, iso_path, rr_name=name, file_mode=0o100000 | node.mode,
            udf_path=udf_path,
        )  # fmt: skip

    def _iso_name(self, node: PlanNode) -> str:
        """Return a short name in ascending order, so that directories stay sorted as they grow."""
        self._count += 1
        ending = "" if node.shape is NodeShape.DIRECTORY else ".;1"
        return f"{'D' if node.shape is NodeShape.DIRECTORY else 'F'}{self._count:07d}{ending}"

    def _own(self, node: PlanNode) -> None:
        """Set owner and permissions on both sides' records."""
        record = self._image.get_record(iso_path=self._iso_paths[node.path])
        kind = {NodeShape.FILE: 0o100000, NodeShape.DIRECTORY: 0o040000}.get(node.shape, 0o120000)
        px = record.rock_ridge.dr_entries.px_record or record.rock_ridge.ce_entries.px_record
        px.posix_file_mode = kind | node.mode
        if node.shape is NodeShape.FILE:
            px.posix_file_links = node.num_links
        px.posix_user_id, px.posix_group_id = node.uid & 0xFFFFFFFF, node.gid & 0xFFFFFFFF
        if node.shape is NodeShape.SYMLINK:
            return
        entry = self._image.get_record(udf_path=f"/{node.path}")
        entry.uid, entry.gid = node.uid & 0xFFFFFFFF, node.gid & 0xFFFFFFFF
        entry.perms = _udf_permissions(node.mode)


def _udf_permissions(mode: int) -> int:
    """Return ECMA-167 4/14.9.5 permissions: 5 bits a class (x w r, attributes, delete)."""
    permissions = 0
    for shift, bits in ((0, mode & 7), (5, mode >> 3 & 7), (10, mode >> 6 & 7)):
        triple = bits >> 2 << 2 | (bits & 2) | (bits & 1)
        permissions |= triple << shift
    return permissions
