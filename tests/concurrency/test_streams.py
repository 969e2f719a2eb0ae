"""Streams under attack: left, cancelled and failing between waves, in any order of arrival."""

import asyncio
from contextlib import aclosing

import pytest
from stage import SPEC, place_of, play, queued, sim_disk, take

from tieredmoe.errors import ExpertLoadError
from tieredmoe.testing.faults import FaultPlan

ALL = range(SPEC.n_experts)


async def consume(stage, layer, experts=ALL, *, seen=None, hold_s=0.0):
    seen = [] if seen is None else seen
    async with aclosing(stage.hierarchy.stream(layer, experts)) as leases:
        async for lease in leases:
            seen += lease.experts
            await stage.use(lease, lease.slots)
            await asyncio.sleep(hold_s)
    assert sorted(seen) == sorted(set(experts))


@pytest.mark.parametrize("slots", [(1,), (2,), (1, 2), (2, 1, 3)])
def test_every_expert_comes_once_whatever_the_order_of_arrival(slots):
    for seed in range(10):
        disk = sim_disk(seed=seed, jitter=1, latency_s=1e-3)
        play(lambda stage: consume(stage, 0), slots, disk=disk)


@pytest.mark.parametrize("slots", [(1,), (2,), (1, 3), (2, 1, 4)])
@pytest.mark.parametrize("bad", ALL)
def test_an_error_in_any_wave_ends_the_stream_and_gives_everything_back(slots, bad):
    async def scenario(stage):
        with pytest.raises(ExpertLoadError, match=f"expert {bad}"):
            await consume(stage, 0)
        await stage.settle()
        await consume(stage, 0)

    play(scenario, slots, disk=sim_disk(faults=FaultPlan().at(0, place_of(0, bad))), faulty=True)


@pytest.mark.parametrize("slots", [(1,), (2,), (1, 2), (2, 4)])
def test_a_stream_cancelled_between_two_waves_gives_everything_back(slots):
    async def scenario(stage):
        for n_before in range(SPEC.n_experts):
            seen = []
            task = stage.spawn("stream", consume(stage, 0, seen=seen, hold_s=1e-4))
            stage.when(lambda n=n_before, seen=seen: len(seen) > n, task.cancel)
            await asyncio.wait({task})
            assert task.cancelled()
            await stage.settle()

    play(scenario, slots)


def test_a_stream_abandoned_without_closing_it_gives_everything_back():
    async def scenario(stage):
        async for _ in stage.hierarchy.stream(0, ALL):
            break
        await asyncio.sleep(0)  # the loop closes what nobody refers to any more

    play(scenario, (2, 4))


@pytest.mark.parametrize("slots", [(1,), (2,), (1, 2), (2, 1, 3)])
def test_requests_that_stream_at_once_share_the_tier_and_end(slots):
    async def scenario(stage):
        for i in range(4):
            stage.spawn(f"stream {i}", consume(stage, i % 2, hold_s=5e-5))
        stage.spawn("caller", take(stage, 0, [0]))
        await stage.finish()

    play(scenario, slots)


def test_what_is_resident_is_served_before_it_can_be_evicted():
    async def scenario(stage):
        await take(stage, 0, [4, 5])
        before = stage.hierarchy.stats()
        await consume(stage, 0)
        assert stage.hierarchy.stats().since(before).cache_hits == 2

    for slots in ((2,), (1, 3)):
        play(scenario, slots)


def test_what_is_resident_is_yielded_without_waiting_for_the_disk():
    async def scenario(stage):
        await take(stage, 0, [4, 5])
        async with aclosing(stage.hierarchy.stream(0, ALL)) as leases:
            first = await anext(leases)
            assert first.experts == (4, 5)
            assert stage.disk.stats().reads == 2

    play(scenario, (2, 4))


def test_a_stream_that_flies_tops_up_only_where_nobody_waits():
    async def scenario(stage):
        log = []

        async def streaming():
            async with aclosing(stage.hierarchy.stream(0, ALL)) as leases:
                async for lease in leases:
                    log.append(lease.experts)
                    await stage.use(lease, lease.experts)
                    await asyncio.sleep(1e-3)

        stage.spawn("stream", streaming())
        await asyncio.sleep(5e-4)
        await queued(stage, "caller", 1, [0, 1], log)
        await stage.finish()
        assert log.index("caller") < len(log) - 1

    play(scenario, (2, 2))
