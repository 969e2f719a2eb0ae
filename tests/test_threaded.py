"""The hierarchy on its own thread: two faces, full hits without it, and every way to give up."""

import asyncio
import threading
from contextlib import aclosing, closing

import pytest
from threaded_stage import (
    PACK,
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

from tieredmoe.errors import ClosedError, ExpertLoadError, WorkingSetTooLargeError
from tieredmoe.policies import LRUPolicy
from tieredmoe.threaded import ThreadedHierarchy


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "experts.bin"
    path.write_bytes(PACK.image)
    return path


@pytest.fixture
def disk():
    disk = HeldDisk()
    yield disk
    disk.let_all_go()


# ---- right bytes, both faces


def test_a_thread_gets_the_right_bytes(path):
    with open_threaded(path, (2, 4)) as hierarchy:
        for layer, experts in [(0, [1, 2]), (1, [7, 0, 3]), (0, [2, 5])]:
            with hierarchy.acquire_blocking(layer, experts) as lease:
                assert sorted(lease.as_completed_blocking()) == sorted(experts)
                assert right(lease, *experts)
        assert_at_rest(hierarchy)


def test_a_coroutine_gets_the_right_bytes(path):
    async def main():
        async with await ThreadedHierarchy.aopen(making(path, (2, 4))) as hierarchy:
            for layer, experts in [(0, [1, 2]), (1, [7, 0, 3]), (0, [2, 5])]:
                async with hierarchy.acquire(layer, experts) as lease:
                    assert sorted([e async for e in lease.as_completed()]) == sorted(experts)
                    assert right(lease, *experts)

    asyncio.run(main())


def test_a_stream_serves_a_set_larger_than_the_tier_in_a_thread(path):
    with open_threaded(path, (2, 3)) as hierarchy:
        for layer in (0, 1):
            seen = []
            with closing(hierarchy.stream_blocking(layer, [3, *range(8)])) as leases:
                for lease in leases:
                    assert right(lease)
                    seen += lease.experts
            assert sorted(seen) == list(range(8))
        assert_at_rest(hierarchy)


def test_a_stream_serves_a_set_larger_than_the_tier_in_a_coroutine(path):
    async def consume(hierarchy):
        seen = []
        async with aclosing(hierarchy.stream(1, [3, *range(8)])) as leases:
            async for lease in leases:
                assert right(lease)
                seen += lease.experts
        assert sorted(seen) == list(range(8))

    with open_threaded(path, (2, 3)) as hierarchy:
        asyncio.run(consume(hierarchy))
        assert_at_rest(hierarchy)


def test_a_stream_yields_what_is_resident_before_what_is_read(path, disk):
    with open_threaded(path, (4,), disk=disk) as hierarchy:
        resident(hierarchy, 0, 1, 2)
        disk.hold(0, 3)
        with closing(hierarchy.stream_blocking(0, [3, 1, 2], timeout=PATIENCE)) as leases:
            assert next(leases).experts == (1, 2)
            disk.let_go(0, 3)
            assert next(leases).experts == (3,)
            assert next(leases, None) is None


def test_an_empty_set_is_an_empty_lease_and_an_empty_stream(path):
    async def awaited(hierarchy):
        async with hierarchy.acquire(0, []) as lease:
            assert (lease.experts, lease.futures, lease.slots) == ((), {}, {})
        assert [lease async for lease in hierarchy.stream(0, [])] == []

    with open_threaded(path, (2,)) as hierarchy:
        with hierarchy.acquire_blocking(0, []) as lease:
            lease.wait()
        assert list(hierarchy.stream_blocking(0, [])) == []
        asyncio.run(awaited(hierarchy))


@pytest.mark.parametrize("verb", ["acquire", "stream", "acquire_blocking", "stream_blocking"])
def test_unknown_experts_are_refused_by_name_at_the_call(path, verb):
    with (
        open_threaded(path, (2,)) as hierarchy,
        pytest.raises(ValueError, match=r"no expert 8; .* experts 0\.\.7"),
    ):
        getattr(hierarchy, verb)(0, [8])


def test_experts_arrive_in_the_order_of_their_reads(path, disk):
    async def awaited(lease):
        return [expert async for expert in lease.as_completed()]

    with open_threaded(path, (6,), disk=disk) as hierarchy:
        resident(hierarchy, 0, 5)
        disk.hold(0, 1, 2, 3)
        with hierarchy.acquire_blocking(0, [1, 2, 5, 3]) as lease:
            assert [e for e, future in lease.futures.items() if future.done()] == [5]
            assert set(lease.slots) == {5}
            waiting = thread(list, lease.as_completed_blocking())
            for expert in (3, 1, 2):
                disk.let_go(0, expert)
                lease.futures[expert].result(PATIENCE)
            assert waiting.result(PATIENCE) == [5, 3, 1, 2]
            assert asyncio.run(awaited(lease)) == [5, 3, 1, 2]
            assert list(lease.as_completed_blocking(timeout=0)) == [5, 3, 1, 2]


def test_two_instances_do_not_know_each_other(path, disk):
    with open_threaded(path, (2,), disk=disk) as first, open_threaded(path, (2,)) as second:
        disk.hold(0, 1)
        with first.acquire_blocking(0, [1]) as lease:
            resident(second, 0, 1)
            second.close()
            disk.let_go(0, 1)
            lease.wait(PATIENCE)
            assert right(lease)
        assert (first.stats().pack_reads, second.stats().pack_reads) == (1, 1)


def test_it_says_what_it_is(path):
    with open_threaded(path, (2,)) as hierarchy, hierarchy.acquire_blocking(0, [1]) as lease:
        lease.wait(PATIENCE)
        lease.wait_on(None)  # host memory: there is nothing to order
        assert hierarchy.spec.n_experts == 8
        assert "1 leases" in repr(hierarchy)
        assert "1/1 landed" in repr(lease)


# ---- full hits, in the caller's thread


def test_a_full_hit_is_served_and_given_back_without_the_loop(path):
    async def awaited(hierarchy):
        async with hierarchy.acquire(0, [2, 1]) as lease:
            assert right(lease)
            await lease.ready()
        async with aclosing(hierarchy.stream(0, [1, 2])) as leases:
            assert [right(lease) async for lease in leases] == [True]

    with open_threaded(path, (2, 4)) as hierarchy:
        resident(hierarchy, 0, 1, 2)
        with blocked_loop(hierarchy):
            for _ in range(3):
                with hierarchy.acquire_blocking(0, [1, 2]) as lease:
                    assert right(lease)
                    assert all(future.done() for future in lease.futures.values())
                    lease.wait(0)
                assert lease.slots == {}
            with closing(hierarchy.stream_blocking(0, [1, 2])) as leases:
                assert [right(lease) for lease in leases] == [True]
            asyncio.run(awaited(hierarchy))
            assert hierarchy.stats().cache_hits == 12
        assert_at_rest(hierarchy)


def test_a_full_hit_needs_no_suspension(path):
    async def awaited(hierarchy):
        with pytest.raises(StopIteration) as done:
            hierarchy.acquire(0, [1]).__await__().send(None)
        done.value.value.release()

    with open_threaded(path, (2,)) as hierarchy:
        resident(hierarchy, 0, 1)
        asyncio.run(awaited(hierarchy))


def test_what_has_landed_is_given_back_without_the_loop(path):
    with open_threaded(path, (2,)) as hierarchy:
        lease = hierarchy.acquire_blocking(0, [1, 2])
        lease.wait(PATIENCE)
        with blocked_loop(hierarchy):
            lease.release()
            assert hierarchy._hierarchy.top.residency.n_available == 2


@pytest.mark.parametrize("landed", [True, False])
def test_a_lease_given_back_without_the_loop_wakes_who_waits_in_the_queue(path, landed):
    with open_threaded(path, (2,)) as hierarchy:
        resident(hierarchy, 0, 1, 2)
        lease = hierarchy.acquire_blocking(0, [1, 2])
        if landed:
            waiting = thread(hierarchy.acquire_blocking, 0, [3])
            wait_queued(hierarchy, 1)
            with blocked_loop(hierarchy):
                lease.release()
        else:
            with blocked_loop(hierarchy):  # the ticket is posted, and queued after the release
                waiting = thread(hierarchy.acquire_blocking, 0, [3])
                wait_until(lambda: hierarchy._thread._promises)
                lease.release()
        with waiting.result(PATIENCE) as other:
            other.wait(PATIENCE)
            assert right(other)


def test_a_full_hit_does_not_overtake_who_waits_in_the_queue(path):
    order = []

    def take(hierarchy, name, experts):
        with hierarchy.acquire_blocking(0, experts) as lease:
            order.append(name)
            lease.wait(PATIENCE)

    with open_threaded(path, (2,)) as hierarchy:
        resident(hierarchy, 0, 1)
        with hierarchy.acquire_blocking(0, [1]):
            first = thread(take, hierarchy, "first", [2, 3])
            wait_queued(hierarchy, 1)
            second = thread(take, hierarchy, "second", [1])
            wait_queued(hierarchy, 2)
        first.result(PATIENCE)
        second.result(PATIENCE)
        assert order == ["first", "second"]
        assert_at_rest(hierarchy)


def test_releasing_inside_the_mutex_neither_waits_nor_forgets(path):
    """As garbage collection does, when it runs a finaliser in the middle of an admission."""
    with open_threaded(path, (2,)) as hierarchy:
        resident(hierarchy, 0, 1, 2)
        lease = hierarchy.acquire_blocking(0, [1, 2])
        with hierarchy._hierarchy.top.residency._mutex:
            lease.release()
        assert lease.released
        assert_at_rest(hierarchy)


def test_a_hit_that_meets_the_closing_is_refused_with_its_pins_given_back(path):
    class ClosingPolicy(LRUPolicy):
        """Closes the tier in the middle of an admission, once."""

        closing = None

        def step(self, layer, keys):
            super().step(layer, keys)
            if self.closing is not None:
                self.closing()

    policy = ClosingPolicy(n_slots=2, layers=(0, 1), top_k=2)
    with open_threaded(path, (2,), policy=policy) as hierarchy:
        resident(hierarchy, 0, 1)
        policy.closing = hierarchy._hierarchy.top.shut
        with pytest.raises(ClosedError):
            hierarchy.acquire_blocking(0, [1])
        assert_at_rest(hierarchy)


# ---- asking for too much


def test_a_set_that_can_never_fit_is_refused_in_both_faces(path):
    async def awaited(hierarchy):
        with pytest.raises(WorkingSetTooLargeError, match=r"5 distinct .* 4 slots"):
            await hierarchy.acquire(0, range(5))

    with open_threaded(path, (2, 4)) as hierarchy:
        with pytest.raises(WorkingSetTooLargeError, match=r"5 distinct .* 4 slots"):
            hierarchy.acquire_blocking(0, range(5))
        asyncio.run(awaited(hierarchy))
        assert_at_rest(hierarchy)


@pytest.mark.parametrize("hit", [True, False])
def test_a_thread_that_asks_for_more_than_its_own_lease_leaves_is_refused(path, hit):
    with open_threaded(path, (2, 4)) as hierarchy:
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


def test_a_task_that_asks_for_more_than_its_own_lease_leaves_is_refused(path):
    async def main():
        async with await ThreadedHierarchy.aopen(making(path, (2, 4))) as hierarchy:
            async with hierarchy.acquire(0, [0, 1, 2]) as lease:
                await lease.ready()
                with pytest.raises(WorkingSetTooLargeError, match="3 of them held"):
                    await hierarchy.acquire(0, [2, 3, 4])
                other = asyncio.ensure_future(hierarchy.admit(0, hierarchy._keys(0, [3, 4])))
                await asyncio.sleep(0)
                wait_queued(hierarchy, 1)
            (await other).release()  # another task may wait for what this one gives back

    asyncio.run(main())


# ---- giving up


def test_a_timeout_while_waiting_for_slots_gives_everything_back(path):
    with open_threaded(path, (2,)) as hierarchy:
        with hierarchy.acquire_blocking(0, [1, 2]):
            waited = thread(lambda: hierarchy.acquire_blocking(0, [3], timeout=0))
            with pytest.raises(TimeoutError, match="layer 0: no experts within 0 s"):
                waited.result(PATIENCE)
        assert_at_rest(hierarchy)


def test_a_timeout_while_waiting_for_arrivals_leaves_the_lease_as_it_is(path, disk):
    with open_threaded(path, (2,), disk=disk) as hierarchy:
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


def test_a_timeout_ends_a_stream_with_everything_given_back(path, disk):
    with open_threaded(path, (2,), disk=disk) as hierarchy:
        disk.hold(0, 1)
        with pytest.raises(TimeoutError):
            list(hierarchy.stream_blocking(0, [1], timeout=0))
        disk.let_go(0, 1)
        assert_at_rest(hierarchy)


def test_a_grant_that_comes_after_the_timeout_is_given_back(path):
    with open_threaded(path, (2,)) as hierarchy:
        with blocked_loop(hierarchy), pytest.raises(TimeoutError):
            hierarchy.acquire_blocking(0, [3], timeout=0)
        assert_at_rest(hierarchy)


def test_an_acquire_cancelled_in_the_queue_lets_the_next_one_in(path):
    async def main():
        async with await ThreadedHierarchy.aopen(making(path, (2,))) as hierarchy:
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


def test_a_cancellation_in_the_moment_of_the_grant_gives_the_lease_back(path):
    """The I/O thread has resolved the promise; the caller is cancelled before it hears of that."""

    async def main():
        async with await ThreadedHierarchy.aopen(making(path, (2,))) as hierarchy:
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


def test_a_cancellation_in_the_middle_of_the_grant_gives_the_lease_back(path):
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
        async with await ThreadedHierarchy.aopen(making(path, (2,), policy=policy)) as hierarchy:
            task = asyncio.ensure_future(hierarchy.admit(0, hierarchy._keys(0, [3])))
            await asyncio.sleep(0)
            assert policy.admitting.wait(PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            policy.go.set()
            assert_at_rest(hierarchy)

    asyncio.run(main())


def test_a_cancellation_before_the_grant_stops_it(path):
    """The caller is cancelled while the I/O thread is busy, and before it looks at the acquire."""

    async def main():
        async with await ThreadedHierarchy.aopen(making(path, (2,))) as hierarchy:
            with blocked_loop(hierarchy):
                task = asyncio.ensure_future(hierarchy.admit(0, hierarchy._keys(0, [3])))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert_at_rest(hierarchy)
            assert hierarchy.stats().cache_misses == 0

    asyncio.run(main())


def test_a_cancelled_waiter_cancels_nobody_else(path, disk):
    async def main():
        async with await ThreadedHierarchy.aopen(making(path, (4,), disk=disk)) as hierarchy:
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


def test_releasing_in_mid_read_ends_all_waits_for_the_lease(path, disk):
    with open_threaded(path, (2,), disk=disk) as hierarchy:
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


def test_nothing_is_handed_out_of_a_lease_that_was_released(path):
    async def awaited(lease):
        await lease.ready()

    with open_threaded(path, (2,)) as hierarchy:
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


def test_leaving_a_stream_early_gives_everything_back(path):
    async def awaited(hierarchy):
        async with aclosing(hierarchy.stream(0, range(8))) as leases:
            async for _ in leases:
                break

    with open_threaded(path, (2, 4)) as hierarchy:
        with closing(hierarchy.stream_blocking(0, range(8))) as leases:
            next(leases)
        asyncio.run(awaited(hierarchy))
        assert_at_rest(hierarchy)


def test_a_stream_cancelled_while_it_waits_gives_everything_back(path, disk):
    async def main():
        async with await ThreadedHierarchy.aopen(making(path, (2, 4), disk=disk)) as hierarchy:
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
def test_a_failed_read_reaches_every_waiter_and_the_next_acquire_starts_clean(path, disk, slots):
    async def awaited(hierarchy):
        async with hierarchy.acquire(1, [3]) as lease:
            with pytest.raises(ExpertLoadError, match="layer 1, expert 3"):
                await lease.ready()

    with open_threaded(path, slots, disk=disk) as hierarchy:
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


def test_the_policy_is_called_inside_the_mutex_only(path):
    class Guarded:
        """Forwards to ``policy``, and notes every call made by a thread that is not alone in it."""

        def __init__(self, policy):
            self.policy = policy
            self.calls = []
            self.mutex = None

        def __getattr__(self, name):
            self.calls.append((name, self.mutex is None or self.mutex.locked()))
            return getattr(self.policy, name)

    policy = Guarded(LRUPolicy(n_slots=2, layers=(0, 1), top_k=2))
    with open_threaded(path, (2,), policy=policy) as hierarchy:
        policy.mutex = hierarchy._hierarchy.top.residency._mutex
        for experts in ([1, 2], [1, 2], [3], [3, 1]):
            resident(hierarchy, 0, *experts)
        resident(hierarchy, 1, 0)
    assert {name for name, _ in policy.calls} == {
        "step", "admit", "hold", "release", "forget", "victim",
    }  # fmt: skip
    assert all(alone for _, alone in policy.calls)


def test_executed_experts_are_booked_by_one_thread_at_a_time(path):
    class Watched(dict):
        def __setitem__(self, layer, n_pairs):
            alone.append(hierarchy._booking.locked())
            super().__setitem__(layer, n_pairs)

    alone = []
    with open_threaded(path, (2,)) as hierarchy:
        hierarchy._hierarchy.executed_experts = Watched(hierarchy._hierarchy.executed_experts)
        hierarchy.count_executed(0, 3)
        hierarchy.count_executed(0, 4)
        assert hierarchy.stats().executed_experts[0] == 7
    assert alone == [True, True]


def test_steps_of_full_hits_are_counted_for_snapshots(path, tmp_path):
    where = tmp_path / "stats.json"
    with open_threaded(path, (2,), stats_path=where, stats_every=2) as hierarchy:
        resident(hierarchy, 0, 1)
        hierarchy.acquire_blocking(0, [1]).release()
        assert in_loop(hierarchy, lambda core: core._snapshots._writing) is not None
    assert '"cache_hits": 1' in where.read_text()
