"""The slots of prefetch: a few of a tier's slots, for experts that nobody has asked for yet.

They are slots like all others, of the same arena and budget, so an expert that is used where it
landed has cost no copy: its slot changes sides, and the policy hears of the expert then. Until that
moment it is none of the policy's business, so a wrong guess never makes it give up an expert that
it has reason to keep: what a guess displaces is an older guess, once the ring has its share.

Rejected: prefetching into the cache itself (in small caches guesses drive out what is used), and
memory of its own (idle when nothing is guessed, and every use would be a copy).

A ring never holds a pin: whoever pins an expert takes it out. Counted, per layer, is what became of
each prefetch, so the counts add up at any time::

    issued = useful + late + wasted + dropped + failed + those in the ring
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import attrs

from tieredmoe.entry import FILLING, READY, Entry

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tieredmoe.spec import ExpertKey

CACHE_PER_RING = 4
"""A ring takes by itself at most one slot in so many."""


def ring_slots(n_slots: int, top_k: int, *, asked: int | None = None) -> int:
    """How many of ``n_slots`` slots prefetch may have: as ``asked``, by default 2 × ``top_k``.

    By default never more than a quarter; always so few that a layer's top-k fits beside them, and
    none where that leaves nothing: below 2 × ``top_k`` slots.
    """
    if n_slots < 2 * top_k:
        return 0
    if asked is None:
        asked = min(2 * top_k, n_slots // CACHE_PER_RING)
    return min(asked, n_slots - top_k)


@attrs.define
class PrefetchCounts:
    """What became of the prefetches of one layer, in experts."""

    issued: int = 0
    """Taken on: a slot was found and a read was asked for."""
    useful: int = 0
    """Had landed when demand came for them."""
    late: int = 0
    """Were on their way when demand came for them, which shortened its wait."""
    wasted: int = 0
    """Were read and lost their slot, used by nobody."""
    dropped: int = 0
    """Were given up on their way. Behind another tier a read may have begun, and ends there."""
    failed: int = 0
    """Could not be read; nobody was told."""

    @property
    def ended(self) -> int:
        """How many are in the ring no more."""
        return self.useful + self.late + self.wasted + self.dropped + self.failed


class Ring:
    """The entries of prefetch in at most ``n_max`` slots, those first that are to go first.

    Called by ``Residency``, inside its mutex.
    """

    __slots__ = ("counts", "entries", "n_max", "n_ready", "n_stale")

    def __init__(self) -> None:
        self.n_max = 0
        self.n_ready = 0
        self.n_stale = 0
        self.entries: dict[ExpertKey, Entry] = {}
        self.counts: dict[int, PrefetchCounts] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def put(self, entry: Entry) -> None:
        """``entry`` has a slot and is FILLING."""
        entry.in_ring = True
        self.entries[entry.key] = entry
        self._count(entry).issued += 1

    def landed(self) -> None:
        """One entry has become READY."""
        self.n_ready += 1

    def refresh(self, key: ExpertKey) -> None:
        """``key`` was guessed again: if it is here, it goes last."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.entries[key] = entry
            self.n_stale -= entry.stale
            entry.stale = False

    def use(self, entry: Entry) -> None:
        """Demand has come for ``entry``, which leaves."""
        if entry.state is READY:
            self._count(entry).useful += 1
        else:
            self._count(entry).late += 1
        self._leave(entry)

    def waste(self, entry: Entry) -> None:
        """``entry``, read for nothing or being read, leaves."""
        self._count(entry).wasted += 1
        self._leave(entry)

    def end(self, entry: Entry, *, dropped: bool) -> None:
        """``entry`` leaves without having landed: ``dropped``, or failed."""
        counts = self._count(entry)
        if dropped:
            counts.dropped += 1
        else:
            counts.failed += 1
        self._leave(entry)

    def stale(self, layer: int, chosen: Collection[int]) -> list[Entry]:
        """Let guesses for ``layer`` that were not ``chosen`` go first; those still FILLING."""
        wrong = [
            entry
            for key, entry in self.entries.items()
            if key.layer == layer and key.expert not in chosen and not entry.stale
        ]
        if wrong:
            for entry in wrong:
                entry.stale = True
            self.n_stale += len(wrong)
            right = {key: entry for key, entry in self.entries.items() if not entry.stale}
            gone = {key: entry for key, entry in self.entries.items() if entry.stale}
            self.entries = gone | right
        return [entry for entry in wrong if entry.state is FILLING]

    def oldest_ready(self, *, stale: bool = False) -> Entry | None:
        """The READY entry that is to go first; with ``stale``, only one known to be wrong."""
        if not self.n_ready or (stale and not self.n_stale):
            return None
        limit = self.n_stale if stale else len(self.entries)
        of_those = islice(self.entries.values(), limit)
        return next((entry for entry in of_those if entry.state is READY), None)

    def surplus(self) -> Iterator[Entry]:
        """The entries beyond ``n_max``, those that go first."""
        return iter(list(islice(self.entries.values(), max(0, len(self) - self.n_max))))

    def _leave(self, entry: Entry) -> None:
        del self.entries[entry.key]
        entry.in_ring = False
        self.n_ready -= entry.state is READY
        self.n_stale -= entry.stale
        entry.stale = False

    def _count(self, entry: Entry) -> PrefetchCounts:
        layer = entry.key.layer
        counts = self.counts.get(layer)
        if counts is None:
            # Replaced, not changed: other threads read it.
            counts = PrefetchCounts()
            self.counts = {**self.counts, layer: counts}
        return counts

    def check(self) -> None:
        """Assert that nothing is counted twice or lost; O(n), for tests."""
        entries = self.entries
        assert len(entries) <= self.n_max, f"{len(entries)} prefetched, {self.n_max} slots for them"
        for key, entry in entries.items():
            assert entry.key == key, f"{entry} under another's key"
            assert entry.in_ring, f"{entry} does not know that it is in the ring"
            assert not entry.pins, f"{entry} is wanted and in the ring"
        ready = sum(entry.state is READY for entry in entries.values())
        assert ready == self.n_ready, (
            f"{ready} prefetched experts are ready, counted {self.n_ready}"
        )
        stale = [entry.stale for entry in entries.values()]
        assert stale == sorted(stale, reverse=True), "a wrong guess behind others"
        assert sum(stale) == self.n_stale, f"{sum(stale)} wrong guesses, counted {self.n_stale}"
        for layer, counts in self.counts.items():
            n_here = sum(key.layer == layer for key in entries)
            assert counts.issued == counts.ended + n_here, f"layer {layer}: {counts}, {n_here} here"
