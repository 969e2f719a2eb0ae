"""SIEVE: a queue that never moves, a mark per key, and a hand that walks from old to new.

Source: Zhang et al., "SIEVE is simpler than LRU", NSDI 2024. The hand clears marks and stops at the
first key without one, which goes; there it starts next time, behind the newest key from the oldest
again. Held keys are passed over with their marks, since they stand in no queue.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from tieredmoe.sim.rank_order import RankOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.spec import ExpertKey


class SIEVEPolicy:
    """Evicts the first unmarked key from the hand on; a use of a key in the cache marks it."""

    def __init__(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> None:
        del n_slots, layers, top_k
        self._n_admitted = 0
        self._hand = 0
        self._marked: set[ExpertKey] = set()
        order = self._order = RankOrder()
        self.hold = order.hold
        self.release = order.release

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Those of ``keys`` that have slots are marked."""
        del layer
        for key in keys:
            if key in self._order.rank:
                self._marked.add(key)
                self._order.warm(key)

    def admit(self, key: ExpertKey) -> None:
        """``key`` is the newest in the queue, unmarked."""
        self._n_admitted += 1
        self._order.admit(key, self._n_admitted)

    def forget(self, key: ExpertKey) -> None:
        """``key`` has lost its slot; if the hand stopped at it, the marks before it are cleared."""
        if self._order.coldest() is None and self.victim() == key:
            _, passed = self._walk()
            self._marked.difference_update(passed)
            placed = self._order.placed
            after = bisect_right(placed, self._order.rank[key])
            self._hand = placed[after] if after < len(placed) else 0
        self._order.forget(key)
        self._marked.discard(key)

    def victim(self) -> ExpertKey | None:
        """The oldest cold key, else the one at which the hand will stop."""
        return self._order.coldest() or self._walk()[0]

    def resize(self, n_slots: int) -> None:
        """The order of victims does not depend on how many slots there are."""
        del n_slots

    def _walk(self) -> tuple[ExpertKey | None, list[ExpertKey]]:
        """Where the hand stops, and the marked keys on its way there."""
        placed, key_at = self._order.placed, self._order.key_at
        if not placed:
            return None, []
        start = bisect_left(placed, self._hand) % len(placed)
        passed: list[ExpertKey] = []
        for i in range(start, start + len(placed)):
            key = key_at[placed[i % len(placed)]]
            if key not in self._marked:
                return key, passed
            passed.append(key)
        return passed[0], passed  # all were marked: it comes round to where it began
