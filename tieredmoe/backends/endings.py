"""The end of reads: what they are counted as, and who waits until none is left.

A ring and threads end reads in different places and count them alike.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from tieredmoe.backends.batch import error_kind
from tieredmoe.backends.protocol import ReadStats

if TYPE_CHECKING:
    from tieredmoe.backends.lane import Read
    from tieredmoe.backends.lanes import Lanes


class ReadCounters:
    """Counts ended reads. Takes no lock: its owner calls it from one thread, or under his."""

    def __init__(self) -> None:
        self.retries = 0
        self._reads = 0
        self._read_nbytes = 0
        self._short_reads = 0
        self._errors = Counter[str]()

    def ended(self, read: Read) -> None:
        """Count ``read``, whose last block has ended, and all that its blocks took."""
        self._short_reads += sum(block.short_reads for block in read.blocks)
        self.retries += sum(block.retries for block in read.blocks)
        if read.error is None:
            self._reads += 1
            self._read_nbytes += read.nbytes
        else:
            self._errors[error_kind(read.error)] += 1

    def snapshot(self, lanes: Lanes, *, submit_ns_max: int = 0) -> ReadStats:
        """The counters, and what of ``lanes`` is on its way."""
        return ReadStats(
            reads=self._reads,
            read_nbytes=self._read_nbytes,
            short_reads=self._short_reads,
            retries=self.retries,
            errors=dict(self._errors),
            in_flight=lanes.n_in_flight,
            queued=lanes.n_queued,
            submit_ns_max=submit_ns_max,
            demand_delay_s=lanes.demand_delay_s,
            ahead_s=lanes.ahead_s,
        )


class Waiters:
    """Coroutines that wait for the same moment, which may come more than once."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def next(self) -> asyncio.Future[None]:
        """A future of the caller's own: it resolves at the next ``wake``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def wake(self) -> None:
        """Resolve what has been handed out and not been cancelled."""
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)
