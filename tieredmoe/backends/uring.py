"""Reads through io_uring on the event loop: one system call per acquire, no thread per block.

On huge pages a block of 12 MB costs the loop tens of microseconds, whole, and the kernel reads all
of an acquire in parallel. A completion is an eventfd that the loop watches; one wake brings all
that have landed, and one more system call tops the queue up.

A slot is busy until its completion, whatever happened to its future: io_uring cannot cancel a block
read that was issued. ``_flying`` holds the memory until then.

Rejected: a thread for the ring (same speed, more CPU time, and every completion would cross
threads), SQPOLL (a core spent on polling), registered buffers (see ``ring``), reads through the
page cache (a submission then copies, up to 10 ms for 8 MB: those go to threads).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections import deque
from errno import EAGAIN, EBUSY, EINTR, ENOMEM
from typing import TYPE_CHECKING

import attrs

from tieredmoe.backends.batch import check_batch, check_process, fail_read, refused
from tieredmoe.backends.endings import ReadCounters, Waiters
from tieredmoe.backends.lane import N_READS_MIN, Read
from tieredmoe.backends.lanes import Lanes
from tieredmoe.budget import format_size
from tieredmoe.errors import ClosedError
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tieredmoe.backends.blockread import BlockRead
    from tieredmoe.backends.datafile import DataFile
    from tieredmoe.backends.protocol import BackendInfo, ReadOp, ReadStats
    from tieredmoe.backends.ring import Ring

COMPLETIONS_PER_WAKE = 256
"""The loop does other work after so many; the rest comes with its next turn."""
N_SUBMIT_RETRIES = 3
READ_NBYTES_MAX = 1 << 30
"""One read's length has 32 bits in the ring and a little less in the kernel; longer ones go on."""


@attrs.define(eq=False)
class _Flight:
    """A block in the ring, and the descriptor it is read through."""

    read: Read
    block: BlockRead
    fd: int


