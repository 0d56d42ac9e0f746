"""Mounting a file system: in a thread, in a process of its own, or in the foreground.

**In a thread** (`mounted`) the server and its user share one interpreter. What the user does on
the mount must let the server run meanwhile, and three things do not: touching a memory map of a
file on the mount, starting a subprocess whose program or working directory lies there, and
anything else that waits for the kernel while holding Python's lock. They hang. Plain reads,
writes and listings are safe. **In a process** (`mounted_process`) there is no such rule.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

from tierwise.archive.fuse import device
from tierwise.archive.fuse.server import Fault, Server, log_fault
from tierwise.archive.fuse.session import MountOptions
from tierwise.archive.operations import Operations
from tierwise.core.errors import AccessError, StateError, TierwiseError

_START_TIMEOUT_S = 30.0
_BUSY_RETRY_S = 0.05
_BUSY_PATIENCE_S = 2.0
_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def mounted(
    operations: Operations,
    mountpoint: str | os.PathLike[str],
    *,
    options: MountOptions | None = None,
    on_fault: Callable[[Fault], None] = log_fault,
) -> Iterator[Path]:
    """Mount a file system for the length of a `with` block, served by a thread.

    Args:
        operations: The file system.
        mountpoint: An existing directory; the mount of a dead server there is cleared first.
        options: How to mount it; by default as `MountOptions` says.
        on_fault: Told of every defect met while answering.

    Yields:
        The absolute path of the mount point.

    Raises:
        MissingFileError, UsageError: The mount point is no directory.
        AccessError: The system refuses; `can_mount` says why beforehand.
        StateError: On leaving, files are still open: the mount is detached and the server goes on
            until they close, or the process ends.
    """
    path = _absolute(mountpoint)
    server = _connect(operations, path, options or MountOptions(), on_fault)
    thread = threading.Thread(target=server.run, name=f"fuse {path}", daemon=True)
    thread.start()
    try:
        _await_ready(server, path)
        yield path
    finally:
        _leave(path)
        thread.join(_BUSY_PATIENCE_S)
    if thread.is_alive():
        raise StateError(f"files under {path} are still open: it was detached, not closed")


def serve(
    operations: Operations,
    mountpoint: str | os.PathLike[str],
    *,
    options: MountOptions | None = None,
    on_fault: Callable[[Fault], None] = log_fault,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Mount a file system and serve it in the calling (main) thread until it is unmounted.

    SIGINT and SIGTERM unmount it: at once if nothing is open there, otherwise it is detached
    and served until the last file closes; a second signal ends that wait. When this returns,
    `operations.destroy` has run.

    Args:
        operations: The file system.
        mountpoint: An existing directory; the mount of a dead server there is cleared first.
        options: How to mount it; by default as `MountOptions` says.
        on_fault: Told of every defect met while answering.
        on_ready: Called once the mount answers (from another thread), to print or to notify
            systemd.

    Raises:
        MissingFileError, UsageError, AccessError: As `mounted`.
    """
    path = _absolute(mountpoint)
    server = _connect(operations, path, options or MountOptions(), on_fault)
    starter = threading.Thread(target=_finish_start, args=(server, path, on_ready), daemon=True)
    gc.collect()
    gc.freeze()
    with _unmount_on_signals(path):
        starter.start()
        server.run()
    if server.refusal is not None:
        raise AccessError(server.refusal)


