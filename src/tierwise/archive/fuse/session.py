"""What a mount knows while it runs: the file system, the kernel's references, the open files.

The kernel counts its references to inodes in the replies it received and returns them in
FORGETs; `Session` keeps that count, so that a file system hears one `forget` an inode.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass

from tierwise.archive.fuse import wire
from tierwise.archive.fuse.openfiles import OpenFiles
from tierwise.archive.operations import ROOT_INODE, Attributes, Caller, Opened, Operations

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """How a file system is mounted.

    Args:
        name: Subtype: the mount shows as `fuse.<name>`.
        source: First column of `df` and `mount`; the name if empty.
        entry_timeout_s: How long the kernel may remember names, and their absence. Long, since
            every change goes through the mount or is told by a `Notifier`; 300 s made stat two
            to three times faster than none (measured).
        attribute_timeout_s: The same for attributes; 0 is used while a backing file is open for
            writing, whose size and times only the kernel knows.
        allow_other: Whether other users may enter; None: yes for root, no for others (whose
            `fusermount3` wants `user_allow_other` in /etc/fuse.conf).
        read_only: Whether the kernel refuses changes.
        passthrough: Whether backing files are handed to the kernel.
        acl: Whether POSIX ACLs are kept and obeyed.
        read_ahead_kib: Read-ahead window of served files, KiB; needs root.
    """

    name: str = "tierwise"
    source: str = ""
    entry_timeout_s: float = 300.0
    attribute_timeout_s: float = 300.0
    allow_other: bool | None = None
    read_only: bool = False
    passthrough: bool = True
    acl: bool = True
    read_ahead_kib: int = 1024


class Request:
    """One message of the kernel: who asks what of which inode; the rest is in `body`.

    `prepared` notes that what its handler does beside the loop first has been done.
    """

    __slots__ = ("body", "gid", "inode", "opcode", "pid", "prepared", "uid", "unique")

    def __init__(self, message: memoryview) -> None:
        _, self.opcode, self.unique, self.inode, self.uid, self.gid, self.pid, _, _ = (
            wire.IN_HEADER.unpack_from(message)
        )
        self.body = message[wire.HEADER_BYTES :]
        self.prepared = False

    def caller(self) -> Caller:
        """Return who asks."""
        return Caller(uid=self.uid, gid=self.gid, pid=self.pid)

    def detach(self) -> None:
        """Copy the body, so that the buffer it came in can be used again."""
        self.body = memoryview(bytes(self.body))


class Session:
    """The state of one mount.

    Args:
        operations: The file system.
        device: Descriptor of the FUSE connection.
        options: How it is mounted.
        clock_ns: Returns now, nanoseconds since 1970.
    """

    def __init__(
        self,
        operations: Operations,
        device: int,
        options: MountOptions,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.operations = operations
        self.device = device
        self.options = options
        self.clock_ns = clock_ns
        self.files = OpenFiles(device)
        self.directories: dict[tuple[int, int], int] = {}
        """(inode, handle) -> parent"""
        self.capabilities = wire.Init(0)
        self.entry_valid_ns = int(options.entry_timeout_s * _NS)
        self._attribute_valid_ns = int(options.attribute_timeout_s * _NS)
        self._references: dict[int, int] = {}
        self.without_default_acl: set[int] = set()
        self._set_id: set[int] = set()
        """Inodes with set-ID bits, by the attributes last told to the kernel."""

    def attribute_valid_ns(self, inode: int) -> int:
        """Return how long the kernel may keep an inode's attributes."""
        return 0 if self.files.is_written(inode) else self._attribute_valid_ns

    def entry(self, attributes: Attributes) -> bytes:
        """Return the reply for a name, and count the reference that the kernel takes with it."""
        inode = attributes.inode
        reply = wire.entry_reply(attributes, self.entry_valid_ns, self.attribute_valid_ns(inode))
        self._note_set_id(attributes)
        self._references[inode] = self._references.get(inode, 0) + 1
        return reply

    def attributes(self, attributes: Attributes) -> bytes:
        """Return the reply for an inode's attributes."""
        self._note_set_id(attributes)
        return wire.attributes_reply(attributes, self.attribute_valid_ns(attributes.inode))

    def dereference(self, inode: int, count: int) -> None:
        """Take back references; tell the file system when none is left."""
        left = self._references.get(inode, 0) - count
        if left > 0:
            self._references[inode] = left
        elif self._references.pop(inode, None) is not None and inode != ROOT_INODE:
            self.files.content_changed(inode)
            self.without_default_acl.discard(inode)
            self._set_id.discard(inode)
            self.operations.forget(inode)

    def attributes_changed(self, inode: int) -> None:
        """Have the kernel drop an inode's attributes; it takes no lock for that."""
        body = wire.INVALIDATE_INODE_OUT.pack(inode, -1, 0)
        header = wire.OUT_HEADER.pack(
            wire.OUT_HEADER.size + len(body), wire.NotifyCode.INVALIDATE_INODE, 0
        )
        with contextlib.suppress(OSError):
            os.write(self.device, header + body)

    def _note_set_id(self, attributes: Attributes) -> None:
        if attributes.mode & (stat.S_ISUID | stat.S_ISGID):
            self._set_id.add(attributes.inode)
        else:
            self._set_id.discard(attributes.inode)

    def opened(self, inode: int, opened: Opened, flags: int) -> bytes:
        """Note an opening and return the reply for it.

        A file with set-ID bits is served, so that whoever writes to it takes them away. Where
        writes may come that nobody tells of, attributes kept from before are dropped.
        """
        may_pass = inode not in self._set_id
        was_written = self.files.is_written(inode)
        try:
            open_flags, backing_id = self.files.add(inode, opened, flags, may_pass=may_pass)
        except Exception:
            self.operations.release(inode, opened.handle)
            raise
        if self.files.is_written(inode) and not was_written and inode in self._references:
            self.attributes_changed(inode)
        return wire.OPEN_OUT.pack(opened.handle, open_flags, backing_id)

    def is_referenced(self, inode: int) -> bool:
        """Return whether the kernel knows an inode."""
        return inode in self._references

    def references(self) -> dict[int, int]:
        """Return how many references the kernel holds of each inode."""
        return dict(self._references)
