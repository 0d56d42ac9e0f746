"""The loop: read a request, have it answered, write the reply.

One thread reads and answers; a request that would have to wait (`Later`) goes on in a thread of
its own, and the loop with the next. Whatever a handler raises becomes the caller's errno; what is
no `OSError` becomes EIO and a `Fault`, and the mount lives on.

Left out: several readers. Python runs one at a time, and two gained a tenth at most (measured).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from tierwise.archive.fuse import attributes, directories, files, names, wire
from tierwise.archive.fuse.names import Handler
from tierwise.archive.fuse.negotiate import agree
from tierwise.archive.fuse.notify import QueuedNotifier
from tierwise.archive.fuse.session import MountOptions, Request, Session
from tierwise.archive.fuse.wire import Init, Opcode
from tierwise.archive.operations import RETRY, Later, Operations

_HANDLERS: Final[dict[int, Handler]] = {
    **names.HANDLERS,
    **attributes.HANDLERS,
    **files.HANDLERS,
    **directories.HANDLERS,
}
_SILENT: Final = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})
_READ_AGAIN: Final = frozenset({errno.EINTR, errno.EAGAIN, errno.ENOENT})
_MAX_ERRNO: Final = 511
_MAX_WAITING: Final = 256
"""Requests that wait at once; more queue behind them."""

_log = logging.getLogger("tierwise.archive.fuse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A defect met while answering: the caller got EIO.

    Args:
        request: What was asked, such as "READ of inode 7".
        error: What was raised.
        traceback: Where.
    """

    request: str
    error: BaseException
    traceback: str


def log_fault(fault: Fault) -> None:
    """Log a fault; what a mount does unless told otherwise."""
    _log.error("%s failed: %r\n%s", fault.request, fault.error, fault.traceback)


class _Answered:
    """The operations, one of which has its answer already (see `Later`)."""

    def __init__(self, operations: Operations, name: str, answer: object) -> None:
        self._operations = operations
        self._name = name
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            return lambda *_, **__: self._answer
        return getattr(self._operations, name)


