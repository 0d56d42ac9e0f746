"""Which inodes are open, how, and where their bytes go.

The kernel refuses an opening whose way of doing I/O does not fit the inode's other openings
(EIO). So the way is chosen when an inode is first opened and kept until its last handle closes:
passthrough if the file system gave a backing file and the kernel takes it, served otherwise.
Served openings may differ among themselves (cached, direct).

Passthrough needs Linux 6.9, CAP_SYS_ADMIN and a backing file system that is not stacked itself.
Where the kernel says no, the front end reads and writes the same descriptor on its behalf.

Source: https://docs.kernel.org/filesystems/fuse-passthrough.html
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import dataclass, field
from typing import Final

from tierwise.archive.fuse.wire import OpenFlag
from tierwise.archive.operations import Opened

_BACKING_OPEN: Final = 0x4010E501
"""_IOW(229, 1, struct fuse_backing_map): descriptor, flags, padding"""
_BACKING_CLOSE: Final = 0x4004E502
"""_IOW(229, 2, uint32_t)"""
_NOT_NOW: Final = frozenset({errno.ELOOP, errno.EINVAL, errno.EOPNOTSUPP, errno.EMFILE})
"""Refusals that concern one backing file; any other one ends passthrough for the mount."""


@dataclass(slots=True, kw_only=True)
class _OpenInode:
    """An inode with open handles.

    Args:
        backing_id: The kernel's number of the registered backing file; 0 while served.
        descriptors: Of each handle, its backing descriptor or None.
        files: Of each handle with one, the (device, inode) of the backing file.
        writers: Handles that may write.
    """

    backing_id: int
    descriptors: dict[int, int | None] = field(default_factory=dict)
    files: dict[int, tuple[int, int]] = field(default_factory=dict)
    writers: set[int] = field(default_factory=set)

    def fits(self, file: tuple[int, int] | None) -> bool:
        """Return whether a further opening with this backing file sees the same bytes.

        One without may join served openings: the file system answers for it.
        """
        if file is None:
            return not self.backing_id
        return all(other == file for other in self.files.values())


class OpenFiles:
    """All open files of one mount.

    Args:
        device: Descriptor of the FUSE connection.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._inodes: dict[int, _OpenInode] = {}
        self._cached: set[int] = set()
        self.passthrough = False
        """Whether passthrough was negotiated and has not failed."""

    def add(
        self, inode: int, opened: Opened, flags: int, *, may_pass: bool = True
    ) -> tuple[int, int]:
        """Note an opening and return its OpenFlags and backing id for the reply.

        Args:
            inode: What was opened.
            opened: The file system's answer.
            flags: open(2)'s.
            may_pass: Whether passthrough will do, should this be the inode's first opening.

        Raises:
            RuntimeError: The file system moved the inode to another backing file while it was open:
                the bytes of the two openings would part. The caller gets EIO.
        """
        entry = self._inodes.get(inode)
        file = _identity(opened.backing)
        if entry is None:
            backing_id = self._register(opened.backing) if may_pass else 0
            entry = self._inodes[inode] = _OpenInode(backing_id=backing_id)
        elif not entry.fits(file):
            raise RuntimeError(f"inode {inode} changed its backing file while open")
        entry.descriptors[opened.handle] = opened.backing
        if file is not None:
            entry.files[opened.handle] = file
        if flags & os.O_ACCMODE != os.O_RDONLY:
            entry.writers.add(opened.handle)
        return self._reply_flags(inode, entry, opened), entry.backing_id

    def _reply_flags(self, inode: int, entry: _OpenInode, opened: Opened) -> int:
        if entry.backing_id:
            self._cached.discard(inode)
            return OpenFlag.PASSTHROUGH
        if opened.direct and opened.backing is None:
            return OpenFlag.DIRECT_IO
        keep = (opened.keep_cache or opened.backing is not None) and inode in self._cached
        self._cached.add(inode)
        return OpenFlag.KEEP_CACHE if keep else 0

    def _register(self, descriptor: int | None) -> int:
        if not self.passthrough or descriptor is None:
            return 0
        request = bytearray(struct.pack("<iIQ", descriptor, 0, 0))
        try:
            return int(fcntl.ioctl(self._device, _BACKING_OPEN, request, True))
        except OSError as error:
            self.passthrough = error.errno in _NOT_NOW
            return 0

    def descriptor(self, inode: int, handle: int) -> int | None:
        """Return the backing descriptor of a handle, or None if the file system serves it."""
        entry = self._inodes.get(inode)
        return None if entry is None else entry.descriptors.get(handle)

    def is_written(self, inode: int) -> bool:
        """Return whether writes may happen that neither side is told of."""
        entry = self._inodes.get(inode)
        return entry is not None and bool(entry.writers & entry.files.keys())

    def remove(self, inode: int, handle: int) -> None:
        """Forget a handle; with the last one, take the backing file back from the kernel."""
        entry = self._inodes.get(inode)
        if entry is None:
            return
        entry.descriptors.pop(handle, None)
        entry.files.pop(handle, None)
        entry.writers.discard(handle)
        if not entry.descriptors:
            del self._inodes[inode]
            if entry.backing_id:
                fcntl.ioctl(self._device, _BACKING_CLOSE, struct.pack("<I", entry.backing_id))

    def content_changed(self, inode: int) -> None:
        """Note that cached pages of an inode are wrong: the next opening drops them."""
        self._cached.discard(inode)

    def handles(self) -> list[tuple[int, int]]:
        """Return every (inode, handle) still open."""
        return [
            (inode, handle) for inode, entry in self._inodes.items() for handle in entry.descriptors
        ]


def _identity(descriptor: int | None) -> tuple[int, int] | None:
    if descriptor is None:
        return None
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
