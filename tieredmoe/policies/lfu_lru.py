"""The policy of the published system: frequency first, recency breaks ties.

Source: SGLang's expert pack (``reuse-lfu-lru``). Each use adds one to the key's count, which
survives eviction, stops at 255 and never ages; the victim has the lowest count, and among equals
the least recent use. Its known weakness follows: experts of a topic long past keep their slots.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.policies.order import CLASS_SHIFT, Group, VictimOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.spec import ExpertKey

COUNT_MAX = 255


class LfuLruPolicy:
    """Evicts the key used least often, of those the one whose last use is longest ago.

    Uses are counted and ordered by ``step``, and within one step as its keys are. ``n_slots``,
    ``layers`` and ``top_k`` are taken because every policy is built with them; this one needs none
    of them.
    """

    __slots__ = ("_clock", "_order", "admit", "forget", "hold", "release", "victim")

    def __init__(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> None:
        del n_slots, layers, top_k
        self._clock = 0
        group = Group(n_classes=COUNT_MAX + 1)
        order = self._order = VictimOrder(lambda _: group)
        # Bound, not wrapped: a hit calls these for each of its keys.
        self.admit = order.admit
        self.hold = order.hold
        self.release = order.release
        self.forget = order.forget
        self.victim = partial(order.victim, group)

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Each of ``keys`` is used once more, the last of them most recently."""
        del layer
        ranked = self._order.ranked
        stamp = self._clock
        for key in keys:
            stamp += 1
            node = ranked.get(key) or self._order.see(key)
            uses = node.rank >> CLASS_SHIFT
            if uses < COUNT_MAX:
                uses += 1
            node.rank = uses << CLASS_SHIFT | stamp
        self._clock = stamp

    def resize(self, n_slots: int) -> None:
        """The order of victims does not depend on how many slots there are."""
        del n_slots
