"""The hierarchy on its own thread: two faces, full hits without it, and what is refused."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing

import pytest
from threaded_stage import (
    PATIENCE,
    HeldDisk,
    assert_at_rest,
    blocked_loop,
    making,
    open_threaded,
    resident,
    right,
    thread,
    wait_queued,
    wait_until,
)

from tieredmoe.errors import BudgetError, ClosedError
from tieredmoe.policies import LRUPolicy
from tieredmoe.threaded import ThreadedHierarchy

# ---- right bytes, both faces


def test_a_thread_gets_the_right_bytes():
    with open_threaded((2, 4)) as hierarchy:
        for layer, experts in [(0, [1, 2]), (1, [7, 0, 3]), (0, [2, 5])]:
            with hierarchy.acquire_blocking(layer, experts) as lease:
                assert sorted(lease.as_completed_blocking()) == sorted(experts)
                assert right(lease, *experts)
        assert_at_rest(hierarchy)


def test_a_coroutine_gets_the_right_bytes():
    async def main():
        async with await ThreadedHierarchy.aopen(making((2, 4))) as hierarchy:
            for layer, experts in [(0, [1, 2]), (1, [7, 0, 3]), (0, [2, 5])]:
                async with hierarchy.acquire(layer, experts) as lease:
                    assert sorted([e async for e in lease.as_completed()]) == sorted(experts)
                    assert right(lease, *experts)

    asyncio.run(main())


def test_a_stream_serves_a_set_larger_than_the_tier_in_a_thread():
    with open_threaded((2, 3)) as hierarchy:
        for layer in (0, 1):
            seen = []
            with closing(hierarchy.stream_blocking(layer, [3, *range(8)])) as leases:
                for lease in leases:
                    assert right(lease)
                    seen += lease.experts
            assert sorted(seen) == list(range(8))
        assert_at_rest(hierarchy)


def test_a_stream_serves_a_set_larger_than_the_tier_in_a_coroutine():
    async def consume(hierarchy):
        seen = []
        async with aclosing(hierarchy.stream(1, [3, *range(8)])) as leases:
            async for lease in leases:
                assert right(lease)
                seen += lease.experts
        assert sorted(seen) == list(range(8))

    with open_threaded((2, 3)) as hierarchy:
        asyncio.run(consume(hierarchy))
        assert_at_rest(hierarchy)


def test_a_stream_yields_what_is_resident_before_what_is_read():
    disk = HeldDisk()
    with open_threaded((4,), disk=disk) as hierarchy:
        resident(hierarchy, 0, 1, 2)
        disk.hold(0, 3)
        with closing(hierarchy.stream_blocking(0, [3, 1, 2], timeout=PATIENCE)) as leases:
            assert next(leases).experts == (1, 2)
            disk.let_go(0, 3)
            assert next(leases).experts == (3,)
            assert next(leases, None) is None


def test_an_empty_set_is_an_empty_lease_and_an_empty_stream():
    async def awaited(hierarchy):
        async with hierarchy.acquire(0, []) as lease:
            assert (lease.experts, lease.futures, lease.slots) == ((), {}, {})
        assert [lease async for lease in hierarchy.stream(0, [])] == []

    with open_threaded((2,)) as hierarchy:
        with hierarchy.acquire_blocking(0, []) as lease:
            lease.wait()
        assert list(hierarchy.stream_blocking(0, [])) == []
        asyncio.run(awaited(hierarchy))


@pytest.mark.parametrize("verb", ["acquire", "stream", "acquire_blocking", "stream_blocking"])
def test_unknown_experts_are_refused_by_name_at_the_call(verb):
    with (
        open_threaded((2,)) as hierarchy,
        pytest.raises(ValueError, match=r"no expert 8; .* experts 0\.\.7"),
    ):
        getattr(hierarchy, verb)(0, [8])


def test_experts_arrive_in_the_order_of_their_reads():
    disk = HeldDisk()

    async def awaited(lease):
        return [expert async for expert in lease.as_completed()]

    with open_threaded((6,), disk=disk) as hierarchy:
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


def test_two_instances_do_not_know_each_other():
    disk = HeldDisk()
    with open_threaded((2,), disk=disk) as first, open_threaded((2,)) as second:
        disk.hold(0, 1)
        with first.acquire_blocking(0, [1]) as lease:
            resident(second, 0, 1)
            second.close()
            disk.let_go(0, 1)
            lease.wait(PATIENCE)
            assert right(lease)
        assert (first.stats().pack_reads, second.stats().pack_reads) == (1, 1)


def test_it_says_what_it_is():
    with open_threaded((2,)) as hierarchy, hierarchy.acquire_blocking(0, [1]) as lease:
        lease.wait(PATIENCE)
        lease.wait_on(None)  # host memory: there is nothing to order
        assert hierarchy.spec.n_experts == 8
        assert "1 leases" in repr(hierarchy)
        assert "1/1 landed" in repr(lease)


# ---- full hits, in the caller's thread


def test_a_full_hit_is_served_and_given_back_without_the_loop():
    async def awaited(hierarchy):
        async with hierarchy.acquire(0, [2, 1]) as lease:
            assert right(lease)
            await lease.ready()
        async with aclosing(hierarchy.stream(0, [1, 2])) as leases:
            assert [right(lease) async for lease in leases] == [True]

    with open_threaded((2, 4)) as hierarchy:
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


def test_a_full_hit_needs_no_suspension():
    async def awaited(hierarchy):
        with pytest.raises(StopIteration) as done:
            hierarchy.acquire(0, [1]).__await__().send(None)
        done.value.value.release()

    with open_threaded((2,)) as hierarchy:
        resident(hierarchy, 0, 1)
        asyncio.run(awaited(hierarchy))


def test_what_has_landed_is_given_back_without_the_loop():
    with open_threaded((2,)) as hierarchy:
        lease = hierarchy.acquire_blocking(0, [1, 2])
        lease.wait(PATIENCE)
        with blocked_loop(hierarchy):
            lease.release()
            assert hierarchy._hierarchy.top.residency.n_available == 2


def test_it_can_be_resized_from_any_thread_and_any_loop():
    with open_threaded((2, 4)) as hierarchy:
        assert hierarchy.arena is hierarchy._hierarchy.top.arena
        assert hierarchy.resize_blocking(2) == 2
        assert hierarchy.stats().cache_capacity_experts == 2
        assert asyncio.run(hierarchy.resize(4)) == 4
        with pytest.raises(ValueError, match="opened with 4 slots, not 5"):
            hierarchy.resize_blocking(5)
        with pytest.raises(BudgetError, match="1 slots are fewer"):
            asyncio.run(hierarchy.resize(1))


def test_a_full_hit_given_back_in_its_thread_lets_a_resize_end():
    with open_threaded((4,)) as hierarchy:
        resident(hierarchy, 0, 0, 1, 2, 3)
        lease = hierarchy.acquire_blocking(0, [0, 1, 2, 3])
        with ThreadPoolExecutor(1) as caller:
            resizing = caller.submit(hierarchy.resize_blocking, 2)
            wait_until(lambda: hierarchy.stats().cache_capacity_experts == 2)
            assert not resizing.done()
            lease.release()
            assert resizing.result(PATIENCE) == 2


@pytest.mark.parametrize("landed", [True, False])
def test_a_lease_given_back_without_the_loop_wakes_who_waits_in_the_queue(landed):
    with open_threaded((2,)) as hierarchy:
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


def test_a_full_hit_does_not_overtake_who_waits_in_the_queue():
    order = []

    def take(hierarchy, name, experts):
        with hierarchy.acquire_blocking(0, experts) as lease:
            order.append(name)
            lease.wait(PATIENCE)

    with open_threaded((2,)) as hierarchy:
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


def test_releasing_inside_the_mutex_neither_waits_nor_forgets():
    """As garbage collection does, when it runs a finaliser in the middle of an admission."""
    with open_threaded((2,)) as hierarchy:
        resident(hierarchy, 0, 1, 2)
        lease = hierarchy.acquire_blocking(0, [1, 2])
        with hierarchy._hierarchy.top.residency._mutex:
            lease.release()
        assert lease.released
        assert_at_rest(hierarchy)


def test_a_hit_that_meets_the_closing_is_refused_with_its_pins_given_back():
    class ClosingPolicy(LRUPolicy):
        """Closes the tier in the middle of an admission, once."""

        closing = None

        def step(self, layer, keys):
            super().step(layer, keys)
            if self.closing is not None:
                self.closing()

    policy = ClosingPolicy(n_slots=2, layers=(0, 1), top_k=2)
    with open_threaded((2,), policy=policy) as hierarchy:
        resident(hierarchy, 0, 1)
        policy.closing = hierarchy._hierarchy.top.shut
        with pytest.raises(ClosedError):
            hierarchy.acquire_blocking(0, [1])
        assert_at_rest(hierarchy)
