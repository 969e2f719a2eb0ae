"""A top tier whose copies end later than they are enqueued: what fences are for."""

import asyncio

import pytest
from stage import full, place_of, play, sim_disk, take

from tieredmoe.errors import ExpertLoadError
from tieredmoe.testing.faults import FaultPlan
from tieredmoe.testing.stream import SimStream

CHAINS = [(1, 1), (1, 4), (2, 2), (3, 1), (4, 1, 3)]


def slow_copies(stage, latency_s=1.0):
    stage.late._latency_s = latency_s


@pytest.mark.parametrize("slots", CHAINS)
def test_an_expert_has_landed_before_its_bytes_are_there_and_has_them_after_its_fence(slots):
    async def scenario(stage):
        slow_copies(stage)
        async with stage.hierarchy.acquire(0, [0]) as lease:
            await lease.ready()
            assert stage.loop.time() < 0.5
            assert not lease.slots[0].ready.passed()
            stream = SimStream()
            lease.wait_on(stream)
            await stream.synchronize()
            stage.holds(lease, 0)

    play(scenario, slots, late=True)


@pytest.mark.parametrize("slots", CHAINS)
def test_a_slot_given_to_another_expert_before_its_copy_has_ended_holds_the_other_one(slots):
    async def scenario(stage):
        slow_copies(stage)
        for expert in range(5):
            async with stage.hierarchy.acquire(0, [expert]) as lease:
                await lease.ready()
        async with stage.hierarchy.acquire(0, [4]) as lease:
            await stage.use(lease, [4])

    play(scenario, slots, late=True)


def test_a_staging_slot_is_not_read_into_again_before_its_copy_has_ended():
    async def scenario(stage):
        slow_copies(stage)
        lease = await stage.lease(0, [0, 1, 2])
        await lease.futures[0]
        await asyncio.sleep(0.5)
        assert not lease.futures[1].done()
        assert stage.entry(0, 0, tier=0).pins == 1
        await lease.ready()
        assert stage.loop.time() > 2  # two copies had to end for the third to be enqueued
        await stage.use(lease, [0, 1, 2])
        lease.release()

    play(scenario, (1, 3), late=True)


def test_a_lease_released_in_mid_copy_leaves_the_source_pinned_until_the_fence():
    async def scenario(stage):
        slow_copies(stage)
        lease = await stage.lease(0, [0])
        await lease.ready()
        lease.release()
        stage.spawn("next", take(stage, 1, [3]))
        await asyncio.sleep(0.5)
        assert stage.entry(0, 0, tier=0).pins == 1
        await stage.finish()

    play(scenario, (1, 1), late=True)


@pytest.mark.parametrize("slots", CHAINS)
def test_the_close_waits_for_the_copies_that_run(slots):
    async def scenario(stage):
        slow_copies(stage)
        await full(stage)
        await stage.close()
        assert stage.loop.time() > 1

    play(scenario, slots, late=True)


def test_a_failed_read_never_reaches_the_device():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1])
        with pytest.raises(ExpertLoadError):
            await lease.futures[0]
        await lease.futures[1]
        await stage.use(lease, [1])
        assert len(stage.tiers) == 2
        assert stage.hierarchy.stats().h2d_bytes == stage.hierarchy.stats().pack_payload_bytes
        lease.release()

    faults = FaultPlan().at(0, place_of(0, 0))
    play(scenario, (2, 2), late=True, disk=sim_disk(faults=faults), faulty=True)