class Server:
    """Serves one connection until it is unmounted.

    Args:
        operations: The file system.
        device: Descriptor of the connection; closed at the end.
        options: How it is mounted.
        privileged: Whether backing files may be registered.
        on_fault: Told of every fault.
        clock_ns: Returns now, nanoseconds since 1970.
    """

    def __init__(
        self,
        operations: Operations,
        device: int,
        options: MountOptions,
        *,
        privileged: bool,
        on_fault: Callable[[Fault], None] = log_fault,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.session = Session(operations, device, options, clock_ns)
        self.ready = threading.Event()
        """Set when INIT is settled, well or ill, or the connection has ended."""
        self.refusal: str | None = None
        """Why INIT failed."""
        self._privileged = privileged
        self._on_fault = on_fault
        self._turn = threading.Lock()
        self._interrupts: dict[int, threading.Event] = {}
        self._closing = threading.Event()
        self._waiting = ThreadPoolExecutor(_MAX_WAITING, "fuse-wait")
        self._notifier = QueuedNotifier(device, self._forget_cached, self._notify_failed)

    def run(self) -> None:
        """Answer requests until the file system is unmounted; then close everything."""
        buffer = bytearray(wire.BUFFER_BYTES)
        view = memoryview(buffer)
        device = self.session.device
        self._notifier.start()
        try:
            while True:
                try:
                    length = os.readv(device, [buffer])
                except OSError as error:
                    if error.errno in _READ_AGAIN:
                        continue
                    if error.errno == errno.ENODEV:
                        break
                    raise
                self._serve(Request(view[:length]))
        finally:
            self._close()

    def _serve(self, request: Request) -> None:
        opcode = request.opcode
        if opcode == Opcode.INTERRUPT:
            waiting = self._interrupts.get(wire.INTERRUPT_IN.unpack_from(request.body)[0])
            if waiting is not None:
                waiting.set()
        elif opcode == Opcode.INIT:
            self._initialise(request)
        elif opcode == Opcode.DESTROY:
            self._reply(request, b"")
        else:
            self._answer(request, self.session.operations)

    def _answer(self, request: Request, operations: Operations) -> None:
        """Have a request answered under the one-call-at-a-time rule, and reply."""
        handler = _HANDLERS.get(request.opcode)
        if handler is None:
            code = errno.ENOTTY if request.opcode == Opcode.IOCTL else errno.ENOSYS
            self._reply(request, code)
            return
        reply: bytes | int | None
        try:
            with self._turn:
                reply = _checked(handler(self.session, operations, request))
        except Later as later:
            if request.opcode in _SILENT:
                self._fault(request, later)
                return
            self._postpone(request, handler.__name__.rstrip("_"), later)
            return
        except OSError as error:
            reply = self._errno(request, error)
        except Exception as error:
            self._fault(request, error)
            reply = errno.EIO
        if reply is not None and request.opcode not in _SILENT:
            self._reply(request, reply)

    def _errno(self, request: Request, error: OSError) -> int:
        if error.errno is None or not 0 < error.errno <= _MAX_ERRNO:
            self._fault(request, error)
            return errno.EIO
        return error.errno

    def _postpone(self, request: Request, operation: str, later: Later) -> None:
        request.detach()
        interrupted = self._interrupts.setdefault(request.unique, threading.Event())
        if self._closing.is_set():
            interrupted.set()
        self._waiting.submit(self._wait, request, operation, later, interrupted)

    def _wait(
        self, request: Request, operation: str, later: Later, interrupted: threading.Event
    ) -> None:
        """Do a `Later`'s work, then go on with the request."""
        try:
            answer = _answer_of(later, interrupted)
        except OSError as error:
            self._reply(request, self._errno(request, error))
        except Exception as error:
            self._fault(request, error)
            self._reply(request, errno.EIO)
        else:
            operations = self.session.operations
            if answer is not RETRY:
                operations = _Answered(operations, operation, answer)  # type: ignore[assignment]
            self._answer(request, operations)

    def _initialise(self, request: Request) -> None:
        try:
            agreement = agree(request.body, self.session.options, privileged=self._privileged)
        except OSError as error:
            self.refusal = error.strerror
            self._reply(request, error.errno or errno.EPROTO)
        else:
            self.session.capabilities = agreement.capabilities
            self.session.files.passthrough = Init.PASSTHROUGH in agreement.capabilities
            self._greet(request, agreement.reply)
        self.ready.set()

    def _greet(self, request: Request, reply: bytes) -> None:
        try:
            with self._turn:
                self.session.operations.mounted(self._notifier)
        except Exception as error:
            self._fault(request, error)
            self.refusal = f"the file system refuses to be mounted: {error}"
            self._reply(request, errno.EIO)
        else:
            self._reply(request, reply)

    def _reply(self, request: Request, reply: bytes | int) -> None:
        """Send a body, or an errno; a reply the kernel will not have becomes EIO."""
        self._interrupts.pop(request.unique, None)
        body, code = (b"", reply) if isinstance(reply, int) else (reply, 0)
        header = wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(body), -code, request.unique)
        try:
            os.writev(self.session.device, [header, body])
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENOTCONN):
                return
            self._fault(request, error)
            header = wire.OUT_HEADER.pack(wire.OUT_HEADER.size, -errno.EIO, request.unique)
            with contextlib.suppress(OSError):
                os.write(self.session.device, header)

    def _close(self) -> None:
        """Interrupt what waits, close what is open, forget what is known, let go."""
        self._closing.set()
        for waiting in list(self._interrupts.values()):
            waiting.set()
        self._waiting.shutdown(wait=True)
        self._notifier.stop()
        operations, session = self.session.operations, self.session
        for inode, handle in session.files.handles():
            session.files.remove(inode, handle)
            self._quietly(operations.release, inode, handle)
        for inode, handle in session.directories:
            self._quietly(operations.releasedir, inode, handle)
        for inode, count in session.references().items():
            self._quietly(session.dereference, inode, count)
        self._quietly(operations.destroy)
        os.close(session.device)
        self.ready.set()

    def _quietly(self, call: Callable[..., None], *arguments: int) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self._report(f"closing ({call.__name__})", error)

    def _forget_cached(self, inode: int) -> None:
        self.session.files.content_changed(inode)
        self.session.without_default_acl.discard(inode)

    def _notify_failed(self, error: OSError) -> None:
        self._report("a notification", error)

    def _fault(self, request: Request, error: BaseException) -> None:
        known = request.opcode in Opcode.__members__.values()
        what = Opcode(request.opcode).name if known else f"opcode {request.opcode}"
        self._report(f"{what} of inode {request.inode}", error)

    def _report(self, what: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        try:
            self._on_fault(Fault(request=what, error=error, traceback=text))
        except Exception:
            _log.exception("on_fault failed for %s: %r", what, error)


def _checked(reply: object) -> bytes | None:
    if reply is None or isinstance(reply, bytes):
        return reply
    raise TypeError(f"an operation answered with {type(reply).__name__}, not bytes")


def _answer_of(later: Later, interrupted: threading.Event) -> object:
    if interrupted.is_set():
        raise OSError(errno.EINTR, "interrupted before its turn came")
    return later.work(interrupted)
