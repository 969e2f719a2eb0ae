"""Hints from other threads and loops: posted, never waited for, and as good as in the loop."""

import asyncio
import threading

import pytest
from threaded_stage import (
    HeldDisk,
    assert_at_rest,
    blocked_loop,
    in_loop,
    making,
    open_threaded,
    resident,
    right,
    wait_until,
)

from tieredmoe.errors import ClosedError
from tieredmoe.spec import Priority
from tieredmoe.threaded import ThreadedHierarchy


def landed(hierarchy, n):
    wait_until(lambda: in_loop(hierarchy, lambda core: core.top.residency.ring.n_ready) == n)


@pytest.mark.parametrize("slots", [(8,), (2, 8)])
def test_what_a_thread_has_prefetched_is_a_full_hit_without_the_io_thread(slots):
    with open_threaded(slots) as hierarchy:
        assert hierarchy.prefetch(0, [1, 2]) == 2
        landed(hierarchy, 2)
        assert hierarchy.prefetch(0, [1, 2]) == 0
        with blocked_loop(hierarchy), hierarchy.acquire_blocking(0, [1, 2]) as lease:
            assert right(lease, 1, 2)
        assert hierarchy.stats().prefetch.useful == 2
        assert hierarchy.prefetch_report().by_layer[0].useful == 2
        assert_at_rest(hierarchy)


def test_a_hint_does_not_wait_for_the_io_thread():
    with open_threaded((8,)) as hierarchy:
        with blocked_loop(hierarchy):
            assert hierarchy.prefetch(0, [1, 2], priority=Priority.CERTAIN) == 2
            hierarchy.routed(0, [1, 2])
        resident(hierarchy, 0, 1, 2)
        stats = hierarchy.stats().prefetch
        assert stats.useful + stats.late == 2


def test_a_routing_reaches_the_tiers_before_what_is_asked_after_it():
    disk = HeldDisk()
    with open_threaded((8,), disk=disk) as hierarchy:
        hierarchy.prefetch(0, [1, 2])
        landed(hierarchy, 2)
        hierarchy.routed(0, [1])
        resident(hierarchy, 0, 1)
        hierarchy.prefetch(0, [3, 4])
        landed(hierarchy, 2)
        assert in_loop(hierarchy, lambda core: core.stats().prefetch.wasted) == 1


def test_hints_of_many_threads_end_with_nothing_left():
    with open_threaded((2, 8)) as hierarchy:

        def guess(first):
            for i in range(30):
                hierarchy.prefetch(i % 2, [(first + i) % 8, (first + 3 * i) % 8])
                if i % 5 == 0:
                    hierarchy.routed(i % 2, [first])
                resident(hierarchy, i % 2, (first + i) % 8)

        threads = [threading.Thread(target=guess, args=(i,)) for i in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        wait_until(lambda: in_loop(hierarchy, lambda core: core.top.transfers.n) == 0)
        in_loop(hierarchy, lambda core: core.check())
        report = hierarchy.prefetch_report().by_layer
        assert sum(counts.issued for counts in report.values()) > 0


def test_wrong_hints_are_refused_where_they_are_made():
    with open_threaded((8,)) as hierarchy:
        with pytest.raises(ValueError, match="acquire"):
            hierarchy.prefetch(0, [1], priority=Priority.DEMAND)
        with pytest.raises(ValueError, match="no expert"):
            hierarchy.prefetch(0, [99])
        with pytest.raises(ValueError, match="layer 9"):
            hierarchy.routed(9, [1])


def test_a_hint_to_a_closed_hierarchy_changes_nothing():
    async def main():
        async with await ThreadedHierarchy.aopen(making((8,))) as hierarchy:
            hierarchy.prefetch(0, [1])
        assert hierarchy.prefetch(0, [2]) in (0, 1)
        hierarchy.routed(0, [2])
        with pytest.raises(ClosedError):
            hierarchy.acquire_blocking(0, [2])

    asyncio.run(main())
