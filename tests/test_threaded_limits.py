"""What a threaded hierarchy refuses, and what its trace tells."""

import asyncio

import pytest
from threaded_stage import (
    PATIENCE,
    acquire,
    assert_at_rest,
    blocked_loop,
    making,
    open_threaded,
    resident,
    stream,
    thread,
    wait_queued,
)

from tieredmoe.errors import QueueFullError, WorkingSetTooLargeError
from tieredmoe.threaded import ThreadedHierarchy
from tieredmoe.trace import EventKind

# ---- asking for too much


def test_one_more_than_may_wait_is_refused_in_both_faces():
    async def awaited(hierarchy):
        with pytest.raises(QueueFullError, match="1 acquires wait"):
            await hierarchy.acquire(0, [3])
        with pytest.raises(QueueFullError):
            await anext(hierarchy.stream(0, [3]))

    with open_threaded((2,), waiting_max=1) as hierarchy:
        with hierarchy.acquire_blocking(0, [1, 2]):
            waiting = thread(hierarchy.acquire_blocking, 0, [4])
            wait_queued(hierarchy, 1)
            for ask in (acquire, stream):
                with pytest.raises(QueueFullError, match="1 acquires wait"):
                    thread(ask, hierarchy, 0, 3).result(PATIENCE)
            asyncio.run(awaited(hierarchy))
        waiting.result(PATIENCE).release()
        assert_at_rest(hierarchy)


def test_a_set_that_can_never_fit_is_refused_in_both_faces():
    async def awaited(hierarchy):
        with pytest.raises(WorkingSetTooLargeError, match=r"5 distinct .* 4 slots"):
            await hierarchy.acquire(0, range(5))

    with open_threaded((2, 4)) as hierarchy:
        with pytest.raises(WorkingSetTooLargeError, match=r"5 distinct .* 4 slots"):
            hierarchy.acquire_blocking(0, range(5))
        asyncio.run(awaited(hierarchy))
        assert_at_rest(hierarchy)


@pytest.mark.parametrize("hit", [True, False])
def test_a_thread_that_asks_for_more_than_its_own_lease_leaves_is_refused(hit):
    with open_threaded((2, 4)) as hierarchy:
        if hit:
            resident(hierarchy, 0, 0, 1, 2)
        with hierarchy.acquire_blocking(0, [0, 1, 2]) as lease:
            lease.wait(PATIENCE)
            with pytest.raises(WorkingSetTooLargeError, match="3 of them held"):
                hierarchy.acquire_blocking(0, [2, 3, 4], timeout=PATIENCE)
            with (
                hierarchy.acquire_blocking(0, [2, 3], timeout=PATIENCE),
                pytest.raises(WorkingSetTooLargeError, match="4 of them held"),
            ):
                next(hierarchy.stream_blocking(1, [0], timeout=PATIENCE))
        assert_at_rest(hierarchy)


def test_a_task_that_asks_for_more_than_its_own_lease_leaves_is_refused():
    async def main():
        async with await ThreadedHierarchy.aopen(making((2, 4))) as hierarchy:
            async with hierarchy.acquire(0, [0, 1, 2]) as lease:
                await lease.ready()
                with pytest.raises(WorkingSetTooLargeError, match="3 of them held"):
                    await hierarchy.acquire(0, [2, 3, 4])
                other = asyncio.ensure_future(hierarchy.admit(0, hierarchy._keys(0, [3, 4])))
                await asyncio.sleep(0)
                wait_queued(hierarchy, 1)
            (await other).release()  # another task may wait for what this one gives back

    asyncio.run(main())


# ---- the trace


def test_what_happens_in_all_threads_is_told_also_after_the_close():
    with open_threaded((2, 4), trace_events=100) as hierarchy:
        resident(hierarchy, 0, 1)
        with blocked_loop(hierarchy):
            hierarchy.acquire_blocking(0, [1]).release()
        told = [(event.kind.value, event.tier) for event in hierarchy.trace()]
        assert told.count(("landed", "tier 1")) == 1
        assert told[-2:] == [("acquired", "tier 1"), ("released", "tier 1")]
    assert len(hierarchy.trace()) == len(told)
    ended = threaded_times(hierarchy, EventKind.LANDED)
    assert ended == sorted(ended)


def threaded_times(hierarchy, kind):
    return [event.at_s for event in hierarchy.trace() if event.kind is kind]
