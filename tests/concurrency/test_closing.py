"""Closing against everything else that can happen in the same tick."""

import asyncio
from contextlib import aclosing

import pytest
from stage import SPEC, full, play, queued, sim_disk, take

from tieredmoe.errors import ClosedError


def test_grant_and_close_in_one_tick_refuse_the_one_who_waits():
    async def scenario(stage):
        log = []
        lease = await full(stage)
        await queued(stage, "waiting", 1, [0, 1], log)
        closing = stage.spawn("closing", stage.close())  # its first step comes before the wake-up
        lease.release()
        assert stage.entry(1, 0) is not None
        await asyncio.wait({closing})
        assert isinstance(stage.failure_of("waiting"), ClosedError)
        assert log == []

    for slots in ((4,), (2, 4), (1, 4)):
        play(scenario, slots)


def test_close_and_grant_in_one_tick_refuse_the_one_who_waits():
    async def scenario(stage):
        lease = await full(stage)
        await queued(stage, "waiting", 1, [0, 1])
        stage.closing = True
        closing = stage.spawn("closing", stage.close())
        stage.when(lambda: stage.top.closed, lease.release)
        await asyncio.wait({closing})
        assert isinstance(stage.failure_of("waiting"), ClosedError)

    play(scenario)


def test_close_and_cancel_in_one_tick_cancel_the_one_who_waits():
    async def scenario(stage):
        await full(stage)
        waiting = await queued(stage, "waiting", 1, [0, 1])
        closing = stage.spawn("closing", stage.close())
        stage.when(lambda: stage.top.closed, waiting.cancel)
        await asyncio.wait({closing, waiting})
        assert waiting.cancelled()

    play(scenario)


def test_a_slot_freed_by_the_close_goes_to_nobody():
    async def scenario(stage):
        await full(stage)
        waiting = await queued(stage, "waiting", 1, [0, 1])
        await stage.close()
        assert stage.entry(1, 0) is None
        assert stage.disk.stats().reads == 4
        await asyncio.wait({waiting})
        assert isinstance(stage.failure_of("waiting"), ClosedError)

    for slots in ((4,), (2, 4)):
        play(scenario, slots)


@pytest.mark.parametrize("slots", [(4,), (2, 4), (1, 4), (2, 1, 4)])
@pytest.mark.parametrize("queue_depth", [1, 8])
def test_landing_and_close_in_one_tick_leave_nothing(slots, queue_depth):
    async def scenario(stage):
        stage.spawn("reading", take(stage, 0, [0, 1, 2, 3]))
        stage.spawn("joining", take(stage, 0, [0, 3]))
        read = asyncio.Event()
        stage.when(
            lambda: stage.disk.stats().reads == 1,
            lambda: (stage.spawn("closing", stage.close()), read.set()),
        )
        await read.wait()
        await asyncio.wait({stage.tasks["closing"]})
        for name in ("reading", "joining"):
            failure = stage.failure_of(name)
            assert failure is None or isinstance(failure, ClosedError)

    play(scenario, slots, disk=sim_disk(queue_depth=queue_depth))


def test_two_closes_at_once_both_end_with_everything_closed():
    async def scenario(stage):
        await stage.lease(0, [0, 1, 2])
        stage.spawn("one", stage.close())
        stage.spawn("two", stage.close())

    for slots in ((4,), (2, 4), (1, 4)):
        play(scenario, slots)


def test_a_close_cancelled_again_and_again_still_ends_with_everything_closed():
    async def scenario(stage):
        await stage.lease(0, [0, 1, 2])
        stage.closing = True
        closing = stage.spawn("closing", stage.hierarchy.close())
        for _ in range(10):
            await asyncio.sleep(1e-5)
            closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled()
        stage.assert_closed()

    for slots in ((4,), (2, 4), (1, 4)):
        play(scenario, slots)


def test_a_drain_may_be_cancelled_and_tried_again():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1])
        draining = stage.spawn("draining", stage.top.transfers.drain())
        await asyncio.sleep(0)
        draining.cancel()
        await asyncio.wait({draining})
        await stage.top.transfers.drain()
        assert set(lease.slots) == {0, 1}
        lease.release()

    play(scenario, (4,))


