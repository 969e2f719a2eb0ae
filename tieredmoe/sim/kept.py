"""A routing trace through a chain of tiers of which each lower one keeps what is evicted above it.

As ``replay``, with the residencies that production runs and the decisions that its tiers make
(``keep_evicted``), in the order in which a tier makes them when one caller at a time acquires,
waits and releases. There is no time: copies end at once, reads in the order in which they were
asked for. Exact where each tier has slots for all that one step asks of it; else which expert has
to wait for a slot depends on what lands when.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from tieredmoe.entry import READY
from tieredmoe.errors import WorkingSetTooLargeError
from tieredmoe.keeping import keep_evicted
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tieredmoe.entry import Entry
    from tieredmoe.residency import Residency
    from tieredmoe.sim.replay import Step


def replay_kept(
    trace: Iterable[Step], tiers: Sequence[Residency]
) -> Iterator[list[list[ExpertKey]]]:
    """Play ``trace`` through ``tiers``, the top one first: per step, the keys that each missed.

    What the last one missed is what the disk is asked for. Raises ``WorkingSetTooLargeError`` at a
    step that has more experts than the top tier has slots; nothing is pinned between steps.
    """
    top, below = tiers[0], tiers[1:]
    for layer, experts in trace:
        missed: list[list[ExpertKey]] = [[] for _ in tiers]
        admission = top.admit([ExpertKey(layer, expert) for expert in experts])
        if admission is None:
            raise WorkingSetTooLargeError(n_wanted=len(experts), n_slots=top.n_slots)
        missed[0] += [entry.key for entry in admission.to_fill]
        _fill(admission.to_fill, below, missed[1:])
        for entry in admission.to_fill:
            top.commit(entry)
        for entry in admission.entries:
            top.unpin(entry)
        yield missed


def _fill(
    entries: Sequence[Entry], below: Sequence[Residency], missed: Sequence[list[ExpertKey]]
) -> list[Entry]:
    """Bring what ``entries`` of a tier are to hold up through those ``below``; in that order."""
    if not below or not entries:
        return list(entries)
    tier = below[0]
    keep_evicted(tier, entries, partial(_copy_back, below))
    queue = deque(sorted((e.key for e in entries), key=lambda key: key not in tier.entries))
    wanted = {entry.key: entry for entry in entries}
    arrived: list[Entry] = []
    flying: deque[Entry] = deque()
    while queue or flying:
        hits, to_fill = _granted(queue, tier)
        missed[0].extend(entry.key for entry in to_fill)
        flying.extend(_fill(to_fill, below[1:], missed[1:]))
        if not hits:
            tier.commit(flying[0])
            hits.append(flying.popleft())
        for entry in hits:
            entry.copied_up = True
            tier.demote(entry)
            arrived.append(wanted[entry.key])
    return arrived


def _granted(queue: deque[ExpertKey], tier: Residency) -> tuple[list[Entry], list[Entry]]:
    """Admit what fits of ``queue``, in order: entries that are READY, and those to fill."""
    hits: list[Entry] = []
    to_fill: list[Entry] = []
    while queue and (admission := tier.admit((queue[0],))) is not None:
        queue.popleft()
        (entry,) = admission.entries
        (hits if entry.state is READY else to_fill).append(entry)
    return hits, to_fill


def _copy_back(below: Sequence[Residency], key: ExpertKey, successor: Entry) -> None:
    del successor
    tier = below[0]
    entry = tier.take_in(key)
    if len(below) > 1:
        keep_evicted(below[1], [entry], partial(_copy_back, below[1:]))
    tier.commit(entry)
    tier.unpin(entry)
