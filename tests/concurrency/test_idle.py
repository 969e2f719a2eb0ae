"""Kernels outlive leases: a slot is not written before those who read it have ended."""

import asyncio

import pytest
from stage import play, take

from tieredmoe.memory.fences import PASSED, JoinedFence, joined
from tieredmoe.testing.stream import LateFence, SimStream


def test_a_slot_is_written_only_after_the_kernels_of_its_last_holder():
    async def scenario(stage):
        async with stage.hierarchy.acquire(0, [0, 1]) as lease:
            await lease.ready()
            stage.launch(lease, [0, 1], duration_s=1.0)
        begin = stage.loop.time()
        await take(stage, 1, [0, 1])
        assert stage.loop.time() - begin > 0.9

    play(scenario, (2, 2), late=True)


def test_it_waits_for_all_holders_on_whatever_streams():
    async def scenario(stage):
        leases = [await stage.lease(0, [0]) for _ in range(3)]
        await leases[0].ready()
        for lease, duration_s in zip(leases, (0.5, 2.0, 1.0), strict=True):
            stage.launch(lease, [0], duration_s=duration_s)  # two streams, in turns
        for lease in leases:
            lease.release()
        begin = stage.loop.time()
        await take(stage, 1, [0])
        assert stage.loop.time() - begin > 1.9

    play(scenario, (1, 1), late=True)


def test_one_lease_may_be_read_on_several_streams():
    async def scenario(stage):
        async with stage.hierarchy.acquire(0, [0]) as lease:
            await lease.ready()
            for duration_s in (1.0, 2.0):
                stage.launch(lease, [0], duration_s=duration_s)
        begin = stage.loop.time()
        await take(stage, 1, [0])
        assert stage.loop.time() - begin > 1.9

    play(scenario, (1, 1), late=True)


def test_a_stream_that_is_told_again_is_waited_for_once():
    """As who launches a kernel per arrival does."""

    async def scenario(stage):
        lease = await stage.lease(0, [0, 1])
        stream = SimStream()
        async for _ in lease.as_completed():
            lease.wait_on(stream)
        assert len(lease.fences()) == 1
        lease.release()
        await stream.synchronize()

    play(scenario, (2, 2), late=True)


def test_fences_made_earlier_are_taken():
    """As another thread makes them, whose release comes to the loop later."""

    async def scenario(stage):
        lease = await stage.lease(0, [0])
        await lease.ready()
        stage.launch(lease, [0], duration_s=1.0)
        lease.release(lease.fences())
        begin = stage.loop.time()
        await take(stage, 1, [0])
        assert stage.loop.time() - begin > 0.9

    play(scenario, (1, 1), late=True)


def test_other_slots_need_not_wait():
    async def scenario(stage):
        async with stage.hierarchy.acquire(0, [0]) as lease:
            await lease.ready()
            stage.launch(lease, [0], duration_s=1.0)
        async with stage.hierarchy.acquire(1, [0]) as other:
            await other.ready()
            stream = SimStream()
            other.wait_on(stream)
            await stream.synchronize()
            assert stage.loop.time() < 0.5
        await asyncio.sleep(1)

    play(scenario, (2, 2), late=True)


@pytest.mark.parametrize("fast", [False, True])
def test_a_release_inside_the_mutex_keeps_its_fences(fast):
    """As when garbage collection releases a lease in the middle of an admission."""

    async def scenario(stage):
        lease = await stage.lease(0, [0])
        await lease.ready()
        stage.launch(lease, [0], duration_s=1.0)
        with stage.top.residency._mutex:
            if fast:
                lease.release_landed(stage.loop.call_soon)
            else:
                lease.release()
        begin = stage.loop.time()
        await take(stage, 1, [0])
        assert stage.loop.time() - begin > 0.9

    play(scenario, (1, 1), late=True)


def test_closing_waits_for_kernels_and_frees_no_memory_under_them():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1])
        await lease.ready()
        stage.launch(lease, [0, 1], duration_s=1.0)
        stage.closing = True
        await stage.hierarchy.close()
        assert stage.loop.time() > 0.9

    play(scenario, (2, 2), late=True)


def test_a_lease_released_by_the_close_orders_nothing_any_more():
    async def scenario(stage):
        lease = await stage.lease(0, [0])
        await lease.ready()
        lease.release()
        stream = SimStream()
        lease.wait_on(stream)
        assert not stream.n_pending
        assert not lease.fences()

    play(scenario, (2, 2), late=True)


# ---- joined fences


def test_joined_fences_keep_one_per_stream():
    async def main():
        one, two = SimStream(), SimStream()
        one.wait_for(LateFence())
        two.wait_for(LateFence())
        fence = PASSED
        for stream in (one, two, one, one, two):
            fence = joined(fence, stream.fence())
        assert isinstance(fence, JoinedFence)
        assert len(fence.parts) == 2
        earlier = fence.parts[0]
        assert joined(fence, earlier) is fence
        assert fence.covers(earlier)
        assert fence.covers(PASSED)
        assert not fence.covers(LateFence())

    asyncio.run(main())


def test_a_joined_fence_passes_with_the_last_of_its_parts():
    parts = [LateFence() for _ in range(3)]
    fence = joined(joined(parts[0], parts[1]), parts[2])
    calls = []
    fence.on_passed(lambda: calls.append("passed"))
    for number in (1, 0, 2):
        assert not fence.passed()
        assert calls == []
        parts[number].pass_now()
    assert fence.passed()
    assert calls == ["passed"]
    fence.on_passed(lambda: calls.append("at once"))
    assert calls[1:] == ["at once"]


def test_a_stream_that_waits_for_a_joined_fence_waits_for_all():
    parts = [LateFence(), LateFence()]
    stream = SimStream()
    joined(*parts).wait_on(stream)
    assert stream.n_pending == 2


def test_joining_drops_what_has_passed():
    old, new = LateFence(), LateFence()
    old.pass_now()
    assert joined(old, new) is new
    assert joined(PASSED, new) is new
    assert joined(new, PASSED) is new
    assert joined(PASSED, PASSED) is PASSED
