"""The same files on several drives: each read goes to the copy that will have it first.

That copy is the one whose bytes outstanding, divided by the rate at which it completes reads, end
soonest. A read that fails on one copy is given to another, but only once the first has ended, so
two never write the same memory. What a failing drive has not started yet moves at once, and an idle
drive takes over what another has queued.

A read repeated into the memory where it has just landed was not believed (its digest was wrong), so
it goes to another copy than before.

Rejected: taking turns (the slower drive sets the pace), reading from two at once and keeping the
first (half the bandwidth is thrown away, and the loser still writes into the slot), and retrying on
the drive that failed (its backend has done that).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, OrderedDict
from functools import partial
from typing import TYPE_CHECKING

import attrs

from tieredmoe.backends.batch import check_batch, check_process, error_kind, fail_read
from tieredmoe.backends.drives import Drive, DriveStats, close_all, combined_info, summed
from tieredmoe.backends.mirror_copy import Copy, MirroredRead, no_copy_left
from tieredmoe.backends.protocol import ReadOp
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tieredmoe.backends.protocol import ReadBackend, ReadStats

logger = logging.getLogger(__name__)

N_REMEMBERED = 256
"""So many reads back it is known which copy served them."""


class MirrorBackend:
    """A ``ReadBackend`` over copies of the same files; it owns the copies' backends.

    An error reaches the caller only when every copy has failed the read; it names all of them. A
    read that a drive never answers keeps its memory and its future: it cannot be read elsewhere.
    """

    def __init__(self, copies: Sequence[Drive]) -> None:
        """Bind to the running loop; all ``copies`` hold the same files in the same order."""
        assert copies
        assert len({copy.n_files for copy in copies}) == 1, "all copies hold the same files"
        self.info = combined_info("mirror", copies)
        self._n_files = copies[0].n_files
        self._copies = tuple(Copy(drive) for drive in copies)
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._reads: dict[asyncio.Future[None], MirroredRead] = {}
        self._served_by: OrderedDict[tuple[int, int, int], Copy] = OrderedDict()
        self._n_asked = 0
        self._n_moved = 0
        self._errors: Counter[str] = Counter()
        self._closing = False
        self._idle = asyncio.Event()

    def submit(
        self, batch: Sequence[ReadOp], *, priority: Priority = Priority.DEMAND
    ) -> list[asyncio.Future[None]]:
        """Give each read to a copy, one submission per copy; see ``ReadBackend.submit``."""
        if self._closing:
            raise ClosedError("this backend is closed; it takes no more reads")
        check_process(self._pid)
        check_batch(batch, n_files=self._n_files, alignment=self.info.alignment)
        shares: dict[Copy, list[MirroredRead]] = {}
        reads = []
        for op in batch:
            # A view of our own: the caller may release his, and the read may start a second time.
            own = ReadOp(op.file_index, op.offset, op.target[:], op.address, op.needed_nbytes)
            read = MirroredRead(own, self._loop.create_future(), priority)
            self._reads[read.future] = read
            reads.append(read)
            copy = self._choose(read)
            self._assign(read, copy)
            shares.setdefault(copy, []).append(read)
        for copy, share in shares.items():
            self._start(copy, share)
        return [read.future for read in reads]

    def promote(self, read: asyncio.Future[None]) -> None:
        """See ``ReadBackend.promote``; a read that moves to another copy stays promoted."""
        known = self._reads.get(read)
        if known is not None:
            known.priority = Priority.DEMAND
            if known.copy is not None and known.running is not None:
                known.copy.drive.backend.promote(known.running)

    def drop(self, read: asyncio.Future[None]) -> bool:
        """See ``ReadBackend.drop``; also true for a read that waits for its second copy."""
        known = self._reads.get(read)
        if known is None or not self._withdraw(known):
            return False
        self._forget(known)
        read.cancel()
        return True

    async def drain(self) -> None:
        """Return when no read is queued or in flight on any copy. Cancelling it changes nothing."""
        check_process(self._pid)
        while self._reads:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Refuse new reads, then close all copies at once; see ``ReadBackend.close``.

        Reads that fail from now on are not given to another copy.
        """
        if os.getpid() != self._pid:
            return  # all of it is the parent's
        self._closing = True
        await close_all([copy.drive for copy in self._copies])
        await self.drain()

    def stats(self) -> ReadStats:
        """The sum over the copies; ``errors`` are the reads that no copy could serve.

        A read served by its second copy counts among ``retries``.
        """
        stats = summed([copy.drive.backend.stats() for copy in self._copies])
        return attrs.evolve(
            stats,
            errors=dict(self._errors),
            retries=stats.retries + self._n_moved,
            in_flight=len(self._reads) - stats.queued,
        )

    def drive_stats(self) -> tuple[DriveStats, ...]:
        """What each copy did, in their order."""
        return tuple(copy.stats() for copy in self._copies)

    def __repr__(self) -> str:
        return f"<MirrorBackend {len(self._reads)} reads, {list(self._copies)}>"

    # ---- choosing

    def _choose(self, read: MirroredRead) -> Copy:
        """The copy for ``read``, among those that have not failed it; there is one."""
        now_s = self._loop.time()
        untried = [copy for copy in self._copies if copy not in read.failures]
        usable = [copy for copy in untried if not copy.avoided(now_s)] or untried
        doubted = self._served_by.get(_place(read.op))
        usable = [copy for copy in usable if copy is not doubted] or usable
        overdue = [copy for copy in usable if copy.overdue(self._n_asked)]
        best = self._best_rate()
        return min(overdue or usable, key=partial(_finish, read.nbytes, now_s, best))

    def _best_rate(self) -> float:
        """Bytes per second of the fastest copy, which one that is not known yet is taken to be."""
        return max(copy.rate.nbytes_per_s or 0.0 for copy in self._copies) or 1.0

    # ---- a read's life

    def _assign(self, read: MirroredRead, copy: Copy) -> None:
        self._n_asked += 1
        copy.asked = self._n_asked
        read.copy = copy
        copy.rate.started(read.nbytes, now_s=self._loop.time())

    def _start(self, copy: Copy, reads: Sequence[MirroredRead]) -> None:
        """Submit ``reads``, all of one priority, to ``copy``; a refusal is a failure of each."""
        ops = [read.op for read in reads]
        try:
            futures = copy.drive.backend.submit(ops, priority=reads[0].priority)
        except Exception as error:  # noqa: BLE001 (whatever a drive raises is told of each read)
            for read in reads:
                self._failed(read, copy, error)
            return
        for read, future in zip(reads, futures, strict=True):
            read.running = future
            copy.reads[future] = read
            future.add_done_callback(partial(self._ended, read))

    def _move(self, read: MirroredRead, copy: Copy | None = None) -> None:
        copy = copy or self._choose(read)
        self._assign(read, copy)
        self._start(copy, [read])

    def _withdraw(self, read: MirroredRead) -> bool:
        """True if ``read`` had not been started by its copy, which now never will."""
        copy, running = read.copy, read.running
        assert copy is not None
        if running is None or not copy.drive.backend.drop(running):
            return False
        read.running = None
        del copy.reads[running]
        copy.rate.ended(read.nbytes, now_s=self._loop.time(), landed=False)
        return True

    def _ended(self, read: MirroredRead, running: asyncio.Future[None]) -> None:
        if read.running is not running:
            return  # it was withdrawn before it started
        copy = read.copy
        assert copy is not None
        assert not running.cancelled(), "a copy's future is known to nobody but this mirror"
        read.running = None
        del copy.reads[running]
        error = running.exception()
        if error is None:
            copy.rate.ended(read.nbytes, now_s=self._loop.time(), landed=True)
            copy.succeeded()
            self._remember(read.op, copy)
            self._forget(read)
            if not read.future.done():
                read.future.set_result(None)
        else:
            self._failed(read, copy, error)
        if not self._closing:
            self._relieve(copy)

    def _failed(self, read: MirroredRead, copy: Copy, error: BaseException) -> None:
        now_s = self._loop.time()
        copy.rate.ended(read.nbytes, now_s=now_s, landed=False)
        read.failures[copy] = error
        if self._closing or not isinstance(error, ReadError | ClosedError):
            self._give_up(read)
            return
        copy.failed(error, now_s=now_s)
        self._evacuate(copy)
        if len(read.failures) == len(self._copies) or read.future.done():
            self._give_up(read)
        else:
            self._n_moved += 1
            self._move(read)

    def _give_up(self, read: MirroredRead) -> None:
        self._forget(read)
        error = no_copy_left(read.failures, self._copies)
        if not isinstance(error, ClosedError):
            self._errors[error_kind(error)] += 1
        fail_read(read.future, error)

    def _evacuate(self, failing: Copy) -> None:
        """Move what ``failing`` has not started to copies that are well."""
        now_s = self._loop.time()
        well = {copy for copy in self._copies if not copy.avoided(now_s)}
        for read in list(failing.reads.values()):
            if well - read.failures.keys() and self._withdraw(read):
                self._move(read)

    def _relieve(self, copy: Copy) -> None:
        """Let ``copy``, which has just ended a read, have the last one queued at a slower copy."""
        now_s = self._loop.time()
        busy = [other for other in self._copies if other is not copy and other.reads]
        if not busy or copy.avoided(now_s):
            return
        best = self._best_rate()
        slowest = max(busy, key=partial(_finish, 0, now_s, best))
        read = next(reversed(slowest.reads.values()))
        if copy in read.failures:
            return
        sooner = _finish(read.nbytes, now_s, best, copy) < _finish(0, now_s, best, slowest)
        if sooner and self._withdraw(read):
            self._move(read, copy)

    def _remember(self, op: ReadOp, copy: Copy) -> None:
        self._served_by[_place(op)] = copy
        if len(self._served_by) > N_REMEMBERED:
            self._served_by.popitem(last=False)

    def _forget(self, read: MirroredRead) -> None:
        del self._reads[read.future]
        if not self._reads:
            self._idle.set()