def test_what_has_landed_is_still_there_when_a_lease_outlives_the_close_of_nobody():
    async def scenario(stage):
        lease = await stage.lease(0, [0])
        await lease.ready()
        await stage.close()
        assert lease.released
        assert lease.slots == {}
        lease.release()

    play(scenario)


def test_a_lease_released_by_the_close_says_so_to_the_one_who_iterates():
    async def scenario(stage):
        async with stage.hierarchy.acquire(0, [0, 1]) as landed:
            await landed.ready()
        lease = await stage.lease(0, [0, 1, 2])
        iterating = lease.as_completed()
        assert await anext(iterating) == 0
        await stage.close()
        with pytest.raises(ClosedError):
            await anext(iterating)

    play(scenario)


def test_a_lease_released_while_iterated_says_so_also_when_everything_has_landed():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1])
        await lease.ready()
        iterating = lease.as_completed()
        await anext(iterating)
        lease.release()
        with pytest.raises(ClosedError):
            await anext(iterating)
        with pytest.raises(ClosedError):
            await lease.ready()

    play(scenario)


def test_a_lease_released_by_another_task_wakes_the_one_who_waits_for_its_experts():
    async def scenario(stage):
        lease = await stage.lease(0, [0])
        waiting = stage.spawn("waiting", lease.ready())
        await asyncio.sleep(0)
        lease.release()
        await asyncio.wait({waiting})
        assert isinstance(stage.failure_of("waiting"), ClosedError)
        with pytest.raises(ClosedError):
            lease.futures[0].result()

    play(scenario)


def test_releasing_twice_gives_back_once():
    async def scenario(stage):
        lease = await stage.lease(0, [0])
        other = await stage.lease(0, [0])
        await lease.ready()
        lease.release()
        lease.release()
        assert stage.entry(0, 0).pins == 1
        other.release()

    play(scenario)


def test_a_stream_ends_in_the_close_wherever_it_is():
    async def scenario(stage):
        async def consume(layer, hold_s):
            async with aclosing(stage.hierarchy.stream(layer, range(SPEC.n_experts))) as leases:
                async for lease in leases:
                    await stage.use(lease, lease.slots)
                    await asyncio.sleep(hold_s)

        stage.spawn("fast", consume(0, 0))
        stage.spawn("slow", consume(1, 1))
        await asyncio.sleep(stage.close_after_s)
        await stage.close()
        for name in ("fast", "slow"):
            await asyncio.wait({stage.tasks[name]})
            failure = stage.failure_of(name)
            assert failure is None or isinstance(failure, ClosedError)

    def closing_after(seconds):
        async def timed(stage):
            stage.close_after_s = seconds
            await scenario(stage)

        return timed

    for slots in ((2,), (1, 2), (2, 4)):
        for seconds in (0, 5e-5, 1.5e-4, 3e-4, 1):
            play(closing_after(seconds), slots)


def test_nothing_can_be_asked_of_a_closed_hierarchy():
    async def scenario(stage):
        await stage.close()
        with pytest.raises(ClosedError):
            await stage.hierarchy.acquire(0, [0])
        with pytest.raises(ClosedError):
            async for _ in stage.hierarchy.stream(0, [0]):
                pass
        await stage.hierarchy.close()

    play(scenario)


def test_the_close_of_a_tier_gives_those_who_wait_for_queued_reads_their_error():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1, 2])
        stage.closing = True
        stage.top.shut()
        closing = stage.spawn("closing", stage.top.close())
        await asyncio.wait({closing})
        errors = [future.exception() for future in lease.futures.values()]
        assert errors[0] is None  # it ran
        assert all(isinstance(error, ClosedError) for error in errors[1:])
        assert stage.disk.stats().reads == 1
        lease.release()

    play(scenario, (3,), disk=sim_disk(queue_depth=1))


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_the_check_of_a_hierarchy_looks_at_every_tier(broken):
    async def scenario(stage):
        stage.hierarchy.check()
        stage.tiers[broken].residency._evictable += 1
        with pytest.raises(AssertionError, match="I4"):
            stage.hierarchy.check()
        stage.tiers[broken].residency._evictable -= 1

    play(scenario, (2, 1, 2))
