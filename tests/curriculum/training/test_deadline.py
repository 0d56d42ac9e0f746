"""Functions that never return are ended, whatever they do; those that return are left alone."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import pytest

from tierwise.curriculum.training.deadline import OverdueError, call_within


def sleeps() -> NoReturn:
    while True:
        time.sleep(1000)


def loops() -> NoReturn:
    while True:
        pass


def backtracks() -> NoReturn:
    # 2^60 ways to fail; the engine holds the interpreter's lock all the while
    re.fullmatch(r"(a|a)+", "a" * 60 + "b")
    raise AssertionError


def catches_all() -> NoReturn:
    while True:
        try:
            time.sleep(1000)
        except Exception:
            continue


def catches_once() -> NoReturn:
    try:
        time.sleep(1000)
    except BaseException:  # rude
        time.sleep(1000)
    raise AssertionError


@pytest.mark.parametrize("hangs", [sleeps, loops, backtracks, catches_all, catches_once])
def test_it_is_ended_in_the_main_thread(hangs: Callable[[], NoReturn]) -> None:
    started = time.monotonic()
    with pytest.raises(OverdueError):
        call_within(0.2, hangs)
    assert time.monotonic() - started < 10


def test_it_is_left_behind_in_another_thread() -> None:
    found: list[str] = []
    gate = threading.Event()

    def ask() -> None:
        try:
            call_within(0.2, gate.wait)
        except OverdueError:
            found.append("overdue")
        found.append(call_within(10, lambda: "answer"))
        try:
            call_within(10, lambda: {"a": "b"}["nothing"])
        except KeyError:
            found.append("raised")

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(10)
    gate.set()
    assert found == ["overdue", "answer", "raised"]


def test_what_returns_or_raises_in_time_is_left_alone() -> None:
    assert call_within(10, lambda: 5) == 5
    with pytest.raises(KeyError):
        call_within(10, lambda: {"a": "b"}["nothing"])
    with pytest.raises(OverdueError):
        call_within(0, lambda: 5)


def test_somebody_elses_timer_and_handler_go_on() -> None:
    rung: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    outer = signal.setitimer(signal.ITIMER_REAL, 0.4)
    try:
        with pytest.raises(OverdueError):
            call_within(0.1, sleeps)
        assert call_within(10, lambda: 5) == 5
        assert not rung
        end = time.monotonic() + 10
        while not rung and time.monotonic() < end:
            time.sleep(0.01)
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, handler)
