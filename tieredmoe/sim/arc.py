"""ARC: recency and frequency share the cache, and misses say in which proportion.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, whose
names are used: T1 holds keys used once, T2 those used again, B1 and B2 the names of what left them
lately, p is the size that T1 should have. Several keys are used in one step here, so p moves for
all that the step misses before the first victim is chosen, and victims are chosen for them in turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import TYPE_CHECKING

from tieredmoe.sim.rank_order import RankOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.spec import ExpertKey

_T2 = 1 << 60
"""Ranks of T2 start here, those of T1 end here."""


class ARCPolicy:
    """Evicts the least recent key of T1 or of T2, whichever is larger than p gives it."""

    def __init__(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> None:
        del layers, top_k
        self._n_slots = n_slots
        self._p = 0.0
        self._n_uses = 0
        self._n_t1 = 0
        self._b1: OrderedDict[ExpertKey, None] = OrderedDict()
        self._b2: OrderedDict[ExpertKey, None] = OrderedDict()
        self._awaited: OrderedDict[ExpertKey, bool] = OrderedDict()
        """The keys that the last step missed, each with whether B2 knew it."""
        self._known: set[ExpertKey] = set()
        order = self._order = RankOrder()
        self.hold = order.hold
        self.release = order.release

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Keys with slots move to the recent end of T2; ghosts move p."""
        del layer
        self._awaited.clear()
        self._known.clear()
        for key in keys:
            rank = self._order.rank.get(key)
            if rank is not None:
                self._n_t1 -= rank < _T2
                self._n_uses += 1
                self._order.move(key, _T2 + self._n_uses)
                continue
            in_b1, in_b2 = key in self._b1, key in self._b2
            if in_b1:
                self._p = min(self._n_slots, self._p + max(1, len(self._b2) / len(self._b1)))
            elif in_b2:
                self._p = max(0, self._p - max(1, len(self._b1) / len(self._b2)))
            if in_b1 or in_b2:
                self._known.add(key)
            self._awaited[key] = in_b2

    def admit(self, key: ExpertKey) -> None:
        """``key`` enters T2 if a ghost's name was its, else T1."""
        self._n_uses += 1
        again = key in self._known
        self._order.admit(key, self._n_uses + (_T2 if again else 0))
        self._n_t1 += not again
        self._awaited.pop(key, None)
        self._b1.pop(key, None)
        self._b2.pop(key, None)

    def forget(self, key: ExpertKey) -> None:
        """``key`` has lost its slot; its name is kept for a while, if it was the victim."""
        was_victim = self._order.coldest() is None and self.victim() == key
        rank = self._order.rank.get(key)
        self._order.forget(key)
        assert rank is not None
        in_t1 = rank < _T2
        self._n_t1 -= in_t1
        if was_victim:
            (self._b1 if in_t1 else self._b2)[key] = None
            self._trim()

    def victim(self) -> ExpertKey | None:
        """The oldest cold key, else the least recent of T1 or of T2."""
        cold = self._order.coldest()
        if cold is not None:
            return cold
        placed, key_at = self._order.placed, self._order.key_at
        if not placed:
            return None
        first_of_t2 = bisect_left(placed, _T2)
        from_b2 = next(iter(self._awaited.values()), False)
        t1_is_full = self._n_t1 > self._p or (from_b2 and self._n_t1 == int(self._p))
        if first_of_t2 == len(placed) or (first_of_t2 and self._n_t1 and t1_is_full):
            return key_at[placed[0]]
        return key_at[placed[first_of_t2]]

    def resize(self, n_slots: int) -> None:
        """The ghosts, and p, are for ``n_slots`` from now on."""
        self._n_slots = n_slots
        self._p = min(self._p, n_slots)
        self._trim()

    def _trim(self) -> None:
        """Forget the oldest ghosts: |T1| + |B1| ≤ c, and all four lists together ≤ 2c."""
        while self._b1 and self._n_t1 + len(self._b1) > self._n_slots:
            self._b1.popitem(last=False)
        n_all = len(self._order.rank) + len(self._b1) + len(self._b2)
        while self._b2 and n_all > 2 * self._n_slots:
            self._b2.popitem(last=False)
            n_all -= 1
