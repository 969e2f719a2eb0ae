"""An entry: one expert in one slot, from its admission to its eviction.

The entry *is* the record of the transfer in flight: whoever wants an expert that is on its way pins
the entry and is told by it. Its state changes in ``Residency`` alone.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.spec import ExpertKey


class EntryState(enum.Enum):
    """Where an entry is in its life; ABSENT ones live on only in their last users' hands."""

    FILLING = "filling"
    READY = "ready"
    ABSENT = "absent"


FILLING, READY, ABSENT = EntryState.FILLING, EntryState.READY, EntryState.ABSENT


class Place(NamedTuple):
    """A slot to write, and the expert ``evicted`` from it, if one had to go.

    ``evicted_spare``: nobody misses that one, which the tier above has from here, or which was
    prefetched and not asked for.
    """

    slot_index: int
    evicted: ExpertKey | None = None
    evicted_spare: bool = False


class Entry:
    """One expert in one slot. ``pins`` counts every reason for it to stay: leases and copies.

    While FILLING it is also the record of the transfer in flight: whoever wants the expert pins the
    entry and adds to ``waiters``, which are called once, when it lands or fails. ``evicted`` had to
    go for it, if anything did (see ``Place``). ``in_ring``: it was prefetched and nobody has asked
    for it; ``stale``: the layer has been routed, and not to it. ``copied_up``: the tier above has
    it from here, so it can go first.
    """

    __slots__ = (
        "copied_up",
        "evicted",
        "evicted_spare",
        "fill",
        "in_ring",
        "key",
        "pins",
        "slot_index",
        "stale",
        "state",
        "waiters",
    )

    def __init__(self, key: ExpertKey, place: Place, *, pins: int = 1) -> None:
        self.key = key
        self.slot_index, self.evicted, self.evicted_spare = place
        self.copied_up = False
        self.state = FILLING
        self.pins = pins
        self.in_ring = False
        self.stale = False
        self.fill: object | None = None
        self.waiters: list[Callable[[Entry, BaseException | None], None]] = []

    def __repr__(self) -> str:
        return (
            f"<Entry L{self.key.layer}.E{self.key.expert} {self.state.value} "
            f"slot={self.slot_index} pins={self.pins}>"
        )


class Admission(NamedTuple):
    """A granted working set: one pinned entry per key, in key order, and those to fill."""

    entries: list[Entry]
    to_fill: list[Entry]
