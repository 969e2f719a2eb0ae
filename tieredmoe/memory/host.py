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
from tieredmoe.spec import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.memory.pages import HostRegion
    from tieredmoe.memory.protocol import Fence, HostSlot, Part, Slot


class PassedFence:
    """A fence with nothing before it: it has always passed."""

    __slots__ = ()

    def passed(self) -> bool:
        """Return True."""
        return True

    def on_passed(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at once."""
        callback()

    def wait_on(self, stream: object) -> None:
        """Order nothing: there is no work to wait for."""


PASSED = PassedFence()


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

    __slots__ = ("_region", "_slots", "slot_nbytes")

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

    def copy_from(self, source: Slot, target: Slot, parts: Sequence[Part]) -> Fence:
        """Copy ``parts`` of the host slot ``source`` into our ``target``; done on return.

        Drops the GIL for each part, so other threads run while memory moves. ``source`` may be
        rewritten as soon as this returns.
        """
        assert self._region is not None, "copy into a closed arena"
        ours = self._slots[target.slot_index]
        assert ours is target, "copy into another arena's slot"
        theirs = cast("HostSlot", source)  # what the protocol asks of every source
        for part in parts:
            assert part.nbytes >= 0
            assert 0 <= part.source_offset <= theirs.nbytes - part.nbytes
            assert 0 <= part.target_offset <= ours.nbytes - part.nbytes
            ctypes.memmove(
                ours.address + part.target_offset,
                theirs.address + part.source_offset,
                part.nbytes,
            )
        ours.ready = PASSED
        return PASSED

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
