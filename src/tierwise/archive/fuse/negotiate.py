"""INIT: what this front end and the kernel agree on.

Only what is done is claimed. Not claimed: writeback cache (excludes passthrough and delays
ENOSPC to close), remote locks (the kernel's own are exact on one machine), export support.

HANDLE_KILLPRIV_V2 makes taking set-ID bits away ours; without it every write(2) asks for
`security.capability` first, which costs small writes by passthrough most of their speed. The
kernel takes no bits in passthrough then, so set-ID files are served (see `session`).
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

from tierwise.archive.fuse import wire
from tierwise.archive.fuse.session import MountOptions
from tierwise.archive.fuse.wire import Init

MAJOR: Final = 7
MIN_MINOR: Final = 31
"""Linux 5.4; older kernels lay some structures out differently."""
MAX_MINOR: Final = 45
"""Linux 6.18, the newest one read about; newer kernels follow the answer."""

_MAX_PAGES: Final = 256
_BACKGROUND: Final = 64
_CONGESTION: Final = 48
_STACK_DEPTH: Final = 1
_LOW: Final = 0xFFFFFFFF

_ALWAYS: Final = (
    Init.ASYNC_READ
    | Init.ATOMIC_O_TRUNC
    | Init.BIG_WRITES
    | Init.DO_READDIRPLUS
    | Init.READDIRPLUS_AUTO
    | Init.ASYNC_DIO
    | Init.PARALLEL_DIROPS
    | Init.MAX_PAGES
    | Init.CACHE_SYMLINKS
    | Init.HANDLE_KILLPRIV_V2
    | Init.SETXATTR_EXT
    | Init.INIT_EXT
    | Init.DIRECT_IO_ALLOW_MMAP
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The outcome of INIT.

    Args:
        minor: The kernel's protocol minor version.
        capabilities: What both sides do.
        reply: The body to answer with.
    """

    minor: int
    capabilities: Init
    reply: bytes


def agree(body: memoryview, options: MountOptions, *, privileged: bool) -> Agreement:
    """Return what to answer to an INIT.

    Args:
        body: The request's body.
        options: How the file system is mounted.
        privileged: Whether this process may register backing files.

    Raises:
        OSError: EPROTO if the kernel speaks a protocol too old.
    """
    if len(body) >= wire.INIT_IN.size:
        major, minor, _, low, high = wire.INIT_IN.unpack_from(body)
    else:
        (major, minor, _, low), high = wire.INIT_IN_SHORT.unpack_from(body), 0
    if major < MAJOR or (major == MAJOR and minor < MIN_MINOR):
        raise OSError(
            errno.EPROTO, f"the kernel speaks FUSE {major}.{minor}, not {MAJOR}.{MIN_MINOR}"
        )
    wanted = _ALWAYS
    if options.acl:
        wanted |= Init.POSIX_ACL | Init.DONT_MASK
    if options.passthrough and privileged:
        wanted |= Init.PASSTHROUGH
    both = wanted & Init(low | (high << 32 if low & Init.INIT_EXT else 0))
    return Agreement(minor=minor, capabilities=both, reply=_reply(minor, both, options))


def _reply(minor: int, both: Init, options: MountOptions) -> bytes:
    return wire.INIT_OUT.pack(
        MAJOR,
        min(minor, MAX_MINOR),
        options.read_ahead_kib << 10,
        both & _LOW,
        _BACKGROUND,
        _CONGESTION,
        wire.MAX_WRITE_BYTES,
        1,
        _MAX_PAGES,
        0,
        both >> 32,
        _STACK_DEPTH if Init.PASSTHROUGH in both else 0,
    )
