"""A trace tells the whole story; ``stage`` plays each of these back and compares."""

import asyncio
from contextlib import aclosing

import pytest
from stage import full, place_of, play, queued, sim_disk, take

from tieredmoe.errors import ExpertLoadError
from tieredmoe.testing.faults import Fault, FaultPlan
from tieredmoe.trace import EventKind


def story(stage, *kinds):
    """The events of these kinds, as short lines."""
    return [
        f"{event.kind.value} {event.tier} {event.layer}:{','.join(map(str, event.experts))}"
        for event in stage.hierarchy.trace()
        if not kinds or event.kind in kinds
    ]


def events(stage, kind):
    return [event for event in stage.hierarchy.trace() if event.kind is kind]


def test_a_miss_a_hit_and_an_eviction_are_told_in_order():
    async def scenario(stage):
        await take(stage, 0, [0])
        await take(stage, 0, [0])
        await take(stage, 1, [5])
        assert story(stage) == [
            "filling tier 1 0:0",
            "filling tier 0 0:0",
            "acquired tier 1 0:0",
            "landed tier 0 0:0",
            "copying tier 0 0:0",
            "copied tier 0 0:0",
            "landed tier 1 0:0",
            "released tier 1 0:0",
            "acquired tier 1 0:0",
            "released tier 1 0:0",
            "evicted tier 1 0:0",
            "filling tier 1 1:5",
            "evicted tier 0 0:0",
            "filling tier 0 1:5",
            "acquired tier 1 1:5",
            "landed tier 0 1:5",
            "copying tier 0 1:5",
            "copied tier 0 1:5",
            "landed tier 1 1:5",
            "released tier 1 1:5",
        ]
        times = [event.at_s for event in stage.hierarchy.trace()]
        assert times == sorted(times)
        read = events(stage, EventKind.LANDED)[0].at_s - events(stage, EventKind.FILLING)[0].at_s
        assert read > 1e-5, "the time is the loop's"

    play(scenario, (1, 1), trace_events=200)


def test_hits_misses_and_joins_are_those_of_each_acquire():
    async def scenario(stage):
        await take(stage, 0, [0])
        first = await stage.lease(0, [0, 1, 2])
        await take(stage, 0, [1, 2, 3])
        first.release()
        counts = [(e.hits, e.misses, e.joins) for e in events(stage, EventKind.ACQUIRED)]
        assert counts == [(0, 1, 0), (1, 2, 0), (0, 3, 2)]

    play(scenario, trace_events=300)


def test_a_wait_begins_and_ends_under_the_number_of_its_acquire():
    async def scenario(stage):
        lease = await full(stage)
        await queued(stage, "first", 1, [0, 1])
        impatient = await queued(stage, "impatient", 1, [2, 3])
        await asyncio.sleep(1)
        impatient.cancel()
        await asyncio.sleep(1)
        lease.release()
        await stage.finish()
        asked = events(stage, EventKind.QUEUED)
        (granted,) = events(stage, EventKind.GRANTED)
        (left,) = events(stage, EventKind.LEFT)
        assert (granted.acquire, left.acquire) == (asked[0].number, asked[1].number)
        assert granted.at_s - asked[0].at_s >= 2
        assert 1 <= left.at_s - asked[1].at_s < 2
        assert (granted.hits, granted.misses) == (0, 2)

    play(scenario, trace_events=300)


def test_those_whom_the_close_refuses_have_left():
    async def scenario(stage):
        await full(stage)
        waiting = await queued(stage, "waiting", 1, [0])
        await stage.close()
        await asyncio.wait({waiting})
        stage.failure_of("waiting")
        assert story(stage, EventKind.LEFT) == ["left tier 1 1:0"]

    play(scenario, trace_events=200)


def test_a_failed_and_a_dropped_fill_are_told_apart_and_why():
    async def scenario(stage):
        async with stage.hierarchy.acquire(0, [0]) as lease:
            with pytest.raises(ExpertLoadError):
                await lease.ready()
        lease = await stage.lease(0, [1, 2, 3])
        lease.release()  # one is being read, the others have not started
        failed = events(stage, EventKind.FAILED)
        assert len(failed) == 2
        assert all("injected fault" in event.error for event in failed)
        assert "dropped tier 1 0:3" in story(stage, EventKind.DROPPED)

    disk = sim_disk(queue_depth=1, faults=FaultPlan().at(0, place_of(0, 0), Fault("torn")))
    play(scenario, disk=disk, faulty=True, trace_events=300)


def test_what_a_stream_gives_back_in_parts_belongs_to_the_acquire_of_its_wave():
    async def scenario(stage):
        async with aclosing(stage.hierarchy.stream(0, range(6))) as leases:
            async for lease in leases:
                await stage.use(lease, lease.experts)
        begun = {e.acquire: e for e in events(stage, EventKind.ACQUIRED)}
        parts = events(stage, EventKind.RELEASED)
        assert len(parts) > len(begun)
        for acquire, event in begun.items():
            given_back = [e for part in parts if part.acquire == acquire for e in part.experts]
            assert sorted(given_back) == sorted(event.experts)

    play(scenario, (2, 3), trace_events=300)


@pytest.mark.parametrize("slots", [(2, 4), (1, 2, 3)])
def test_a_device_s_copies_last_until_their_fences(slots):
    async def scenario(stage):
        await take(stage, 0, [0, 1, 2])
        for kind in (EventKind.COPYING, EventKind.COPIED):
            assert len(events(stage, kind)) == 3 * (len(slots) - 1)
        name = stage.tiers[-2].name
        begun = [e.at_s for e in events(stage, EventKind.COPYING) if e.tier == name]
        ended = [e.at_s for e in events(stage, EventKind.COPIED) if e.tier == name]
        assert all(b < e for b, e in zip(begun, ended, strict=True))

    play(scenario, slots, late=True, trace_events=300)


def test_full_hits_of_other_threads_are_told_too():
    async def scenario(stage):
        await take(stage, 0, [0, 1])
        keys = stage.hierarchy.keys(0, [1, 0])
        hit = stage.hierarchy.hits(0, keys, owner="a thread")
        hit.release_landed(stage.loop.call_soon)
        assert story(stage)[-2:] == ["acquired tier 1 0:1,0", "released tier 1 0:1,0"]
        assert stage.hierarchy.trace()[-2].hits == 2

    play(scenario, trace_events=200)


def test_without_a_trace_there_are_no_events():
    async def scenario(stage):
        await take(stage, 0, [0])
        assert stage.hierarchy.trace() == ()

    play(scenario)
