"""The replay of a chain that keeps, and the tiers themselves: the same keys, in every tier."""

import asyncio
import random

import pytest

from tieredmoe.errors import WorkingSetTooLargeError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.residency import Residency
from tieredmoe.sim import Step, replay_kept
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.arena import LateArena
from tieredmoe.testing.disk import SimDisk
from tieredmoe.testing.loop import sim_run
from tieredmoe.testing.tiny_pack import TinyPack, host_arena, tiny_spec
from tieredmoe.tier import Tier

SPEC = tiny_spec(layers=(1, 2, 3), n_experts=8, role_nbytes=8)
PACK = TinyPack(SPEC)


def skewed_trace(seed, n_steps=120, size_max=4):
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(SPEC.n_experts)]
    steps = []
    for i in range(n_steps):
        drawn = rng.choices(range(SPEC.n_experts), weights, k=rng.randint(1, size_max))
        steps.append(Step(SPEC.layers[i % 3], list(dict.fromkeys(drawn))))
    return steps


def policy_of(slots, name):
    return make_policy(name, n_slots=slots, layers=SPEC.layers, top_k=SPEC.top_k)


def replayed(trace, slots, policy):
    """``slots`` from the disk up."""
    top = Residency(slots[-1], policy_of(slots[-1], policy))
    below = [Residency(n, policy_of(n, "lru")) for n in reversed(slots[:-1])]
    tiers = [top, *below]
    return [
        ([set(keys) for keys in missed], [set(tier.entries) for tier in tiers])
        for missed in replay_kept(trace, tiers)
    ], tiers


def served(trace, slots, policy, *, late=False):
    async def main():
        disk = SimDisk([PACK.image], jitter=0, queue_depth=1)
        source, tiers = PackSource(PACK, disk), []
        for i, n_slots in enumerate(slots):
            top = i == len(slots) - 1
            arena = LateArena(n_slots, SPEC.slot_nbytes) if top and late else host_arena(n_slots)
            name = policy if top else "lru"
            source = Tier(
                name=f"tier {i}",
                source=source,
                arena=arena,
                policy=policy_of(n_slots, name),
                keeps=not top,
            )
            tiers.insert(0, source)
        steps = []
        before = [tier.residency.misses for tier in tiers]
        async with Hierarchy(source, SPEC) as hierarchy:
            for layer, experts in trace:
                async with hierarchy.acquire(layer, experts) as lease:
                    await lease.ready()
                await asyncio.sleep(1)
                after = [tier.residency.misses for tier in tiers]
                n_missed = [now - then for now, then in zip(after, before, strict=True)]
                steps.append((n_missed, [set(tier.residency.entries) for tier in tiers]))
                before = after
        return steps, hierarchy

    return sim_run(main())


CHAINS = [(6, 4), (9, 5), (4, 4), (2, 6), (18, 6), (5, 4, 5), (8, 5, 4)]


@pytest.mark.parametrize("policy", ["lru", "lfu_lru"])
@pytest.mark.parametrize("slots", CHAINS, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_tier_misses_and_holds_in_the_replay_what_it_does_in_the_chain(slots, policy, seed):
    trace = skewed_trace(seed)
    in_replay, tiers = replayed(trace, slots, policy)
    in_chain, hierarchy = served(trace, slots, policy)
    for (missed, entries), (n_missed, held) in zip(in_replay, in_chain, strict=True):
        assert [len(keys) for keys in missed] == n_missed
        assert entries == held
    stats = hierarchy.stats()
    for tier, counted in zip(tiers, stats.tiers, strict=True):
        assert (tier.hits, tier.misses) == (counted.hits, counted.misses)
    assert stats.pack_reads == tiers[-1].misses


@pytest.mark.parametrize("slots", [(9, 5), (18, 6)], ids=str)
def test_late_copies_change_no_hit_of_callers_who_wait_for_them(slots):
    """Copies down take slots for as long as they run: with room for these, nothing differs."""
    trace = skewed_trace(3)
    in_replay, tiers = replayed(trace, slots, "lru")
    _, hierarchy = served(trace, slots, "lru", late=True)
    assert [tier.hits for tier in hierarchy.stats().tiers] == [tier.hits for tier in tiers]
    assert in_replay


def test_two_tiers_miss_about_as_one_of_all_slots_but_those_that_reads_pass_through():
    trace = skewed_trace(4, n_steps=600)
    _, (top, below) = replayed(trace, (8, 6), "lru")
    _, (alone,) = replayed(trace, (6,), "lru")
    _, (larger,) = replayed(trace, (10,), "lru")
    assert below.misses < 0.85 * alone.misses
    assert below.misses < 1.05 * larger.misses
    assert top.misses == alone.misses


def test_a_step_that_never_fits_is_refused():
    step = Step(1, [0, 1, 2])
    with pytest.raises(WorkingSetTooLargeError):
        replayed([step], (8, 2), "lru")


def test_nothing_is_pinned_between_steps():
    _, tiers = replayed(skewed_trace(5), (6, 3, 4), "lru")
    for tier in tiers:
        tier.check()
        assert tier.n_available == tier.n_slots
        assert all(isinstance(key, ExpertKey) for key in tier.entries)
