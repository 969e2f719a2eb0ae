"""S3-FIFO: a small queue on trial, a main queue, and a memory of what left the small one.

Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. A new key enters
the small queue, a tenth of the slots. At its end it moves to the main queue if it was used twice or
more since; otherwise it goes, and its name is kept in a ghost queue as long as the main one: a key
found there when it comes back enters the main queue at once. The end of the main queue goes if it
was not used since it entered or was passed over last; otherwise it enters again, with one of its at
most three uses taken off.

It costs the least of all per use, resists scans, and knows no layers: kept for its independence of
what a token is. A key that is held stands in no queue and comes back to its place, so no held key
is walked over. A walk past a used key takes a use off it: O(1) per eviction, on average over uses.

Rejected: moving keys while the victim is looked for (who looks without evicting would change which
expert goes next). The walk is done again, for good, when its victim is forgotten.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.spec import ExpertKey

SMALL_SHARE = 0.1
USES_MAX = 3
USES_TO_STAY = 2


class _Queued:
    """A key with a slot: its queue, its place in it, its uses since it took that place."""

    __slots__ = ("evictable", "in_main", "key", "place", "uses")

    def __init__(self, key: ExpertKey, *, in_main: bool, place: int) -> None:
        self.key = key
        self.in_main = in_main
        self.place = place
        self.uses = 0
        self.evictable = False


class S3FIFOPolicy:
    """Evicts from the small queue what was not used twice, else from the main queue what was not.

    Uses of a key without a slot are not counted. ``layers`` and ``top_k`` are taken because every
    policy is built with them.
    """

    def __init__(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> None:
        del layers, top_k
        self._nodes: dict[ExpertKey, _Queued] = {}
        # The evictable ones, by place.
        self._small: list[tuple[int, _Queued]] = []
        self._main: list[tuple[int, _Queued]] = []
        self._cold: OrderedDict[ExpertKey, _Queued] = OrderedDict()
        self._ghosts: OrderedDict[ExpertKey, None] = OrderedDict()
        self._n_in_main = 0
        self._places = 0
        self.resize(n_slots)

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Each of ``keys`` that has a slot is used once more."""
        del layer
        for key in keys:
            node = self._nodes.get(key)
            if node is not None:
                node.uses = min(node.uses + 1, USES_MAX)
                if key in self._cold:
                    del self._cold[key]
                    self._enter(node)

    def admit(self, key: ExpertKey) -> None:
        """``key`` enters a queue, the main one if it left the small one a while ago."""
        assert key not in self._nodes, f"{key} is admitted already"
        in_main = key in self._ghosts
        if in_main:
            del self._ghosts[key]
        self._n_in_main += in_main
        self._nodes[key] = _Queued(key, in_main=in_main, place=self._next_place())

    def hold(self, key: ExpertKey) -> None:
        """Take the evictable ``key`` out of its queue; its place is kept."""
        node = self._nodes.get(key)
        assert node is not None, f"{key} is not admitted"
        assert node.evictable, f"{key} is not evictable"
        node.evictable = False
        if key in self._cold:
            del self._cold[key]
        else:
            self._leave(node)

    def release(self, key: ExpertKey, *, cold: bool = False) -> None:
        """Put the held ``key`` back in its place, or behind the other cold ones."""
        node = self._nodes.get(key)
        assert node is not None, f"{key} is not admitted"
        assert not node.evictable, f"{key} is not held"
        node.evictable = True
        if cold:
            self._cold[key] = node
        else:
            self._enter(node)

    def forget(self, key: ExpertKey) -> None:
        """``key`` has lost its slot; if it was the victim, what the walk to it passed moves on."""
        node = self._nodes.get(key)
        assert node is not None, f"{key} is not admitted"
        if node.evictable:
            if not self._cold:
                victim, passed = self._walk()
                if victim is node:
                    self._pass(passed)
                    self._remember(node)
            self.hold(key)
        self._n_in_main -= node.in_main
        del self._nodes[key]

    def victim(self) -> ExpertKey | None:
        """The oldest cold key, else the one that the walk along the queues ends at."""
        if self._cold:
            return next(iter(self._cold))
        victim, _ = self._walk()
        return None if victim is None else victim.key

    def resize(self, n_slots: int) -> None:
        """The main queue, and with it the ghosts', has its share of ``n_slots``."""
        self._main_max = n_slots - int(SMALL_SHARE * n_slots)
        while len(self._ghosts) > self._main_max:
            self._ghosts.popitem(last=False)

    def _walk(self) -> tuple[_Queued | None, list[_Queued]]:
        """The victim, and what has to move to the end of the main queue before it, in order."""
        passed: list[_Queued] = []
        if self._n_in_main <= self._main_max or not self._main:
            for _, node in self._small:
                if node.uses < USES_TO_STAY:
                    return node, passed
                passed.append(node)
        first_moved = passed[0] if passed else None
        for _, node in self._main:
            if not node.uses:
                return node, passed
            passed.append(node)
        if first_moved is not None or not passed:
            return first_moved, passed
        # All were used, so the walk goes around until the first of the least used has none left.
        least = min(node.uses for node in passed)
        i = next(i for i, node in enumerate(passed) if node.uses == least)
        return passed[i], passed * least + passed[:i]

    def _pass(self, nodes: list[_Queued]) -> None:
        for node in nodes:
            self._leave(node)
            if node.in_main:
                node.uses -= 1
            else:
                node.in_main = True
                node.uses = 0
                self._n_in_main += 1
            node.place = self._next_place()
            self._enter(node)

    def _remember(self, victim: _Queued) -> None:
        if not victim.in_main:
            self._ghosts[victim.key] = None
            if len(self._ghosts) > self._main_max:
                self._ghosts.popitem(last=False)

    def _enter(self, node: _Queued) -> None:
        insort(self._main if node.in_main else self._small, (node.place, node))

    def _leave(self, node: _Queued) -> None:
        queue = self._main if node.in_main else self._small
        del queue[bisect_left(queue, (node.place, node))]

    def _next_place(self) -> int:
        self._places += 1
        return self._places