@contextlib.contextmanager
def mounted_process(
    factory: Callable[[], Operations],
    mountpoint: str | os.PathLike[str],
    *,
    options: MountOptions | None = None,
) -> Iterator[MountProcess]:
    """Mount a file system for the length of a `with` block, served by a process of its own.

    Args:
        factory: Makes the file system, in the new process; must be picklable (a function or class
            of an importable module, or a `functools.partial` of one).
        mountpoint: As for `mounted`.
        options: As for `mounted`.

    Yields:
        The process; `path` is the mount point.

    Raises:
        TierwiseError: As `mounted`, or what `factory` raised.
        StateError: The process ended before the mount answered, or, on leaving, files were still
            open: the server was ended all the same.
    """
    path = _absolute(mountpoint)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve_in_process,
        args=(factory, path, options or MountOptions(), theirs),
        name=f"fuse {path}",
        daemon=True,
    )
    with _signals_held():
        process.start()
    theirs.close()
    try:
        _await_process(ours, path)
        yield MountProcess(path=path, pid=process.pid or 0)
    finally:
        ours.close()
        if process.is_alive():
            with contextlib.suppress(AccessError):  # what stays mounted is found again below
                _leave(path)
        process.join(_BUSY_PATIENCE_S)
        busy = process.is_alive()
        _end(process)
        device.clear_stale_mount(path)
    if busy:
        raise StateError(f"files under {path} were still open: they are dead now")


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back, so that a process is started whole or not at all.

    The new process begins with both held back. A Ctrl-C, which reaches every process of the
    terminal, then leaves the server alone: whoever started it unmounts.
    """
    resource_tracker.ensure_running()  # or starting it would let the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        with _handlers_held():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _handlers_held() -> Iterator[None]:
    """Hold Python's handlers back too: a signal to another thread runs them in the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda found, _: came.append(found)) for number in _ENDING
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for found in came:
            signal.raise_signal(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class MountProcess:
    """A mount and the process that serves it."""

    path: Path
    pid: int


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End a server that waits for open files: asked twice it closes them, else it is killed."""
    for end in (process.terminate, process.terminate, process.kill):
        if process.is_alive():
            end()
            process.join(_BUSY_PATIENCE_S)


def _absolute(mountpoint: str | os.PathLike[str]) -> Path:
    path = Path(os.path.abspath(mountpoint))  # noqa: PTH100 - resolve() would touch a dead mount
    device.clear_stale_mount(path)
    return path.resolve()


def _connect(
    operations: Operations, path: Path, options: MountOptions, on_fault: Callable[[Fault], None]
) -> Server:
    connection = device.connect(path, options)
    return Server(
        operations,
        connection,
        options,
        privileged=device.is_privileged(),
        on_fault=on_fault,
    )


def _await_ready(server: Server, path: Path) -> None:
    if not server.ready.wait(_START_TIMEOUT_S):
        raise StateError(f"the kernel did not greet the mount at {path}")
    if server.refusal is not None:
        raise AccessError(server.refusal)
    device.set_read_ahead(path, server.session.options.read_ahead_kib)


def _finish_start(server: Server, path: Path, on_ready: Callable[[], None]) -> None:
    with contextlib.suppress(TierwiseError):
        _await_ready(server, path)
        on_ready()


def _leave(path: Path) -> None:
    """Unmount; after some patience with those still closing files, lazily."""
    deadline = time.monotonic() + _BUSY_PATIENCE_S
    while True:
        try:
            device.unmount(path)
        except StateError as error:
            if "in use" not in error.message:
                return
        else:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(_BUSY_RETRY_S)
    with contextlib.suppress(StateError):
        device.unmount(path, lazy=True)


@contextlib.contextmanager
def _unmount_on_signals(path: Path) -> Iterator[None]:
    """Have SIGINT and SIGTERM unmount, while the loop is blocked in the kernel."""
    asked = threading.Event()

    def on_signal(number: int, _: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt(signal.Signals(number).name)
        asked.set()
        threading.Thread(target=_leave, args=(path,), daemon=True).start()

    previous = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _serve_in_process(
    factory: Callable[[], Operations],
    path: Path,
    options: MountOptions,
    pipe: multiprocessing.connection.Connection,
) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    try:
        serve(factory(), path, options=options, on_ready=lambda: _greet(pipe, path))
    except TierwiseError as error:
        with contextlib.suppress(OSError):
            pipe.send(error)
    except KeyboardInterrupt:
        return


def _greet(pipe: multiprocessing.connection.Connection, path: Path) -> None:
    """Say that the mount answers; unmount when the other side is gone, however it went."""
    with contextlib.suppress(EOFError, OSError):
        pipe.send(None)
        pipe.recv()
    _leave(path)


def _await_process(pipe: multiprocessing.connection.Connection, path: Path) -> None:
    if not pipe.poll(_START_TIMEOUT_S):
        raise StateError(f"the mount at {path} did not answer in {_START_TIMEOUT_S:.0f} s")
    try:
        outcome = pipe.recv()
    except EOFError as error:
        raise StateError(f"the process serving {path} ended before it answered") from error
    if outcome is not None:
        raise outcome
