import asyncio
import errno
import itertools
import random
import threading

import pytest
from gated import N_PAGES, PAGE, GatedDisk, assert_landed, op, opened, run, turn_the_loop

from tieredmoe.backends import open_backend
from tieredmoe.errors import ConfigError, DirectIOUnavailableError, ReadError
from tieredmoe.spec import Priority


def test_every_byte_lands_in_its_place(path, memory):
    async def scenario():
        async with opened(path) as backend:
            ops = [op(memory, page, 3) for page in range(0, 60, 3)]
            await asyncio.gather(*backend.submit(ops))
            for each in ops:
                assert_landed(each)
            stats = backend.stats()
            assert (stats.reads, stats.read_nbytes) == (20, 60 * PAGE)
            assert (stats.in_flight, stats.queued, stats.errors) == (0, 0, {})

    run(scenario)


def test_a_thousand_reads_may_be_outstanding(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, window_pages=16) as backend:
            ops = [op(memory, i % N_PAGES, at=i % 512) for i in range(512)] * 2
            futures = backend.submit(ops)
            assert backend.stats().queued == len(ops) - 16
            disk.is_open = True
            disk.let_go(16)
            await backend.drain()
            assert all(future.done() for future in futures)
            for each in ops:
                assert_landed(each)

    run(scenario)


def test_the_window_is_never_exceeded(path, memory):
    disk = GatedDisk(is_open=True)
    window_pages = 8

    async def scenario():
        async with opened(path, disk, window_pages=window_pages) as backend:
            sizes = random.Random(1).choices(range(1, 12), k=300)
            await asyncio.gather(*backend.submit([op(memory, 5, n_pages) for n_pages in sizes]))

    run(scenario)
    assert len(disk.window_seen) == 300
    for in_flight in disk.window_seen:
        assert len(in_flight) <= 2 or sum(in_flight) <= window_pages * PAGE


def test_the_window_is_filled(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, window_pages=8) as backend:
            backend.submit([op(memory, i, 2) for i in range(0, 20, 2)])
            await disk.wait_entered(4)
            assert (backend.stats().in_flight, backend.stats().queued) == (4, 6)

    run(scenario)


def test_two_blocks_are_in_flight_even_where_one_fills_the_window(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, window_pages=1) as backend:
            backend.submit([op(memory, i, 10) for i in range(0, 50, 10)])
            await disk.wait_entered(2)
            assert (backend.stats().in_flight, backend.stats().queued) == (2, 3)

    run(scenario)


def test_waiting_reads_start_in_order(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, n_threads=2) as backend:
            backend.submit([op(memory, page) for page in range(6)])
            backend.submit([op(memory, page) for page in range(6, 10)])
            await disk.wait_entered(2)
            for _ in range(8):
                disk.let_go(1)
                await disk.wait_entered()
            assert disk.offsets[2:] == [page * PAGE for page in range(2, 10)]

    run(scenario)


def test_a_busy_loop_does_not_keep_the_next_read_from_starting(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, n_threads=2) as backend:
            backend.submit([op(memory, page) for page in range(6)])
            disk.let_go(4)
            for _ in range(6):
                disk.entered.acquire()  # the loop stands still here

    run(scenario)


def test_one_failed_read_leaves_the_others_alone(path, memory):
    disk = GatedDisk(is_open=True)
    disk.fail_with = {PAGE: OSError(errno.EIO, "broken")}

    async def scenario():
        async with opened(path, disk) as backend:
            ops = [op(memory, page) for page in range(3)]
            results = await asyncio.gather(*backend.submit(ops), return_exceptions=True)
            assert [type(result) for result in results] == [type(None), ReadError, type(None)]
            assert (results[1].path, results[1].errno) == (path, errno.EIO)
            stats = backend.stats()
            assert (stats.reads, stats.retries, stats.errors) == (2, 1, {"EIO": 1})

    run(scenario)


def test_a_read_behind_the_files_end_counts_as_eof(path, memory):
    async def scenario():
        async with opened(path) as backend:
            (future,) = backend.submit([op(memory, N_PAGES - 1, 2)])
            with pytest.raises(ReadError, match="expected 8192 bytes and got 4096"):
                await future
            assert backend.stats().errors == {"eof": 1}

    run(scenario)


