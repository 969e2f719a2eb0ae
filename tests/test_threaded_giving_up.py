"""Giving up on a threaded hierarchy, its faults, and its counters."""

import asyncio
import threading
from contextlib import aclosing, closing

import pytest
from threaded_stage import (
    PATIENCE,
    HeldDisk,
    assert_at_rest,
    blocked_loop,
    in_loop,
    making,
    open_threaded,
    resident,
    right,
    thread,
    wait_queued,
    wait_until,
)

from tieredmoe.errors import ClosedError, ExpertLoadError
from tieredmoe.policies import LRUPolicy
from tieredmoe.threaded import ThreadedHierarchy

# ---- giving up


def test_a_timeout_while_waiting_for_slots_gives_everything_back():
    with open_threaded((2,)) as hierarchy:
        with hierarchy.acquire_blocking(0, [1, 2]):
            waited = thread(lambda: hierarchy.acquire_blocking(0, [3], timeout=0))
            with pytest.raises(TimeoutError, match="layer 0: no experts within 0 s"):
                waited.result(PATIENCE)
        assert_at_rest(hierarchy)


def test_a_timeout_while_waiting_for_arrivals_leaves_the_lease_as_it_is():
    disk = HeldDisk()
    with open_threaded((2,), disk=disk) as hierarchy:
        resident(hierarchy, 0, 1)
        disk.hold(0, 2)
        with hierarchy.acquire_blocking(0, [1, 2]) as lease:
            with pytest.raises(TimeoutError, match=r"1 of 2 experts .* still held"):
                lease.wait(0)
            assert right(lease, 1)
            disk.let_go(0, 2)
            lease.wait(PATIENCE)
            assert right(lease, 1, 2)
        assert_at_rest(hierarchy)


def test_a_timeout_ends_a_stream_with_everything_given_back():
    disk = HeldDisk()
    with open_threaded((2,), disk=disk) as hierarchy:
        disk.hold(0, 1)
        with pytest.raises(TimeoutError):
            list(hierarchy.stream_blocking(0, [1], timeout=0))
        disk.let_go(0, 1)
        assert_at_rest(hierarchy)


def test_a_grant_that_comes_after_the_timeout_is_given_back():
    with open_threaded((2,)) as hierarchy:
        with blocked_loop(hierarchy), pytest.raises(TimeoutError):
            hierarchy.acquire_blocking(0, [3], timeout=0)
        assert_at_rest(hierarchy)


def test_an_acquire_cancelled_in_the_queue_lets_the_next_one_in():
    async def main():
        async with await ThreadedHierarchy.aopen(making((2,))) as hierarchy:
            async with hierarchy.acquire(0, [1, 2]) as lease:
                await lease.ready()
                head = asyncio.ensure_future(hierarchy.admit(0, hierarchy._keys(0, [3, 4])))
                await asyncio.sleep(0)
                wait_queued(hierarchy, 1)
                tail = asyncio.ensure_future(hierarchy.admit(0, hierarchy._keys(0, [1])))
                await asyncio.sleep(0)
                wait_queued(hierarchy, 2)
                head.cancel()
                (await tail).release()
                assert head.cancelled()
            assert_at_rest(hierarchy)

    asyncio.run(main())


def test_a_cancellation_in_the_moment_of_the_grant_gives_the_lease_back():
    """The I/O thread has resolved the promise; the caller is cancelled before it hears of that."""

    async def main():
        async with await ThreadedHierarchy.aopen(making((2,))) as hierarchy:
            lease = await hierarchy.acquire(0, [1, 2])
            await lease.ready()
            task = asyncio.ensure_future(hierarchy.admit(0, hierarchy._keys(0, [3])))
            await asyncio.sleep(0)
            wait_queued(hierarchy, 1)
            lease.release()
            wait_until(lambda: not hierarchy._thread._promises)  # without a turn of our own loop
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert_at_rest(hierarchy)

    asyncio.run(main())


