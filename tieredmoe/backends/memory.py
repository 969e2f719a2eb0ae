"""Reads from files held in memory: for tests, and for running without a disk.

It keeps every promise of ``ReadBackend`` and nothing more: no virtual time, no faults (those are
the simulated disk's, ``tieredmoe.testing.disk``). A read ends in the loop's next iteration, never
within ``submit``, so that callers meet the same order of events as with a real disk.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from tieredmoe.backends.protocol import BackendInfo, ReadOp, ReadStats
from tieredmoe.errors import ClosedError, ReadError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class _Read(NamedTuple):
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
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._reads = 0
        self._read_nbytes = 0
        self._n_eof = 0

    def submit(self, batch: Sequence[ReadOp]) -> list[asyncio.Future[None]]:
        """Start all reads of ``batch``; they end in order in the loop's next iteration.

        Raises ``ClosedError`` after ``close`` and ``ValueError`` for an operation that no backend
        of this alignment could do; then nothing was started.
        """
        if self._closed:
            raise ClosedError("the memory backend is closed")
        check_batch(batch, n_files=len(self._files), alignment=self.info.alignment)
        loop = asyncio.get_running_loop()
        reads = [_Read(op, memoryview(op.target), loop.create_future()) for op in batch]
        for read in reads:
            loop.call_soon(self._read, read)
        self._in_flight += len(reads)
        return [read.future for read in reads]

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

    def _read(self, read: _Read) -> None:
        nbytes = read.view.nbytes
        content = self._files[read.op.file_index][read.op.offset : read.op.offset + nbytes]
        read.view[: content.nbytes] = content
        read.view.release()
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()
        if content.nbytes == nbytes:
            self._reads += 1
            self._read_nbytes += nbytes
            if not read.future.done():
                read.future.set_result(None)
            return
        self._n_eof += 1
        path = self._paths[read.op.file_index]
        error = end_of_file(read.op, nbytes=nbytes, path=path, n_got=content.nbytes)
        fail_read(read.future, error)


def check_batch(batch: Sequence[ReadOp], *, n_files: int, alignment: int) -> None:
    """Raise ``ValueError`` naming the first operation of ``batch`` that cannot be a read."""
    for i, op in enumerate(batch):
        objection = _objection(op, n_files=n_files, alignment=alignment)
        if objection is not None:
            raise ValueError(
                f"read {i} of a batch of {len(batch)} (file {op.file_index}, offset {op.offset}, "
                f"{op.target.nbytes} bytes to {op.address:#x}): {objection}; nothing was started"
            )


def _objection(op: ReadOp, *, n_files: int, alignment: int) -> str | None:
    target = op.target
    if not 0 <= op.file_index < n_files:
        return f"there are {n_files} files"
    if target.readonly or not target.c_contiguous or target.itemsize != 1 or target.ndim != 1:
        return "the target is no writable, contiguous view of bytes"
    if op.offset < 0 or not target.nbytes:
        return "it reads nothing, or from before the start of the file"
    if op.offset % alignment or target.nbytes % alignment or op.address % alignment:
        return f"offset, length and address must be multiples of {alignment}"
    return None


def end_of_file(op: ReadOp, *, nbytes: int, path: Path | str, n_got: int) -> ReadError:
    """The error of a read of ``nbytes`` that met the end of its file after ``n_got`` of them."""
    fact = f"the file ended after {n_got} bytes of it"
    return ReadError(path=path, offset=op.offset, nbytes=nbytes, errno=0, fact=fact)


def fail_read(future: asyncio.Future[None], error: Exception) -> None:
    """Fail ``future`` unless its owner gave it up; an error nobody fetches is not reported twice.

    Failed reads are counted, so a future dropped by a cancelled owner hides nothing, and asyncio's
    "exception was never retrieved" would be noise.
    """
    if not future.done():
        future.set_exception(error)
        future.exception()
