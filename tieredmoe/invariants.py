"""What must hold of a tier between any two calls: the invariants I1 to I6 as assertions.

Rejected: assertions in the methods themselves, which would look at one key and cost every acquire.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tieredmoe.entry import ABSENT, FILLING, READY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tieredmoe.copying import Ticket
    from tieredmoe.residency import Residency
    from tieredmoe.tier import Tier


def check_tier(tier: Tier, queue: Iterable[Ticket]) -> None:
    """Assert that ``tier``, in whose ``queue`` these wait, is consistent, and I5 and I6; O(n)."""
    residency = tier.residency
    residency.check()
    tier.fills.check()
    waiting = list(queue)
    for ticket, later in pairwise(waiting):
        assert ticket.priority <= later.priority, "I6: prefetch waits in front of demand"
    if waiting:
        head = waiting[0].keys
        assert residency.n_fitting(head) < len(head), "I6: the head fits and waits"
    for entry in residency.entries.values():
        assert (entry.fill is not None) == (entry.state is FILLING), f"I5: {entry}"


def check_residency(residency: Residency) -> None:
    """Assert that slots, entries, ring and policy agree; O(n), inside the mutex."""
    _check_slots(residency)
    residency.ring.check()
    evictable = 0
    for key, entry in residency.entries.items():
        assert entry.key == key, "I2: an entry under another's key"
        assert entry.state is not ABSENT, f"I3: {entry} is in the table"
        assert entry.pins >= 0, entry
        assert entry.state is FILLING or not entry.waiters, f"I3: {entry} landed, waiters left"
        assert entry.in_ring == (key in residency.ring.entries), f"I1: {entry} is on both sides"
        evictable += entry.state is READY and not entry.pins and not entry.in_ring
    for key in residency.ring.entries:
        assert key in residency.entries, f"I2: {key} was prefetched and is not in the table"
    counted = residency._evictable  # noqa: SLF001 (an invariant is about what nobody else sees)
    assert evictable == counted, f"I4: {evictable} evictable, counted {counted}"
    victim = residency.policy.victim()
    assert (victim is not None) == (evictable > 0), "I4: the policy and the pins disagree"
    if victim is not None:
        entry = residency.entries[victim]
        assert entry.state is READY, f"I4: {entry} proposed"
        assert not entry.pins, f"I4: {entry} proposed"
        assert not entry.in_ring, f"I4: {entry} proposed"


def _check_slots(residency: Residency) -> None:
    owned = [entry.slot_index for entry in residency.entries.values()]
    given_up = [slot_index for slot_index in owned if slot_index >= residency.n_slots]
    in_use = sorted(owned + residency._free)  # noqa: SLF001 (as above)
    assert in_use == [*range(residency.n_slots), *sorted(given_up)], "I1: slots lost or shared"
    stranded = [e.slot_index for e in residency._stranded if e.state is not ABSENT]  # noqa: SLF001 (as above)
    assert sorted(given_up) == sorted(stranded), "I1: a slot given up is used"
