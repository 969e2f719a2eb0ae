"""The leaf of every chain: experts of an opened model, read through a backend."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from tieredmoe.backends.drives import DrivesBackend
from tieredmoe.backends.protocol import ReadBackend, ReadOp
from tieredmoe.errors import ClosedError, ConfigError, ReadError
from tieredmoe.memory.protocol import HostSlot, Part, Slot
from tieredmoe.pack.fills import GatheredFill, ReadFill, arrange
from tieredmoe.spec import Priority
from tieredmoe.stats import SourceCounters

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from tieredmoe.pack.records import Extents, Records
    from tieredmoe.spec import ExpertKey


class PackSource:
    """Reads experts of ``pack`` into host slots; one batch is one submission.

    A slot needs room for all reads of an expert. When its fill ends, the record lies in it in its
    uniform layout, moved there within the slot if the reads brought its roles elsewhere. With
    ``arranged=False`` it is left as the reads brought it, for a copy upwards to do that by
    ``parts``, or for use where it is by the layouts of ``spec_as_read``.

    It owns ``backend``, which must have opened the files that ``extents`` counts, in that order.
    """

    def __init__(self, pack: Records, backend: ReadBackend, *, arranged: bool = True) -> None:
        self._pack = pack
        self._backend = backend
        self._arranged = arranged
        self._whole = {
            layer: (Part(0, 0, layout.payload_nbytes),)
            for layer, layout in pack.spec.layouts.items()
        }
        info = backend.info
        self._counters = SourceCounters(
            backend=info.name,
            direct_io=info.direct,
            fallbacks=tuple(f"{each.backend}: {each.reason}" for each in info.fallbacks),
        )

    @property
    def counters(self) -> SourceCounters:
        """What was asked of the disk, its backend's retries up to date; in any thread."""
        stats = self._backend.stats()
        self._counters.retries = stats.retries
        self._counters.demand_delay_s = stats.demand_delay_s
        self._counters.ahead_s = stats.ahead_s
        if isinstance(self._backend, DrivesBackend):
            self._counters.drives = self._backend.drive_stats()
        return self._counters

    def read_into(
        self, requests: Sequence[tuple[ExpertKey, Slot]], *, priority: Priority = Priority.DEMAND
    ) -> Sequence[ReadFill | GatheredFill]:
        """Start reading each expert into its slot, which must be host memory."""
        located = [(key, cast("HostSlot", slot), self._pack.extents(key)) for key, slot in requests]
        ops = [_ops(slot, extents) for _, slot, extents in located]
        batch = [op for of_expert in ops for op in of_expert]
        reads = iter(self._backend.submit(batch, priority=priority))
        return [
            self._fill(where, of_expert, [next(reads) for _ in of_expert], priority=priority)
            for where, of_expert in zip(located, ops, strict=True)
        ]

    def parts(self, key: ExpertKey) -> Sequence[Part]:
        """Where the bytes of ``key`` lie in a slot of the tier above, and where they belong."""
        return self._whole[key.layer] if self._arranged else self._pack.extents(key).parts

    async def close(self) -> None:
        """Refuse new reads, drain, close the files. Cancelled, it stops waiting; call it again."""
        await self._backend.close()

    def _fill(
        self,
        where: tuple[ExpertKey, HostSlot, Extents],
        ops: Sequence[ReadOp],
        reads: Sequence[asyncio.Future[None]],
        *,
        priority: Priority,
    ) -> ReadFill | GatheredFill:
        key, slot, extents = where
        moved = self._arranged and any(p.source_offset != p.target_offset for p in extents.parts)
        fill: ReadFill | GatheredFill
        if len(reads) == 1 and not moved:
            reads[0].add_done_callback(partial(self._read_ended, ops[0].target.nbytes))
            fill = ReadFill(self._backend, reads[0])
        else:
            move = partial(arrange, slot, extents.parts) if moved else None
            fill = GatheredFill(
                self._backend,
                ops,
                reads,
                arrange=move,
                on_read=self._read_ended,
                priority=priority,
            )
        fill.done.add_done_callback(partial(self._fill_ended, key))
        return fill

    def _read_ended(self, nbytes: int, read: asyncio.Future[None]) -> None:
        if not _never_started(read):
            self._counters.pack_read_bytes += nbytes

    def _fill_ended(self, key: ExpertKey, done: asyncio.Future[None]) -> None:
        if _never_started(done):
            return
        error = done.exception()
        self._counters.pack_reads += 1
        if error is None:
            self._counters.pack_payload_bytes += self._pack.spec.layouts[key.layer].payload_nbytes
        else:
            kind = error.kind if isinstance(error, ReadError) else type(error).__name__
            self._counters.read_errors[kind] += 1


def _never_started(read: asyncio.Future[None]) -> bool:
    return read.cancelled() or isinstance(read.exception(), ClosedError)


def _ops(slot: HostSlot, extents: Extents) -> list[ReadOp]:
    if extents.nbytes > slot.nbytes:
        raise ConfigError(
            f"a slot of {slot.nbytes:,} bytes has no room for the {extents.nbytes:,} that are read "
            "for this expert; make the slots of the tier above the disk slot_nbytes of the model"
        )
    ops, end = [], 0
    for file_index, offset, nbytes, needed_nbytes in extents.envelopes:
        target = slot.view[end : end + nbytes]
        ops.append(ReadOp(file_index, offset, target, slot.address + end, needed_nbytes))
        end += nbytes
    return ops
