"""The order of victims, shared by the policies whose ranks only grow.

A policy ranks keys by integers and changes a key's rank only by raising it, when the key is used:
recency does that, and so do (count, recency) and a decayed count written against a fixed origin of
time. ``VictimOrder`` keeps the evictable keys such that the lowest rank is at hand. It gets that
almost for free from how ranks arise: within one *class* (the rank's high bits: a use count, say)
keys are mostly released in the order in which they were ranked, so each class is a linked list that
grows at its end. A key released out of that order (leases that overlap) goes into one list kept
sorted by bisection.

Keys fall into one or several *groups* (layers, say), each with its own order. Cold keys have one
list for all groups. Where classes grow for ever, as decayed counts do, a group keeps a window of
them that its policy moves on (``Group.advance``); what falls out of it is one class, in order.

The order is that of ranks, hence of ``step`` calls, never that of releases: which expert is evicted
does not depend on the order in which transfers land or overlapping leases end.

Rejected: one heap with stale entries left in it (its cleaning stalls a hit now and then, or it
grows without end); a table of classes with those that run empty left in it (the first victim after
a pause walks over them); plain dicts as queues (taking from the front of a dict walks over the
entries deleted there); ``OrderedDict`` (eight hashes of a key per use where nodes need three, twice
the time); asking candidates whether they are pinned (with all but one slot pinned that is a scan).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.spec import ExpertKey

CLASS_SHIFT = 48
"""A rank is ``class << CLASS_SHIFT | stamp``. Stamps count uses; 2**48 of them take centuries."""


class Ranked:
    """What is known of one key. Its policy raises ``rank``; all else is its ``VictimOrder``'s.

    ``placed`` is the rank under which it stands in the order while it is ``evictable``. A node that
    is in no linked list is its own neighbour. ``uses`` and ``weight`` are for its policy to keep.
    """

    __slots__ = (
        "after",
        "before",
        "evictable",
        "group",
        "has_slot",
        "key",
        "placed",
        "rank",
        "uses",
        "weight",
    )

    def __init__(self, key: ExpertKey, group: Group) -> None:
        self.key = key
        self.group = group
        self.rank = 0
        self.uses: float = 0
        self.weight = 0
        self.placed = 0
        self.has_slot = False
        self.evictable = False
        self.before: Ranked | _Ring = self
        self.after: Ranked | _Ring = self


class _Ring:
    """A linked list of nodes, closed to a ring by itself."""

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.before: Ranked | _Ring = self
        self.after: Ranked | _Ring = self

    def take(self, other: _Ring) -> None:
        """Append the nodes of ``other``, which keeps none."""
        first, last = other.after, other.before
        if first is not other:
            self.before.after = first
            first.before = self.before
            last.after = self
            self.before = last
            other.before = other.after = other


class Group:
    """Keys with an order of their own: ``n_classes`` lists from class ``base`` on, and late ones.

    The first list holds all classes up to ``base``.
    """

    __slots__ = ("base", "late", "occupied", "rings")

    def __init__(self, *, n_classes: int) -> None:
        self.rings = [_Ring() for _ in range(n_classes)]
        self.base = 0
        self.occupied = 0  # bit i is set while ring i has keys, and until found empty
        self.late: list[tuple[int, ExpertKey, Ranked]] = []

    def advance(self, base: int) -> None:
        """Tell classes apart from ``base`` on; O(classes that have keys and are merged).

        The classes of ranks must stay below ``base`` plus the number of classes.
        """
        assert base >= self.base, "time does not run backwards"
        lowest, *others = self.rings
        n = min(base - self.base, len(others))
        merged = self.occupied & (2 << n) - 2
        while merged:
            lowest.take(self.rings[(merged & -merged).bit_length() - 1])
            merged &= merged - 1
        self.rings = [lowest, *others[n:], *others[:n]]
        self.occupied = self.occupied >> n & ~1 | (lowest.after is not lowest)
        self.base = base

    def front(self) -> Ranked | None:
        """The node of the lowest placed rank, cold ones left out."""
        late = self.late
        while self.occupied:
            lowest = (self.occupied & -self.occupied).bit_length() - 1
            first = self.rings[lowest].after
            if isinstance(first, Ranked):
                return late[0][2] if late and late[0] < (first.placed, first.key) else first
            self.occupied &= self.occupied - 1
        return late[0][2] if late else None


class VictimOrder:
    """Evictable keys by group and rank, cold ones before all others, the oldest cold one first.

    ``ranked`` holds every key ever seen; its policy adds keys (``see``) and raises their ranks, at
    any time, also of evictable keys: the order finds that out when the key comes to the front.
    Ranks differ, but for keys never used: those have rank 0 and go by layer and number. Every
    method costs O(1), or O(log n) comparisons and one move within a list for a key released out of
    rank order.
    """

    __slots__ = ("_cold", "_group_of", "ranked")

    def __init__(self, group_of: Callable[[ExpertKey], Group]) -> None:
        self.ranked: dict[ExpertKey, Ranked] = {}
        self._group_of = group_of
        self._cold = _Ring()

    def see(self, key: ExpertKey) -> Ranked:
        """The node of ``key``, made if the key is new."""
        node = self.ranked.get(key)
        if node is None:
            node = self.ranked[key] = Ranked(key, self._group_of(key))
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
            late = node.group.late
            del late[bisect_left(late, (node.placed, key, node))]
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
        if cold:
            end = self._cold
            last = end.before
        else:
            group = node.group
            i = (rank >> CLASS_SHIFT) - group.base
            if i < 0:  # noqa: PLR1730 (a call for each hit, and seldom needed)
                i = 0
            end = group.rings[i]
            last = end.before
            if last is end:
                group.occupied |= 1 << i
            elif last.placed >= rank:  # type: ignore[union-attr]  # not the end, so a node
                insort(group.late, (rank, key, node))
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

    def victim(self, group: Group) -> ExpertKey | None:
        """The cold key or else the key of ``group`` to go next; None if all of those are held."""
        while (node := self._front(group)) is not None:
            key = node.key
            if node.placed == node.rank:
                return key
            # Used since, though not held: its place is further back. A use moves a key only once.
            self.hold(key)
            self.release(key)
        return None

    def regroup(self) -> None:
        """Ask for the group of every key again, for groups that are new and empty; O(n log n)."""
        cold: set[ExpertKey] = set()
        node = self._cold.after
        while isinstance(node, Ranked):
            cold.add(node.key)
            node = node.after
        for node in sorted(self.ranked.values(), key=_rank):
            moves = node.evictable and node.key not in cold
            if moves:
                self.hold(node.key)
            node.group = self._group_of(node.key)
            if moves:
                self.release(node.key)

    def _front(self, group: Group) -> Ranked | None:
        first = self._cold.after
        return first if isinstance(first, Ranked) else group.front()


def _rank(node: Ranked) -> tuple[int, ExpertKey]:
    return node.rank, node.key
