"""Least recently used: the plain policy, and the one to know the failing of.

A model runs its layers in a cycle, so with fewer slots than one token uses the victim is always the
expert whose layer comes next: the hit rate is then not low but zero.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.policies.order import Group, VictimOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.spec import ExpertKey


class LRUPolicy:
    """Evicts the key whose last use is longest ago.

    Uses are ordered by ``step``, and within one step as its keys are; when a key was released plays
    no part. ``n_slots``, ``layers`` and ``top_k`` are taken because every policy is built with
    them; recency needs none of them.
    """

    __slots__ = ("_clock", "_order", "admit", "forget", "hold", "release", "victim")

    def __init__(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> None:
        del n_slots, layers, top_k
        self._clock = 0
        group = Group(n_classes=1)
        order = self._order = VictimOrder(lambda _: group)
        # Bound, not wrapped: a hit calls these for each of its keys.
        self.admit = order.admit
        self.hold = order.hold
        self.release = order.release
        self.forget = order.forget
        self.victim = partial(order.victim, group)

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """All ``keys`` are used now, the last of them most recently."""
        del layer
        ranked = self._order.ranked
        stamp = self._clock
        for key in keys:
            stamp += 1
            node = ranked.get(key) or self._order.see(key)
            node.rank = stamp
        self._clock = stamp

    def resize(self, n_slots: int) -> None:
        """The order of victims does not depend on how many slots there are."""
        del n_slots
