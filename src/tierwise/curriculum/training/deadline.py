"""A call of somebody else's function that may never return, ended after a time.

In the main thread a timer signal interrupts it: loops, sleeps, network waits and the engine of
regular expressions, in the same process, so that the function keeps whatever it holds. Elsewhere
signals do not reach, and the call is made in a thread that is left behind when its time is over.

Left out: code that waits inside C without ever looking at signals; a separate process would end
that too, but the function and its arguments would have to be copied there, by pickling.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Value = TypeVar("Value")


class OverdueError(BaseException):
    """Raised when the time is over; no `Exception`, so that the function cannot catch it by one."""


def call_within(seconds: float, function: Callable[[], Value]) -> Value:
    """Return what a function returns, or raise what it raises.

    Args:
        seconds: How long it may take; 0 or less is over already.
        function: What to call.

    Raises:
        OverdueError: The time is over.
    """
    if seconds <= 0:
        raise OverdueError
    if threading.current_thread() is threading.main_thread():
        return _interrupted(seconds, function)
    return _left_behind(seconds, function)


def _interrupted(seconds: float, function: Callable[[], Value]) -> Value:
    waiting = True

    def ring(number: int, frame: FrameType | None) -> None:
        if waiting:
            raise OverdueError

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    # rings again every second, should the function have caught the first one
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        return function()
    finally:
        waiting = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:  # somebody else's timer goes on
            spent_s = time.monotonic() - started
            signal.setitimer(signal.ITIMER_REAL, max(left_s - spent_s, 1e-6), interval_s)


def _left_behind(seconds: float, function: Callable[[], Value]) -> Value:
    made: list[Value] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            made.append(function())
        except BaseException as error:  # handed to the caller below
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not made:
        raise OverdueError
    return made[0]
