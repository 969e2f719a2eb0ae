import pytest

from tieredmoe.errors import ConfigError
from tieredmoe.policies import (
    POLICIES,
    LfuLruPolicy,
    LRFUPolicy,
    LRUPolicy,
    NextUsePolicy,
    S3FIFOPolicy,
    make_policy,
)


def test_policies_are_made_by_name():
    made = {name: make_policy(name, n_slots=4, layers=[0, 1], top_k=2) for name in POLICIES}
    assert {name: type(policy) for name, policy in made.items()} == {
        "lrfu": LRFUPolicy,
        "next_use": NextUsePolicy,
        "lfu_lru": LfuLruPolicy,
        "lru": LRUPolicy,
        "s3_fifo": S3FIFOPolicy,
    }


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'clock'; known: lrfu, next_use, lfu_lru, lru, s3_fifo"):
        make_policy("clock", n_slots=4, layers=[0], top_k=2)
