"""Eviction policies: which expert leaves when a slot is needed."""

from tieredmoe.policies.lfu_lru import LfuLruPolicy
from tieredmoe.policies.lru import LRUPolicy
from tieredmoe.policies.protocol import EvictionPolicy
from tieredmoe.policies.registry import POLICIES, PolicyFactory, make_policy

__all__ = [
    "POLICIES",
    "EvictionPolicy",
    "LRUPolicy",
    "LfuLruPolicy",
    "PolicyFactory",
    "make_policy",
]
