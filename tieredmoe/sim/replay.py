"""A routing trace through a ``Residency``: what a tier would have hit and missed.

The object replayed is the one that production runs, policy and all, so a simulated hit rate is that
of the real tier as long as one caller at a time acquires, waits and releases. There is no time: a
step's misses have landed before the next step. Rejected: a simulator with a cache of its own (two
implementations of one policy part ways unseen).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import attrs

from tieredmoe.errors import WorkingSetTooLargeError
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tieredmoe.residency import Residency


class Step(NamedTuple):
    """One MoE layer of one step was routed to these distinct experts."""

    layer: int
    experts: Sequence[int]


@attrs.frozen
class Replayed:
    """What a replay counted: lookups by their outcome, one per expert of a step."""

    n_steps: int
    hits: int
    misses: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Hits per lookup, 0 if there were none."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


def replay(trace: Iterable[Step], residency: Residency) -> Replayed:
    """The counts of ``trace`` played through ``residency``, which goes on from where it is.

    Raises ``WorkingSetTooLargeError`` at a step that has more experts than there are slots.
    """
    hits, evictions = residency.hits, residency.evictions
    n_steps = misses = 0
    for missed in replay_steps(trace, residency):
        n_steps += 1
        misses += len(missed)
    return Replayed(
        n_steps=n_steps,
        hits=residency.hits - hits,
        misses=misses,
        evictions=residency.evictions - evictions,
    )


def replay_steps(trace: Iterable[Step], residency: Residency) -> Iterator[list[ExpertKey]]:
    """Play ``trace`` step by step, yielding the keys that each step missed, in the step's order.

    The misses of one tier are what the tier below it is asked for, so chains can be replayed from
    the top down. Raises as ``replay`` does; nothing is pinned between steps.
    """
    for layer, experts in trace:
        admission = residency.admit([ExpertKey(layer, expert) for expert in experts])
        if admission is None:
            raise WorkingSetTooLargeError(n_wanted=len(experts), n_slots=residency.n_slots)
        for entry in admission.to_fill:
            residency.commit(entry)
        for entry in admission.entries:
            residency.unpin(entry)
        yield [entry.key for entry in admission.to_fill]
