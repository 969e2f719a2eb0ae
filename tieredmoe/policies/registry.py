"""Policies by the names that a configuration uses."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from tieredmoe.errors import ConfigError
from tieredmoe.policies.lfu_lru import LfuLruPolicy
from tieredmoe.policies.lrfu import LRFUPolicy
from tieredmoe.policies.lru import LRUPolicy
from tieredmoe.policies.next_use import NextUsePolicy
from tieredmoe.policies.s3_fifo import S3FIFOPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tieredmoe.policies.protocol import EvictionPolicy


class PolicyFactory(Protocol):
    """What builds a policy; the classes themselves do."""

    def __call__(self, *, n_slots: int, layers: Sequence[int], top_k: int) -> EvictionPolicy:
        """Build a policy for ``n_slots`` slots of a model with these routed layers and top-k."""


POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        "lrfu": LRFUPolicy,
        "next_use": NextUsePolicy,
        "lfu_lru": LfuLruPolicy,
        "lru": LRUPolicy,
        "s3_fifo": S3FIFOPolicy,
    }
)
"""The policies that come with the library, by name."""


def make_policy(name: str, *, n_slots: int, layers: Sequence[int], top_k: int) -> EvictionPolicy:
    """Build the policy called ``name``; raises ``ConfigError`` with the known names if none is."""
    factory = POLICIES.get(name)
    if factory is None:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
    return factory(n_slots=n_slots, layers=layers, top_k=top_k)
