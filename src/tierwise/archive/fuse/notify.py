"""Telling the kernel, unasked, that something changed.

The kernel may take locks for such a message that a request being answered holds, so messages go
out from a thread of their own, in order.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable

from tierwise.archive.fuse import wire
from tierwise.archive.fuse.wire import NotifyCode

_HARMLESS = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.ENOTEMPTY, errno.EBADF})
"""The kernel did not know the inode or name, or the mount is gone."""
_PATIENCE_S = 5.0


class QueuedNotifier:
    """A `Notifier` that queues; `start` and `stop` frame its life.

    Args:
        device: Descriptor of the FUSE connection.
        forget_cached: Told of every inode whose pages are to go, before the kernel is.
        on_failure: Told when the kernel refuses a message for a reason that is our defect.
    """

    def __init__(
        self,
        device: int,
        forget_cached: Callable[[int], None],
        on_failure: Callable[[OSError], None],
    ) -> None:
        self._device = device
        self._forget_cached = forget_cached
        self._on_failure = on_failure
        self._stopped = False
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="fuse-notify", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is queued, then end; a message the kernel will not take is given up on."""
        self._queue.put(None)
        self._thread.join(_PATIENCE_S)
        self._stopped = True

    def inode_changed(self, inode: int, *, data: bool = True) -> None:
        """Drop cached attributes and, with `data`, cached pages of an inode."""
        self._forget_cached(inode)
        body = wire.INVALIDATE_INODE_OUT.pack(inode, 0 if data else -1, 0)
        self._put(NotifyCode.INVALIDATE_INODE, body)

    def entry_changed(self, parent: int, name: bytes) -> None:
        """Drop what the kernel remembers of a name, or of its absence."""
        body = wire.INVALIDATE_ENTRY_OUT.pack(parent, len(name), 0) + name + b"\0"
        self._put(NotifyCode.INVALIDATE_ENTRY, body)

    def _put(self, code: NotifyCode, body: bytes) -> None:
        self._queue.put(wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(body), code, 0) + body)

    def _send_all(self) -> None:
        while (message := self._queue.get()) is not None and not self._stopped:
            try:
                os.write(self._device, message)
            except OSError as error:
                if error.errno not in _HARMLESS:
                    self._on_failure(error)
