"""A directory, served again somewhere else: the reference file system.

It shows what `Operations` ask for on something whose right answers are known, and is what the
front end's tests and benches mount. Inode numbers are the directory's own (its root is 1), so it
must lie on one file system; every inode the kernel knows is held by a path descriptor, which
keeps its number from being used again. As root, what a caller makes belongs to the caller.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path

from tierwise.archive.fuse import system
from tierwise.archive.operations import (
    ROOT_INODE,
    Attributes,
    Caller,
    DirectoryEntry,
    FileSystemStatistics,
    Later,
    Opened,
    OpenedDirectory,
    Operations,
    RenameFlags,
    SetAttributes,
    XattrFlags,
    inherited_group,
)

_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATION = os.O_CREAT | os.O_EXCL


class InputOutput(StrEnum):
    """How a mirror answers for its files' bytes."""

    BACKING = "backing"
    CACHED = "cached"
    DIRECT = "direct"


class Mirror(Operations):
    """Serves a directory.

    Args:
        source: The directory.
        io: Whether files are given as backing descriptors, or read and written by the mirror with
            or without the kernel's page cache.
    """

    def __init__(self, source: Path, io: InputOutput = InputOutput.BACKING) -> None:
        self._io = io
        root = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._root_number = os.fstat(root).st_ino
        self._paths = {ROOT_INODE: root}
        self._listings: dict[int, list[bytes]] = {}
        self._may_chown = os.geteuid() == 0
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def destroy(self) -> None:
        """Close every path descriptor."""
        for descriptor in self._paths.values():
            os.close(descriptor)
        self._paths.clear()

    # Names

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return a name's attributes, and hold on to its inode."""
        return self._adopt(os.open(name, _PATH, dir_fd=self._paths[parent]))

    def forget(self, inode: int) -> None:
        """Let go of an inode."""
        descriptor = self._paths.pop(inode, None)
        if descriptor is not None:
            os.close(descriptor)

    def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Attributes, Opened]:
        """Make a file and open it."""
        directory = self._paths[parent]
        descriptor = os.open(name, os.O_RDWR | _CREATION | os.O_CLOEXEC, 0o600, dir_fd=directory)
        attributes = self._own(parent, name, stat.S_IFREG | mode, caller)
        return attributes, self._opened(descriptor)

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attributes:
        """Make a file, FIFO, socket or device node."""
        os.mknod(name, stat.S_IFMT(mode) | 0o600, rdev, dir_fd=self._paths[parent])
        return self._own(parent, name, mode, caller)

    def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attributes:
        """Make a directory."""
        os.mkdir(name, 0o700, dir_fd=self._paths[parent])
        return self._own(parent, name, stat.S_IFDIR | mode, caller)

    def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attributes:
        """Make a symbolic link."""
        os.symlink(target, name, dir_fd=self._paths[parent])
        return self._own(parent, name, stat.S_IFLNK | 0o777, caller)

    def link(self, inode: int, parent: int, name: bytes) -> Attributes:
        """Give an inode another name."""
        os.link(self._path(inode), name, dst_dir_fd=self._paths[parent], follow_symlinks=True)
        return self.getattr(inode)

    def tmpfile(
        self, parent: int, mode: int, flags: int, caller: Caller
    ) -> tuple[Attributes, Opened]:
        """Make a file without a name."""
        kept = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags & os.O_EXCL
        descriptor = os.open(self._path(parent), kept, 0o600)
        held = os.open(f"/proc/self/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
        attributes = self._give(parent, self._adopt(held), stat.S_IFREG | mode, caller)
        return attributes, self._opened(descriptor)

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name."""
        os.unlink(name, dir_fd=self._paths[parent])

    def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=self._paths[parent])

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: RenameFlags
    ) -> None:
        """Move a name."""
        system.rename(self._paths[parent], name, self._paths[new_parent], new_name, flags)

    def readlink(self, inode: int) -> bytes:
        """Return a symbolic link's target."""
        return os.readlink(b"", dir_fd=self._paths[inode])

    # Attributes

    def getattr(self, inode: int) -> Attributes:
        """Return an inode's attributes."""
        return Attributes.from_stat(os.fstat(self._paths[inode]), inode=inode)

    def setattr(self, inode: int, changes: SetAttributes, caller: Caller) -> Attributes:
        """Change owner, mode, size and times, in this order."""
        path = self._path(inode)
        if changes.uid is not None or changes.gid is not None:
            os.chown(path, _or_same(changes.uid), _or_same(changes.gid))
        if changes.mode is not None:
            Path(path).chmod(changes.mode)
        if changes.size is not None:
            os.truncate(path, changes.size)
        if changes.atime_ns is not None or changes.mtime_ns is not None:
            now = self.getattr(inode)
            atime = now.atime_ns if changes.atime_ns is None else changes.atime_ns
            mtime = now.mtime_ns if changes.mtime_ns is None else changes.mtime_ns
            os.utime(path, ns=(atime, mtime))
        return self.getattr(inode)

    def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return an extended attribute."""
        return os.getxattr(self._path(inode), name)

    def setxattr(
        self, inode: int, name: bytes, value: bytes, flags: XattrFlags, caller: Caller
    ) -> None:
        """Set an extended attribute."""
        os.setxattr(self._path(inode), name, value, flags)

    def listxattr(self, inode: int) -> Sequence[bytes]:
        """Return the names of extended attributes."""
        return [os.fsencode(name) for name in os.listxattr(self._path(inode))]

    def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an extended attribute."""
        os.removexattr(self._path(inode), name)

    def statfs(self) -> FileSystemStatistics:
        """Return the room on the directory's file system."""
        found = os.fstatvfs(self._paths[ROOT_INODE])
        return FileSystemStatistics(
            blocks=found.f_blocks,
            blocks_free=found.f_bfree,
            blocks_available=found.f_bavail,
            files=found.f_files,
            files_free=found.f_ffree,
            block_size=found.f_frsize,
        )

    # Files

    def open(self, inode: int, flags: int, caller: Caller) -> Opened:
        """Open a file for both, or for reading where writing is impossible."""
        kept = flags & os.O_TRUNC | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path(inode), os.O_RDWR | kept)
        except OSError as error:
            if flags & os.O_ACCMODE != os.O_RDONLY or error.errno == errno.ENOENT:
                raise
            descriptor = os.open(self._path(inode), os.O_RDONLY | os.O_CLOEXEC)
        return self._opened(descriptor)

    def read(self, inode: int, handle: int, offset: int, size: int, caller: Caller) -> bytes:
        """Return bytes of a file."""
        return os.pread(handle, size, offset)

    def write(self, inode: int, handle: int, offset: int, data: memoryview, caller: Caller) -> int:
        """Write bytes to a file."""
        return os.pwrite(handle, data, offset)

    def release(self, inode: int, handle: int) -> None:
        """Close a file."""
        os.close(handle)

    def fsync(self, inode: int, handle: int, *, data_only: bool) -> None:
        """Make a file durable, without holding up the mount."""
        sync = os.fdatasync if data_only else os.fsync
        raise Later(lambda _: sync(handle))

    def fallocate(self, inode: int, handle: int, mode: int, offset: int, length: int) -> None:
        """Allocate or punch."""
        system.fallocate(handle, mode, offset, length)

    def lseek(self, inode: int, handle: int, offset: int, whence: int) -> int:
        """Find data or a hole."""
        return os.lseek(handle, offset, whence)

    # Directories

    def opendir(self, inode: int) -> OpenedDirectory:
        """Open a directory."""
        descriptor = os.open(self._path(inode), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        parent = inode if inode == ROOT_INODE else self._number(os.stat("..", dir_fd=descriptor))
        return OpenedDirectory(handle=descriptor, parent=parent)

    def readdir(
        self, inode: int, handle: int, cookie: int, *, plus: bool
    ) -> Iterator[DirectoryEntry]:
        """Yield entries of the listing taken when it was begun; a cookie is an index into it."""
        if cookie == 0:
            self._listings[handle] = [os.fsencode(name) for name in os.listdir(handle)]
        for index, name in enumerate(self._listings[handle][cookie:], start=cookie + 1):
            with contextlib.suppress(FileNotFoundError):
                if plus:
                    found = self.lookup(inode, name)
                    number, mode = found.inode, found.mode
                else:
                    result = os.stat(name, dir_fd=handle, follow_symlinks=False)
                    found, number, mode = None, self._number(result), result.st_mode
                yield DirectoryEntry(
                    name=name, inode=number, mode=mode, cookie=index, attributes=found
                )

    def releasedir(self, inode: int, handle: int) -> None:
        """Close a directory."""
        self._listings.pop(handle, None)
        os.close(handle)

    def fsyncdir(self, inode: int, handle: int, *, data_only: bool) -> None:
        """Make names durable, without holding up the mount."""
        raise Later(lambda _: os.fsync(handle))

    def syncfs(self) -> None:
        """Make everything durable."""
        descriptor = os.open(self._path(ROOT_INODE), os.O_RDONLY | os.O_CLOEXEC)
        try:
            system.sync_file_system(descriptor)
        finally:
            os.close(descriptor)

    # Inodes

    def _path(self, inode: int) -> str:
        return f"/proc/self/fd/{self._paths[inode]}"

    def _number(self, result: os.stat_result) -> int:
        return ROOT_INODE if result.st_ino == self._root_number else result.st_ino

    def _adopt(self, descriptor: int) -> Attributes:
        """Hold on to the inode of a path descriptor, or close it if it is held already."""
        result = os.fstat(descriptor)
        inode = self._number(result)
        if inode in self._paths:
            os.close(descriptor)
        else:
            self._paths[inode] = descriptor
        return Attributes.from_stat(result, inode=inode)

    def _own(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attributes:
        return self._give(parent, self.lookup(parent, name), mode, caller)

    def _give(self, parent: int, made: Attributes, mode: int, caller: Caller) -> Attributes:
        """Give a new object to its caller, with the mode it asked for."""
        mode, group = inherited_group(self.getattr(parent), mode, caller)
        if self._may_chown:
            os.chown(self._path(made.inode), caller.uid, group)
        if not stat.S_ISLNK(mode):
            Path(self._path(made.inode)).chmod(stat.S_IMODE(mode))
        return self.getattr(made.inode)

    def _opened(self, descriptor: int) -> Opened:
        if self._io is InputOutput.BACKING:
            return Opened(handle=descriptor, backing=descriptor)
        return Opened(
            handle=descriptor,
            direct=self._io is InputOutput.DIRECT,
            keep_cache=self._io is InputOutput.CACHED,
        )


def _or_same(identifier: int | None) -> int:
    return -1 if identifier is None else identifier
