"""A simulated disk that is worse than a real one: the one disk of every concurrency harness.

It is a ``ReadBackend`` over byte images and the loop's clock, so on a ``SimLoop`` a second of disk
time costs nothing and a seed fixes everything. Real disks hide bugs: a buffer that is used too
early, or again too soon, mostly holds the right bytes by then. This one writes every byte of a
target wrong before it writes any byte right: garbage in a part of it as the read starts, garbage
in the rest midway, the right bytes all at once at the very end, and nothing after that. Whoever
looks before the end, or hands out a buffer that is still being read into, gets wrong bytes.

It also knows who may write where, and records a violation (and raises) when two reads are given
overlapping memory, when an operation's address is not that of its memory, and when somebody else
wrote into a target during its read.

Rejected: real files under a real loop (no control of order, no verdict on a hang) and a latency
without bandwidth (queues then never form, and most shutdown bugs need a queue).
"""

from __future__ import annotations

import asyncio
import ctypes
import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from errno import errorcode
from typing import TYPE_CHECKING, NoReturn

import attrs

from tieredmoe.backends.batch import check_batch, fail_read
from tieredmoe.backends.lane import Lane, Read
from tieredmoe.backends.memory import end_of_file
from tieredmoe.backends.protocol import BackendInfo, ReadOp, ReadStats
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.spec import PAGE_NBYTES, Priority
from tieredmoe.testing.faults import Fault, FaultPlan

if TYPE_CHECKING:
    from pathlib import Path

Content = bytes | bytearray | memoryview | Callable[[int, int], bytes]
"""A file: its bytes, or a function of (offset, nbytes) giving as many of them as there are."""

_INVERTED = bytes(255 - i for i in range(256))


@attrs.define(eq=False)
class _Read:
    """A read from ``submit`` to its end.

    ``view`` is the disk's own: an owner who releases his view in the middle is still written into,
    as by a real disk.
    """

    op: ReadOp
    future: asyncio.Future[None]
    view: memoryview
    content: bytes = b""
    fault: Fault | None = None
    n_soiled: int = 0


