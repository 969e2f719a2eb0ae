"""The ring's backend against a scripted kernel: order, windows, errors, and whose memory it is."""

import asyncio
import ctypes
import errno
import gc
import os
import weakref

import pytest
from fake_ring import FakeRing, landing, make, opened
from gated import N_PAGES, PAGE, POISON, assert_landed, op, run

from tieredmoe.backends import uring
from tieredmoe.backends.blockread import BlockRead
from tieredmoe.backends.protocol import ReadOp
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.spec import Priority


def pages(offsets):
    return [offset // PAGE for offset in offsets]


def test_an_acquire_is_one_submission_and_one_wake(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring) as backend:
            ops = [op(memory, page) for page in range(12)]
            futures = backend.submit(ops)
            assert ring.n_submits == 1
            await landing(ring)
            assert ring.n_wakes == 1
            assert all(future.done() for future in futures)
            for each in ops:
                assert_landed(each)
            assert backend.stats().submit_ns_max > 0

    run(scenario)


def test_what_exceeds_the_window_follows_with_one_submission_per_wake(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring, window_pages=4) as backend:
            backend.submit([op(memory, page) for page in range(10)])
            assert (len(ring.held), backend.stats().queued) == (4, 6)
            await landing(ring, 3)
            assert (ring.n_submits, len(ring.held), backend.stats().queued) == (2, 4, 3)
            await landing(ring)
            assert (ring.n_submits, len(ring.held), backend.stats().queued) == (3, 3, 0)
            assert pages(ring.submitted) == list(range(10))

    run(scenario)


def test_two_large_reads_are_in_flight_whatever_the_window(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring, window_pages=1) as backend:
            backend.submit([op(memory, i, 10) for i in range(0, 50, 10)])
            assert (len(ring.held), backend.stats().queued) == (2, 3)

    run(scenario)


def test_demand_overtakes_prefetch_and_keeps_its_own_order(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring, window_pages=2) as backend:
            backend.submit([op(memory, page) for page in (0, 1)])
            backend.submit([op(memory, page) for page in (20, 21)], priority=Priority.WARMUP)
            hinted = backend.submit([op(memory, 10), op(memory, 11)], priority=Priority.CERTAIN)
            backend.submit([op(memory, page) for page in (2, 3)])
            backend.promote(hinted[1])
            for _ in range(8):
                await landing(ring, 1)
            assert pages(ring.submitted) == [0, 1, 2, 3, 11, 10, 20, 21]

    run(scenario)


def test_more_reads_than_entries_are_taken_in_turns(path, memory):
    ring = FakeRing(n_entries=4)

    async def scenario():
        async with opened(path, ring, window_pages=1000) as backend:
            futures = backend.submit([op(memory, page % N_PAGES) for page in range(100)])
            assert len(ring.held) == 4
            ring.is_open = True
            ring.let_go()
            await asyncio.gather(*futures)
            assert backend.stats().reads == 100

    run(scenario)


def test_a_full_queue_is_submitted_to_make_room(path, memory):
    ring = FakeRing(n_entries=4)

    async def scenario():
        # 3 parts each: two reads of three entries do not fit the four there are.
        async with opened(path, ring, window_pages=1000, read_splits=3) as backend:
            futures = backend.submit([op(memory, page, 3) for page in (0, 3)])
            assert (ring.n_submits, len(ring.held)) == (2, 6)
            await landing(ring)
            await asyncio.gather(*futures)
            assert_landed(op(memory, 0, 6))

    run(scenario)


def test_a_read_in_parts_is_one_read_that_ends_with_its_last_part(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring, read_splits=3) as backend:
            (future,) = backend.submit([op(memory, 0, 7)])
            assert pages(ring.submitted) == [0, 3, 6]
            assert backend.stats().in_flight == 1
            await landing(ring, 2)
            assert not future.done()
            await landing(ring, 1)
            assert future.done()
            assert_landed(op(memory, 0, 7))
            assert (backend.stats().reads, backend.stats().read_nbytes) == (1, 7 * PAGE)

    run(scenario)


def test_a_failed_part_fails_the_read_once_all_parts_have_ended(path, memory):
    ring = FakeRing()
    ring.answers = {0: [-errno.EPERM]}

    async def scenario():
        async with opened(path, ring, read_splits=2) as backend:
            (future,) = backend.submit([op(memory, 0, 4)])
            await landing(ring, 1)
            assert not future.done()
            await landing(ring, 1)
            with pytest.raises(ReadError) as caught:
                await future
            assert (caught.value.offset, caught.value.nbytes) == (0, 4 * PAGE)
            assert backend.stats().errors == {"EPERM": 1}

    run(scenario)


def test_more_completions_than_a_wake_takes_are_not_forgotten(path, memory):
    ring = FakeRing(n_entries=1000)

    async def scenario():
        async with opened(path, ring, window_pages=1000) as backend:
            futures = backend.submit([op(memory, page % N_PAGES) for page in range(600)])
            ring.let_go()
            done = []
            while not all(future.done() for future in futures):
                await asyncio.sleep(0)
                done.append(sum(future.done() for future in futures))
            assert max(b - a for a, b in zip([0, *done], done, strict=False)) == 256

    run(scenario)


@pytest.mark.parametrize(
    ("answers", "offsets", "short_reads", "retries"),
    [
        ([2 * PAGE], [0, 2 * PAGE], 1, 0),
        ([PAGE, PAGE, PAGE], [0, PAGE, 2 * PAGE, 3 * PAGE], 3, 0),
        ([100], [0, 0], 1, 1),
        ([-errno.EINTR, -errno.EAGAIN], [0, 0, 0], 0, 2),
        ([-errno.EIO], [0, 0], 0, 1),
    ],
)
def test_what_threads_would_mend_is_mended_here(
    path, memory, answers, offsets, short_reads, retries
):
    ring = FakeRing(is_open=True)
    ring.answers = {0: answers[:1]} | {(i + 1) * PAGE: [a] for i, a in enumerate(answers[1:])}
    if answers[0] < 0:
        ring.answers = {0: list(answers)}

    async def scenario():
        async with opened(path, ring) as backend:
            await backend.submit([op(memory, 0, 4)])[0]
            assert_landed(op(memory, 0, 4))
            assert ring.submitted == offsets
            stats = backend.stats()
            assert (stats.short_reads, stats.retries) == (short_reads, retries)

    run(scenario)


def test_a_block_longer_than_one_read_can_be_is_continued(path, memory, monkeypatch):
    monkeypatch.setattr(uring, "READ_NBYTES_MAX", 2 * PAGE)
    ring = FakeRing(is_open=True)

    async def scenario():
        async with opened(path, ring) as backend:
            await backend.submit([op(memory, 0, 5)])[0]
            assert_landed(op(memory, 0, 5))
            assert pages(ring.submitted) == [0, 2, 4]

    run(scenario)


def test_a_bug_in_handling_a_completion_reaches_its_future_alone(path, memory, monkeypatch):
    ring = FakeRing(is_open=True)
    ring.answers = {0: [-errno.EIO]}

    def broken(block, code, *, fd):
        raise TypeError("a bug")

    async def scenario():
        async with opened(path, ring) as backend:
            monkeypatch.setattr(BlockRead, "failed", broken)
            bad, good = backend.submit([op(memory, 0), op(memory, 1)])
            with pytest.raises(TypeError, match="a bug"):
                await bad
            await good
            assert backend.stats().errors == {"TypeError": 1}

    run(scenario)


@pytest.mark.parametrize(
    ("code", "n_reads"),
    [(errno.EIO, 2), (errno.EINTR, 4), (errno.EINVAL, 1), (errno.EBADF, 2), (errno.ENOMEM, 1)],
)
def test_what_stays_broken_is_one_error_and_the_others_land(path, memory, code, n_reads):
    ring = FakeRing(is_open=True)
    ring.answers = {0: [-code] * 10}

    async def scenario():
        async with opened(path, ring) as backend:
            bad, good = backend.submit([op(memory, 0), op(memory, 1)])
            with pytest.raises(ReadError) as caught:
                await bad
            await good
            assert (caught.value.path, caught.value.errno) == (path, code)
            assert ring.submitted.count(0) == n_reads
            assert backend.stats().errors == {errno.errorcode[code]: 1}

    run(scenario)


def test_a_lost_descriptor_is_replaced_for_all_reads_that_met_it(path, memory):
    ring = FakeRing(is_open=True)
    ring.answers = {0: [-errno.EBADF], PAGE: [-errno.ESTALE]}

    async def scenario():
        async with opened(path, ring) as backend:
            await asyncio.gather(*backend.submit([op(memory, 0), op(memory, 1)]))
            assert_landed(op(memory, 0, 2))
            assert backend.stats().retries == 2

    run(scenario)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EBUSY])
