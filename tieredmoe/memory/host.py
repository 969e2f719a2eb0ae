"""Slots in host memory: a cache tier, staging, or the "device" of a machine without one.

Copies are done when ``copy_from`` returns, so every fence here has always passed; tiers run the
same code as on a device, where fences are events.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, cast

import attrs

from tieredmoe.budget import format_size
from tieredmoe.memory.fences import PASSED
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.memory.pages import HostRegion
    from tieredmoe.memory.protocol import Fence, HostSlot, Part, Slot
    from tieredmoe.spec import ExpertKey


@attrs.define(eq=False)
class HostArenaSlot:
    """One slot of a ``HostArena``; see ``memory.protocol.HostSlot``."""

    arena: HostArena
    slot_index: int
    nbytes: int
    view: memoryview
    address: int
    ready: Fence = PASSED
    idle: Fence = PASSED


class HostArena:
    """``n_slots`` equal slots, end to end in one region of host memory."""

    __slots__ = ("_n_backed", "_region", "_slots", "slot_nbytes")

    slot_nbytes: int

    def __init__(self, region: HostRegion, *, n_slots: int, slot_nbytes: int) -> None:
        """Cut ``region`` into slots; it must hold them, and nobody else may use it."""
        assert n_slots > 0
        assert slot_nbytes > 0
        assert slot_nbytes % PAGE_NBYTES == 0
        assert region.address % PAGE_NBYTES == 0
        assert region.nbytes >= n_slots * slot_nbytes
        self.slot_nbytes = slot_nbytes
        self._region: HostRegion | None = region
        self._n_backed = n_slots
        self._slots = tuple(
            HostArenaSlot(
                arena=self,
                slot_index=i,
                nbytes=slot_nbytes,
                view=region.view[i * slot_nbytes : (i + 1) * slot_nbytes],
                address=region.address + i * slot_nbytes,
            )
            for i in range(n_slots)
        )

    @property
    def n_slots(self) -> int:
        """How many slots there are."""
        return len(self._slots)

    def slot(self, slot_index: int) -> HostArenaSlot:
        """The slot of that number; always the same object."""
        assert self._region is not None, "slot of a closed arena"
        assert 0 <= slot_index < len(self._slots)
        return self._slots[slot_index]

    def copy_from(self, key: ExpertKey, source: Slot, target: Slot, parts: Sequence[Part]) -> Fence:
        """Copy ``parts`` of the host slot ``source`` into our ``target``; done on return.

        Drops the GIL for each part, so other threads run while memory moves. ``source`` may be
        rewritten as soon as this returns.
        """
        del key  # of no matter to bytes
        assert self._region is not None, "copy into a closed arena"
        ours = self._slots[target.slot_index]
        assert ours is target, "copy into another arena's slot"
        # Host slots are what the protocol asks of every source.
        _copy(cast("HostSlot", source), ours, parts)
        return PASSED

    @property
    def copies_out(self) -> bool:
        """True: a copy is the same in both directions."""
        return True

    def copy_out(self, source: Slot, target: Slot, parts: Sequence[Part]) -> Fence:
        """Copy ``parts`` of our ``source`` into ``target``; done on return, as ``copy_from``."""
        assert self._region is not None, "copy out of a closed arena"
        ours = self._slots[source.slot_index]
        assert ours is source, "copy out of another arena's slot"
        _copy(ours, cast("HostSlot", target), parts)
        return PASSED

    def fence(self, stream: object) -> Fence:
        """Return a fence that has passed: what the host does is done when it returns."""
        del stream
        return PASSED

    def resize(self, n_slots: int) -> None:
        """Keep memory for the first ``n_slots`` slots, and give back that of the others.

        Nobody may use those others; growing back, they hold zeros. Raises ``BudgetError``, with
        nothing changed, if the kernel has not that much. Memory that a device has registered stays.
        """
        assert self._region is not None, "resizing a closed arena"
        assert 0 < n_slots <= len(self._slots)
        before, self._n_backed = self._n_backed, min(n_slots, self._n_backed)
        nbytes = n_slots * self.slot_nbytes
        if n_slots > before:
            self._region.take_again(before * self.slot_nbytes, nbytes)
        elif n_slots < before:
            self._region.give_back(nbytes)
        self._n_backed = n_slots

    def close(self) -> None:
        """Release every view of the region; idempotent. The pool gives the memory back.

        A slot of which somebody still holds an array keeps its view, and with it the memory.
        """
        if self._region is None:
            return
        region, self._region = self._region, None
        for view in (region.view, *(slot.view for slot in self._slots)):
            with contextlib.suppress(BufferError):
                view.release()

    def __repr__(self) -> str:
        state = " closed" if self._region is None else ""
        return f"<HostArena{state} {len(self._slots)} slots of {format_size(self.slot_nbytes)}>"


def _copy(source: HostSlot, target: HostSlot, parts: Sequence[Part]) -> None:
    assert source.ready.passed(), "a device still writes what the host is to copy"
    for part in parts:
        assert part.nbytes >= 0
        assert 0 <= part.source_offset <= source.nbytes - part.nbytes
        assert 0 <= part.target_offset <= target.nbytes - part.nbytes
        ctypes.memmove(
            target.address + part.target_offset, source.address + part.source_offset, part.nbytes
        )
    target.ready = PASSED
