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

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def victim(self) -> ExpertKey | None:
        """The evictable key to go next, or None if every key is held. Changes nothing."""
