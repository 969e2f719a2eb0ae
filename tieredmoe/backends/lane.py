"""The reads of one device: who waits, who goes next, how much is in flight. No I/O, no asyncio.

Demand fills the device's queue: an acquire is submitted whole, up to the number of bytes at which a
submission would block. Prefetch has a window of its own, as much as keeps the device busy for 1 ms
and never less than a record, and waits while demand waits or has more in flight than keeps the
device busy. So what a demand read may find in front of it is bounded, and a prefetch still reads at
nearly the device's speed (large reads are split and run in parallel by the kernel). For how long
demand did find some is measured (``demand_delay_s``).

The window is small because what is in flight cannot be dropped when the router has answered. A
token of DeepSeek-V4-Flash in virtual time (12 GB/s, 54 % hits, a look-ahead that is right about 75
%), beside the time without prefetch, for 5, 12, 40 and 100 ms of computing: 0.96, 0.94, 0.86 and
0.83 with one record in flight, 1.03, 1.01, 0.93 and 0.85 with two, 1.10, 1.08, 1.00 and 0.88 with 8
ms of them.

Rejected: one queue for all devices (a slow one would fill the window of a fast one) and a share of
the bandwidth for prefetch (demand would wait for hints).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import attrs

from tieredmoe.backends.blockread import BlockRead, blocks_of
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.backends.datafile import DataFile
    from tieredmoe.backends.protocol import ReadOp

N_READS_MIN = 2
"""So many reads may be in flight whatever their size: one alone idles the disk between reads."""
PREFETCH_N_RECORDS = 1
PREFETCH_S = 1e-3
_MEMORY_S = 0.5
"""The rate is measured over the last half second to second in which the device was busy."""


@attrs.define(eq=False)
class Read:
    """One operation on its way: the blocks it is read in, of which ``n_left`` have not ended."""

    future: asyncio.Future[None]
    blocks: list[BlockRead]
    nbytes: int
    device: int
    n_left: int
    error: BaseException | None = None

    @classmethod
    def of(
        cls,
        op: ReadOp,
        file: DataFile,
        *,
        future: asyncio.Future[None],
        alignment: int,
        n_splits: int,
    ) -> Read:
        """The read of ``op`` with a view of its own: the owner may release his at once."""
        ours = attrs.evolve(op, target=op.target[:])
        blocks = blocks_of(ours, file, alignment=alignment, n_splits=n_splits)
        return cls(future, blocks, ours.target.nbytes, file.device, len(blocks))

    def block_ended(self, error: BaseException | None) -> bool:
        """Note the end of one block; True if it was the last, so nothing writes any more."""
        self.error = self.error or error
        self.n_left -= 1
        return self.n_left == 0


class Lane:
    """Reads of one device, waiting by priority and admitted to a window of bytes and reads."""

    def __init__(
        self,
        *,
        window_nbytes: int,
        n_reads_max: int,
        record_nbytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``record_nbytes``: the size of a record, where one takes several reads."""
        assert window_nbytes > 0
        assert n_reads_max > 0
        self.window_nbytes = window_nbytes
        self.n_in_flight = 0
        self.in_flight_nbytes = 0
        self._n_reads_max: Final = n_reads_max
        self._n_prefetch_max: Final = max(1, n_reads_max * 3 // 4)
        self._record_nbytes = record_nbytes
        self._waiting = {p: OrderedDict[asyncio.Future[None], Read]() for p in Priority}
        self.demand_delay_s = 0.0
        """Seconds, each from a moment in which demand found prefetch in flight until the last read
        of that had ended, or was wanted by demand itself: the most by which it can have been late.
        """
        self.ahead_s = 0.0
        """Seconds in which prefetch was all that was in flight or waited: what demand was spared,
        as far as the guesses were right."""
        self._ahead_since: float | None = None
        self._prefetches: dict[asyncio.Future[None], Read] = {}
        self._prefetch_nbytes = 0
        self._in_the_way: set[asyncio.Future[None]] = set()
        self._in_the_way_since = 0.0
        self._clock: Final = clock
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._landed_nbytes = 0.0

    @property
    def n_queued(self) -> int:
        """How many reads wait."""
        return sum(len(waiting) for waiting in self._waiting.values())

    @property
    def prefetch_window_nbytes(self) -> int:
        """How much prefetch may be in flight: four records or 8 ms of the measured rate."""
        rate = self._landed_nbytes / self._busy_s if self._busy_s else 0.0
        return max(PREFETCH_N_RECORDS * self._record_nbytes, int(PREFETCH_S * rate))

    def put(self, read: Read, priority: Priority) -> None:
        """Let ``read`` wait."""
        self._record_nbytes = max(self._record_nbytes, read.nbytes)
        self._waiting[priority][read.future] = read
        if priority is Priority.DEMAND:
            self._meet_prefetch()
            self._note_ahead()

    def take(self) -> Read | None:
        """The next read that may start; it counts as in flight from here on."""
        for priority, waiting in self._waiting.items():
            if not waiting:
                continue
            future, read = next(iter(waiting.items()))
            if not self._admits(read.nbytes, is_prefetch=priority is not Priority.DEMAND):
                return None
            del waiting[future]
            self._start(read, is_prefetch=priority is not Priority.DEMAND)
            return read
        return None

    def ended(self, read: Read) -> None:
        """Account for a read that ``take`` gave and that has ended."""
        now = self._clock()
        self._busy_s += now - self._busy_since
        self._busy_since = now
        self._landed_nbytes += read.nbytes
        if self._busy_s > 2 * _MEMORY_S:
            self._busy_s /= 2
            self._landed_nbytes /= 2
        self.n_in_flight -= 1
        self.in_flight_nbytes -= read.nbytes
        self._no_prefetch(read.future)
        self._note_ahead()

    def promote(self, future: asyncio.Future[None]) -> None:
        """Let a waiting prefetch wait as demand, last in that queue; one in flight is demand."""
        for priority, waiting in self._waiting.items():
            if priority is not Priority.DEMAND and future in waiting:
                self.put(waiting.pop(future), Priority.DEMAND)
        self._no_prefetch(future)
        self._note_ahead()

    def remove(self, future: asyncio.Future[None]) -> bool:
        """Whether the read waited; it does no more."""
        return any(waiting.pop(future, None) for waiting in self._waiting.values())

    def clear(self) -> list[asyncio.Future[None]]:
        """Forget all that wait; returns their futures."""
        futures = [future for waiting in self._waiting.values() for future in waiting]
        for waiting in self._waiting.values():
            waiting.clear()
        return futures

    def halve(self) -> None:
        """Halve the window: the kernel had no memory for what was asked of it."""
        self.window_nbytes = max(1, self.window_nbytes // 2)

    def _admits(self, nbytes: int, *, is_prefetch: bool) -> bool:
        if self.n_in_flight >= self._n_reads_max:
            return False
        if self.n_in_flight >= N_READS_MIN and self.in_flight_nbytes + nbytes > self.window_nbytes:
            return False
        return not is_prefetch or (
            len(self._prefetches) < self._n_prefetch_max
            and self.n_in_flight - len(self._prefetches) < N_READS_MIN
            and self._prefetch_nbytes + nbytes <= self.prefetch_window_nbytes
        )

    def _start(self, read: Read, *, is_prefetch: bool) -> None:
        if not self.n_in_flight:
            self._busy_since = self._clock()
        self.n_in_flight += 1
        self.in_flight_nbytes += read.nbytes
        if is_prefetch:
            self._prefetches[read.future] = read
            self._prefetch_nbytes += read.nbytes
            self._note_ahead()

    def _note_ahead(self) -> None:
        """What is in flight or waits has changed."""
        alone = 0 < len(self._prefetches) == self.n_in_flight
        if alone and not self._waiting[Priority.DEMAND]:
            if self._ahead_since is None:
                self._ahead_since = self._clock()
        elif self._ahead_since is not None:
            self.ahead_s += self._clock() - self._ahead_since
            self._ahead_since = None

    def _meet_prefetch(self) -> None:
        """Demand has come: what prefetch is in flight is in its way."""
        met = self._prefetches.keys() - self._in_the_way
        if met:
            if not self._in_the_way:
                self._in_the_way_since = self._clock()
            self._in_the_way |= met

    def _no_prefetch(self, future: asyncio.Future[None]) -> None:
        """``future`` is no prefetch in flight any more."""
        read = self._prefetches.pop(future, None)
        if read is None:
            return
        self._prefetch_nbytes -= read.nbytes
        if future in self._in_the_way:
            self._in_the_way.remove(future)
            if not self._in_the_way:
                self.demand_delay_s += self._clock() - self._in_the_way_since