def test_a_cancellation_in_the_middle_of_the_grant_gives_the_lease_back():
    """The I/O thread is admitting, too late to be stopped, and finds its promise cancelled."""

    class SlowPolicy(LRUPolicy):
        """Takes its time over an admission."""

        admitting, go = threading.Event(), threading.Event()

        def step(self, layer, keys):
            super().step(layer, keys)
            self.admitting.set()
            self.go.wait(PATIENCE)

    async def main():
        policy = SlowPolicy(n_slots=2, layers=(0, 1), top_k=2)
        async with await ThreadedHierarchy.aopen(making((2,), policy=policy)) as hierarchy:
            task = asyncio.ensure_future(hierarchy.admit(0, hierarchy._keys(0, [3])))
            await asyncio.sleep(0)
            assert policy.admitting.wait(PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            policy.go.set()
            assert_at_rest(hierarchy)

    asyncio.run(main())


def test_a_cancellation_before_the_grant_stops_it():
    """The caller is cancelled while the I/O thread is busy, and before it looks at the acquire."""

    async def main():
        async with await ThreadedHierarchy.aopen(making((2,))) as hierarchy:
            with blocked_loop(hierarchy):
                task = asyncio.ensure_future(hierarchy.admit(0, hierarchy._keys(0, [3])))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert_at_rest(hierarchy)
            assert hierarchy.stats().cache_misses == 0

    asyncio.run(main())


def test_a_cancelled_waiter_cancels_nobody_else():
    disk = HeldDisk()

    async def main():
        async with await ThreadedHierarchy.aopen(making((4,), disk=disk)) as hierarchy:
            disk.hold(0, 1)
            async with hierarchy.acquire(0, [1]) as mine, hierarchy.acquire(0, [1, 2]) as yours:
                waiting = [asyncio.ensure_future(lease.ready()) for lease in (mine, mine, yours)]
                await asyncio.sleep(0)
                waiting[0].cancel()
                assert not mine.futures[1].cancel()
                await asyncio.wait({waiting[0]})
                disk.let_go(0, 1)
                await asyncio.gather(*waiting[1:])
                assert right(mine)
                assert right(yours)
            assert_at_rest(hierarchy)

    asyncio.run(main())


def test_releasing_in_mid_read_ends_all_waits_for_the_lease():
    disk = HeldDisk()
    with open_threaded((2,), disk=disk) as hierarchy:
        disk.hold(0, 1)
        lease = hierarchy.acquire_blocking(0, [1])
        waiting = thread(lease.wait)
        disk.wait_started(0, 1)
        lease.release()
        assert lease.released
        assert lease.slots == {}
        with pytest.raises(ClosedError):
            waiting.result(PATIENCE)
        with pytest.raises(ClosedError):
            lease.futures[1].result(PATIENCE)
        disk.let_go(0, 1)
        assert_at_rest(hierarchy)


def test_nothing_is_handed_out_of_a_lease_that_was_released():
    async def awaited(lease):
        await lease.ready()

    with open_threaded((2,)) as hierarchy:
        resident(hierarchy, 0, 1)
        for experts in ([1], [1, 2]):
            lease = hierarchy.acquire_blocking(0, experts)
            lease.wait(PATIENCE)
            lease.release()
            lease.release()
            with pytest.raises(ClosedError):
                lease.wait()
            with pytest.raises(ClosedError):
                asyncio.run(awaited(lease))
        assert_at_rest(hierarchy)


def test_leaving_a_stream_early_gives_everything_back():
    async def awaited(hierarchy):
        async with aclosing(hierarchy.stream(0, range(8))) as leases:
            async for _ in leases:
                break

    with open_threaded((2, 4)) as hierarchy:
        with closing(hierarchy.stream_blocking(0, range(8))) as leases:
            next(leases)
        asyncio.run(awaited(hierarchy))
        assert_at_rest(hierarchy)


def test_a_stream_cancelled_while_it_waits_gives_everything_back():
    disk = HeldDisk()

    async def main():
        async with await ThreadedHierarchy.aopen(making((2, 4), disk=disk)) as hierarchy:
            disk.hold(0, *range(8))
            task = asyncio.ensure_future(anext(hierarchy.stream(0, range(8))))
            await asyncio.to_thread(disk.wait_started, 0, 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            disk.let_all_go()
            assert_at_rest(hierarchy)

    asyncio.run(main())


# ---- faults


@pytest.mark.parametrize("slots", [(4,), (2, 4)])
def test_a_failed_read_reaches_every_waiter_and_the_next_acquire_starts_clean(slots):
    disk = HeldDisk()

    async def awaited(hierarchy):
        async with hierarchy.acquire(1, [3]) as lease:
            with pytest.raises(ExpertLoadError, match="layer 1, expert 3"):
                await lease.ready()

    with open_threaded(slots, disk=disk) as hierarchy:
        disk.spoil(1, 3)
        with hierarchy.acquire_blocking(1, [3, 4]) as lease:
            with pytest.raises(ExpertLoadError, match="layer 1, expert 3"):
                lease.futures[3].result(PATIENCE)
            lease.futures[4].result(PATIENCE)
            assert set(lease.slots) == {4}
        asyncio.run(awaited(hierarchy))
        with pytest.raises(ExpertLoadError):
            list(hierarchy.stream_blocking(1, range(8)))
        disk.repair()
        with hierarchy.acquire_blocking(1, [3]) as lease:
            lease.wait(PATIENCE)
            assert right(lease)
        assert_at_rest(hierarchy)


# ---- counters


def test_the_policy_is_called_inside_the_mutex_only():
    class Guarded:
        """Forwards to ``policy``, and notes every call made by a thread that is not alone in it."""

        def __init__(self, policy):
            self.policy = policy
            self.calls = []
            self.mutex = None

        def __getattr__(self, name):
            method = getattr(self.policy, name)

            def called(*args, **options):
                self.calls.append((name, self.mutex is None or self.mutex.locked()))
                return method(*args, **options)

            return called

    policy = Guarded(LRUPolicy(n_slots=2, layers=(0, 1), top_k=2))
    with open_threaded((2,), policy=policy) as hierarchy:
        policy.mutex = hierarchy._hierarchy.top.residency._mutex
        for experts in ([1, 2], [1, 2], [3], [3, 1]):
            resident(hierarchy, 0, *experts)
        resident(hierarchy, 1, 0)
    assert {name for name, _ in policy.calls} == {
        "step", "admit", "hold", "release", "forget", "victim",
    }  # fmt: skip
    assert not [name for name, alone in policy.calls if not alone]


def test_executed_experts_are_booked_by_one_thread_at_a_time():
    class Watched(dict):
        def __setitem__(self, layer, n_pairs):
            alone.append(hierarchy._booking.locked())
            super().__setitem__(layer, n_pairs)

    alone = []
    with open_threaded((2,)) as hierarchy:
        hierarchy._hierarchy.executed_experts = Watched(hierarchy._hierarchy.executed_experts)
        hierarchy.count_executed(0, 3)
        hierarchy.count_executed(0, 4)
        assert hierarchy.stats().executed_experts[0] == 7
    assert alone == [True, True]


def test_steps_of_full_hits_are_counted_for_snapshots(tmp_path):
    where = tmp_path / "stats.json"
    with open_threaded((2,), stats_path=where, stats_every=2) as hierarchy:
        resident(hierarchy, 0, 1)
        hierarchy.acquire_blocking(0, [1]).release()
        assert in_loop(hierarchy, lambda core: core._snapshots._writing) is not None
    assert '"cache_hits": 1' in where.read_text()
