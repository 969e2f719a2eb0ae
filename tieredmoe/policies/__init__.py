"""Eviction policies: which expert leaves when a slot is needed."""

from tieredmoe.policies.choice import POLICY_CHOICES, Choice, choose_policy, remembers
from tieredmoe.policies.lfu_lru import LfuLruPolicy
from tieredmoe.policies.lrfu import LRFUPolicy
from tieredmoe.policies.lru import LRUPolicy
from tieredmoe.policies.next_use import NextUsePolicy
from tieredmoe.policies.protocol import EvictionPolicy, LearningPolicy, RememberingPolicy
from tieredmoe.policies.registry import POLICIES, PolicyFactory, make_policy
from tieredmoe.policies.s3_fifo import S3FIFOPolicy
from tieredmoe.policies.use_counts import UseCounts

__all__ = [
    "POLICIES",
    "POLICY_CHOICES",
    "Choice",
    "EvictionPolicy",
    "LRFUPolicy",
    "LRUPolicy",
    "LearningPolicy",
    "LfuLruPolicy",
    "NextUsePolicy",
    "PolicyFactory",
    "RememberingPolicy",
    "S3FIFOPolicy",
    "UseCounts",
    "choose_policy",
    "make_policy",
    "remembers",
]
