"""Room in the disk buffer: what is left of its limit, who is slowed down, who gets ENOSPC.

Copies whose discs are verified go first. Once what may not go passes three quarters of the limit,
writers are slowed, the more the fuller it is, so that sealing and burning may keep up; at the
limit they get ENOSPC, and nothing written before is lost. Without a limit nobody is slowed, and
the disk itself says when it is full.

Counting at every write would be slow, so the buffer is counted anew after a quarter of what was
left has been written. Left out: fairness among writers; each waits for its own bytes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from tierwise.archive.catalogue import Catalogue
from tierwise.archive.inventory import buffer_bytes
from tierwise.archive.namespace import fail

SLOW_FROM = 0.75
"""Share of the limit from which writers are slowed. Source: our estimate."""
SLOWEST_BYTES_S = 8 * 1024 * 1024
"""Rate of one writer into a buffer that is all but full. Source: our estimate; a little less than
a 2x Blu-ray drive writes (9 MB/s)."""
MAX_WAIT_S = 0.125
"""The longest wait before one write: the kernel's largest, 1 MiB, at the slowest rate."""
_MIN_WAIT_S = 0.01


class Room:
    """The limit of one archive's buffer.

    Args:
        catalogue: The open catalogue.
        limit_bytes: What the buffer may hold; None: no limit but the disk's.
        unsettled: Returns the bytes in open files that the catalogue does not know of yet.
        evict: Frees up to so many bytes of copies that discs make unnecessary; returns how many.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        limit_bytes: int | None,
        *,
        unsettled: Callable[[], int],
        evict: Callable[[int], int],
    ) -> None:
        self._catalogue, self._limit = catalogue, limit_bytes
        self._unsettled, self._evict = unsettled, evict
        self._known_bytes = 0  # may be written before the next count
        self._pinned_bytes = 0  # may not be evicted
        self._owed_s = 0.0  # waits too short to be worth one

    def take(self, num_bytes: int) -> None:
        """Make room for bytes about to be written.

        Raises:
            OSError: ENOSPC; nothing more may be evicted.
        """
        if self._limit is None:
            return
        self._known_bytes -= num_bytes
        self._pinned_bytes += num_bytes
        if self._known_bytes > 0:
            return
        used = self._used()
        over = used + num_bytes - self._limit
        self._known_bytes = max(0, -over // 4)
        self._pinned_bytes = used + num_bytes - self._evictable()
        if over > 0 and self._evict(over) < over:
            self._pinned_bytes -= num_bytes
            fail(errno.ENOSPC)

    def wait_s(self, num_bytes: int) -> float:
        """Return how long a writer should wait before so many bytes, seconds; mostly 0.

        The wait per byte grows in proportion from nothing at `SLOW_FROM` of the limit to
        1 / `SLOWEST_BYTES_S` at all of it; `MAX_WAIT_S` bounds each.
        """
        if self._limit is None:
            return 0.0
        fill = self._pinned_bytes / self._limit
        share = min(max((fill - SLOW_FROM) / (1 - SLOW_FROM), 0.0), 1.0)
        self._owed_s += share * num_bytes / SLOWEST_BYTES_S
        if self._owed_s < _MIN_WAIT_S:
            return 0.0
        wait, self._owed_s = min(self._owed_s, MAX_WAIT_S), 0.0
        return wait

    def free_bytes(self, disk_free_bytes: int) -> int:
        """Return what may be written without waiting for a disc, given what the disk has left."""
        if self._limit is None:
            return disk_free_bytes
        return max(0, min(disk_free_bytes, self._limit - self._used()))

    def _used(self) -> int:
        return buffer_bytes(self._catalogue) + self._unsettled()

    def _evictable(self) -> int:
        return sum(
            int(self._catalogue.value(sql))
            for sql in (
                "SELECT COALESCE(SUM(size), 0) FROM versions WHERE resident > 0"
                " AND state = 'burned' AND version NOT IN (SELECT version FROM recalls)",
                "SELECT COALESCE(SUM(i.size), 0) FROM images i JOIN arrays a ON a.number = i.array"
                " WHERE i.buffered = 1 AND i.state = 'burned' AND a.state = 'burned'",
            )
        )
