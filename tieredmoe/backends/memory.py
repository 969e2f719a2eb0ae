"""Reads from files held in memory: for tests, and for running without a disk.

It keeps every promise of ``ReadBackend`` and nothing more: no virtual time, no faults (those are
the simulated disk's, ``tieredmoe.testing.disk``). A read ends in the loop's next iteration, never
within ``submit``, so that callers meet the same order of events as with a real disk.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, NamedTuple

from tieredmoe.backends.batch import check_batch, check_process, fail_read
from tieredmoe.backends.protocol import BackendInfo, ReadOp, ReadStats
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class _Read(NamedTuple):
    priority: Priority
    op: ReadOp
    view: memoryview  # the backend's own: the owner may release his while the read lasts
    future: asyncio.Future[None]


class MemoryBackend:
    """A ``ReadBackend`` over byte strings; bound to the loop of its first ``submit``.

    ``files`` are the files' contents by file index, ``paths`` what errors call them (default
    ``memory:0``, ``memory:1``, …). ``alignment`` is enforced as a direct backend would.
    """

    def __init__(
        self,
        files: Sequence[bytes | bytearray | memoryview],
        *,
        paths: Sequence[Path | str] | None = None,
        alignment: int = 1,
    ) -> None:
        self.info = BackendInfo(
            name="memory",
            direct=False,
            alignment=alignment,
            window_nbytes=2**63,
            reason="files held in memory",
        )
        self._files = [memoryview(file).cast("B") for file in files]
        self._paths = list(paths) if paths else [f"memory:{i}" for i in range(len(files))]
        assert len(self._paths) == len(self._files), "one path for each file"
        self._closed = False
        self._pid = os.getpid()
        self._due: list[_Read] = []
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._reads = 0
        self._read_nbytes = 0
        self._n_eof = 0

    def submit(
        self, batch: Sequence[ReadOp], *, priority: Priority = Priority.DEMAND
    ) -> list[asyncio.Future[None]]:
        """Start all reads of ``batch``; they end in the loop's next iteration, demand first.

        Raises ``ClosedError`` after ``close`` and ``ValueError`` for an operation that no backend
        of this alignment could do; then nothing was started.
        """
        check_process(self._pid)
        if self._closed:
            raise ClosedError("the memory backend is closed")
        check_batch(batch, n_files=len(self._files), alignment=self.info.alignment)
        loop = asyncio.get_running_loop()
        reads = [_Read(priority, op, memoryview(op.target), loop.create_future()) for op in batch]
        self._due += reads
        self._in_flight += len(reads)
        if reads:
            loop.call_soon(self._read_all)
        return [read.future for read in reads]

    def promote(self, read: asyncio.Future[None]) -> None:
        """Change nothing: every read of this backend is started by ``submit``."""

    def drop(self, read: asyncio.Future[None]) -> bool:
        """False: every read of this backend is started by ``submit``."""
        del read
        return False

    async def drain(self) -> None:
        """Return when no read is in flight. Cancelling it changes nothing."""
        while self._in_flight:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Refuse new reads and drain. Idempotent; cancelled, it may be called again."""
        self._closed = True
        await self.drain()

    def stats(self) -> ReadStats:
        """A snapshot of the counters; ``reads`` are those that ended well."""
        return ReadStats(
            reads=self._reads,
            read_nbytes=self._read_nbytes,
            short_reads=self._n_eof,
            retries=0,
            errors={"eof": self._n_eof} if self._n_eof else {},
            in_flight=self._in_flight,
            queued=0,
        )

    def _read_all(self) -> None:
        due, self._due = self._due, []
        for read in sorted(due, key=lambda read: read.priority):
            self._read(read)

    def _read(self, read: _Read) -> None:
        nbytes = read.view.nbytes
        content = self._files[read.op.file_index][read.op.offset : read.op.offset + nbytes]
        read.view[: content.nbytes] = content
        read.view.release()
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()
        needed = nbytes if read.op.needed_nbytes is None else read.op.needed_nbytes
        if content.nbytes >= needed:
            self._reads += 1
            self._read_nbytes += nbytes
            if not read.future.done():
                read.future.set_result(None)
            return
        self._n_eof += 1
        path = self._paths[read.op.file_index]
        error = end_of_file(read.op, nbytes=nbytes, path=path, n_got=content.nbytes)
        fail_read(read.future, error)


def end_of_file(op: ReadOp, *, nbytes: int, path: Path | str, n_got: int) -> ReadError:
    """The error of a read of ``nbytes`` that met the end of its file after ``n_got`` of them."""
    fact = f"the file ended after {n_got} bytes of it"
    return ReadError(path=path, offset=op.offset, nbytes=nbytes, errno=0, fact=fact)
