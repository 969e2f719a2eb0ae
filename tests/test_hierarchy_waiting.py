"""Sets that do not fit: refused at once, or waiting in one queue, until the close refuses them."""

import asyncio

import pytest
from hierarchy_stage import assert_at_rest, run

from tieredmoe.errors import ClosedError, WorkingSetTooLargeError
from tieredmoe.testing.disk import SimDisk
from tieredmoe.testing.loop import sim_run
from tieredmoe.testing.tiny_pack import TinyPack, tiny_hierarchy, tiny_spec


def test_a_set_that_can_never_fit_is_refused_at_once_and_leaves_nothing():
    async def scenario(hierarchy, _):
        with pytest.raises(WorkingSetTooLargeError, match=r"5 distinct .* 4 slots.*stream"):
            await hierarchy.acquire(0, range(5))
        assert hierarchy.top.residency.entries == {}

    run(scenario, (2, 4))


def test_a_task_that_asks_for_more_than_its_own_lease_leaves_is_refused():
    async def scenario(hierarchy, _):
        async with hierarchy.acquire(0, [0, 1, 2]) as lease:
            await lease.ready()
            with pytest.raises(WorkingSetTooLargeError, match="3 of them held"):
                await hierarchy.acquire(0, [2, 3, 4])
            async with hierarchy.acquire(0, [2, 3]):
                pass

    run(scenario, (2, 4))


def test_waiting_acquires_are_served_first_come_first_served():
    async def scenario(hierarchy, _):
        order = []

        async def take(name, experts):
            async with hierarchy.acquire(0, experts) as lease:
                order.append(name)
                await lease.ready()
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take("a", [0, 1, 2]))
            await asyncio.sleep(0)
            tasks.create_task(take("b", [3, 4, 5]))
            await asyncio.sleep(0)
            tasks.create_task(take("c", [0]))  # would fit beside a, but b came first
        assert order == ["a", "b", "c"]

    run(scenario, (2, 4))


def test_an_acquire_cancelled_in_the_queue_lets_the_next_one_in():
    async def scenario(hierarchy, _):
        async with hierarchy.acquire(0, [0, 1, 2]) as lease:
            await lease.ready()
            head = asyncio.ensure_future(hierarchy.admit(0, hierarchy.keys(0, [3, 4])))
            await asyncio.sleep(0)
            tail = asyncio.ensure_future(hierarchy.admit(0, hierarchy.keys(0, [5])))
            await asyncio.sleep(0)
            assert not tail.done()
            head.cancel()
            await asyncio.wait({head, tail})
            assert head.cancelled()
            tail.result().release()

    run(scenario, (2, 4))


def test_closing_refuses_what_waits_and_drops_what_is_queued():
    pack = TinyPack(tiny_spec())

    async def main():
        disk = SimDisk([pack.image], queue_depth=1)
        hierarchy, _ = tiny_hierarchy(pack, (2, 4), disk=disk)
        lease = await hierarchy.acquire(0, [0, 1, 2, 3])
        waiting = asyncio.ensure_future(hierarchy.admit(1, hierarchy.keys(1, [0])))
        await asyncio.sleep(0)
        await hierarchy.close()
        with pytest.raises(ClosedError):
            await waiting
        for future in lease.futures.values():
            with pytest.raises(ClosedError):
                await future
        with pytest.raises(ClosedError):
            await hierarchy.acquire(0, [0])
        assert disk.stats().reads <= 1
        assert_at_rest(hierarchy, disk)
        await hierarchy.close()

    sim_run(main(), collect_garbage=False)


def test_close_runs_to_its_end_before_a_cancellation_is_raised():
    pack = TinyPack(tiny_spec())

    async def main():
        hierarchy, disk = tiny_hierarchy(pack, (2, 4))
        await hierarchy.acquire(0, [0, 1])
        closing = asyncio.ensure_future(hierarchy.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert_at_rest(hierarchy, disk)

    sim_run(main(), collect_garbage=False)
