"""A task that holds pins and asks for more: it is served or refused, it never hangs."""

import asyncio
from contextlib import aclosing

import pytest
from stage import full, place_of, play, queued, sim_disk, take

from tieredmoe.errors import ExpertLoadError, WorkingSetTooLargeError
from tieredmoe.testing.faults import FaultPlan


def test_a_holder_is_not_made_to_wait_behind_one_who_waits_for_him():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1])
        await lease.ready()
        waiting = await queued(stage, "waiting", 1, [0, 1, 2])
        async with stage.hierarchy.acquire(0, [2]) as more:
            await more.ready()
            await stage.use(more, [2])
        assert not waiting.done()
        lease.release()

    play(scenario, (2, 4))


def test_a_holder_asking_again_for_what_he_holds_is_served_at_once():
    async def scenario(stage):
        lease = await full(stage)
        await queued(stage, "waiting", 1, [0])
        async with stage.hierarchy.acquire(0, [0, 1]) as again:
            await stage.use(again, [0, 1])
        lease.release()

    play(scenario, (2, 4))


def test_a_holder_who_must_wait_for_another_holder_waits_ahead_of_the_queue():
    async def scenario(stage):
        log = []
        other = await stage.lease(1, [0])
        await other.ready()

        async def hold_and_ask():
            async with stage.hierarchy.acquire(0, [0, 1]) as lease:
                await lease.ready()
                await asyncio.sleep(1)
                await take(stage, 0, [2, 3], log)

        stage.spawn("holder", hold_and_ask())
        await asyncio.sleep(0.5)
        await queued(stage, "waiting", 1, [1, 2, 3], log)
        await asyncio.sleep(1)
        assert log == []
        other.release()
        await stage.finish()
        assert log == ["holder", "waiting"]

    play(scenario, (2, 4))


def test_of_two_holders_who_would_wait_for_each_other_the_second_is_refused():
    async def scenario(stage):
        async def hold_and_ask(layer):
            async with stage.hierarchy.acquire(layer, [0, 1]) as lease:
                await lease.ready()
                await asyncio.sleep(1)
                async with stage.hierarchy.acquire(layer, [2, 3]) as more:
                    await more.ready()
                    await stage.use(more, [2, 3])

        stage.spawn("first", hold_and_ask(0))
        await asyncio.sleep(0)
        stage.spawn("second", hold_and_ask(1))
        await asyncio.sleep(2)
        refused = stage.failure_of("second")
        assert isinstance(refused, WorkingSetTooLargeError)
        assert refused.n_held == 4

    play(scenario, (2, 4))


def test_a_holder_who_gave_up_waiting_no_longer_counts_against_others():
    async def scenario(stage):
        async def hold_and_ask(layer, *, after_s, patience_s):
            async with stage.hierarchy.acquire(layer, [0, 1]) as lease:
                await lease.ready()
                await asyncio.sleep(after_s)
                async with stage.excused(), asyncio.timeout(patience_s):
                    await take(stage, layer, [2, 3])
                await asyncio.sleep(1)

        stage.spawn("impatient", hold_and_ask(0, after_s=1, patience_s=1))
        stage.spawn("patient", hold_and_ask(1, after_s=2.5, patience_s=10))
        await stage.finish()
        assert stage.outcomes == ["timed out", "served"]

    play(scenario, (2, 4))


def test_a_holder_may_stream_while_another_waits_for_what_he_holds():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1])
        await lease.ready()
        await queued(stage, "waiting", 1, [0, 1, 2])
        seen = []
        async with aclosing(stage.hierarchy.stream(0, range(6))) as leases:
            async for wave in leases:
                await stage.use(wave, wave.experts)
                seen += wave.experts
        assert sorted(seen) == list(range(6))
        lease.release()

    play(scenario, (2, 4))


def test_the_consumer_of_a_stream_may_ask_for_more_in_its_body():
    async def scenario(stage):
        async def consume(layer):
            async with aclosing(stage.hierarchy.stream(layer, range(6))) as leases:
                async for wave in leases:
                    try:
                        await take(stage, layer, [wave.experts[0], 5])
                    except WorkingSetTooLargeError:
                        refused.append(layer)

        refused = []
        for layer in (0, 1):
            stage.spawn(f"stream {layer}", consume(layer))
        await stage.finish()

    for slots in ((2, 2), (2, 4), (1, 3)):
        play(scenario, slots)


def test_experts_that_failed_hold_no_slot_and_do_not_count_as_held():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1])
        with pytest.raises(ExpertLoadError):
            await lease.ready()
        await asyncio.sleep(1)
        other = stage.spawn("other", take(stage, 1, [0, 1], hold_s=1))
        await asyncio.sleep(0.5)
        async with stage.hierarchy.acquire(0, [2, 3]) as more:  # waits for the other
            await more.ready()
            await stage.use(more, [2, 3])
        assert other.done()
        lease.release()

    faults = FaultPlan().at(0, place_of(0, 0)).at(0, place_of(0, 1))
    play(scenario, (2,), disk=sim_disk(faults=faults), faulty=True)


def test_a_holder_streams_through_what_others_will_give_back_however_little():
    async def scenario(stage):
        mine = [await stage.lease(0, range(6)), await stage.lease(1, [0])]
        for lease in mine:
            await lease.ready()
        stage.spawn("other", take(stage, 1, [1], hold_s=1))  # in the last of eight slots
        await asyncio.sleep(0.5)
        seen = []
        async with aclosing(stage.hierarchy.stream(1, [2, 3, 4, 5])) as leases:
            async for wave in leases:
                await stage.use(wave, wave.experts)
                seen += wave.experts
        assert sorted(seen) == [2, 3, 4, 5]
        for lease in mine:
            lease.release()

    play(scenario, (2, 8))


def test_a_holder_of_everything_cannot_stream_anything_else():
    async def scenario(stage):
        lease = await full(stage)
        async with aclosing(stage.hierarchy.stream(1, [0, 1])) as leases:
            with pytest.raises(WorkingSetTooLargeError, match="held by tasks"):
                await anext(leases)
        lease.release()

    play(scenario, (2, 4))
