"""A tier that keeps what the one above evicts: where experts go, and what waits for what."""

import asyncio
import random

import pytest
from stage import PAYLOAD_NBYTES, SPEC, full, play, sim_disk, take

from tieredmoe.errors import DeviceError
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.stream import SimStream

BOTH = pytest.mark.parametrize("late", [False, True])


async def touch(stage, layer, experts):
    """A step of which everything has ended before the next begins."""
    await take(stage, layer, experts)
    await stage.settle()


async def one_by_one(stage, experts):
    for expert in experts:
        await touch(stage, 0, [expert])


def here(stage, tier):
    return set(stage.tiers[tier].residency.entries)


def keys(layer, experts):
    return {ExpertKey(layer, expert) for expert in experts}


def n_reads(stage):
    return stage.hierarchy.stats().pack_reads


def keeping(scenario, slots, **options):
    return play(scenario, slots, keeps=True, trace_events=50_000, **options)


@BOTH
def test_what_is_evicted_above_is_served_again_without_a_read(late):
    async def scenario(stage):
        for layer in SPEC.layers:
            for pair in ([0, 1], [2, 3], [4, 5]):
                await touch(stage, layer, pair)
        read = n_reads(stage)
        assert read == 12
        for expert in range(6):
            await touch(stage, 0, [expert])
        assert n_reads(stage) == read

    keeping(scenario, (12, 2), late=late)


@BOTH
def test_two_tiers_hold_as_many_experts_as_both_have_slots_for(late):
    """But for the slot of the last read, whose expert is above by now."""

    async def scenario(stage):
        for expert in range(6):
            await touch(stage, 0, [expert])
        for expert in range(6):
            await touch(stage, 1, [expert])
        read = n_reads(stage)
        for expert in reversed(range(1, 6)):
            await touch(stage, 1, [expert])
        assert n_reads(stage) == read
        assert len(here(stage, 0) | here(stage, 1)) >= 5

    keeping(scenario, (4, 2), late=late)


@BOTH
def test_a_victim_that_is_still_here_is_warm_again_without_a_copy(late):
    async def scenario(stage):
        for expert in range(4):
            await touch(stage, 0, [expert])
        # All four are here, two of them above too: these go first.
        assert stage.tiers[0].residency.policy.victim() in keys(0, [2, 3])
        await touch(stage, 1, [0])
        assert keys(0, [0, 1, 2]) <= here(stage, 0)
        assert stage.hierarchy.stats().copied_back == 0

    keeping(scenario, (4, 2), late=late)


@BOTH
def test_a_victim_that_is_not_here_any_more_is_copied_back(late):
    async def scenario(stage):
        await one_by_one(stage, range(4))
        assert ExpertKey(0, 2) not in here(stage, 0)
        assert stage.hierarchy.stats().copied_back == 0
        await touch(stage, 0, [4])
        assert ExpertKey(0, 2) in here(stage, 0)
        read = n_reads(stage)
        await touch(stage, 0, [2])
        assert n_reads(stage) == read
        stats = stage.hierarchy.stats()
        assert stats.copied_back == stats.tiers[1].copied_back > 0
        assert stats.d2h_bytes == stats.copied_back * PAYLOAD_NBYTES
        assert stats.ram_hits == stats.tiers[1].hits == 1

    keeping(scenario, (3, 2), late=late)


def test_what_is_evicted_above_while_its_copy_up_runs_is_warm_when_that_has_ended():
    async def scenario(stage):
        stage.late._latency_s = 1.0
        for expert in (0, 1):
            async with stage.hierarchy.acquire(0, [expert]) as lease:
                await lease.ready()
        assert stage.entry(0, 0, tier=0).pins == 1
        await asyncio.sleep(5)
        assert stage.tiers[0].residency.policy.victim() == ExpertKey(0, 1)

    keeping(scenario, (4, 1), late=True)


def test_the_slot_above_is_not_written_before_the_copy_out_of_it_has_ended():
    """The arena itself finds a source that is rewritten under its copy."""

    async def scenario(stage):
        for expert in (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5):
            async with stage.hierarchy.acquire(0, [expert]) as lease:
                await lease.ready()
                await stage.use(lease, [expert])
        assert stage.hierarchy.stats().copied_back > 4

    keeping(scenario, (3, 2), late=True)


def test_a_slot_is_not_read_into_before_the_copy_back_into_it_has_ended():
    async def scenario(stage):
        await one_by_one(stage, range(4))
        stage.late._latency_s = 1.0
        began = stage.loop.time()
        async with stage.hierarchy.acquire(0, [4]) as lease:
            await lease.ready()
        assert stage.entry(0, 2, tier=0).pins == 1
        for layer, expert in ((0, 5), (1, 0)):
            assert stage.loop.time() < began + 0.5
            async with stage.hierarchy.acquire(layer, [expert]) as lease:
                await lease.ready()
        assert stage.loop.time() > began + 1  # no slot is left to read into before
        await asyncio.sleep(5)

    keeping(scenario, (3, 2), late=True)


def test_an_expert_is_served_from_here_while_its_copy_back_runs():
    async def scenario(stage):
        await one_by_one(stage, range(4))
        stage.late._latency_s = 1.0
        began = stage.loop.time()
        async with stage.hierarchy.acquire(0, [4]) as lease:
            await lease.ready()
        read = n_reads(stage)
        async with stage.hierarchy.acquire(0, [2]) as lease:
            await lease.ready()
            assert stage.loop.time() < began + 0.5
            await stage.use(lease, [2])
        assert n_reads(stage) == read

    keeping(scenario, (3, 2), late=True)


