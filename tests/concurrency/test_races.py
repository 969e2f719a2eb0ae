"""Two things in one tick: what fuzzing seldom hits, one race at a time.

"One tick" is one step of the loop: the second thing happens before anyone could react to the first.
"""

import asyncio
from contextlib import aclosing

import pytest
from stage import full, place_of, play, queued, sim_disk, take

from tieredmoe.entry import FILLING, READY
from tieredmoe.testing.faults import Fault, FaultPlan

# ---- grant and cancel


def test_grant_then_cancel_in_one_tick_gives_the_grant_back():
    async def scenario(stage):
        lease = await full(stage)
        task = await queued(stage, "queued", 1, [0, 1])
        lease.release()
        assert stage.entry(1, 0).pins == 1
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    play(scenario)


def test_cancel_then_grant_in_one_tick_gives_the_grant_back():
    async def scenario(stage):
        lease = await full(stage)
        task = await queued(stage, "queued", 1, [0, 1])
        task.cancel()
        lease.release()
        await asyncio.wait({task})
        assert task.cancelled()

    play(scenario)


def test_two_cancels_around_a_grant_give_it_back_once():
    async def scenario(stage):
        lease = await full(stage)
        task = await queued(stage, "queued", 1, [0, 1])
        task.cancel()
        lease.release()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    play(scenario)


def test_a_grant_given_back_goes_to_the_next_in_the_queue():
    async def scenario(stage):
        lease = await full(stage)
        head = await queued(stage, "head", 1, [0, 1, 2])
        tail = await queued(stage, "tail", 1, [3, 4])
        lease.release()
        assert not tail.done()
        assert stage.entry(1, 3) is None
        head.cancel()
        await asyncio.wait({head, tail})
        assert head.cancelled()
        tail.result()

    play(scenario)


def test_a_cancelled_head_wakes_the_next_which_fits():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1, 2])
        await lease.ready()
        head = await queued(stage, "head", 1, [0, 1])
        tail = await queued(stage, "tail", 1, [5])
        head.cancel()
        await asyncio.wait({head, tail})
        tail.result()
        assert not lease.released
        lease.release()

    play(scenario)


def test_a_cancel_in_the_middle_of_the_queue_disturbs_nobody():
    async def scenario(stage):
        log = []
        lease = await full(stage)
        await queued(stage, "first", 1, [0, 1, 2, 3], log)
        middle = await queued(stage, "middle", 1, [4], log)
        await queued(stage, "last", 1, [5], log)
        middle.cancel()
        lease.release()
        await stage.finish()
        assert log == ["first", "last"]

    play(scenario)


def test_nobody_jumps_the_queue_though_he_would_fit():
    async def scenario(stage):
        log = []
        lease = await stage.lease(0, [0, 1, 2])
        await lease.ready()
        await queued(stage, "large", 1, [0, 1, 2, 3], log)
        await queued(stage, "small", 1, [5], log)
        await queued(stage, "hit", 0, [0], log)
        lease.release()
        await stage.finish()
        assert log == ["large", "small", "hit"]

    play(scenario)


def test_a_stream_does_not_jump_the_queue_either():
    async def scenario(stage):
        log = []

        async def streaming():
            async with aclosing(stage.hierarchy.stream(1, [5])) as leases:
                async for lease in leases:
                    log.append("stream")
                    await stage.use(lease, [5])

        lease = await stage.lease(0, [0, 1, 2])
        await lease.ready()
        await queued(stage, "large", 1, [0, 1, 2, 3], log)
        stage.spawn("stream", streaming())
        await asyncio.sleep(0)
        lease.release()
        await stage.finish()
        assert log == ["large", "stream"]

    play(scenario)


def test_release_and_acquire_in_one_tick_queues_behind_those_who_wait():
    async def scenario(stage):
        log = []
        lease = await full(stage)
        await queued(stage, "waiting", 1, [0, 1, 2], log)
        lease.release()
        async with stage.hierarchy.acquire(0, [0, 1, 2]):
            assert log == ["waiting"]

    play(scenario)


# ---- landing and leaving


@pytest.mark.parametrize("slots", [(2,), (1, 2), (2, 2)])
def test_landing_and_cancel_in_one_tick(slots):
    async def scenario(stage):
        task = stage.spawn("waiting", take(stage, 0, [0]))
        stage.when(lambda: (e := stage.entry(0, 0)) and e.state is READY, task.cancel)
        await asyncio.wait({task})
        assert task.cancelled()

    play(scenario, slots)


@pytest.mark.parametrize("slots", [(2,), (1, 2), (2, 2)])
def test_the_tick_between_the_read_and_the_landing_is_no_place_to_lose_a_pin(slots):
    async def scenario(stage):
        task = stage.spawn("waiting", take(stage, 0, [0]))
        stage.when(
            lambda: (e := stage.entry(0, 0)) and e.fill is not None and e.fill.done.done(),
            task.cancel,
        )
        await asyncio.wait({task})
        assert task.cancelled()

    play(scenario, slots)


def test_an_expert_wanted_again_in_the_tick_in_which_it_was_given_up_is_not_lost():
    async def scenario(stage):
        first = await stage.lease(0, [0, 1])
        first.release()
        second = await stage.lease(0, [1, 0])
        await second.ready()
        await stage.use(second, [0, 1])
        second.release()

    for slots in ((2,), (1, 2), (2, 2), (4, 1, 2)):
        for queue_depth in (1, 8):
            play(scenario, slots, disk=sim_disk(queue_depth=queue_depth))


