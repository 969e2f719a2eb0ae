"""Cancelling, dropping, draining and closing: no read is lost and no writer is left."""

import asyncio
import errno
import gc
import os
import random

import pytest
from gated import (
    N_PAGES,
    PAGE,
    POISON,
    GatedDisk,
    assert_landed,
    make,
    op,
    opened,
    run,
    turn_the_loop,
)

from tieredmoe.errors import ClosedError


def test_cancelling_a_future_does_not_stop_its_read(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, n_threads=2) as backend:
            ops = [op(memory, page) for page in range(4)]
            futures = backend.submit(ops)
            await disk.wait_entered(2)
            for future in futures:
                future.cancel()
            disk.let_go(4)
            await backend.drain()
            for each in ops:
                assert_landed(each)
            assert backend.stats().reads == 4

    run(scenario)


def test_a_storm_of_cancellations_loses_no_read(path, memory):
    choose = random.Random(7)

    async def scenario():
        async with opened(path, window_pages=4) as backend:
            futures = []
            for i in range(400):
                futures += backend.submit([op(memory, i % N_PAGES, at=i)])
                choose.choice(futures).cancel()
                if i % 10 == 0:
                    await asyncio.wait([choose.choice(futures)])
            await backend.drain()
            assert all(future.done() for future in futures)
            assert backend.stats().reads == 400
            for i in range(400):
                assert_landed(op(memory, i % N_PAGES, at=i))

    run(scenario)


def test_a_queued_read_can_be_dropped_and_never_starts(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, n_threads=2) as backend:
            started, _, queued, other = backend.submit([op(memory, page) for page in range(4)])
            assert backend.drop(queued)
            assert queued.cancelled()
            assert not backend.drop(queued)
            assert not backend.drop(started)
            disk.let_go(3)
            await asyncio.gather(started, other)
            await backend.drain()
            assert not backend.drop(started)
            assert sorted(disk.offsets) == [0, PAGE, 3 * PAGE]

    run(scenario)


def test_dropping_a_large_read_lets_the_small_one_behind_it_in(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, window_pages=4) as backend:
            sizes = (1, 1, 10, 2)
            large = backend.submit([op(memory, 5, n_pages) for n_pages in sizes])[2]
            await disk.wait_entered(2)
            assert backend.drop(large)
            await disk.wait_entered()
            assert (backend.stats().in_flight, backend.stats().queued) == (3, 0)

    run(scenario)


def test_drain_waits_for_reads_whose_futures_are_cancelled_and_gone(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk) as backend:
            backend.submit([op(memory, 0)])[0].cancel()
            await disk.wait_entered()
            draining = asyncio.create_task(backend.drain())
            await turn_the_loop()
            assert not draining.done()
            disk.let_go(1)
            await draining
            assert disk.in_flight == {}

    run(scenario)


def test_a_cancelled_drain_changes_nothing(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk) as backend:
            futures = backend.submit([op(memory, 0)])
            draining = asyncio.create_task(backend.drain())
            await disk.wait_entered()
            draining.cancel()
            await asyncio.wait([draining])
            assert draining.cancelled()
            disk.let_go(1)
            await backend.drain()
            assert futures[0].done()

    run(scenario)


def test_close_drops_what_waits_and_drains_what_is_in_flight(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, n_threads=2) as backend:
            futures = backend.submit([op(memory, page) for page in range(5)])
            await disk.wait_entered(2)
            closing = [asyncio.create_task(backend.close()) for _ in range(2)]
            await asyncio.wait(futures[2:])
            assert not any(task.done() for task in closing)
            with pytest.raises(ClosedError):
                backend.submit([op(memory, 0)])
            disk.let_go(2)
            await asyncio.gather(*closing)
            assert [future.exception() is None for future in futures] == [True] * 2 + [False] * 3
            assert {type(future.exception()) for future in futures[2:]} == {ClosedError}
            assert_landed(op(memory, 0))
            assert set(op(memory, 2).target) == {POISON}

    run(scenario)


def test_close_frees_files_and_threads_and_may_be_called_again(path):
    async def scenario():
        async with opened(path) as backend:
            await backend.close()
            await backend.close()
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(backend._files[0].fd)
            assert not any(thread.is_alive() for thread in backend._threads)
            assert repr(backend).startswith("<ThreadsBackend threads closed, 0 in flight")

    run(scenario)


def test_a_cancelled_close_still_frees_everything_when_the_last_read_ends(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk) as backend:
            futures = backend.submit([op(memory, 0)])
            await disk.wait_entered()
            closing = asyncio.create_task(backend.close())
            await turn_the_loop()
            closing.cancel()
            await asyncio.wait([closing])
            assert closing.cancelled()
            disk.let_go(1)
            await asyncio.wait(futures)
            assert not any(thread.is_alive() for thread in backend._threads)

    run(scenario)


def test_a_hundred_shutdowns_in_mid_read_leave_no_writer(path, memory):
    choose = random.Random(3)

    async def shut_down_once():
        disk = GatedDisk()
        async with opened(path, disk, window_pages=6) as backend:
            futures = backend.submit([op(memory, page, 2) for page in range(0, 16, 2)])
            await disk.wait_entered(choose.randrange(1, 4))
            for future in choose.sample(futures, 4):
                future.cancel()
            closing = asyncio.create_task(backend.close())
            await asyncio.to_thread(disk.let_go, choose.randrange(1, 3))
            disk.let_go(100)
            await closing
            assert disk.in_flight == {}
            # From here on the memory is the caller's: a late writer would show.
            memory.view[:] = bytes([POISON]) * memory.nbytes
        assert all(future.done() for future in futures)

    async def scenario():
        for _ in range(100):
            await shut_down_once()
        assert set(memory.view) == {POISON}

    run(scenario)


def test_failures_that_nobody_awaits_are_not_complained_about(path, memory):
    disk = GatedDisk(is_open=True)
    disk.fail_with = {0: OSError(errno.EPERM, "no")}

    async def scenario():
        async with opened(path, disk) as backend:
            backend.submit([op(memory, 0)])
            await backend.drain()
            disk.is_open = False
            backend.submit([op(memory, page, 8) for page in (8, 16, 24, 32)])
        gc.collect()

    run(scenario)


def test_a_loop_that_ends_with_reads_in_flight_takes_no_thread_down(path, memory):
    disk = GatedDisk()

    async def scenario():
        backend = make(path, disk)
        backend.submit([op(memory, 0)])
        await disk.wait_entered()
        return backend

    backend = asyncio.run(scenario())
    disk.let_go(1)
    backend._stop()  # joins the threads; one that had died of the closed loop would be reported
    os.close(backend._files[0].fd)
    assert_landed(op(memory, 0))