def test_a_failure_that_is_no_os_error_reaches_the_future(path, memory):
    disk = GatedDisk(is_open=True)
    disk.fail_with = {0: TypeError("a bug")}

    async def scenario():
        async with opened(path, disk) as backend:
            with pytest.raises(TypeError, match="a bug"):
                await backend.submit([op(memory, 0)])[0]
            await backend.submit([op(memory, 1)])[0]
            assert backend.stats().errors == {"TypeError": 1}

    run(scenario)


def test_threads_that_the_system_refuses_are_one_clear_error(path, monkeypatch):
    starts = itertools.count()
    start = threading.Thread.start

    def refuse_the_third(thread):
        if next(starts) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    async def scenario():
        monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
        with pytest.raises(ConfigError, match="refused 16 reading threads: can't start"):
            open_backend("buffered", [path])
        monkeypatch.undo()
        assert not [t for t in threading.enumerate() if t.name.startswith("tieredmoe-read")]

    run(scenario)


def test_demand_overtakes_prefetch_and_keeps_its_own_order(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, n_threads=2) as backend:
            backend.submit([op(memory, page) for page in (0, 1)])
            backend.submit([op(memory, page) for page in (20, 21)], priority=Priority.WARMUP)
            hinted = backend.submit([op(memory, 10), op(memory, 11)], priority=Priority.CERTAIN)
            backend.submit([op(memory, page) for page in (2, 3)])
            backend.promote(hinted[1])
            await disk.wait_entered(2)
            for _ in range(3):
                disk.let_go(1)
                await disk.wait_entered()
            # Of two threads one is left to demand, so prefetch goes on one by one.
            disk.is_open = True
            disk.let_go(2)
            await backend.drain()
            assert disk.offsets[2:] == [page * PAGE for page in (2, 3, 11, 10, 20, 21)]

    run(scenario)


def test_prefetch_leaves_threads_to_demand(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, n_threads=4, record_nbytes=1 << 20) as backend:
            backend.submit([op(memory, page) for page in range(8)], priority=Priority.CERTAIN)
            await disk.wait_entered(3)
            assert (backend.stats().in_flight, backend.stats().queued) == (3, 5)
            backend.submit([op(memory, 20)])
            await disk.wait_entered()
            assert disk.offsets[3] == 20 * PAGE

    run(scenario)


def test_the_parts_of_a_block_are_read_at_the_same_time(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk, read_splits=3) as backend:
            (future,) = backend.submit([op(memory, 0, 7)])
            await disk.wait_entered(3)
            assert sorted(disk.offsets) == [0, 3 * PAGE, 6 * PAGE]
            assert backend.stats().in_flight == 1
            disk.let_go(2)
            await turn_the_loop()
            assert not future.done()
            disk.let_go(1)
            await future
            assert_landed(op(memory, 0, 7))
            assert (backend.stats().reads, backend.stats().read_nbytes) == (1, 7 * PAGE)

    run(scenario)


def test_a_failed_part_fails_the_read_once_all_parts_have_ended(path, memory):
    disk = GatedDisk()
    disk.fail_with = {0: OSError(errno.EPERM, "no")}

    async def scenario():
        async with opened(path, disk, read_splits=2) as backend:
            (future,) = backend.submit([op(memory, 0, 4)])
            await disk.wait_entered(2)
            disk.let_go(1)
            await turn_the_loop()
            assert not future.done()
            disk.let_go(1)
            with pytest.raises(ReadError) as caught:
                await future
            assert (caught.value.offset, caught.value.nbytes) == (0, 4 * PAGE)
            assert backend.stats().errors == {"EPERM": 1}

    run(scenario)


@pytest.mark.parametrize("name", ["auto", "threads", "buffered"])
def test_records_of_an_odd_number_of_pages_are_read_as_the_backend_says(path, memory, name):
    async def scenario():
        try:
            backend = open_backend(name, [path])
        except DirectIOUnavailableError as error:
            pytest.skip(str(error))
        ops = [op(memory, page, 7) for page in range(0, 56, 7)]
        await asyncio.gather(*backend.submit(ops))
        for each in ops:
            assert_landed(each)
        assert backend.info.direct == (name != "buffered" and backend.info.reason != "tmpfs")
        await backend.close()

    run(scenario)


def test_the_caller_may_release_his_view_at_once(path, memory):
    disk = GatedDisk()

    async def scenario():
        async with opened(path, disk) as backend:
            read = op(memory, 3)
            (future,) = backend.submit([read])
            read.target.release()
            disk.let_go(1)
            await future
            assert_landed(op(memory, 3))

    run(scenario)
