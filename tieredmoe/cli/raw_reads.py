"""The ceiling to compare a backend with: the same direct reads with nothing around them.

Threads that do nothing but ``preadv``, each on its own share of the records, into the same memory;
no event loop, no queue, no futures. What a backend reaches of it is what its machinery leaves.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tieredmoe.backends.probe import open_direct
from tieredmoe.cli.read_rate import ReadRate
from tieredmoe.errors import ReadError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tieredmoe.backends.kernel import Kernel
    from tieredmoe.cli.read_rate import Place
    from tieredmoe.memory import HostPool


def read_raw(
    files: Sequence[Path],
    where: Sequence[Place],
    pool: HostPool,
    *,
    kernel: Kernel,
    record_nbytes: int,
    n_in_flight: int,
    n_records: int,
) -> ReadRate:
    """Read ``n_records`` of ``where``, ``n_in_flight`` at once; blocks.

    Raises ``DirectIOUnavailableError`` where reads are not direct, and ``ReadError``.
    """
    buffers = [pool.carve(record_nbytes) for _ in range(n_in_flight)]
    failures: list[tuple[Place, OSError]] = []
    with ExitStack() as opened:
        data = [open_direct(file, kernel) for file in files]
        for file in data:
            opened.callback(file.close)

        def read_share(first: int) -> None:
            target = [buffers[first].view]
            for index in range(first, n_records, n_in_flight):
                place = where[index % len(where)]
                try:
                    kernel.preadv(data[place.file_index].fd, target, place.offset)
                except OSError as error:
                    failures.append((place, error))
                    return

        threads = [threading.Thread(target=read_share, args=(i,)) for i in range(n_in_flight)]
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = time.perf_counter() - wall_s, time.process_time() - cpu_s
    if failures:
        place, error = failures[0]
        raise ReadError(
            path=files[place.file_index],
            offset=place.offset,
            nbytes=record_nbytes,
            errno=error.errno or 0,
            fact="a plain direct read failed",
        ) from error
    return ReadRate(n_records * record_nbytes, *taken)
