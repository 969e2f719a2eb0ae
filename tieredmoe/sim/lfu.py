"""Least frequently used, counted while in the cache: the textbook's LFU.

Unlike production's ``lfu_lru``, whose counts survive eviction, a key that comes back starts at one
use; so the first keys used twice keep their slots for ever, which is what the textbook's is known
for. Of equals the least recently used goes, as in libCacheSim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.sim.rank_order import RankOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.spec import ExpertKey

_USE = 1 << 48
"""A rank is uses × this + when the last one was; 2**48 uses take centuries."""


class LFUPolicy:
    """Evicts the key used least often since it took its slot, of equals the least recent."""

    def __init__(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> None:
        del n_slots, layers, top_k
        self._n_uses = 0
        order = self._order = RankOrder()
        self.hold = order.hold
        self.release = order.release
        self.forget = order.forget
        self.victim = order.first

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Each of ``keys`` that has a slot is used once more."""
        del layer
        for key in keys:
            self._n_uses += 1
            rank = self._order.rank.get(key)
            if rank is not None:
                self._order.move(key, (rank // _USE + 1) * _USE + self._n_uses)

    def admit(self, key: ExpertKey) -> None:
        """``key`` has been used once."""
        self._n_uses += 1
        self._order.admit(key, _USE + self._n_uses)

    def resize(self, n_slots: int) -> None:
        """The order of victims does not depend on how many slots there are."""
        del n_slots
