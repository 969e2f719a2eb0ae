"""How fast a drive reads, measured as experts are read: whole blocks, directly, several in flight.

A number to divide a pack by, not a benchmark: a fraction of a second per drive, and if several
directories are on one drive each gets all of it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tieredmoe.backends import ReadOp, open_backend
from tieredmoe.errors import PackError
from tieredmoe.memory import HostPool
from tieredmoe.pack.progress import Reporter, run_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieredmoe.backends import ReadBackend
    from tieredmoe.memory import HostRegion

BLOCK_NBYTES = 8 << 20
N_IN_FLIGHT = 4
SAMPLE_NBYTES = 256 << 20
"""What is written to a directory to be read: more than the cache of a drive's controller holds
ready, little enough to be written in a second."""

MEASURED_S = 0.3
"""The file is read until so much time has passed, but once as a whole."""


async def measure_drive(
    path: Path | str, *, backend: str = "auto", sample_nbytes: int = SAMPLE_NBYTES
) -> float:
    """Bytes per second that ``backend`` reads from the drive of ``path``.

    Of a directory, a file of ``sample_nbytes`` is written there and removed again; a file is read
    itself. Raises ``PackError`` if that cannot be written, ``ReadError`` if it cannot be read, and
    what ``open_backend`` raises. Cancelling returns when all is removed.
    """
    path = _settled(path)
    if path.is_file():
        return await _read_rate(path, backend)
    with _sample_directory(path) as directory:
        sample = directory / "sample.bin"
        await run_in_thread(partial(_write_sample, sample, sample_nbytes), None)
        return await _read_rate(sample, backend)


def _settled(path: Path | str) -> Path:
    return Path(path).absolute()


@contextmanager
def _sample_directory(path: Path) -> Iterator[Path]:
    try:
        directory = tempfile.TemporaryDirectory(dir=path, prefix=".tieredmoe-")
    except OSError as error:
        raise PackError(path, f"its speed cannot be measured: {error.strerror}") from error
    with directory:
        yield Path(directory.name)


def _write_sample(path: Path, nbytes: int, reporter: Reporter) -> None:
    try:
        with path.open("wb") as file:
            for offset in range(0, nbytes, BLOCK_NBYTES):
                reporter.report("copy", done_nbytes=offset, total_nbytes=nbytes)
                # Random bytes: a drive that compresses would be measured too fast.
                file.write(os.urandom(min(BLOCK_NBYTES, nbytes - offset)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        directory = path.parent.parent
        raise PackError(directory, f"its speed cannot be measured: {error.strerror}") from error


async def _read_rate(path: Path, backend_name: str) -> float:
    n_blocks = path.stat().st_size // BLOCK_NBYTES  # noqa: ASYNC240 (nothing runs beside it yet)
    if not n_blocks:
        raise PackError(path, f"is too small to measure its drive; {BLOCK_NBYTES:,} bytes would do")
    backend = open_backend(backend_name, [path])
    try:
        with _region(N_IN_FLIGHT * BLOCK_NBYTES) as region:
            return await _timed(backend, region, n_blocks)
    finally:
        await backend.close()


async def _timed(backend: ReadBackend, region: HostRegion, n_blocks: int) -> float:
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    n_started = n_read = 0

    async def read_on(slot: int) -> None:
        nonlocal n_started, n_read
        start = slot * BLOCK_NBYTES
        target = region.view[start : start + BLOCK_NBYTES]
        while n_started < n_blocks or loop.time() - begin_s < MEASURED_S:
            offset = n_started % n_blocks * BLOCK_NBYTES
            n_started += 1
            await backend.submit([ReadOp(0, offset, target, region.address + start)])[0]
            n_read += 1

    try:
        async with asyncio.TaskGroup() as readers:
            for slot in range(N_IN_FLIGHT):
                readers.create_task(read_on(slot))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    finally:
        await backend.drain()  # the memory is theirs until then
    return n_read * BLOCK_NBYTES / (loop.time() - begin_s)


@contextmanager
def _region(nbytes: int) -> Iterator[HostRegion]:
    pool = HostPool.allocate(nbytes)
    region = pool.carve(nbytes)
    try:
        yield region
    finally:
        region.view.release()
        pool.close()