def test_reads_at_hand_come_before_what_is_to_be_kept():
    """Two slots, two reads: nothing is kept, and nobody waits for a copy."""

    async def scenario(stage):
        await touch(stage, 0, [0, 1])
        await touch(stage, 0, [2, 3])
        stage.late._latency_s = 1.0
        began = stage.loop.time()
        async with stage.hierarchy.acquire(0, [4, 5]) as lease:
            await lease.ready()
            assert stage.loop.time() < began + 0.5
        assert stage.hierarchy.stats().copied_back == 0
        await asyncio.sleep(5)

    keeping(scenario, (2, 4), late=True)


def test_a_tier_full_of_running_copies_keeps_nothing_and_hangs_nobody():
    async def scenario(stage):
        await touch(stage, 0, [0, 1, 2])
        stage.late._latency_s = 1.0
        for layer, experts in ((0, [3, 4]), (1, [0, 1, 2]), (0, [0, 1, 2]), (1, [3, 4, 5])):
            async with stage.hierarchy.acquire(layer, experts) as lease:
                await lease.ready()
                await stage.use(lease, experts)

    keeping(scenario, (2, 3), late=True)


@BOTH
def test_what_is_asked_for_keeps_its_slot_here_whatever_is_kept_or_read_beside_it(late):
    async def scenario(stage):
        await one_by_one(stage, range(5))
        assert here(stage, 0) == keys(0, [1, 2, 4])
        read = n_reads(stage)
        await touch(stage, 0, [5, 1])  # 1 is the next to go here
        assert n_reads(stage) == read + 1

    keeping(scenario, (3, 2), late=late)


def test_the_close_waits_for_copies_back():
    async def scenario(stage):
        await one_by_one(stage, range(4))
        stage.late._latency_s = 1.0
        began = stage.loop.time()
        async with stage.hierarchy.acquire(0, [4]) as lease:
            await lease.ready()
        assert stage.late.copies_back
        await stage.close()
        assert stage.loop.time() > began + 1

    keeping(scenario, (3, 2), late=True)


@BOTH
def test_experts_of_slots_given_up_above_are_warm_here(late):
    async def scenario(stage):
        await touch(stage, 0, [0, 1, 2, 3])
        await stage.hierarchy.resize(2)
        gone = keys(0, range(4)) - here(stage, 1)
        assert len(gone) == 2
        await touch(stage, 1, [0])
        await touch(stage, 1, [1])
        assert gone <= here(stage, 0)

    keeping(scenario, (5, 4), late=late)


def test_what_the_middle_tier_gives_up_is_kept_at_the_bottom():
    """There is room for all experts, however they are spread: each is read once."""

    async def scenario(stage):
        rng = random.Random(1)
        for _ in range(100):
            await touch(stage, rng.choice(SPEC.layers), rng.sample(range(6), 2))
        stats = stage.hierarchy.stats()
        assert stats.pack_reads == 12
        assert all(tier.copied_back for tier in stats.tiers[1:])

    keeping(scenario, (10, 3, 5))


def test_a_copy_back_that_the_device_refuses_leaves_nothing():
    async def scenario(stage):
        await one_by_one(stage, range(4))

        def refuse(source, target, parts):
            raise DeviceError("cuMemcpyDtoHAsync_v2", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

        stage.late.copy_out = refuse
        await one_by_one(stage, [4, 5, 0, 1])
        assert stage.hierarchy.stats().copied_back == 0

    play(scenario, (3, 2), late=True, keeps=True)


def test_an_arena_whose_copies_out_would_block_is_asked_for_none():
    async def scenario(stage):
        stage.late.copies_out = False
        await one_by_one(stage, [0, 1, 2, 3, 4, 5, 0, 1])
        assert stage.hierarchy.stats().copied_back == 0
        assert stage.hierarchy.stats().ram_hits > 0

    keeping(scenario, (4, 2), late=True)


def test_staging_keeps_nothing():
    async def scenario(stage):
        for expert in (0, 1, 2, 0, 1, 2):
            await touch(stage, 0, [expert])
        stats = stage.hierarchy.stats()
        assert stats.copied_back == stats.d2h_bytes == 0
        assert stats.pack_reads == 6

    play(scenario, (1, 1), late=True)


def test_kernels_see_the_right_bytes_though_everything_moves():
    async def scenario(stage):
        rng = random.Random(1)
        stream = SimStream()
        for _ in range(80):
            layer, experts = rng.choice(SPEC.layers), rng.sample(range(6), 2)
            async with stage.hierarchy.acquire(layer, experts) as lease:
                await lease.ready()
                lease.wait_on(stream)
                stage.launch(lease, experts)
        await stream.synchronize()
        stats = stage.hierarchy.stats()
        assert stats.ram_hits > 10
        assert stats.copied_back > 10

    keeping(scenario, (5, 5), late=True, disk=sim_disk(queue_depth=2, jitter=0.9))


def test_a_lease_over_the_whole_top_tier_needs_nothing_of_what_is_kept():
    async def scenario(stage):
        lease = await full(stage)
        lease.release()
        await asyncio.sleep(0)
        await touch(stage, 1, range(3))

    keeping(scenario, (3, 3), late=True)
