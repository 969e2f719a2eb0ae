import pytest

from tieredmoe.errors import ConfigError
from tieredmoe.policies import POLICIES, LfuLruPolicy, LRUPolicy, make_policy


def test_policies_are_made_by_name():
    made = {name: make_policy(name, n_slots=4, layers=[0, 1], top_k=2) for name in POLICIES}
    assert type(made["lru"]) is LRUPolicy
    assert type(made["lfu_lru"]) is LfuLruPolicy


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'clock'; known: lfu_lru, lru"):
        make_policy("clock", n_slots=4, layers=[0], top_k=2)
