"""The slots of a tier that have memory, while the tier gives some up or takes them again.

Which experts are where is ``Residency``'s business and changes at once. Memory follows: it is given
back in one piece, when no expert is left in the slots given up and nothing that a device has been
told to do reads or writes them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tieredmoe.entry import READY
from tieredmoe.memory.fences import PASSED, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tieredmoe.entry import Entry
    from tieredmoe.memory.protocol import Arena, Fence, Slot
    from tieredmoe.residency import Residency
    from tieredmoe.spec import ExpertKey


class Backing:
    """How many slots of ``arena`` have memory; ``shrinking`` while these are more than are used."""

    __slots__ = ("_arena", "_n_backed", "_residency", "_slots", "_waiting", "shrinking")

    def __init__(self, residency: Residency, arena: Arena, slots: Sequence[Slot]) -> None:
        self.shrinking = False
        self._residency = residency
        self._arena = arena
        self._slots = slots
        self._n_backed = len(slots)
        self._waiting: list[asyncio.Future[None]] = []

    def resize(self, n_slots: int) -> None:
        """Use ``n_slots`` slots; ``give_back`` then gives back the memory of others.

        Raises ``BudgetError``, with nothing changed, if memory for more cannot be had.
        """
        assert 0 < n_slots <= len(self._slots)
        if n_slots > self._n_backed:
            self._arena.resize(n_slots)
            self._n_backed = n_slots
        # Before experts are swept: whoever unpins one afterwards in another thread sees it.
        self.shrinking = n_slots < self._n_backed
        self._residency.resize(n_slots)
        if not self.shrinking:
            self._wake()

    def give_back(self, again: Callable[[], None]) -> list[ExpertKey]:
        """Give back what nobody needs; returns the experts evicted for it.

        If a device still has to do with it, ``again`` is called when it may not any more.
        """
        residency = self._residency
        swept = residency.sweep()
        if residency.n_stranded:
            return swept
        for slot in self._slots[residency.n_slots : self._n_backed]:
            fence = joined(slot.ready, slot.idle)
            if not fence.passed():
                fence.on_passed(again)
                return swept
        self._arena.resize(residency.n_slots)
        self._n_backed = residency.n_slots
        self.shrinking = False
        self._wake()
        return swept

    def keep_idle(self, entries: Sequence[Entry], fences: Sequence[Fence]) -> None:
        """Let the slots of those that are READY not be written before ``fences`` have passed.

        Inside the mutex: two holders who let go of one slot must not forget each other.
        """
        for entry in entries:
            if entry.state is READY:
                slot = self._slots[entry.slot_index]
                for fence in fences:
                    slot.idle = fence if slot.idle is PASSED else joined(slot.idle, fence)

    async def idle(self) -> None:
        """Return when nothing on a device reads a slot. Cancelling it changes nothing."""
        for slot in self._slots:
            if not slot.idle.passed():
                passed = asyncio.Event()
                slot.idle.on_passed(passed.set)
                await passed.wait()

    async def settled(self) -> None:
        """Return when nothing is left to give back. Safe to cancel.

        A tier that is closed gives back everything: no pins are left then.
        """
        if self.shrinking:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
