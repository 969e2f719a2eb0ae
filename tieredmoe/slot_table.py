"""The slots of a ``Residency`` and who has them: what its methods do inside the mutex.

Here is how a slot is found and an expert loses one; what callers may ask for, and that each call is
atomic, is ``Residency``'s. Its base class and not a part of it, because a hit must not pay for
another look-up.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tieredmoe.entry import ABSENT, READY, Entry, Place
from tieredmoe.policies.protocol import LearningPolicy, RememberingPolicy
from tieredmoe.ring import Ring

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tieredmoe.policies.protocol import EvictionPolicy
    from tieredmoe.policies.use_counts import UseCounts
    from tieredmoe.spec import ExpertKey


class SlotTable:
    """``n_slots`` slots, free, an expert's, or given up; without the mutex that it carries."""

    __slots__ = (
        "_evictable",
        "_free",
        "_mutex",
        "_stranded",
        "_swept",
        "entries",
        "evictions",
        "hits",
        "joins",
        "learner",
        "misses",
        "n_slots",
        "policy",
        "ring",
    )

    def __init__(self, n_slots: int, policy: EvictionPolicy) -> None:
        assert n_slots > 0
        self.n_slots = n_slots
        self.policy = policy
        self.learner = policy if isinstance(policy, LearningPolicy) else None
        self.entries: dict[ExpertKey, Entry] = {}
        self.ring = Ring()
        self._free = list(range(n_slots - 1, -1, -1))
        self._evictable = 0
        self._stranded: list[Entry] = []  # in slots that were given up, until nobody needs them
        self._swept: list[ExpertKey] = []
        self._mutex = threading.Lock()
        self.hits = 0
        self.misses = 0
        self.joins = 0
        self.evictions = 0

    @property
    def n_stranded(self) -> int:
        """Experts in slots given up that somebody still needed at the last sweep."""
        return len(self._stranded)

    def settle(self) -> None:
        """Let a policy that learns do so; takes the mutex, like ``observe``."""
        if self.learner is not None:
            with self._mutex:
                self.learner.settle()

    def observe(self, layer: int, probabilities: NDArray[np.floating]) -> None:
        """Tell a policy that learns what the router of ``layer`` thought of its experts."""
        if self.learner is not None:
            with self._mutex:
                self.learner.observe(layer, probabilities)

    def use_counts(self) -> UseCounts | None:
        """What the policy remembers, if it does; takes the mutex."""
        if not isinstance(self.policy, RememberingPolicy):
            return None
        with self._mutex:
            return self.policy.use_counts()

    def recall(self, counts: UseCounts) -> None:
        """Let a policy that remembers begin with ``counts``; before anything is admitted."""
        if isinstance(self.policy, RememberingPolicy):
            self.policy.recall(counts)

    def _sweep(self) -> None:
        kept = []
        for entry in self._stranded:
            if entry.state is READY and not entry.pins:
                self._evict(entry)
                self._swept.append(entry.key)
            elif entry.state is not ABSENT:
                kept.append(entry)
        self._stranded = kept

    def _change_sides(self, entry: Entry) -> None:
        """Demand has come for a prefetched expert: its slot is one like all others from now on."""
        self.ring.use(entry)
        self.policy.admit(entry.key)

    def _take_slot(self) -> Place:
        """A slot to write, free or a victim's."""
        if self._free:
            return Place(self._free.pop())
        key = self.policy.victim()
        victim = self.ring.oldest_ready() if key is None else self.entries[key]
        assert victim is not None, "n_fitting() promised a slot"
        return self._taken_from(victim)

    def _take_ring_slot(self, spared: Sequence[ExpertKey]) -> Place | None:
        """A slot for a prefetch, from an expert that is not in use and not ``spared``, or None."""
        ring = self.ring
        victim = ring.oldest_ready(stale=True)
        if len(ring) < ring.n_max:
            if self._free:
                return Place(self._free.pop())
            key = None if victim else self.policy.victim()
            if key is not None:
                victim = self.entries[key]
        victim = victim or ring.oldest_ready()
        if victim is None or victim.key in spared:
            return None
        return self._taken_from(victim)

    def _shrink_ring(self) -> list[ExpertKey]:
        """Take from the ring what it has no place for; the experts evicted for that."""
        evicted = []
        for entry in self.ring.surplus():
            if entry.state is READY:
                self._evict(entry)
                self._free.append(entry.slot_index)
                evicted.append(entry.key)
            else:
                self.ring.waste(entry)
                self.policy.admit(entry.key)
        return evicted

    def _taken_from(self, victim: Entry) -> Place:
        place = Place(victim.slot_index, victim.key, victim.copied_up or victim.in_ring)
        self._evict(victim)
        return place

    def _evict(self, entry: Entry) -> None:
        assert entry.state is READY, entry
        assert not entry.pins, entry
        if entry.in_ring:
            self.ring.waste(entry)
        else:
            self.policy.forget(entry.key)
            self._evictable -= 1
        entry.state = ABSENT
        del self.entries[entry.key]
        self.evictions += 1