def test_a_submission_that_is_refused_for_now_is_tried_again(path, memory, code):
    ring = FakeRing()
    ring.refusals = [code, code]

    async def scenario():
        async with opened(path, ring) as backend:
            futures = backend.submit([op(memory, page) for page in range(4)])
            assert (ring.n_submits, len(ring.held)) == (3, 4)
            await landing(ring)
            await asyncio.gather(*futures)
            assert backend.stats().retries == 2

    run(scenario)


def test_a_submission_taken_in_part_is_continued(path, memory):
    ring = FakeRing()
    ring.takes = [1, 2]

    async def scenario():
        async with opened(path, ring) as backend:
            backend.submit([op(memory, page) for page in range(5)])
            assert (ring.n_submits, pages(ring.submitted)) == (3, [0, 1, 2, 3, 4])

    run(scenario)


def test_no_memory_halves_the_window(path, memory):
    ring = FakeRing()
    ring.refusals = [errno.ENOMEM]

    async def scenario():
        async with opened(path, ring, window_pages=8) as backend:
            backend.submit([op(memory, page) for page in range(20)])
            await landing(ring)
            assert len(ring.held) == 4

    run(scenario)


def test_completions_in_the_way_are_taken_before_the_next_try(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring, window_pages=16) as backend:
            first = backend.submit([op(memory, page) for page in range(4)])
            ring.let_go()
            ring.refusals = [errno.EBUSY]
            second = backend.submit([op(memory, 5)])
            assert all(future.done() for future in first)
            assert (ring.n_submits, len(ring.held)) == (3, 1)
            await landing(ring)
            await landing(ring)
            await asyncio.gather(*second)

    run(scenario)


