"""Keys in the order of ranks that may go up and down: what the laboratory's own policies stand on.

Production's ``VictimOrder`` is faster where ranks only grow. Those of LFU or ARC do not,
so here the evictable keys' ranks are one sorted list, searched by bisection; a rank is an integer
that no two keys share. Rejected: a heap with stale entries (the first victim after a pause pays for
all of them).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieredmoe.spec import ExpertKey


class RankOrder:
    """The keys with slots, those evictable of them in order of rank, cold ones aside.

    ``placed`` is that order, ``key_at`` names the key of each rank in it. Its methods are those of
    an ``EvictionPolicy``, and ``move`` for a new rank.
    """

    def __init__(self) -> None:
        self.rank: dict[ExpertKey, int] = {}
        self.placed: list[int] = []
        self.key_at: dict[int, ExpertKey] = {}
        self._evictable: set[ExpertKey] = set()
        self._cold: OrderedDict[ExpertKey, None] = OrderedDict()

    def admit(self, key: ExpertKey, rank: int) -> None:
        """``key`` has a slot and is held; it has this rank."""
        assert key not in self.rank, f"{key} is admitted already"
        self.rank[key] = rank

    def move(self, key: ExpertKey, rank: int) -> None:
        """``key``, which has a slot, has this rank from now on; a cold one is cold no more."""
        placed = key in self._evictable
        if placed:
            self.hold(key)
        self.rank[key] = rank
        if placed:
            self.release(key)

    def warm(self, key: ExpertKey) -> None:
        """Put a cold key back in its place."""
        if key in self._cold:
            self.move(key, self.rank[key])

    def hold(self, key: ExpertKey) -> None:
        """``key`` stands in no order until ``release``."""
        assert key in self._evictable, f"{key} is not evictable"
        self._evictable.remove(key)
        if key in self._cold:
            del self._cold[key]
        else:
            rank = self.rank[key]
            del self.placed[bisect_left(self.placed, rank)]
            del self.key_at[rank]

    def release(self, key: ExpertKey, *, cold: bool = False) -> None:
        """``key`` is evictable."""
        assert key in self.rank, f"{key} is not admitted"
        assert key not in self._evictable, f"{key} is not held"
        self._evictable.add(key)
        if cold:
            self._cold[key] = None
        else:
            rank = self.rank[key]
            insort(self.placed, rank)
            self.key_at[rank] = key

    def forget(self, key: ExpertKey) -> None:
        """``key`` has lost its slot, held or not."""
        assert key in self.rank, f"{key} is not admitted"
        if key in self._evictable:
            self.hold(key)
        del self.rank[key]

    def coldest(self) -> ExpertKey | None:
        """The oldest cold key, or None."""
        return next(iter(self._cold), None)

    def first(self) -> ExpertKey | None:
        """The oldest cold key, else that of the lowest rank, or None."""
        if self._cold:
            return self.coldest()
        return self.key_at[self.placed[0]] if self.placed else None
