"""Memory that is still there when a hierarchy is closed, and who may write into it before."""

import ctypes

import numpy as np

from tieredmoe.entry import FILLING
from tieredmoe.memory import HostArena, HostRegion
from tieredmoe.spec import PAGE_NBYTES
from tieredmoe.testing.arena import LateArena

POISON = 0xA5


class Memory:
    """Host memory that outlives a hierarchy: a second one can be opened in the same place."""

    def __init__(self, n_slots):
        array = np.full((n_slots + 1) * PAGE_NBYTES, POISON, np.uint8)
        start = -array.ctypes.data % PAGE_NBYTES
        self.view = memoryview(array)[start : start + n_slots * PAGE_NBYTES]
        self.address = array.ctypes.data + start
        self._n_carved = 0

    def carve(self, n_slots):
        start = self._n_carved * PAGE_NBYTES
        self._n_carved += n_slots
        region = HostRegion(self.view[start : start + n_slots * PAGE_NBYTES], self.address + start)
        return HostArena(region, n_slots=n_slots, slot_nbytes=PAGE_NBYTES)

    def poison(self):
        """Take the memory back and make everything in it wrong."""
        self._n_carved = 0
        ctypes.memset(self.address, POISON, self.view.nbytes)

    def untouched(self):
        return bytes(self.view) == bytes([POISON]) * self.view.nbytes


def memory_is_gone(arena):
    return arena.closed if isinstance(arena, LateArena) else arena._region is None


def assert_reads_fill(tier, slots, disk):
    filling = {
        slots[entry.slot_index].address
        for entry in tier.residency.entries.values()
        if entry.state is FILLING
    }
    for op in disk.writers_into(slots[0].address, len(slots) * PAGE_NBYTES):
        assert op.address in filling, f"the disk writes into {op.address:#x}, which is not filling"


def assert_copies_pinned(late, below):
    """The slots below that a running copy of the arena ``late`` reads or writes are pinned."""
    if late.copies or late.copies_back:
        pinned = {entry.slot_index for entry in below.residency.entries.values() if entry.pins}
        for copy in late.copies:
            assert copy.source.slot_index in pinned, "the source of a running copy is evictable"
        for copy in late.copies_back:
            assert copy.target.slot_index in pinned, "the target of a running copy is evictable"