def test_an_abandoned_read_that_runs_is_joined_and_lands_for_the_one_who_joins():
    async def scenario(stage):
        first = await stage.lease(0, [0])
        first.release()
        assert stage.entry(0, 0).state is FILLING
        assert stage.entry(0, 0).pins == 0
        async with stage.hierarchy.acquire(0, [0]) as second:
            await second.ready()
            await stage.use(second, [0])
        assert stage.hierarchy.stats().cache_joins == 1
        assert stage.disk.stats().reads == 1

    play(scenario, (2,))


def test_an_abandoned_read_is_joined_at_once_though_it_has_the_last_slot():
    async def scenario(stage):
        first = await stage.lease(0, [0])
        first.release()
        assert stage.entry(0, 0).waiters == []
        with pytest.raises(StopIteration) as granted:
            stage.hierarchy.acquire(0, [0]).__await__().send(None)
        second = granted.value.value
        await second.ready()
        await stage.use(second, [0])
        second.release()

    play(scenario, (1,))


def test_an_abandoned_read_lands_cold_and_leaves_before_all_others():
    async def scenario(stage):
        async with stage.hierarchy.acquire(0, [1]) as lease:
            await lease.ready()
        abandoned = await stage.lease(0, [0])
        abandoned.release()
        await stage.settle()
        async with stage.hierarchy.acquire(0, [2]):
            pass
        assert stage.entry(0, 0) is None
        assert stage.entry(0, 1) is not None

    play(scenario, (2,))


def test_what_waits_behind_a_read_is_dropped_and_never_read():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1, 2, 3])
        lease.release()
        await stage.settle()
        assert stage.disk.stats().reads == 1

    play(scenario, (4,), disk=sim_disk(queue_depth=1))
    play(scenario, (4, 4), disk=sim_disk(queue_depth=1))


def test_what_only_waits_for_a_slot_below_leaves_no_trace_there():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1, 2, 3])
        lease.release()
        await stage.settle()
        assert stage.tiers[0].residency.misses == 2

    play(scenario, (2, 4), disk=sim_disk(queue_depth=1))


def test_an_expert_that_was_wanted_lands_warm_below_too():
    async def scenario(stage):
        await take(stage, 0, [0])
        abandoned = await stage.lease(0, [1])
        abandoned.release()
        await stage.settle()
        await take(stage, 0, [2])
        assert stage.entry(0, 0, tier=0) is not None
        assert stage.entry(0, 1, tier=0) is None

    play(scenario, (2, 1))


def test_a_slot_of_a_dropped_copy_is_not_written_when_its_expert_arrives_below():
    async def scenario(stage):
        first = await stage.lease(0, [0])
        first.release()  # the read below runs on, the slot on top is free
        other = await stage.lease(1, [1])
        await other.ready()
        await asyncio.sleep(1e-2)
        await stage.use(other, [1])
        other.release()

    # Expert 0 is so slow that it arrives when expert 1 has long been in its slot.
    slow = Fault("slow", delay_s=1e-3)
    play(scenario, (2, 1), disk=sim_disk(faults=FaultPlan().at(0, place_of(0, 0), slow)))


# ---- one caller's future is nobody else's


def test_cancelling_a_caller_who_awaits_a_future_leaves_the_others_waiting():
    async def scenario(stage):
        async def wait():
            async with stage.hierarchy.acquire(0, [0]) as lease:
                await lease.futures[0]
                await stage.use(lease, [0])

        cancelled = stage.spawn("cancelled", wait())
        other = stage.spawn("other", wait())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled, other})
        assert other.result() is None

    for slots in ((2,), (1, 2)):
        play(scenario, slots)


@pytest.mark.parametrize("slots", [(2,), (1, 2)])
@pytest.mark.parametrize("around_all", [True, False])
def test_a_timeout_exactly_at_the_landing_ends_one_way_or_the_other(slots, around_all):
    async def landing_time(stage):
        async with stage.hierarchy.acquire(0, [0]) as lease:
            await lease.ready()
            return stage.loop.time()

    async def timed(stage):
        if around_all:  # its timer is set before those of the read
            async with asyncio.timeout_at(landing_time_s):
                await take(stage, 0, [0])
        else:
            async with stage.hierarchy.acquire(0, [0]) as lease:
                async with asyncio.timeout_at(landing_time_s):
                    await lease.futures[0]
                await stage.use(lease, [0])

    async def scenario(stage):
        stage.call("timed", timed, stage)
        await stage.finish()
        assert stage.loop.time() == landing_time_s
        assert stage.outcomes[0] in {"timed out", "served"}

    landing_time_s = play(landing_time, slots, disk=sim_disk(jitter=0))
    play(scenario, slots, disk=sim_disk(jitter=0))


# ---- victims


def test_the_victim_is_none_of_the_experts_being_acquired():
    """Also where one of those is, by its uses, the next to go."""

    async def scenario(stage):
        for _ in range(4):
            await take(stage, 0, [0, 1, 2])
        await take(stage, 0, [3])
        residency = stage.top.residency
        hits, misses = residency.hits, residency.misses
        await take(stage, 0, [4, 3])
        assert (residency.hits - hits, residency.misses - misses) == (1, 1)

    play(scenario, policy="lfu_lru")