async def open_mirror(
    copies: Mapping[Path, Sequence[Path]], open_files: Callable[[Sequence[Path]], ReadBackend]
) -> MirrorBackend:
    """Open the same files of each directory by ``open_files``, which says how.

    Errors pass, but for one: a copy that cannot be read is left out, at WARNING, as long as
    another can. If this raises, no copy stays open.
    """
    opened: list[Drive] = []
    unreadable: list[ReadError] = []
    try:
        for directory, files in copies.items():
            try:
                opened.append(Drive(directory, open_files(files), len(files)))
            except ReadError as error:
                unreadable.append(error)
        if opened:
            for reason in unreadable:
                logger.warning("a mirrored drive cannot be read and is left out: %s", reason)
            return MirrorBackend(opened)
    except BaseException:
        await close_all(opened)
        raise
    raise unreadable[0]


def _finish(nbytes: int, now_s: float, best: float, copy: Copy) -> tuple[float, int]:
    """When ``copy`` would have ``nbytes`` more; among equals, who was asked longest ago."""
    finish_s = copy.rate.finish_s(nbytes, now_s=now_s, unknown_nbytes_per_s=best)
    return finish_s, copy.asked


def _place(op: ReadOp) -> tuple[int, int, int]:
    return op.file_index, op.offset, op.address
