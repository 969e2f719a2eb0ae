"""The leaf of every chain: experts of a pack, read through a backend."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from tieredmoe.backends.protocol import ReadBackend, ReadOp
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.memory.protocol import HostSlot, Part, Slot
from tieredmoe.stats import SourceCounters

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from tieredmoe.pack.layout import Extent
    from tieredmoe.spec import ExpertKey, MoESpec


class Records(Protocol):
    """What is read: a ``Pack``, or anything else that knows where its records lie."""

    @property
    def spec(self) -> MoESpec:
        """The experts there are."""

    def locate(self, key: ExpertKey) -> Extent:
        """Where the record of ``key`` lies, in whole pages."""


class PackSource:
    """Reads whole records of ``pack`` into host slots; one batch is one submission.

    It owns ``backend``, which must have opened the files that ``locate`` counts, in that order.
    """

    def __init__(self, pack: Records, backend: ReadBackend) -> None:
        self._pack = pack
        self._backend = backend
        self._parts = {
            layer: (Part(0, 0, layout.payload_nbytes),)
            for layer, layout in pack.spec.layouts.items()
        }
        self._counters = SourceCounters(backend=backend.info.name, direct_io=backend.info.direct)

    @property
    def counters(self) -> SourceCounters:
        """What was asked of the disk, its backend's retries up to date; in any thread."""
        self._counters.retries = self._backend.stats().retries
        return self._counters

    def read_into(self, requests: Sequence[tuple[ExpertKey, Slot]]) -> Sequence[DiskFill]:
        """Start reading each record into its slot, which must be host memory."""
        ops = [self._op(key, cast("HostSlot", slot)) for key, slot in requests]
        reads = self._backend.submit(ops)
        for (key, _), op, read in zip(requests, ops, reads, strict=True):
            read.add_done_callback(partial(self._ended, key, op.target.nbytes))
        return [DiskFill(self._backend, read) for read in reads]

    def parts(self, key: ExpertKey) -> Sequence[Part]:
        """A record lies in its slot as it lies in the pack."""
        return self._parts[key.layer]

    async def close(self) -> None:
        """Refuse new reads, drain, close the files."""
        await self._backend.close()

    def _op(self, key: ExpertKey, slot: HostSlot) -> ReadOp:
        where = self._pack.locate(key)
        return ReadOp(where.file_index, where.offset, slot.view[: where.nbytes], slot.address)

    def _ended(self, key: ExpertKey, nbytes: int, read: asyncio.Future[None]) -> None:
        error = None if read.cancelled() else read.exception()
        if read.cancelled() or isinstance(error, ClosedError):
            return  # it never started
        counters = self._counters
        counters.pack_reads += 1
        counters.pack_read_bytes += nbytes
        if error is None:
            counters.pack_payload_bytes += self._pack.spec.layouts[key.layer].payload_nbytes
        else:
            kind = error.kind if isinstance(error, ReadError) else type(error).__name__
            counters.read_errors[kind] += 1


class DiskFill:
    """One record on its way from the disk."""

    __slots__ = ("_backend", "done")

    def __init__(self, backend: ReadBackend, read: asyncio.Future[None]) -> None:
        self._backend = backend
        self.done = read

    def drop_if_queued(self) -> bool:
        """True if the backend had not started the read and now never will."""
        return self._backend.drop(self.done)