class UringBackend:
    """Whole-block reads through one ring; see ``backends.protocol.ReadBackend``.

    On one device at most ``windows[device]`` bytes are in flight (default ``info.window_nbytes``),
    or two reads where two are larger. A read that the disk never answers keeps ``drain`` and
    ``close`` waiting, since its memory may still be written.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        *,
        info: BackendInfo,
        ring: Ring,
        n_entries: int,
        read_splits: int = 1,
        record_nbytes: int = 0,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        """Bind to the running loop and take over ``files`` and ``ring``, which ``close`` closes.

        Raises ``NotImplementedError`` on a loop that cannot watch a descriptor; both stay open.
        """
        assert info.window_nbytes > 0
        assert read_splits > 0
        self.info = info
        self._files = tuple(files)
        self._ring = ring
        self._read_splits = read_splits
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        windows = windows or {file.device: info.window_nbytes for file in files}
        n_reads_max = max(N_READS_MIN, n_entries // (len(windows) * read_splits))
        self._lanes = Lanes(windows, n_reads_max=n_reads_max, record_nbytes=record_nbytes)
        self._to_prep: deque[tuple[Read, BlockRead]] = deque()
        self._flying: dict[int, _Flight] = {}
        self._last_tag = 0
        self._n_outstanding = 0
        self._closing = False
        self._shut = False
        self._settled = Waiters()
        self._counters = ReadCounters()
        self._submit_ns_max = 0
        self._loop.add_reader(ring.event_fd, self._on_wake)

    def submit(
        self, batch: Sequence[ReadOp], *, priority: Priority = Priority.DEMAND
    ) -> list[asyncio.Future[None]]:
        """Start the reads in order, in one system call; see ``ReadBackend.submit``."""
        check_process(self._pid)
        if self._closing:
            raise ClosedError("this backend is closed; it takes no more reads")
        check_batch(batch, n_files=len(self._files), alignment=self.info.alignment)
        for i, op in enumerate(batch):
            # The kernel writes where the address says, so it is not taken on trust.
            if ctypes.addressof(ctypes.c_char.from_buffer(op.target)) != op.address:
                raise refused(batch, i, "the address is not that of the target")
        reads = [
            Read.of(
                op,
                self._files[op.file_index],
                future=self._loop.create_future(),
                alignment=self.info.alignment,
                n_splits=self._read_splits,
            )
            for op in batch
        ]
        self._n_outstanding += len(reads)
        self._lanes.put(reads, priority)
        self._top_up()
        return [read.future for read in reads]

    def promote(self, read: asyncio.Future[None]) -> None:
        """Let a waiting prefetch wait as demand; see ``ReadBackend.promote``."""
        self._lanes.promote(read)
        self._top_up()

    def drop(self, read: asyncio.Future[None]) -> bool:
        """True if ``read`` was still waiting and now never starts; see ``ReadBackend.drop``."""
        if os.getpid() != self._pid or not self._lanes.remove(read):
            return False
        self._n_outstanding -= 1
        read.cancel()
        self._top_up()  # what stood behind it may fit
        return True

    async def drain(self) -> None:
        """Return when no read is queued or in flight. Cancelling it changes nothing."""
        check_process(self._pid)
        while self._n_outstanding:
            await self._settled.next()

    async def close(self) -> None:
        """Refuse new reads, fail waiting ones with ``ClosedError``, drain, free ring and files.

        Idempotent. Cancelling it stops the wait only: everything is freed once the last read ends.
        In a forked child it does nothing, for all of that is the parent's.
        """
        if os.getpid() != self._pid:
            return
        if not self._closing:
            self._closing = True
            dropped = self._lanes.clear()
            self._n_outstanding -= len(dropped)
            for future in dropped:
                fail_read(future, ClosedError("the backend was closed before this read started"))
            self._settle()
        while not self._shut:
            await self._settled.next()

    def stats(self) -> ReadStats:
        """A snapshot of the counters; ``reads`` and ``read_nbytes`` count what landed whole."""
        return self._counters.snapshot(self._lanes, submit_ns_max=self._submit_ns_max)

    def __repr__(self) -> str:
        state = "closed, " if self._closing else ""
        return (
            f"<UringBackend {state}{self._lanes.n_in_flight} in flight "
            f"({format_size(self._lanes.in_flight_nbytes)}), {self._lanes.n_queued} queued>"
        )

    # ---- into the ring

    def _top_up(self) -> None:
        """Start every read that the windows admit, with one system call."""
        if self._shut or os.getpid() != self._pid:
            return  # a forked child must not write to the ring that it shares
        for read in self._lanes.take():
            self._to_prep.extend((read, block) for block in read.blocks)
        self._flush()
        self._settle()

    def _flush(self) -> None:
        """Give the kernel every block that is to be read.

        What it refuses stays in the ring and goes with the next flush, after a completion; if there
        will be none, it is taken back and failed.
        """
        while True:
            while self._to_prep and self._prepped(*self._to_prep[0]):
                self._to_prep.popleft()
            if not self._to_prep and not self._ring.n_unsubmitted:
                return
            code = self._submit()
            if code is None:
                continue
            if len(self._flying) <= self._ring.n_unsubmitted:
                self._give_up(code)
            return

    def _prepped(self, read: Read, block: BlockRead) -> bool:
        tag, fd = self._last_tag + 1, block.file.fd
        nbytes = min(block.rest_nbytes, READ_NBYTES_MAX)
        done = self._ring.prep_read(
            fd, address=block.address, nbytes=nbytes, offset=block.offset, tag=tag
        )
        if done:
            self._last_tag = tag
            self._flying[tag] = _Flight(read, block, fd)
        return done

    def _submit(self) -> int | None:
        """One submission, tried again where that may help; the errno that stays, if any."""
        for i in range(1 + N_SUBMIT_RETRIES):
            self._counters.retries += i > 0
            begin = time.perf_counter_ns()
            try:
                self._ring.submit()
            except OSError as error:
                code = error.errno or EAGAIN
            else:
                return None
            finally:
                self._submit_ns_max = max(self._submit_ns_max, time.perf_counter_ns() - begin)
            if code == ENOMEM:
                self._lanes.halve()
            elif code == EBUSY:
                self._land(self._ring.reap())
            elif code not in {EAGAIN, EINTR}:
                break
        return code

    def _give_up(self, code: int) -> None:
        """Fail every block that is to be read: nothing is in flight that would bring a retry."""
        refused_blocks = [self._flying.pop(tag) for tag in self._ring.retract()]
        failing = [(each.read, each.block) for each in refused_blocks]
        failing += self._to_prep
        self._to_prep.clear()
        for read, block in failing:
            error = block.failure(code)
            if read.block_ended(error):
                self._end(read)
        # Those that wait are tried on their own; where the kernel refuses everything, they end so.
        if self._lanes.n_queued:
            self._loop.call_soon(self._top_up)

    # ---- out of the ring

    def _on_wake(self) -> None:
        """Take what has landed, tell its owners, and top up."""
        if self._shut or os.getpid() != self._pid:
            return  # a forked child shares the ring and must not take the parent's completions
        self._ring.clear_event()
        n_reaped = 0
        while n_reaped < COMPLETIONS_PER_WAKE and (completions := self._ring.reap()):
            n_reaped += len(completions)
            self._land(completions)
        if n_reaped >= COMPLETIONS_PER_WAKE:
            self._loop.call_soon(self._on_wake)  # the event is cleared, and more may be there
        self._top_up()

    def _land(self, completions: Sequence[tuple[int, int]]) -> None:
        for tag, result in completions:
            flight = self._flying.pop(tag)
            read, block = flight.read, flight.block
            error: Exception | None = None
            try:
                if result < 0:
                    block.failed(-result, fd=flight.fd)
                    whole = False
                else:
                    whole = block.took(result)
            except Exception as final:  # noqa: BLE001 (raised again where the future is awaited)
                error, whole = final, True
            if not whole:
                self._to_prep.append((read, block))
            elif read.block_ended(error):
                self._end(read)

    def _end(self, read: Read) -> None:
        self._lanes.ended(read)
        self._counters.ended(read)
        if read.error is not None:
            fail_read(read.future, read.error)
        elif not read.future.done():
            read.future.set_result(None)
        self._n_outstanding -= 1

    def _settle(self) -> None:
        """Once nothing is outstanding: wake who drains, and free everything if closing."""
        if self._n_outstanding:
            return
        if self._closing and not self._shut:
            self._shut = True
            self._loop.remove_reader(self._ring.event_fd)
            self._ring.close()
            for file in self._files:
                file.close()
        self._settled.wake()
