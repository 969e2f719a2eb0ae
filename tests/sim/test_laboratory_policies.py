"""The policies that only replays run: the contract of all policies, and an independent library.

Misses by single lookups of the stored trace were counted with libCacheSim 0.3.5; where it is
installed it counts again.
"""

from functools import cache
from pathlib import Path

import pytest

from tieredmoe.errors import ConfigError
from tieredmoe.residency import Residency
from tieredmoe.sim import Step, replay
from tieredmoe.sim.arc import ARCPolicy
from tieredmoe.sim.fifo import FIFOPolicy
from tieredmoe.sim.foreign_trace import load_trace
from tieredmoe.sim.laboratory import replayable_policy
from tieredmoe.sim.lfu import LFUPolicy
from tieredmoe.sim.sieve import SIEVEPolicy
from tieredmoe.testing.contracts.policy import PolicyContract

OLMOE = load_trace(Path(__file__).parent.parent / "data" / "traces" / "olmoe-1b-7b_80_tokens.npz")

# By libCacheSim 0.3.5.
MISSES = {
    ("lru", 64): 10240,
    ("lru", 160): 6037,
    ("lru", 400): 3789,
    ("fifo", 64): 10240,
    ("fifo", 160): 6935,
    ("fifo", 400): 4202,
    ("lfu", 64): 10240,
    ("lfu", 160): 7691,
    ("lfu", 400): 3775,
    ("sieve", 64): 10240,
    ("sieve", 160): 7691,
    ("sieve", 400): 3775,
    ("belady", 64): 6283,
    ("belady", 160): 3898,
    ("belady", 400): 1885,
}
ARC_MISSES = {160: 6430, 400: 3790}


class TestFIFO(PolicyContract):
    def make_policy(self, *, n_slots, layers, top_k):
        return FIFOPolicy(n_slots=n_slots, layers=layers, top_k=top_k)

    # A key used once more keeps its place in this queue, which is what the test forbids.
    test_a_cold_key_that_is_used_is_an_ordinary_key_again = None


class TestLFU(PolicyContract):
    def make_policy(self, *, n_slots, layers, top_k):
        return LFUPolicy(n_slots=n_slots, layers=layers, top_k=top_k)


class TestSIEVE(PolicyContract):
    def make_policy(self, *, n_slots, layers, top_k):
        return SIEVEPolicy(n_slots=n_slots, layers=layers, top_k=top_k)


class TestARC(PolicyContract):
    def make_policy(self, *, n_slots, layers, top_k):
        return ARCPolicy(n_slots=n_slots, layers=layers, top_k=top_k)


@cache
def lookups():
    return [Step(step.layer, (expert,)) for step in OLMOE.steps() for expert in step.experts]


def misses(policy, n_slots):
    made = replayable_policy(policy, n_slots=n_slots, facts=OLMOE.facts, steps=lookups())
    return replay(lookups(), Residency(n_slots, made)).misses


@pytest.mark.parametrize(("policy", "n_slots"), MISSES, ids=str)
def test_misses_are_those_of_an_independent_library(policy, n_slots):
    assert misses(policy, n_slots) == MISSES[policy, n_slots]


@pytest.mark.parametrize("n_slots", ARC_MISSES)
def test_arc_is_within_half_a_percent_of_an_independent_library(n_slots):
    assert misses("arc", n_slots) == pytest.approx(ARC_MISSES[n_slots], rel=5e-3)


@pytest.mark.parametrize(("policy", "n_slots"), MISSES, ids=str)
def test_the_independent_library_still_says_so(policy, n_slots):
    lib = pytest.importorskip("libcachesim")
    kinds = {
        "lru": lib.LRU,
        "fifo": lib.FIFO,
        "lfu": lib.LFU,
        "sieve": lib.Sieve,
        "belady": lib.Belady,
    }
    theirs = kinds[policy](cache_size=n_slots)
    keys = [step.layer * OLMOE.facts.n_experts + step.experts[0] for step in lookups()]
    next_of, nexts = {}, []
    for i in range(len(keys) - 1, -1, -1):
        nexts.append(next_of.get(keys[i], 1 << 62))
        next_of[keys[i]] = i
    n_missed = 0
    for key, following in zip(keys, reversed(nexts), strict=True):
        request = lib.Request(obj_id=key, obj_size=1)
        request.next_access_vtime = following
        n_missed += not theirs.get(request)
    assert n_missed == MISSES[policy, n_slots]


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'best'; .* lrfu, .* sieve, arc, belady"):
        replayable_policy("best", n_slots=8, facts=OLMOE.facts, steps=[])
