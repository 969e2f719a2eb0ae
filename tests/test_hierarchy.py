"""The hierarchy over a simulated disk: right bytes, right counts, any chain of tiers."""

import random

import numpy as np
import pytest
from hierarchy_stage import CHAINS, payload_of, run

from tieredmoe.errors import ExpertLoadError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.faults import Fault, FaultPlan
from tieredmoe.testing.tiny_pack import TinyPack, tiny_spec


@pytest.mark.parametrize("slots", CHAINS)
def test_every_expert_arrives_with_its_own_bytes_in_any_chain(slots):
    async def scenario(hierarchy, pack):
        rng = random.Random(1)
        for _ in range(60):
            layer = rng.choice(hierarchy.spec.layers)
            experts = rng.sample(range(8), k=min(slots[-1], rng.randint(1, 4)))
            async with hierarchy.acquire(layer, experts) as lease:
                seen = [expert async for expert in lease.as_completed()]
                assert sorted(seen) == sorted(experts)
                for expert in experts:
                    assert payload_of(hierarchy, lease, expert) == pack.payload(
                        ExpertKey(layer, expert)
                    )

    run(scenario, slots)


def test_layers_of_different_sizes_share_slots():
    async def scenario(hierarchy, pack):
        for layer in (0, 2, 1, 0):
            async with hierarchy.acquire(layer, [1, 5]) as lease:
                await lease.ready()
                for expert in (1, 5):
                    assert payload_of(hierarchy, lease, expert) == pack.payload(
                        ExpertKey(layer, expert)
                    )

    run(scenario, (1, 2), spec=tiny_spec(role_nbytes=[800, 4000, 8]))


def test_hits_misses_joins_and_evictions_are_counted_per_distinct_key():
    async def scenario(hierarchy, _):
        async with hierarchy.acquire(0, [1, 2, 1]) as first:
            async with hierarchy.acquire(0, [2]):
                pass  # on its way: a join
            await first.ready()
        async with hierarchy.acquire(0, [1, 2]) as again:
            await again.ready()
        async with hierarchy.acquire(1, [1, 2]) as other:
            await other.ready()
        async with hierarchy.acquire(2, [7]) as last:
            await last.ready()
        return hierarchy.stats()

    stats = run(scenario, (2, 4))
    assert (stats.cache_hits, stats.cache_misses, stats.cache_joins) == (2, 6, 1)
    assert stats.cache_evictions == 1
    assert stats.pack_reads == 5
    assert stats.pack_read_bytes == 5 * 4096
    assert stats.pack_payload_bytes == 5 * 2400
    assert stats.h2d_bytes == 5 * 2400
    assert stats.cache_capacity_experts == 4


def test_without_staging_nothing_is_copied():
    async def scenario(hierarchy, _):
        async with hierarchy.acquire(0, [1, 2]) as lease:
            await lease.ready()
        return hierarchy.stats()

    assert run(scenario, (4,)).h2d_bytes == 0


def test_a_ram_tier_serves_what_the_top_tier_evicted():
    async def scenario(hierarchy, _):
        for _ in range(3):
            for layer in hierarchy.spec.layers:
                async with hierarchy.acquire(layer, [0, 1]) as lease:
                    await lease.ready()
        return hierarchy.stats()

    stats = run(scenario, (16, 2, 2))
    assert stats.pack_reads == 6
    assert stats.cache_misses == 18


def test_a_full_hit_needs_no_suspension():
    async def scenario(hierarchy, _):
        async with hierarchy.acquire(0, [1, 2]) as lease:
            await lease.ready()
        with pytest.raises(StopIteration) as done:
            hierarchy.acquire(0, [2, 1]).__await__().send(None)
        lease = done.value.value
        assert all(future.done() for future in lease.futures.values())
        assert set(lease.slots) == {1, 2}
        lease.release()

    run(scenario)


def test_an_expert_in_flight_has_a_future_and_no_slot():
    async def scenario(hierarchy, _):
        lease = await hierarchy.acquire(0, [1, 2])
        assert lease.slots == {}
        assert not any(future.done() for future in lease.futures.values())
        await lease.futures[1]
        assert 1 in lease.slots
        lease.release()
        assert lease.slots == {}
        lease.release()

    run(scenario)