class SimDisk:
    """A ``ReadBackend`` in virtual time; bound to the loop of its first ``submit``.

    A read starts when fewer than ``queue_depth`` others and less than ``window_nbytes`` are in
    flight, is found after ``latency_s`` ± ``jitter`` of it, and then shares one pipe of
    ``nbytes_per_s`` in the order in which reads were found: with jitter, not the order of
    submission. Those that wait start as in a real backend's ``Lane``. Failed reads are not retried:
    what ``faults`` lets happen is what a backend's own retries could not mend.
    """

    def __init__(
        self,
        files: Sequence[Content],
        *,
        paths: Sequence[Path | str] | None = None,
        alignment: int = PAGE_NBYTES,
        nbytes_per_s: float = 4e9,
        latency_s: float = 100e-6,
        jitter: float = 0.5,
        queue_depth: int = 8,
        window_nbytes: int = 64 * 2**20,
        seed: int = 0,
        faults: FaultPlan | None = None,
    ) -> None:
        assert nbytes_per_s > 0
        assert latency_s >= 0
        assert 0 <= jitter <= 1
        assert queue_depth > 0
        self.info = BackendInfo(
            name="sim",
            direct=True,
            alignment=alignment,
            window_nbytes=window_nbytes,
            reason="a simulated disk",
        )
        self.violations: list[str] = []
        self._files = list(files)
        self._paths = list(paths) if paths else [f"sim:{i}" for i in range(len(files))]
        assert len(self._paths) == len(self._files), "one path for each file"
        self._nbytes_per_s = nbytes_per_s
        self._latency_s = latency_s
        self._jitter = jitter
        self._lane = Lane(window_nbytes=window_nbytes, n_reads_max=queue_depth, clock=_loop_time)
        self._random = random.Random(seed)  # noqa: S311 (a scenario, not a secret)
        self._faults = faults or FaultPlan()
        self._pipe_free_at = 0.0
        self._reads_by_future: dict[asyncio.Future[None], _Read] = {}
        self._owned: list[tuple[int, int, ReadOp]] = []  # (start, end, op), by start: no overlaps
        self._closed = False
        self._idle = asyncio.Event()
        self._reads = 0
        self._read_nbytes = 0
        self._short_reads = 0
        self._errors: Counter[str] = Counter()

    def submit(
        self, batch: Sequence[ReadOp], *, priority: Priority = Priority.DEMAND
    ) -> list[asyncio.Future[None]]:
        """Queue all reads of ``batch`` and start those that the window admits, in order.

        Raises ``ClosedError`` after ``close``, ``ValueError`` as ``ReadBackend`` says, and
        ``AssertionError`` for a violation; then nothing of the batch was started.
        """
        if self._closed:
            raise ClosedError("the simulated disk is closed")
        check_batch(batch, n_files=len(self._files), alignment=self.info.alignment)
        self._take_memory(batch)
        loop = asyncio.get_running_loop()
        reads = [_Read(op, loop.create_future(), memoryview(op.target)) for op in batch]
        for read in reads:
            self._reads_by_future[read.future] = read
            self._lane.put(Read(read.future, [], read.view.nbytes, 0, 1), priority)
        self._start_reads()
        return [read.future for read in reads]

    def promote(self, read: asyncio.Future[None]) -> None:
        """Let a waiting prefetch wait as demand, last in that queue; one in flight is demand."""
        self._lane.promote(read)
        self._start_reads()

    def drop(self, read: asyncio.Future[None]) -> bool:
        """True if ``read`` was still queued: it never starts, and its future is cancelled."""
        if not self._lane.remove(read):
            return False
        self._give_back(self._reads_by_future.pop(read).op)
        read.cancel()
        self._start_reads()  # what stood behind it may fit
        self._note_idle()
        return True

    async def drain(self) -> None:
        """Return when no read is queued or in flight. Cancelling it changes nothing."""
        while self._reads_by_future:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Refuse new reads, fail queued ones with ``ClosedError``, wait for those in flight."""
        self._closed = True
        for future in self._lane.clear():
            self._give_back(self._reads_by_future.pop(future).op)
            fail_read(future, ClosedError("the simulated disk was closed before this read"))
        await self.drain()

    def stats(self) -> ReadStats:
        """A snapshot of the counters; ``reads`` are those that ended well."""
        return ReadStats(
            reads=self._reads,
            read_nbytes=self._read_nbytes,
            short_reads=self._short_reads,
            retries=0,
            errors=dict(self._errors),
            in_flight=self._lane.n_in_flight,
            queued=self._lane.n_queued,
            demand_delay_s=self._lane.demand_delay_s,
            ahead_s=self._lane.ahead_s,
        )

    def writers_into(self, address: int, nbytes: int) -> tuple[ReadOp, ...]:
        """The reads, queued or in flight, that will still write into this range of memory."""
        end = address + nbytes
        return tuple(op for start, stop, op in self._owned if start < end and address < stop)

    def check(self) -> None:
        """Assert that nothing was violated so far."""
        assert not self.violations, "; ".join(self.violations)

    # ---- memory

    def _take_memory(self, batch: Sequence[ReadOp]) -> None:
        """Note each target as the disk's own until its read ends, or violate and take none."""
        taken: list[ReadOp] = []
        for op in batch:
            fact = self._objection(op)
            if fact is not None:
                for other in taken:
                    self._give_back(other)
                self._violated(f"{fact} (file {op.file_index}, offset {op.offset})")
            insort(self._owned, (op.address, op.address + op.target.nbytes, op), key=_first)
            taken.append(op)

    def _objection(self, op: ReadOp) -> str | None:
        at = ctypes.addressof(ctypes.c_char.from_buffer(op.target))
        if at != op.address:
            return f"address {op.address:#x} is not that of the target, {at:#x}"
        i = bisect_left(self._owned, op.address, key=_first)
        neighbours = self._owned[max(0, i - 1) : i + 1]
        for start, end, other in neighbours:
            if start < op.address + op.target.nbytes and op.address < end:
                return (
                    f"target {op.address:#x} is still being read into "
                    f"from file {other.file_index}, offset {other.offset}"
                )
        return None

    def _give_back(self, op: ReadOp) -> None:
        del self._owned[bisect_left(self._owned, op.address, key=_first)]

    def _violated(self, fact: str) -> NoReturn:
        self.violations.append(fact)
        raise AssertionError(fact)

    # ---- a read's life

    def _start_reads(self) -> None:
        while (started := self._lane.take()) is not None:
            self._start(started)

    def _start(self, started: Read) -> None:
        read = self._reads_by_future[started.future]
        op = read.op
        read.content = self._content(op)
        read.fault = self._faults.take(op)
        # Every byte is soiled with its own complement, so none is right by chance.
        read.n_soiled = self._random.randint(0, len(read.content))
        read.view[: read.n_soiled] = read.content[: read.n_soiled].translate(_INVERTED)
        wait = self._latency_s * (1 + self._jitter * self._random.uniform(-1, 1))
        if read.fault is not None:
            wait += read.fault.delay_s
        asyncio.get_running_loop().call_later(wait, self._transfer, started, read)

    def _transfer(self, started: Read, read: _Read) -> None:
        soiled = read.content.translate(_INVERTED)
        intruded = read.view[: read.n_soiled] != soiled[: read.n_soiled]
        read.view[: len(soiled)] = soiled
        read.n_soiled = len(soiled)
        loop = asyncio.get_running_loop()
        begin = max(loop.time(), self._pipe_free_at)
        self._pipe_free_at = begin + read.view.nbytes / self._nbytes_per_s
        loop.call_at(self._pipe_free_at, self._end, started, read)
        if intruded:
            self._found_intruder(read)

    def _end(self, started: Read, read: _Read) -> None:
        intruded = read.view[: read.n_soiled] != read.content.translate(_INVERTED)
        error = self._deliver(read)
        nbytes = read.view.nbytes
        read.view.release()
        self._give_back(read.op)
        self._lane.ended(started)
        del self._reads_by_future[read.future]
        if error is not None:
            fail_read(read.future, error)
        else:
            self._reads += 1
            self._read_nbytes += nbytes
            if not read.future.done():
                read.future.set_result(None)
        self._start_reads()
        self._note_idle()
        if intruded:
            self._found_intruder(read)

    def _note_idle(self) -> None:
        if not self._reads_by_future:
            self._idle.set()

    def _deliver(self, read: _Read) -> ReadError | None:
        """Write what arrives of the right bytes; returns why it is not all of them."""
        op, fault, content = read.op, read.fault, read.content
        path = self._paths[op.file_index]
        if fault is not None and fault.kind in {"error", "torn"}:
            n_right = len(content) // 2 if fault.kind == "torn" else 0
            read.view[:n_right] = content[:n_right]
            self._errors[errorcode.get(fault.errno, str(fault.errno))] += 1
            return ReadError(
                path=path,
                offset=op.offset,
                nbytes=read.view.nbytes,
                errno=fault.errno,
                fact=f"injected fault, {fault.kind}",
            )
        if fault is not None and fault.kind == "eof":
            content = content[: len(content) // 2]
        read.view[: len(content)] = content
        needed = read.view.nbytes if op.needed_nbytes is None else op.needed_nbytes
        if len(content) >= needed:
            return None
        self._short_reads += 1
        self._errors["eof"] += 1
        return end_of_file(op, nbytes=read.view.nbytes, path=path, n_got=len(content))

    def _found_intruder(self, read: _Read) -> NoReturn:
        self._violated(
            f"somebody wrote into a target while file {read.op.file_index}, offset "
            f"{read.op.offset} was being read into it"
        )

    def _content(self, op: ReadOp) -> bytes:
        file = self._files[op.file_index]
        nbytes = op.target.nbytes
        if callable(file):
            content = file(op.offset, nbytes)
            assert len(content) <= nbytes, "a file function gives at most what was asked for"
            return content
        return bytes(memoryview(file).cast("B")[op.offset : op.offset + nbytes])


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def _first(owned: tuple[int, int, ReadOp]) -> int:
    return owned[0]
