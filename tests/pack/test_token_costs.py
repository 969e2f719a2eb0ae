"""What a token costs at best: the arithmetic, and which way is the narrowest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredmoe.pack.token_costs import Rates, TokenBytes, hit_ceiling, token_cost

TOKEN = TokenBytes(experts=1000, reads=1100, dense=500, streamed=40)
RATES = Rates(disk=100.0, link=200.0, memory=5000.0)


def test_without_hits_every_expert_is_read_and_crosses_the_link():
    cost = token_cost(TOKEN, RATES, top_hits=0)
    assert (cost.disk_nbytes, cost.link_nbytes, cost.memory_nbytes) == (1100, 1040, 1500)
    assert (cost.disk_s, cost.link_s, cost.memory_s) == (11.0, 5.2, 0.3)
    assert (cost.bound, cost.step_s, cost.tokens_per_s) == ("disk", 11.0, 1 / 11)


def test_hits_in_ram_cross_the_link_and_not_the_disk():
    cost = token_cost(TOKEN, RATES, top_hits=0.25, host_hits=0.75)
    assert (cost.disk_nbytes, cost.link_nbytes, cost.bound) == (0, 790, "link")


def test_with_everything_where_it_is_computed_the_memory_is_the_bound():
    cost = token_cost(TOKEN, RATES, top_hits=1)
    assert (cost.disk_nbytes, cost.link_nbytes) == (0, 40)
    assert token_cost(TOKEN, Rates(disk=1, link=1e9, memory=1), top_hits=1).bound == "memory"


def test_a_host_has_no_link():
    cost = token_cost(TOKEN, Rates(disk=100.0, link=None, memory=50.0), top_hits=0.5)
    assert (cost.link_nbytes, cost.link_s, cost.disk_s, cost.memory_s) == (0, 0.0, 5.5, 30.0)


@pytest.mark.parametrize(("slots", "most"), [(0, 0.0), (449, 449 / 1472), (1472, 1.0), (9999, 1.0)])
def test_no_policy_hits_more_than_slots_over_the_token_cycle(slots, most):
    assert hit_ceiling(slots, 1472) == most


@given(a=st.floats(0, 1), b=st.floats(0, 1))
def test_more_hits_never_cost_more(a, b):
    low, high = (token_cost(TOKEN, RATES, top_hits=hits) for hits in sorted((a, b)))
    assert low.step_s >= high.step_s
    assert low.disk_nbytes >= high.disk_nbytes
