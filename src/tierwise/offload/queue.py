"""The host's work in the order the next forward needs it: lowest block first, on worker threads.

```
 hook, step() --submit--> heap by (rank, arrival) --pop--> worker threads | whoever waits
```

The rule is Jackson's for one machine with release times and tails: always the available task
that is needed soonest. A thread that waits takes tasks itself instead of idling. A task that
raises, or a worker that dies, is seen by the next caller as an error, never as a hang: waiting
ends when the work is done or when the queue has failed.

Left out: priorities that change while queued, and processes.

Source: Jackson, Scheduling a production line to minimize maximum tardiness, 1955 (the rule);
see docs/offload.md for the theorem it serves.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tierwise.core.errors import StateError

T = TypeVar("T")


class LowestFirst(Generic[T]):
    """Items by rank, and among equals by arrival: the order, apart from who does the work."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._arrivals = itertools.count()

    def push(self, rank: int, item: T) -> None:
        """Add an item; a lower rank leaves sooner."""
        heapq.heappush(self._heap, (rank, next(self._arrivals), item))

    def pop(self) -> T:
        """Remove and return the item of the lowest rank."""
        return heapq.heappop(self._heap)[2]

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove and return every item for which `unwanted` holds."""
        removed = [entry[2] for entry in self._heap if unwanted(entry[2])]
        self._heap = [entry for entry in self._heap if not unwanted(entry[2])]
        heapq.heapify(self._heap)
        return removed

    def __len__(self) -> int:
        return len(self._heap)


@dataclass(slots=True, eq=False)
class Ticket:
    """Counts the tasks of one piece of work.

    Attributes:
        remaining: Tasks queued or running.
        dropped: Tasks cancelled before they ran; the work is then incomplete for good.
    """

    remaining: int = 0
    dropped: int = 0


@dataclass(slots=True, eq=False)
class Task:
    """Something to run on the host.

    Attributes:
        rank: Of the block it belongs to.
        work: What to run; it must not submit or wait.
        ticket: Counted down when the task has run or is dropped.
        speculative: May be dropped, and touches no committed state.
    """

    rank: int
    work: Callable[[], None]
    ticket: Ticket
    speculative: bool = False


class UpdateQueue:
    """Worker threads over one `LowestFirst` heap.

    Args:
        num_threads: Worker threads; they start with the first task.
        before: Called with each task before it runs; for tracing and for injecting faults.
    """

    def __init__(self, num_threads: int, *, before: Callable[[Task], None] | None = None) -> None:
        self.before = before
        self.torn = False  # a task that writes committed state failed half-way
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._tasks: LowestFirst[Task] = LowestFirst()
        self._threads: list[threading.Thread] = []
        self._running = 0  # speculative tasks on worker threads
        self._failure: BaseException | None = None
        self.reported = False  # somebody has heard of the failure
        self._closed = False
        self._process = os.getpid()

    def submit(self, tasks: Iterable[Task]) -> None:
        """Hand over tasks; they start at once."""
        self.check()
        with self._changed:
            for task in tasks:
                task.ticket.remaining += 1
                self._tasks.push(task.rank, task)
            self._changed.notify_all()
        if not self._threads:
            self._start()

    def _start(self) -> None:
        for number in range(self._num_threads):
            name = f"tierwise-offload-{number}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()

    def finish(self, tickets: Iterable[Ticket]) -> None:
        """Return when every task of the tickets is done, running tasks on this thread meanwhile.

        Raises:
            StateError: A task failed or a worker died.
        """
        for ticket in tickets:
            while ticket.remaining:
                with self._changed:
                    while ticket.remaining and not self._tasks and self._failure is None:
                        self._changed.wait()
                    task = self._tasks.pop() if ticket.remaining and self._tasks else None
                self.check()
                if task is not None:
                    self._run(task, own_thread=False)
        self.check()

    def cancel(self, *, wait: bool) -> None:
        """Drop the speculative tasks that have not begun; with `wait`, see the others end."""
        with self._changed:
            for task in self._tasks.remove(lambda task: task.speculative):
                task.ticket.dropped += 1
                task.ticket.remaining -= 1
            self._changed.notify_all()
            while wait and self._running and self._failure is None:
                self._changed.wait()

    def check(self) -> None:
        """Return if the queue can still be trusted.

        Raises:
            StateError: It failed, was closed, or belongs to the parent of this process.
        """
        if self._failure is not None:
            self.reported = True
            said = f"{type(self._failure).__name__}: {self._failure}"
            torn = "the optimizer's state is torn" if self.torn else "the last step is intact"
            raise StateError(
                f"the host's update thread failed ({said}); {torn}",
                hint="load the last checkpoint" if self.torn else "save state_dict() and restart",
            ) from self._failure
        if self._closed:
            raise StateError("the optimizer is closed", hint="make a new OffloadAdamW")
        if os.getpid() != self._process:
            raise StateError("an OffloadAdamW cannot be used in a forked process")

    def fail(self, error: BaseException) -> None:
        """Let every later call fail: committed state can no longer be trusted."""
        with self._changed:
            self._failure = self._failure or error
            self.torn, self.reported = True, True
            self._changed.notify_all()

    def close(self) -> None:
        """Run what is queued, then end the threads; safe to call twice."""
        if os.getpid() != self._process:
            return  # the threads, and perhaps the lock, are the parent's
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _serve(self) -> None:
        finished = False
        try:
            while True:
                with self._changed:
                    while not self._tasks and not self._closed:
                        self._changed.wait()
                    if not self._tasks:
                        finished = True
                        return
                    task = self._tasks.pop()
                    self._running += task.speculative
                try:
                    self._run(task, own_thread=True)
                finally:
                    with self._changed:
                        self._running -= task.speculative
                        self._changed.notify_all()
                if self._failure is not None:
                    return
        finally:
            if not finished:
                with self._changed:
                    self._failure = self._failure or RuntimeError("the thread was killed")
                    self._changed.notify_all()

    def _run(self, task: Task, *, own_thread: bool) -> None:
        try:
            if self.before is not None:
                self.before(task)
            task.work()
        except BaseException as error:  # whatever it is, the next caller must hear of it
            with self._changed:
                self._failure = self._failure or error
                self.torn = self.torn or not task.speculative
                self._changed.notify_all()
            if not own_thread and not isinstance(error, Exception):
                raise  # Ctrl-C while the training thread helped
            return
        with self._changed:
            task.ticket.remaining -= 1
            if not task.ticket.remaining:
                self._changed.notify_all()
