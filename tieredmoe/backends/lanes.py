"""The lanes of a backend, one per device, as one queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.backends.lane import Lane, Read

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Iterator, Mapping

    from tieredmoe.spec import Priority


class Lanes:
    """Reads of several devices, each admitted to its own device's window; see ``Lane``."""

    def __init__(
        self, windows: Mapping[int, int], *, n_reads_max: int, record_nbytes: int = 0
    ) -> None:
        """``windows`` gives the window in bytes by device; ``n_reads_max`` holds for each."""
        self._by_device = {
            device: Lane(
                window_nbytes=window_nbytes, n_reads_max=n_reads_max, record_nbytes=record_nbytes
            )
            for device, window_nbytes in windows.items()
        }
        self._lanes = tuple(self._by_device.values())

    @property
    def n_queued(self) -> int:
        """How many reads wait."""
        return sum(lane.n_queued for lane in self._lanes)

    @property
    def n_in_flight(self) -> int:
        """How many reads have been started and have not ended."""
        return sum(lane.n_in_flight for lane in self._lanes)

    @property
    def in_flight_nbytes(self) -> int:
        """The bytes of those."""
        return sum(lane.in_flight_nbytes for lane in self._lanes)

    @property
    def demand_delay_s(self) -> float:
        """For how long prefetch was in the way of demand, over all devices."""
        return sum(lane.demand_delay_s for lane in self._lanes)

    @property
    def ahead_s(self) -> float:
        """For how long prefetch had a device to itself, over all devices."""
        return sum(lane.ahead_s for lane in self._lanes)

    def put(self, reads: Iterable[Read], priority: Priority) -> None:
        """Let ``reads`` wait, in this order."""
        for read in reads:
            self._by_device[read.device].put(read, priority)

    def take(self) -> Iterator[Read]:
        """Every read that may start now."""
        for lane in self._lanes:
            while (read := lane.take()) is not None:
                yield read

    def ended(self, read: Read) -> None:
        """Account for a read that ``take`` gave and that has ended."""
        self._by_device[read.device].ended(read)

    def promote(self, future: asyncio.Future[None]) -> None:
        """Let a waiting prefetch wait as demand."""
        for lane in self._lanes:
            lane.promote(future)

    def remove(self, future: asyncio.Future[None]) -> bool:
        """Whether the read waited; it does no more."""
        return any(lane.remove(future) for lane in self._lanes)

    def clear(self) -> list[asyncio.Future[None]]:
        """Forget all that wait; returns their futures."""
        return [future for lane in self._lanes for future in lane.clear()]

    def halve(self) -> None:
        """Halve every window."""
        for lane in self._lanes:
            lane.halve()
