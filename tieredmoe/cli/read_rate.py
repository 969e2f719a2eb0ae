"""How fast a backend reads records: bytes, wall time and CPU time, over records all over the files.

Every buffer is asked for again as soon as its read has landed, so the number in flight is constant
and no round waits for its slowest read. Records are read in random order and none twice before all
have been read, so what a drive or a host keeps in a cache of its own helps as little as it can.
"""

from __future__ import annotations

import asyncio
import random
import time
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

import attrs

from tieredmoe.backends.protocol import ReadOp
from tieredmoe.errors import ReadError
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tieredmoe.backends.protocol import ReadBackend
    from tieredmoe.memory import HostPool


class Place(NamedTuple):
    """Where a record of the size measured lies."""

    file_index: int
    offset: int


@attrs.frozen
class ReadRate:
    """What one measurement read, and what that took."""

    nbytes: int
    wall_s: float
    cpu_s: float

    @property
    def gb_per_s(self) -> float:
        """10⁹ bytes per second."""
        return self.nbytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds of this process per 10⁹ bytes, the kernel's work for it included."""
        return self.cpu_s / (self.nbytes / 1e9)


def places(files: Sequence[Path], record_nbytes: int, *, seed: int = 0) -> list[Place]:
    """Every whole record of ``record_nbytes`` (a multiple of 4096) in ``files``, shuffled."""
    assert record_nbytes % PAGE_NBYTES == 0
    found = [
        Place(index, offset)
        for index, file in enumerate(files)
        for offset in range(0, file.stat().st_size - record_nbytes + 1, record_nbytes)
    ]
    random.Random(seed).shuffle(found)  # noqa: S311 (an order, not a secret)
    return found


async def measure(
    backend: ReadBackend,
    where: Sequence[Place],
    pool: HostPool,
    *,
    record_nbytes: int,
    n_in_flight: int,
    n_records: int,
) -> ReadRate:
    """Read ``n_records`` of ``where``, ``n_in_flight`` at once; past its end, from its start again.

    ``pool`` has uncarved room for the buffers. Raises ``ReadError``; nothing is in flight then.
    Cancelling it waits for the reads in flight.
    """
    buffers = [pool.carve(record_nbytes) for _ in range(n_in_flight)]
    upcoming = cycle(where)
    n_left = n_records
    wall_s, cpu_s = time.perf_counter(), time.process_time()

    async def keep_reading(view: memoryview, address: int) -> None:
        nonlocal n_left
        while n_left > 0:
            n_left -= 1
            place = next(upcoming)
            (read,) = backend.submit([ReadOp(place.file_index, place.offset, view, address)])
            await read

    try:
        async with asyncio.TaskGroup() as group:
            for buffer in buffers:
                group.create_task(keep_reading(buffer.view, buffer.address))
    except* ReadError as errors:
        raise errors.exceptions[0] from None
    finally:
        await backend.drain()
    return ReadRate(
        n_records * record_nbytes, time.perf_counter() - wall_s, time.process_time() - cpu_s
    )
