"""Memory that is still there when a hierarchy is closed, to see who writes into it."""

import ctypes

import numpy as np

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
