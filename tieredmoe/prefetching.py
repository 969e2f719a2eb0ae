"""Prefetch into the top tier: taken on at once or not at all, and nobody waits for it.

What may be guessed, and when, is decided above (``tieredmoe.prefetch``); here a guess gets a slot
of the ring and its read waits behind all demand, so the worst it can do is to be wasted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import attrs

from tieredmoe.errors import ClosedError
from tieredmoe.ring import PrefetchCounts, ring_slots
from tieredmoe.spec import Priority
from tieredmoe.stats import PrefetchStats
from tieredmoe.trace import EventKind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tieredmoe.spec import ExpertKey, MoESpec
    from tieredmoe.stats import SourceCounters
    from tieredmoe.tier import Tier


_COUNTED = tuple(a.name for a in attrs.fields(PrefetchCounts))
_WEIGHED = ("useful", "late", "wasted", "dropped")


class PrefetchReport(NamedTuple):
    """What became of the prefetches of each layer that had some, and of the disk's time.

    ``ahead_s`` and ``demand_delay_s`` are over all layers: ``stats.PrefetchStats`` explains them.
    """

    by_layer: Mapping[int, PrefetchCounts]
    ahead_s: float
    demand_delay_s: float


class Prefetching:
    """Guesses for the experts of ``spec`` in ``tier``, in ``n_asked`` slots (None: as suits)."""

    __slots__ = ("_n_asked", "_spec", "_tier")

    def __init__(self, tier: Tier, spec: MoESpec, *, n_asked: int | None) -> None:
        self._tier = tier
        self._spec = spec
        self._n_asked = n_asked
        self.resized()

    def resized(self) -> None:
        """The tier has another number of slots: so has the ring."""
        tier = self._tier
        n_max = ring_slots(tier.residency.n_slots, self._spec.top_k, asked=self._n_asked)
        tier.note_evicted(tier.residency.limit_ring(n_max))
        tier.pump()

    def start(self, keys: Sequence[ExpertKey], priority: Priority) -> int:
        """Start reading those of ``keys`` that are absent into slots of the ring; how many.

        None while anybody waits for slots, and after the close. Errors are counted, and nobody is
        told.
        """
        tier = self._tier
        if tier.closed or tier.n_waiting:
            return 0
        entries = tier.residency.prefetch(keys)
        if entries:
            if tier.trace is not None:
                for entry in entries:
                    tier.trace.note(EventKind.PREFETCHED, tier.name, entry.key)
            tier.fills.start(entries, priority)
        return len(entries)

    def routed(self, layer: int, experts: Collection[int]) -> None:
        """``layer`` was routed to ``experts``: drop other guesses for it, or replace them first."""
        tier = self._tier
        for entry in reversed(tier.residency.mark_wrong(layer, experts)):
            tier.fills.drop(entry, ClosedError("its layer was routed elsewhere"))
        tier.pump()

    def report(self) -> PrefetchReport:
        """What ``PrefetchReport`` says; in any thread."""
        disk = self._tier.source.counters
        by_layer = self._tier.residency.ring.counts
        return PrefetchReport(by_layer, disk.ahead_s, disk.demand_delay_s)

    def stats(self, disk: SourceCounters) -> PrefetchStats:
        """All layers together, in experts and bytes; in any thread."""
        totals = dict.fromkeys(_COUNTED, 0)
        nbytes = dict.fromkeys(_WEIGHED, 0)
        for layer, counts in self._tier.residency.ring.counts.items():
            for name in _COUNTED:
                totals[name] += getattr(counts, name)
            for name in _WEIGHED:
                nbytes[name] += getattr(counts, name) * self._spec.layouts[layer].payload_nbytes
        return PrefetchStats(
            slots=self._tier.residency.ring.n_max,
            demand_delay_s=disk.demand_delay_s,
            ahead_s=disk.ahead_s,
            **totals,
            **{f"{name}_bytes": n for name, n in nbytes.items()},
        )


def hint(priority: Priority) -> Priority:
    """``priority``, which must not be demand's: that is what ``acquire`` is for."""
    if priority is Priority.DEMAND:
        raise ValueError("a prefetch is not demand: acquire what is needed now")
    return priority