def test_a_refusal_waits_for_reads_in_flight_to_try_again(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring) as backend:
            backend.submit([op(memory, 0)])
            ring.refusals = [errno.EAGAIN] * 4
            (future,) = backend.submit([op(memory, 1)])
            assert (ring.n_unsubmitted, future.done()) == (1, False)
            await landing(ring)
            await landing(ring)
            await future
            assert_landed(op(memory, 1))

    run(scenario)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINVAL])
def test_a_refusal_that_stays_fails_the_reads_and_takes_back_their_memory(path, memory, code):
    ring = FakeRing()
    ring.refusals = [code] * 100

    async def scenario():
        async with opened(path, ring, window_pages=4) as backend:
            futures = backend.submit([op(memory, page) for page in range(10)])
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert {type(result) for result in results} == {ReadError}
            assert {result.errno for result in results} == {code}
            assert (ring.n_unsubmitted, ring.held) == (0, {})
            stats = backend.stats()
            assert (stats.in_flight, stats.queued) == (0, 0)
            ring.refusals = []
            (future,) = backend.submit([op(memory, 5)])
            await landing(ring)
            await future
        assert set(op(memory, 0).target) == {POISON}

    run(scenario)


def test_memory_is_kept_until_its_completion_whatever_becomes_of_the_future(path):
    ring = FakeRing()

    class Memory(bytearray):
        pass

    async def scenario():
        async with opened(path, ring) as backend:
            target = Memory(2 * PAGE)
            alive = weakref.ref(target)
            view = memoryview(target)
            start = -address_of(view) % PAGE
            page = view[start : start + PAGE]
            (future,) = backend.submit([ReadOp(0, 0, page, address_of(page))])
            future.cancel()
            page.release()
            view.release()
            del target, future, view, page
            gc.collect()
            assert alive() is not None
            await landing(ring)
            await backend.drain()
            gc.collect()
            assert alive() is None

    run(scenario)


def address_of(view):
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_an_address_that_is_not_the_targets_is_refused(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring) as backend:
            good = op(memory, 0)
            lie = ReadOp(0, 0, memory.view[:PAGE], memory.address + PAGE)
            with pytest.raises(ValueError, match="the address is not that of the target"):
                backend.submit([good, lie])
            assert (ring.n_submits, backend.stats().queued) == (0, 0)

    run(scenario)


def test_a_forked_child_leaves_the_completions_to_its_parent(path, memory, monkeypatch):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring) as backend:
            (future,) = backend.submit([op(memory, 0)])
            ring.let_go()
            with monkeypatch.context() as child:
                child.setattr(os, "getpid", lambda: backend._pid + 1)
                backend._on_wake()
                assert (ring.n_wakes, len(ring.done)) == (0, 1)
            await future

    run(scenario)


def test_close_drops_what_waits_and_keeps_the_ring_until_the_last_completion(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring, window_pages=2) as backend:
            futures = backend.submit([op(memory, page) for page in range(5)])
            closing = [asyncio.create_task(backend.close()) for _ in range(2)]
            await asyncio.wait(futures[2:])
            assert {type(future.exception()) for future in futures[2:]} == {ClosedError}
            with pytest.raises(ClosedError):
                backend.submit([op(memory, 0)])
            await landing(ring, 1)
            assert not ring.closed
            assert not any(task.done() for task in closing)
            await landing(ring, 1)
            await asyncio.gather(*closing)
            assert ring.closed
            assert [future.exception() for future in futures[:2]] == [None, None]

    run(scenario)


def test_a_cancelled_close_still_frees_everything_after_the_last_completion(path, memory):
    ring = FakeRing()

    async def scenario():
        backend = make(path, ring)
        backend.submit([op(memory, 0)])
        closing = asyncio.create_task(backend.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        assert not ring.closed
        await landing(ring)
        assert ring.closed
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(backend._files[0].fd)
        await backend.close()

    run(scenario)


def test_dropping_the_last_waiting_read_ends_the_drain(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring, window_pages=2) as backend:
            futures = backend.submit([op(memory, page) for page in range(3)])
            draining = asyncio.create_task(backend.drain())
            await landing(ring, 0)
            assert backend.drop(futures[2])
            assert not backend.drop(futures[0])
            await landing(ring)
            await draining

    run(scenario)


def test_it_says_what_it_is_doing(path, memory):
    ring = FakeRing()

    async def scenario():
        async with opened(path, ring, window_pages=2) as backend:
            backend.submit([op(memory, page) for page in range(3)])
            assert repr(backend) == "<UringBackend 2 in flight (8 KiB), 1 queued>"
            closing = asyncio.create_task(backend.close())
            await asyncio.sleep(0)
            assert repr(backend) == "<UringBackend closed, 2 in flight (8 KiB), 0 queued>"
            await landing(ring)
            await closing

    run(scenario)
