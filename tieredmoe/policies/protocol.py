"""Eviction policies: an order over keys, and nothing else.

A policy sees keys. It never sees bytes, slots, pins, futures or a clock; time is the sequence of
``step`` calls. ``Residency`` tells it which keys may be proposed: a key that is in use is *held*,
so that choosing a victim never has to skip over pinned experts, however many there are.

Life of a key::

    admit ──▶ held ──release──▶ evictable ──(victim)──▶ forget
                ▲                   │
                └───────hold────────┘          forget is also called on a held key whose fill failed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tieredmoe.policies.use_counts import UseCounts
    from tieredmoe.spec import ExpertKey


class EvictionPolicy(Protocol):
    """Orders evictable keys. Every method costs O(1) or O(log n) in the number of keys."""

    def step(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Logical time moves: one MoE layer of one step was routed to these distinct keys.

        Called once per acquire, before the keys are admitted or held, for hits and misses alike. A
        cold key that is stepped is an ordinary key again.
        """

    def admit(self, key: ExpertKey) -> None:
        """``key`` has taken a slot; it is held until ``release``."""

    def hold(self, key: ExpertKey) -> None:
        """``key`` must not be proposed until ``release``."""

    def release(self, key: ExpertKey, *, cold: bool = False) -> None:
        """``key`` may be proposed again; ``cold`` puts it first in the order of victims."""

    def forget(self, key: ExpertKey) -> None:
        """``key`` has lost its slot, held or not. What the policy knows of its past may stay."""

    def resize(self, n_slots: int) -> None:
        """There are ``n_slots`` slots from now on; keys that lost theirs are forgotten one by one.

        For policies whose order depends on how many there are. Whoever is held stays held, also in
        a slot that is to go.
        """

    def victim(self) -> ExpertKey | None:
        """The evictable key to go next, or None if every key is held. Changes nothing."""


@runtime_checkable
class LearningPolicy(EvictionPolicy, Protocol):
    """A policy that learns, which takes time: it does so in ``settle``, not in ``step``."""

    def settle(self) -> None:
        """Learn from the last step; does nothing when it has.

        Called when the reads of a step are on their way. The next step does it at the latest, and a
        step's victims go by what was known before it: what is evicted does not depend on when this
        is called.
        """

    def observe(self, layer: int, probabilities: NDArray[np.floating]) -> None:
        """The router of ``layer`` gave its experts, chosen or not, these probabilities.

        ``[n_experts]``, summing to 1; of several tokens their mean. After the ``step`` that they
        led to, and not at all where they are unknown.
        """


@runtime_checkable
class RememberingPolicy(EvictionPolicy, Protocol):
    """A policy that knows how often experts are used in the long run."""

    def use_counts(self) -> UseCounts:
        """Uses since it was built and those recalled; O(n)."""

    def recall(self, counts: UseCounts) -> None:
        """Begin with what an earlier policy counted; before the first ``step``. O(n log n)."""
