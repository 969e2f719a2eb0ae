"""The replay and the asynchronous hierarchy are the same cache: same hits, misses and victims."""

import asyncio
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tieredmoe.errors import WorkingSetTooLargeError
from tieredmoe.policies import POLICIES, make_policy
from tieredmoe.residency import Residency
from tieredmoe.sim import Step, replay, replay_steps
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.disk import SimDisk
from tieredmoe.testing.loop import sim_run
from tieredmoe.testing.tiny_pack import TinyPack, tiny_hierarchy, tiny_spec
from tieredmoe.tier import Tier

TRACES = Path(__file__).parent.parent / "data" / "traces"
LAYERS = (1, 2, 3)
N_EXPERTS = 8


def uniform_trace(n_steps=150):
    rng = random.Random(1)
    return [
        Step(LAYERS[i % 3], rng.sample(range(N_EXPERTS), rng.randint(0, 3))) for i in range(n_steps)
    ]


def skewed_trace(n_steps=150):
    rng = random.Random(2)
    weights = [1 / (rank + 1) ** 1.5 for rank in range(N_EXPERTS)]
    draws = (rng.choices(range(N_EXPERTS), weights, k=4) for _ in range(n_steps))
    return [Step(LAYERS[i % 3], list(dict.fromkeys(draw))) for i, draw in enumerate(draws)]


def real_trace(n_tokens=12):
    experts = np.load(TRACES / "olmoe-1b-7b_80_tokens.npz")["expert"][:n_tokens]
    return [
        Step(layer, of_layer.tolist()) for token in experts for layer, of_layer in enumerate(token)
    ]


@cache
def pack_for(layers, n_experts):
    return TinyPack(tiny_spec(layers=layers, n_experts=n_experts, role_nbytes=8))


SMALL = pack_for(LAYERS, N_EXPERTS)
OLMOE = pack_for(tuple(range(16)), 64)


def residency(n_slots, policy, spec=SMALL.spec):
    return Residency(
        n_slots, make_policy(policy, n_slots=n_slots, layers=spec.layers, top_k=spec.top_k)
    )


def served(trace, pack, slots, policy):
    """The same trace by acquire, ready, release: the keys missed and those resident, per step."""

    async def main():
        disk = SimDisk([pack.image], jitter=0)
        hierarchy, _ = tiny_hierarchy(pack, slots, policy=policy, disk=disk)
        steps = []
        async with hierarchy:
            for layer, experts in trace:
                async with hierarchy.acquire(layer, experts) as lease:
                    missed = [key for key in lease.keys() if key.expert not in lease.slots]
                    await lease.ready()
                steps.append((missed, set(hierarchy.top.residency.entries)))
            await disk.drain()
            await asyncio.sleep(1)
        return steps, hierarchy

    return sim_run(main())


def counted(cache):
    return (cache.hits, cache.misses, cache.evictions)


CASES = [
    (trace, pack, slots)
    for trace, pack, chains in (
        (uniform_trace(), SMALL, [(3,), (8,), (1, 4), (2, 9), (12, 2, 6), (24,)]),
        (skewed_trace(), SMALL, [(4,), (8,), (1, 4), (2, 9), (12, 4, 6)]),
        (real_trace(), OLMOE, [(100,), (8, 160), (300, 8, 100)]),
    )
    for slots in chains
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("trace", "pack", "slots"), CASES, ids=lambda case: str(case)[:20])
def test_replay_and_hierarchy_hit_miss_and_evict_the_same_keys(trace, pack, slots, policy):
    simulated = residency(slots[-1], policy, pack.spec)
    in_replay = [(missed, set(simulated.entries)) for missed in replay_steps(trace, simulated)]
    in_hierarchy, hierarchy = served(trace, pack, slots, policy)
    assert in_hierarchy == in_replay
    assert counted(hierarchy.top.residency) == counted(simulated)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("trace", "pack", "slots"),
    [
        (uniform_trace(), SMALL, (12, 6)),
        (skewed_trace(), SMALL, (6, 4)),
        (real_trace(), OLMOE, (300, 100)),
    ],
    ids=lambda case: str(case)[:20],
)
def test_what_the_top_tier_misses_is_the_trace_of_the_tier_below(trace, pack, slots, policy):
    top = residency(slots[1], policy, pack.spec)
    below = residency(slots[0], "lru", pack.spec)
    missed = [key for keys in replay_steps(trace, top) for key in keys]
    replay((Step(key.layer, (key.expert,)) for key in missed), below)
    _, hierarchy = served(trace, pack, slots, policy)
    assert isinstance(hierarchy.top.source, Tier)
    assert counted(hierarchy.top.source.residency) == counted(below)
    assert hierarchy.stats().pack_reads == below.misses


@pytest.mark.parametrize("n_slots", [1, 5, 11])
def test_lru_hits_nothing_at_all_on_a_cycle_larger_than_itself(n_slots):
    cycle = [Step(layer, (expert,)) for layer in LAYERS for expert in range(4)]
    assert replay(cycle * 20, residency(n_slots, "lru")).hits == 0


@pytest.mark.parametrize("n_slots", [4, 6, 8])
def test_lru_hits_nothing_on_a_token_that_is_a_layer_larger_than_itself(n_slots):
    cycle = [Step(layer, (0, 1, 2, 3)) for layer in LAYERS]
    assert replay(cycle * 20, residency(n_slots, "lru")).hits == 0


def test_lru_misses_a_cycle_it_can_hold_once():
    cycle = [Step(layer, (0, 1, 2, 3)) for layer in LAYERS]
    replayed = replay(cycle * 20, residency(12, "lru"))
    assert (replayed.misses, replayed.hits, replayed.evictions) == (12, 19 * 12, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_on_uniform_routing_any_cache_hits_its_share_and_no_more(policy):
    rng = random.Random(3)
    trace = (Step(rng.choice(LAYERS), (rng.randrange(N_EXPERTS),)) for _ in range(8000))
    replayed = replay(trace, residency(6, policy))
    assert replayed.hit_rate == pytest.approx(6 / 24, abs=0.03)


def test_a_replay_goes_on_where_the_last_one_ended():
    kept = residency(4, "lru")
    first = replay([Step(1, (0, 1))], kept)
    second = replay([Step(1, (1, 2)), Step(1, ())], kept)
    assert (first.n_steps, first.hits, first.misses, first.hit_rate) == (1, 0, 2, 0)
    assert (second.n_steps, second.hits, second.misses, second.evictions) == (2, 1, 1, 0)
    assert set(kept.entries) == {ExpertKey(1, 0), ExpertKey(1, 1), ExpertKey(1, 2)}
    kept.check()


def test_nothing_replayed_is_no_hit_rate():
    assert replay([], residency(4, "lru")).hit_rate == 0


def test_a_step_larger_than_the_tier_is_refused_by_name():
    with pytest.raises(WorkingSetTooLargeError, match=r"3 distinct experts .* 2 slots"):
        replay([Step(1, (0, 1, 2))], residency(2, "lru"))
