"""The order of victims, shared by the policies whose ranks only grow.

A policy ranks keys by integers and changes a key's rank only by raising it, when the key is used:
recency does that, and so does (count, recency). ``VictimOrder`` keeps the evictable keys such that
the lowest rank is at hand. It gets that almost for free from how ranks arise: within one *class*
(the rank's high bits: a use count, say) keys are mostly released in the order in which they were
ranked, so each class is a linked list that grows at its end. A key released out of that order
(leases that overlap) goes into one list kept sorted by bisection.

The order is that of ranks, hence of ``step`` calls, never that of releases: which expert is evicted
does not depend on the order in which transfers land or overlapping leases end.

Rejected: one heap with stale entries left in it (its cleaning stalls a hit now and then, or it
grows without end); plain dicts as queues (taking from the front of a dict walks over the entries
deleted there); ``OrderedDict`` (eight hashes of a key per use where nodes need three, twice the
time); asking candidates whether they are pinned (with all but one slot pinned that is a scan).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieredmoe.spec import ExpertKey

CLASS_SHIFT = 48
"""A rank is ``class << CLASS_SHIFT | stamp``. Stamps count uses; 2**48 of them take centuries."""


class Ranked:
    """What is known of one key. Its policy raises ``rank``; all else is its ``VictimOrder``'s.

    ``placed`` is the rank under which it stands in the order while it is ``evictable``. A node that
    is in no linked list is its own neighbour.
    """

    __slots__ = ("after", "before", "evictable", "has_slot", "key", "placed", "rank")

    def __init__(self, key: ExpertKey | None) -> None:
        self.key = key
        self.rank = 0
        self.placed = 0
        self.has_slot = False
        self.evictable = False
        self.before = self
        self.after = self


class VictimOrder:
    """Evictable keys by rank, cold ones before all others, the oldest cold one first.

    ``ranked`` holds every key ever seen; its policy adds keys (``see``) and raises their ranks, at
    any time, also of evictable keys: the order finds that out when the key comes to the front.
    Ranks differ, but for keys never used: those have rank 0 and go by layer and number. Every
    method costs O(1), or O(log n) comparisons and one move within a list for a key released out of
    rank order.
    """

    __slots__ = ("_classes", "_cold", "_late", "_occupied", "ranked")

    def __init__(self, *, n_classes: int) -> None:
        self.ranked: dict[ExpertKey, Ranked] = {}
        # Each list is a ring closed by a node without a key.
        self._cold = Ranked(None)
        self._classes = [Ranked(None) for _ in range(n_classes)]
        self._occupied = 0  # bit c is set while class c has keys, and until found empty
        self._late: list[tuple[int, ExpertKey]] = []

    def see(self, key: ExpertKey) -> Ranked:
        """The node of ``key``, made if the key is new."""
        node = self.ranked.get(key)
        if node is None:
            node = self.ranked[key] = Ranked(key)
        return node

    def admit(self, key: ExpertKey) -> None:
        """``key`` has taken a slot; it is held."""
        node = self.see(key)
        assert not node.has_slot, f"{key} is admitted already"
        node.has_slot = True

    def hold(self, key: ExpertKey) -> None:
        """Take the evictable ``key`` out of the order."""
        node = self.ranked[key]
        assert node.evictable, f"{key} is not evictable"
        node.evictable = False
        before = node.before
        if before is node:
            del self._late[bisect_left(self._late, (node.placed, key))]
        else:
            after = node.after
            before.after = after
            after.before = before
            node.before = node.after = node

    def release(self, key: ExpertKey, *, cold: bool = False) -> None:
        """Put the held ``key`` into the order, by its rank or behind the other cold ones."""
        node = self.ranked[key]
        assert node.has_slot, f"{key} is not admitted"
        assert not node.evictable, f"{key} is not held"
        node.evictable = True
        rank = node.placed = node.rank
        end = self._cold if cold else self._classes[rank >> CLASS_SHIFT]
        last = end.before
        if last is end:
            if not cold:
                self._occupied |= 1 << (rank >> CLASS_SHIFT)
        elif not cold and last.placed >= rank:
            insort(self._late, (rank, key))
            return
        node.before = last
        node.after = end
        last.after = end.before = node

    def forget(self, key: ExpertKey) -> None:
        """``key`` has lost its slot, held or not; its rank is remembered."""
        node = self.ranked[key]
        assert node.has_slot, f"{key} is not admitted"
        if node.evictable:
            self.hold(key)
        node.has_slot = False

    def victim(self) -> ExpertKey | None:
        """The evictable key to go next; None if every key is held."""
        while (node := self._front()) is not None:
            key = node.key
            assert key is not None
            if node.placed == node.rank:
                return key
            # Used since, though not held: its place is further back. A use moves a key only once.
            self.hold(key)
            self.release(key)
        return None

    def _front(self) -> Ranked | None:
        """The node of the lowest placed rank, cold ones before all."""
        first = self._cold.after
        if first.key is not None:
            return first
        late = self._late
        while self._occupied:
            lowest = (self._occupied & -self._occupied).bit_length() - 1
            first = self._classes[lowest].after
            if first.key is not None:
                before = late and late[0] < (first.placed, first.key)
                return self.ranked[late[0][1]] if before else first
            self._occupied &= self._occupied - 1
        return self.ranked[late[0][1]] if late else None