def test_a_cancelled_future_disturbs_neither_the_lease_nor_others():
    async def scenario(hierarchy, _):
        mine = await hierarchy.acquire(0, [1])
        yours = await hierarchy.acquire(0, [1])
        mine.futures[1].cancel()
        await yours.ready()
        await mine.ready()
        assert set(mine.slots) == {1}
        mine.release()
        yours.release()

    run(scenario)


@pytest.mark.parametrize("slots", [(4,), (2, 4), (6, 2, 4)])
def test_a_failed_read_reaches_every_waiter_and_the_next_acquire_starts_clean(slots):
    async def scenario(hierarchy, pack):
        first = await hierarchy.acquire(1, [3, 4])
        second = await hierarchy.acquire(1, [3])
        for lease in (first, second):
            with pytest.raises(ExpertLoadError, match="layer 1, expert 3"):
                await lease.futures[3]
            with pytest.raises(ExpertLoadError):
                await lease.ready()
        assert set(first.slots) <= {4}
        first.release()
        second.release()
        async with hierarchy.acquire(1, [3]) as lease:
            await lease.ready()
            assert payload_of(hierarchy, lease, 3) == pack.payload(ExpertKey(1, 3))
        stats = hierarchy.stats()
        assert (stats.io_errors, stats.cache_hits) == (1, 0)

    pack = TinyPack(tiny_spec())
    bad = pack.locate(ExpertKey(1, 3)).offset
    run(scenario, slots, faults=FaultPlan().at(0, bad, Fault("torn")))


@pytest.mark.parametrize(
    ("layer", "experts", "fact"),
    [
        (7, [0], "layer 7 has no routed experts; this model routes in layers 0..2"),
        (0, [8], "no expert 8; .* experts 0..7"),
        (0, [-1], "no expert -1"),
    ],
)
def test_unknown_layers_and_experts_are_refused_by_name(layer, experts, fact):
    async def scenario(hierarchy, _):
        with pytest.raises(ValueError, match=fact):
            hierarchy.acquire(layer, experts)

    run(scenario)


@pytest.mark.parametrize("experts", [[[1]], 5, [{}]])
def test_what_is_no_series_of_ints_is_refused_by_name(experts):
    async def scenario(hierarchy, _):
        with pytest.raises(ValueError, match=r"flat series of ints.*experts 0\.\.7"):
            hierarchy.acquire(0, experts)

    run(scenario)


def test_experts_may_come_as_an_array_or_whatever_has_a_list_in_it():
    class Tensor:
        """Its elements are equal to no int, as those of a framework's tensors."""

        def __iter__(self):
            return iter([object(), object()])

        def tolist(self):
            return [2, 1]

    async def scenario(hierarchy, _):
        async with hierarchy.acquire(0, np.array([1, 2])) as lease:
            assert lease.experts == (1, 2)
        async with hierarchy.acquire(0, Tensor()) as lease:
            assert lease.experts == (2, 1)

    run(scenario)


def test_an_empty_set_is_an_empty_lease():
    async def scenario(hierarchy, _):
        async with hierarchy.acquire(0, []) as lease:
            assert (lease.experts, [e async for e in lease.as_completed()]) == ((), [])
        assert [lease async for lease in hierarchy.stream(0, [])] == []

    run(scenario)


def test_executed_experts_are_booked_per_layer():
    async def scenario(hierarchy, _):
        hierarchy.count_executed(1, 6)
        hierarchy.count_executed(1, 2)
        return hierarchy.stats().executed_experts

    assert run(scenario) == {0: 0, 1: 8, 2: 0}


def test_a_hierarchy_says_what_it_is():
    async def scenario(hierarchy, _):
        assert isinstance(hierarchy, Hierarchy)
        async with hierarchy.acquire(0, [1]) as lease:
            await lease.ready()
            assert "1 leases" in repr(hierarchy)
            assert "1/1 landed" in repr(lease)

    run(scenario)
