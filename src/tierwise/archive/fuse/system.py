"""The system calls Python has no name for, each raising `OSError` when the kernel refuses."""

from __future__ import annotations

import ctypes
import os
from enum import IntFlag
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.renameat2.argtypes = [
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
]
_libc.syncfs.argtypes = [ctypes.c_int]


class MountFlag(IntFlag):
    """Flags of mount(2)."""

    READ_ONLY = 1
    NO_SUID = 2
    NO_DEVICES = 4


class UnmountFlag(IntFlag):
    """Flags of umount2(2)."""

    NONE = 0
    DETACH = 2
    NO_FOLLOW = 8


def mount(source: str, target: Path, kind: str, flags: MountFlag, data: str) -> None:
    """Mount a file system at a directory."""
    arguments = source.encode(), os.fsencode(target), kind.encode(), flags, data.encode()
    _check(_libc.mount(*arguments))


def unmount(target: Path, flags: UnmountFlag) -> None:
    """Take a mount away."""
    _check(_libc.umount2(os.fsencode(target), flags))


def fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """Allocate, punch, zero, collapse: whatever `mode` says."""
    _check(_libc.fallocate64(descriptor, mode, offset, length))


def rename(directory: int, name: bytes, new_directory: int, new_name: bytes, flags: int) -> None:
    """Rename between two open directories, with the flags of renameat2(2)."""
    _check(_libc.renameat2(directory, name, new_directory, new_name, flags))


def sync_file_system(descriptor: int) -> None:
    """Make everything of the file system that a descriptor lies on durable."""
    _check(_libc.syncfs(descriptor))


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
