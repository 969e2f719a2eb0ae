"""Many threads and many loops at once over tiny tiers, interleaved as finely as Python can."""

import asyncio
import contextlib
import random
import sys
import threading
from contextlib import aclosing, closing

import pytest
from threaded_stage import (
    PATIENCE,
    HeldDisk,
    assert_at_rest,
    assert_nothing_left,
    open_threaded,
    resident,
    right,
    thread,
)

from tieredmoe.errors import ClosedError, ExpertLoadError

N_ROUNDS = 60


@pytest.fixture(autouse=True)
def _fine_interleaving():
    """A thread is interrupted every few bytecodes instead of every 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def some(rng, n_max=2):
    return rng.randrange(2), rng.sample(range(8), k=rng.randint(1, n_max))


def run_all(works):
    """Start them together; raise what any of them raises."""
    barrier = threading.Barrier(len(works))

    def run(work):
        barrier.wait(PATIENCE)
        work()

    for done in [thread(run, work) for work in works]:
        done.result(2 * PATIENCE)


def use(lease, experts):
    """The bytes are right, and stay so for as long as the lease is held."""
    for _ in range(3):
        assert right(lease, *experts)


def blocking(hierarchy, seed):
    def work():
        rng = random.Random(seed)
        for _ in range(N_ROUNDS):
            layer, experts = some(rng)
            with hierarchy.acquire_blocking(layer, experts) as lease:
                for expert in lease.as_completed_blocking():
                    use(lease, [expert])
                use(lease, experts)

    return work


def awaiting(hierarchy, seed, n_tasks=3):
    async def one(rng):
        for _ in range(N_ROUNDS // n_tasks):
            layer, experts = some(rng)
            async with hierarchy.acquire(layer, experts) as lease:
                async for expert in lease.as_completed():
                    use(lease, [expert])
                    await asyncio.sleep(0)
                use(lease, experts)

    async def main():
        async with asyncio.TaskGroup() as tasks:
            for i in range(n_tasks):
                tasks.create_task(one(random.Random(seed + i)))

    return lambda: asyncio.run(main())


@pytest.mark.parametrize("slots", [(4,), (2, 3), (12, 1, 2)])
def test_threads_and_loops_get_the_right_bytes_and_exact_counts(slots):
    with open_threaded(slots) as hierarchy:
        works = [blocking(hierarchy, seed) for seed in range(3)]
        works += [awaiting(hierarchy, seed) for seed in (10, 20)]
        run_all(works)
        assert_at_rest(hierarchy)
        stats = hierarchy.stats()
        n_keys = sum(
            len(some(rng)[1])
            for rng, n_rounds in [
                *[(random.Random(seed), N_ROUNDS) for seed in range(3)],
                *[(random.Random(a + i), N_ROUNDS // 3) for a in (10, 20) for i in range(3)],
            ]
            for _ in range(n_rounds)
        )
        assert stats.cache_hits + stats.cache_misses == n_keys
        n_filled = stats.cache_misses - stats.cache_joins
        assert n_filled == stats.resident_experts + stats.cache_evictions
        if len(slots) == 1:
            assert stats.pack_reads == n_filled


def test_hits_and_releases_in_many_threads_leave_the_books_in_order():
    def work(hierarchy, seed):
        rng = random.Random(seed)
        for _ in range(1500):
            with hierarchy.acquire_blocking(0, rng.sample(range(6), k=4)):
                hierarchy.count_executed(0, 4)

    with open_threaded((6,)) as hierarchy:
        resident(hierarchy, 0, *range(6))
        run_all([lambda seed=seed: work(hierarchy, seed) for seed in range(4)])
        assert_at_rest(hierarchy)
        stats = hierarchy.stats()
        assert (stats.cache_hits, stats.cache_misses) == (4 * 1500 * 4, 6)
        assert stats.executed_experts[0] == 4 * 1500 * 4


def test_hits_and_misses_wake_each_other_up_for_ever():
    """Fast leases over all slots, and one who must get some: a lost wake-up would hang here."""

    def hit(hierarchy, stopped):
        while not stopped.is_set():
            with hierarchy.acquire_blocking(0, [1, 2], timeout=PATIENCE) as lease:
                lease.wait(PATIENCE)

    def miss(hierarchy, stopped):
        for i in range(150):
            with hierarchy.acquire_blocking(0, [3 + i % 5], timeout=PATIENCE) as lease:
                lease.wait(PATIENCE)
        stopped.set()

    with open_threaded((2,)) as hierarchy:
        stopped = threading.Event()
        run_all([lambda: hit(hierarchy, stopped)] * 2 + [lambda: miss(hierarchy, stopped)])
        assert_at_rest(hierarchy)


def test_streams_in_threads_and_loops_take_turns():
    def blocking_stream(hierarchy, layer):
        for _ in range(5):
            with closing(hierarchy.stream_blocking(layer, range(8))) as leases:
                seen = [e for lease in leases for e in lease.experts if right(lease)]
            assert sorted(seen) == list(range(8))

    async def awaited_stream(hierarchy, layer):
        for _ in range(5):
            seen = []
            async with aclosing(hierarchy.stream(layer, range(8))) as leases:
                async for lease in leases:
                    use(lease, lease.experts)
                    seen += lease.experts
            assert sorted(seen) == list(range(8))

    with open_threaded((2, 3)) as hierarchy:
        run_all(
            [lambda layer=layer: blocking_stream(hierarchy, layer) for layer in (0, 1)]
            + [
                lambda layer=layer: asyncio.run(awaited_stream(hierarchy, layer))
                for layer in (0, 1)
            ]
        )
        assert_at_rest(hierarchy)


def impatient(hierarchy, seed):
    """A thread that waits for nothing for long, and lets go of things while they are read."""

    def work():
        rng = random.Random(seed)
        for _ in range(N_ROUNDS):
            layer, experts = some(rng)
            timeout = rng.choice([0, 0, 1e-4, PATIENCE])
            try:
                if rng.random() < 0.2:
                    with closing(hierarchy.stream_blocking(layer, range(8), timeout=timeout)) as it:
                        use(next(it), [])
                    continue
                with hierarchy.acquire_blocking(layer, experts, timeout=timeout) as lease:
                    lease.wait(rng.choice([0, 1e-4, PATIENCE]))
                    use(lease, experts)
            except (TimeoutError, ExpertLoadError):
                pass

    return work


def cancelled(hierarchy, seed):
    """A loop whose tasks are cancelled at any moment."""

    async def one(rng):
        layer, experts = some(rng)
        if rng.random() < 0.3:
            async with aclosing(hierarchy.stream(layer, range(8))) as leases:
                async for lease in leases:
                    use(lease, lease.experts)
            return
        async with hierarchy.acquire(layer, experts) as lease:
            await lease.ready()
            use(lease, experts)

    async def main():
        rng = random.Random(seed)
        for _ in range(N_ROUNDS // 3):
            tasks = [asyncio.ensure_future(one(random.Random(rng.random()))) for _ in range(4)]
            for task in rng.sample(tasks, k=3):
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert outcome is None or isinstance(
                    outcome, (asyncio.CancelledError, ExpertLoadError)
                ), outcome

    return lambda: asyncio.run(main())


@pytest.mark.parametrize("slots", [(4,), (2, 3)])
def test_a_storm_of_cancellations_timeouts_and_errors_leaves_nothing_behind(slots):
    disk = HeldDisk()
    disk.spoil(1, 7)
    with open_threaded(slots, disk=disk) as hierarchy:
        works = [impatient(hierarchy, seed) for seed in range(2)]
        works += [cancelled(hierarchy, seed) for seed in (10, 20)]
        run_all(works)
        assert_at_rest(hierarchy)
        assert not hierarchy._thread._promises
        assert not hierarchy._thread._tasks
        resident(hierarchy, 0, 1)


@pytest.mark.parametrize("seed", range(4))
def test_closing_in_the_middle_of_a_storm_ends_it_for_all(seed):
    hierarchy = open_threaded((2, 3))

    def in_thread(seed):
        rng = random.Random(seed)
        with contextlib.suppress(ClosedError):
            while True:
                layer, experts = some(rng)
                with hierarchy.acquire_blocking(layer, experts) as lease:
                    lease.wait()

    async def in_loop(seed):
        rng = random.Random(seed)
        with contextlib.suppress(ClosedError):
            while True:
                layer, experts = some(rng)
                async with hierarchy.acquire(layer, experts) as lease:
                    await lease.ready()

    def close():
        for i in range(10 * seed):
            with hierarchy.acquire_blocking(0, [i % 8]) as lease:
                lease.wait()
        hierarchy.close()

    run_all(
        [
            lambda: in_thread(1),
            lambda: in_thread(2),
            lambda: asyncio.run(in_loop(3)),
            lambda: asyncio.run(in_loop(4)),
            close,
        ]
    )
    assert_nothing_left(hierarchy)
