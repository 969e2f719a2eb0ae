"""What has a limit stops at it: the queue of those who wait for slots, and the queues below it."""

import asyncio
from contextlib import aclosing

import pytest
from stage import full, play, queued, take

from tieredmoe.errors import QueueFullError


def asked(stage, layer, experts, owner="another"):
    """The acquire of somebody else."""
    return stage.hierarchy.admit(layer, stage.hierarchy.keys(layer, experts), owner=owner)


@pytest.mark.parametrize("slots", [(4,), (2, 4)])
def test_one_more_than_may_wait_is_refused_at_once_and_changes_nothing(slots):
    async def scenario(stage):
        log = []
        lease = await full(stage)
        await queued(stage, "first", 1, [0, 1], log)
        await queued(stage, "second", 1, [2], log)
        with pytest.raises(QueueFullError, match=r"^2 acquires wait .* raise waiting_max"):
            asked(stage, 1, [3]).send(None)  # without a suspension
        assert stage.top.n_waiting == 2
        lease.release()
        await stage.finish()
        assert log == ["first", "second"]

    play(scenario, slots, waiting_max=2)


def test_who_gives_up_waiting_makes_room_for_another():
    async def scenario(stage):
        log = []
        lease = await full(stage)
        waiting = await queued(stage, "impatient", 1, [0], log)
        waiting.cancel()
        await asyncio.wait({waiting})
        await queued(stage, "next", 1, [1], log)
        lease.release()
        await stage.finish()
        assert log == ["next"]

    play(scenario, waiting_max=1)


def test_a_stream_that_has_to_wait_is_refused_with_everything_given_back():
    async def scenario(stage):
        lease = await full(stage)
        await queued(stage, "waiting", 1, [0])
        with pytest.raises(QueueFullError):
            await anext(stage.hierarchy.stream(1, range(6), owner="another"))
        lease.release()

    play(scenario, waiting_max=1)


def test_a_stream_refused_between_two_waves_has_given_back_what_it_had():
    async def scenario(stage):
        seen = []

        async def consume():
            async with aclosing(stage.hierarchy.stream(1, range(6))) as leases:
                async for lease in leases:
                    seen.extend(lease.experts)
                    if stage.top.n_waiting == 0:
                        await queued(stage, "waiting", 0, range(4))

        held = await asked(stage, 0, [5])
        with pytest.raises(QueueFullError):
            await consume()
        assert 0 < len(seen) < 6
        held.release()
        await stage.finish()

    play(scenario, (4,), waiting_max=1)


def test_a_holder_who_has_to_wait_for_more_is_refused_and_keeps_what_he_holds():
    async def scenario(stage):
        other = await asked(stage, 1, [0, 1])
        mine = await stage.lease(0, [0, 1])
        await mine.ready()
        waiting = asyncio.ensure_future(asked(stage, 1, [2, 3], owner="a third"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await stage.hierarchy.acquire(0, [2, 3, 4])
        await stage.use(mine, [0, 1])
        mine.release()
        other.release()
        (await waiting).release()

    play(scenario, (2, 5), waiting_max=1)


def test_a_holder_who_has_not_to_wait_is_served_with_the_queue_full():
    async def scenario(stage):
        lease = await full(stage)
        await queued(stage, "waiting", 1, [0])
        async with stage.hierarchy.acquire(0, [0, 1]) as again:
            await stage.use(again, [0, 1])
        lease.release()

    play(scenario, waiting_max=1)


@pytest.mark.parametrize("slots", [(1, 4), (1, 1, 4), (2, 1, 3)])
def test_below_the_top_never_more_wait_than_there_are_slots_above(slots):
    """The stage asserts the limit at every step; here the queue is as long as it can be."""

    async def scenario(stage):
        lease = await full(stage)
        lease.release()
        task = stage.spawn("next", take(stage, 1, range(slots[-1])))
        await asyncio.sleep(0)
        lengths = [tier.n_waiting for tier in stage.tiers]
        assert sum(lengths[:-1]) >= slots[-1] - 2
        await task

    play(scenario, slots)
