"""First in, first out: the policy that learns nothing, beside which the others are measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.sim.rank_order import RankOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.spec import ExpertKey


class FIFOPolicy:
    """Evicts the key that took its slot before all others; uses play no part."""

    def __init__(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> None:
        del n_slots, layers, top_k
        self._n_admitted = 0
        order = self._order = RankOrder()
        self.hold = order.hold
        self.release = order.release
        self.forget = order.forget
        self.victim = order.first

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Nothing moves, but for cold keys, which take their old places."""
        del layer
        for key in keys:
            self._order.warm(key)

    def admit(self, key: ExpertKey) -> None:
        """``key`` is the last in the queue."""
        self._n_admitted += 1
        self._order.admit(key, self._n_admitted)

    def resize(self, n_slots: int) -> None:
        """The order of victims does not depend on how many slots there are."""
        del n_slots
