"""The life of the I/O thread: opening and closing."""

import asyncio
import threading
from concurrent.futures import Future

import pytest
from threaded_stage import (
    PATIENCE,
    HeldDisk,
    acquire,
    acquire_awaitable,
    assert_nothing_left,
    awaited,
    blocked_loop,
    io_threads,
    making,
    open_threaded,
    resident,
    stream,
    stream_awaitable,
    thread,
    wait_queued,
    wait_until,
)

from tieredmoe.errors import BudgetError, ClosedError, ConfigError
from tieredmoe.loop_thread import LoopThread
from tieredmoe.threaded import ThreadedHierarchy

# ---- opening


def test_an_error_of_the_opening_comes_as_it_is():
    error = BudgetError("3 slots are too few")

    async def make():
        raise error

    async def awaited():
        await ThreadedHierarchy.aopen(make)

    for attempt in (lambda: ThreadedHierarchy.open(make), lambda: asyncio.run(awaited())):
        with pytest.raises(BudgetError) as raised:
            attempt()
        assert raised.value is error


def test_a_failed_opening_leaves_no_thread():
    async def make():
        raise BudgetError("3 slots are too few")

    opening = LoopThread(make, name="tieredmoe-io")
    opening.join()
    assert isinstance(opening.opened.exception(), BudgetError)
    assert io_threads() == []


def test_a_cancelled_opening_closes_what_it_has_made():
    making_it, go = threading.Event(), threading.Event()
    made = Future()

    async def make():
        making_it.set()
        await asyncio.to_thread(go.wait)
        core = await making((2, 4))()
        made.set_result(core)
        return core

    async def main():
        opening = asyncio.ensure_future(ThreadedHierarchy.aopen(make))
        await asyncio.to_thread(making_it.wait)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(main())
    assert not made.done()
    threads = io_threads()
    go.set()
    for each in threads:
        each.join(PATIENCE)
    assert made.result(PATIENCE).top.closed
    assert io_threads() == []


def test_a_system_without_threads_is_a_clear_error(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ConfigError, match="refused a thread"):
        open_threaded((2,))


# ---- closing


def test_closing_frees_everything_and_can_be_repeated_from_anywhere():
    hierarchy = open_threaded((2, 4))
    resident(hierarchy, 0, 1)
    lease = hierarchy.acquire_blocking(0, [1])
    for done in [thread(hierarchy.close) for _ in range(3)]:
        done.result(PATIENCE)
    hierarchy.close()
    asyncio.run(hierarchy.aclose())
    assert lease.released
    assert lease.slots == {}
    lease.release()
    assert_nothing_left(hierarchy)
    assert io_threads() == []


@pytest.mark.parametrize("expert", [1, 2])
def test_nothing_is_served_after_the_close(expert):
    hierarchy = open_threaded((4,))
    resident(hierarchy, 0, 1)
    hierarchy.close()
    for ask in (acquire, stream, awaited(acquire_awaitable), awaited(stream_awaitable)):
        with pytest.raises(ClosedError):
            ask(hierarchy, 0, expert)


def test_closing_refuses_who_waits_and_drains_what_is_read():
    disk = HeldDisk()
    hierarchy = open_threaded((2,), disk=disk)
    disk.hold(0, 1)
    lease = hierarchy.acquire_blocking(0, [1, 2])
    disk.wait_started(0, 1)
    asks = (acquire, stream, awaited(acquire_awaitable), awaited(stream_awaitable))
    waiting = [thread(ask, hierarchy, 1, 4) for ask in asks]
    wait_queued(hierarchy, 4)
    waiting += [thread(lease.wait), thread(awaited(lambda lease: lease.ready()), lease)]
    closing = thread(hierarchy.close)
    for done in waiting:
        with pytest.raises(ClosedError):
            done.result(PATIENCE)
    with pytest.raises(ClosedError):
        lease.futures[1].result(PATIENCE)
    assert not closing.done()  # a read is still writing into its memory
    disk.let_go(0, 1)
    closing.result(PATIENCE)
    assert_nothing_left(hierarchy)


def test_closing_ends_a_stream_whose_consumer_is_busy():
    hierarchy = open_threaded((2, 4))
    leases = hierarchy.stream_blocking(0, range(8))
    lease = next(leases)
    hierarchy.close()
    assert lease.released
    with pytest.raises(ClosedError):
        next(leases)
    assert_nothing_left(hierarchy)


def test_a_cancelled_aclose_stops_only_the_wait():
    disk = HeldDisk()

    async def main(hierarchy):
        closing = asyncio.ensure_future(hierarchy.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing

    hierarchy = open_threaded((2,), disk=disk)
    disk.hold(0, 1)
    hierarchy.acquire_blocking(0, [1])
    disk.wait_started(0, 1)
    asyncio.run(main(hierarchy))
    disk.let_go(0, 1)
    hierarchy.close()
    assert_nothing_left(hierarchy)


def test_a_thread_with_the_ident_of_the_one_that_ended_may_close_it_again():
    hierarchy = open_threaded((2,))
    hierarchy.close()
    hierarchy._thread._thread._ident = threading.get_ident()  # as systems give them again
    hierarchy.close()


def test_it_can_be_opened_again_at_once():
    for _ in range(3):
        with open_threaded((2, 4)) as hierarchy:
            hierarchy.acquire_blocking(0, [1, 2])  # closed with reads in flight


def test_an_acquire_posted_to_a_thread_that_ends_is_refused():
    hierarchy = open_threaded((2,))
    with blocked_loop(hierarchy):
        hierarchy._thread.stop()
        waiting = thread(hierarchy.acquire_blocking, 0, [1])
        wait_until(lambda: hierarchy._thread._promises)
    with pytest.raises(ClosedError):
        waiting.result(PATIENCE)
    hierarchy.close()


def test_a_promise_made_after_the_end_fails_at_once():
    hierarchy = open_threaded((2,))
    hierarchy.close()
    for cancellable in (True, False):
        promise = hierarchy._thread.promise(cancellable=cancellable)
        assert isinstance(promise.exception(timeout=0), ClosedError)


def test_the_io_thread_refuses_to_wait_for_itself():
    disk = HeldDisk()

    def callback(_):
        for wait in (hierarchy.close, lambda: hierarchy.acquire_blocking(0, [2])):
            try:
                wait()
            except RuntimeError as error:
                refused.append(str(error))
        done.set()

    refused, done = [], threading.Event()
    with open_threaded((2,), disk=disk) as hierarchy:
        disk.hold(0, 1)
        with hierarchy.acquire_blocking(0, [1]) as lease:
            lease.futures[1].add_done_callback(callback)
            disk.let_go(0, 1)
            assert done.wait(PATIENCE)
        assert ["waits for the I/O thread" in text for text in refused] == [True, True]
