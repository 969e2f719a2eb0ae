"""One expert on its way from the disk into a slot, in one read or in several.

Rejected: one future per read in the tiers above (an expert is there or it is not; a third of one is
nobody's business), and ending a fill at its first failed read (the others still write its slot).
"""

from __future__ import annotations

import asyncio
import ctypes
from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.errors import ClosedError
from tieredmoe.spec import Priority

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.backends.protocol import ReadBackend, ReadOp
    from tieredmoe.memory.protocol import HostSlot, Part


class ReadFill:
    """One record that one read brings to its place."""

    __slots__ = ("_backend", "done")

    def __init__(self, backend: ReadBackend, read: asyncio.Future[None]) -> None:
        self._backend = backend
        self.done = read

    def promote(self) -> None:
        """Let the read wait as demand, if it waits."""
        self._backend.promote(self.done)

    def drop_if_queued(self) -> bool:
        """True if the backend had not started the read and now never will."""
        return self._backend.drop(self.done)


class GatheredFill:
    """One expert that several reads bring: whole when all have landed, failed once all have ended.

    ``arrange`` is called when all bytes are there, before ``done`` resolves; ``on_read`` at the end
    of each read, with its length and its future.
    """

    __slots__ = (
        "_arrange",
        "_backend",
        "_error",
        "_n_reads",
        "_on_read",
        "_priority",
        "_reads",
        "done",
    )

    def __init__(
        self,
        backend: ReadBackend,
        ops: Sequence[ReadOp],
        reads: Sequence[asyncio.Future[None]],
        *,
        arrange: Callable[[], None] | None,
        on_read: Callable[[int, asyncio.Future[None]], None],
        priority: Priority = Priority.DEMAND,
    ) -> None:
        self._backend = backend
        self._priority = priority
        self._arrange = arrange
        self._on_read = on_read
        self._n_reads = len(reads)
        self._reads: dict[asyncio.Future[None], ReadOp] = {}
        self._error: BaseException | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._follow(ops, reads)

    def promote(self) -> None:
        """Let those of the reads that wait, wait as demand."""
        self._priority = Priority.DEMAND
        for read in self._reads:
            self._backend.promote(read)

    def drop_if_queued(self) -> bool:
        """True if no read had started: then none ever will. Else False, and all will be read.

        A backend drops reads one by one, in order. Once the first is dropped, a later one may start
        before it is dropped too; then those that were dropped are submitted again.
        """
        if self.done.done() or self._error is not None or len(self._reads) < self._n_reads:
            return False
        dropped = []
        for read, op in list(self._reads.items()):
            if not self._backend.drop(read):
                break
            dropped.append(op)
            del self._reads[read]
        if not self._reads:
            self.done.cancel()
            return True
        if dropped:
            try:
                self._follow(dropped, self._backend.submit(dropped, priority=self._priority))
            except Exception as error:  # noqa: BLE001 (it reaches every waiter, with those running)
                self._error = error
        return False

    def _follow(self, ops: Sequence[ReadOp], reads: Sequence[asyncio.Future[None]]) -> None:
        for op, read in zip(ops, reads, strict=True):
            self._reads[read] = op
            read.add_done_callback(partial(self._on_read, op.target.nbytes))
            read.add_done_callback(self._ended)

    def _ended(self, read: asyncio.Future[None]) -> None:
        if self._reads.pop(read, None) is None:
            return  # we dropped it
        error = ClosedError("the read was dropped") if read.cancelled() else read.exception()
        if error is not None and (self._error is None or isinstance(self._error, ClosedError)):
            self._error = error
        if self._error is not None:
            self._drop_rest()
        if not self._reads:
            self._end()

    def _drop_rest(self) -> None:
        """Spare the disk what will not be used: reads of ours that have not started yet."""
        for read in reversed(list(self._reads)):
            if self._backend.drop(read):
                del self._reads[read]

    def _end(self) -> None:
        if self._error is None and self._arrange is not None:
            try:
                self._arrange()
            except Exception as error:  # noqa: BLE001 (it reaches every waiter)
                self._error = error
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(None)


def arrange(slot: HostSlot, parts: Sequence[Part]) -> None:
    """Bring ``parts`` of ``slot`` to their uniform places within it; bytes between are lost."""
    moves = [
        (slot.address + part.target_offset, slot.address + part.source_offset, part.nbytes)
        for part in parts
    ]
    if _only_downwards(parts):
        for target, source, nbytes in moves:
            ctypes.memmove(target, source, nbytes)
        return
    # Some part would be overwritten before its turn: take all of them out first.
    taken = [ctypes.string_at(source, nbytes) for _, source, nbytes in moves]
    for (target, _, nbytes), content in zip(moves, taken, strict=True):
        ctypes.memmove(target, content, nbytes)


def _only_downwards(parts: Sequence[Part]) -> bool:
    """Whether no part's target reaches into the source of a later one."""
    lowest = None
    for part in reversed(parts):
        if lowest is not None and part.target_offset + part.nbytes > lowest:
            return False
        lowest = part.source_offset if lowest is None else min(lowest, part.source_offset)
    return True
