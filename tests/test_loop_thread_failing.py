"""The end of the I/O thread by an error, in a fork, and at the interpreter's exit."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from threaded_stage import (
    PATIENCE,
    HeldDisk,
    acquire,
    acquire_awaitable,
    assert_at_rest,
    assert_nothing_left,
    awaited,
    in_loop,
    io_threads,
    making,
    open_threaded,
    resident,
    stream,
    stream_awaitable,
    thread,
    wait_queued,
)

from tieredmoe.errors import ClosedError
from tieredmoe.loop_thread import LoopThread
from tieredmoe.threaded import ThreadedHierarchy

# ---- the end by an error


class Surprise(BaseException):
    """What no handler expects."""


@pytest.mark.parametrize("error", [Surprise("boo"), ValueError("boo"), SystemExit(3)])
def test_when_the_thread_dies_nobody_hangs_and_everybody_is_told(error):
    disk = HeldDisk()

    def fail():
        raise error

    hierarchy = open_threaded((2,), disk=disk)
    disk.hold(0, 1)
    lease = hierarchy.acquire_blocking(0, [1, 2])
    disk.wait_started(0, 1)
    asks = (acquire, stream, awaited(acquire_awaitable), awaited(stream_awaitable))
    waiting = [thread(ask, hierarchy, 1, 4) for ask in asks]
    wait_queued(hierarchy, 4)
    landing = [thread(lease.wait), thread(awaited(lambda lease: lease.ready()), lease)]
    hierarchy._thread.post(fail)
    for done in waiting:  # before the read has ended
        with pytest.raises(ClosedError, match=r"ended by an error: .*boo|SystemExit"):
            done.result(PATIENCE)
    for done in landing:
        with pytest.raises(ClosedError):
            done.result(PATIENCE)
    with pytest.raises(ClosedError, match="ended by an error"):
        lease.futures[1].result(PATIENCE)
    for call in (
        lambda: hierarchy.acquire_blocking(0, [2]),
        lambda: hierarchy.acquire(0, [2]),
        lambda: hierarchy.stream_blocking(0, [2]),
        lambda: hierarchy.stream(0, [2]),
        hierarchy.stats,
    ):
        with pytest.raises(ClosedError, match="ended by an error") as raised:
            call()
        assert raised.value.__cause__ is error
    lease.release()
    disk.let_go(0, 1)
    for _ in range(2):
        with pytest.raises(ClosedError, match="ended by an error"):
            hierarchy.close()
    with pytest.raises(ClosedError, match="ended by an error"):
        asyncio.run(hierarchy.aclose())
    assert_nothing_left(hierarchy)
    assert io_threads() == []


def test_an_error_of_the_closing_reaches_who_closes(monkeypatch):
    async def fail():
        await close()
        raise OSError("no such file system")

    hierarchy = open_threaded((2,))
    source = hierarchy._hierarchy.top.source
    close = source.close
    monkeypatch.setattr(source, "close", fail)
    with pytest.raises(ClosedError, match="no such file system"):
        hierarchy.close()
    assert io_threads() == []


def test_what_is_no_failure_of_ours_is_left_to_asyncio(caplog):
    def remark(_):
        context = {"message": "a remark", "exception": ValueError("never retrieved")}
        asyncio.get_running_loop().call_exception_handler(context)

    with open_threaded((2,)) as hierarchy:
        in_loop(hierarchy, remark)
        resident(hierarchy, 0, 1)
        assert_at_rest(hierarchy)
    assert "a remark" in caplog.text


class Nothing:
    """A resource that takes nothing and frees nothing."""

    async def close(self):
        pass


def test_an_error_of_the_winding_down_reaches_who_closes():
    async def make():
        return Nothing()

    async def fail():
        raise OSError("a generator will not end")

    thread = LoopThread(make, name="tieredmoe-io")
    thread.opened.result(PATIENCE)
    thread._loop.shutdown_asyncgens = fail
    with pytest.raises(ClosedError, match="will not end"):
        thread.join()
    assert thread._loop.is_closed()
    assert io_threads() == []


def test_an_error_in_the_loop_while_it_opens_closes_what_is_made_then():
    go = threading.Event()
    made = Future()

    async def make():
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.to_thread(go.wait)
        made.set_result(await making((2,))())
        return made.result()

    def fail():
        raise ValueError("in a callback")

    with pytest.raises(ValueError, match="in a callback"):
        ThreadedHierarchy.open(make)
    threads = io_threads()
    go.set()
    for each in threads:
        each.join(PATIENCE)
    assert made.result(PATIENCE).top.closed
    assert io_threads() == []


# ---- other processes


def run_script(script):
    """Run ``script`` with the stage at hand in an interpreter of its own."""
    prelude = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path.cwd())!r}]\n"
    prelude += "import os, threading\nfrom pathlib import Path\nfrom threaded_stage import *\n"
    prelude += "from tieredmoe.errors import ClosedError\n"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{prelude}{script}"],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )


FORK = """
disk = HeldDisk()
hierarchy = open_threaded((4,), disk=disk)
resident(hierarchy, 0, 1)
lease = hierarchy.acquire_blocking(0, [1])
disk.hold(0, 5)
flying = hierarchy.acquire_blocking(0, [5])
hierarchy._hierarchy.top.residency._mutex.acquire()  # some thread is in it when another forks
if os.fork() == 0:
    touched = []
    hierarchy._thread._loop.call_soon_threadsafe = lambda *args: touched.append(args)
    refused = 0
    for call in (
        lambda: hierarchy.acquire_blocking(0, [1]),
        lambda: hierarchy.acquire(0, [2]),
        lambda: hierarchy.stream_blocking(0, [2]),
        lambda: hierarchy.stream(0, [2]),
        hierarchy.stats,
    ):
        try:
            call()
        except ClosedError as error:
            refused += "fork" in str(error)
    for held in (lease, flying):
        held.release()
    hierarchy.close()
    os._exit(99 if touched else refused)
hierarchy._hierarchy.top.residency._mutex.release()
print(os.waitstatus_to_exitcode(os.wait()[1]))
print(right(lease))
lease.release()
disk.let_go(0, 5)
flying.wait()
flying.release()
resident(hierarchy, 0, 2, 3)  # the child has left our descriptors alone
hierarchy.close()
print("closed")
"""


def test_a_fork_of_the_process_is_told_and_disturbs_nothing():
    child = run_script(FORK)
    assert child.stdout.split() == ["5", "True", "closed"]
    assert child.stderr == ""


FORGOTTEN = """
disk = HeldDisk()
disk.hold(0, 1)
hierarchy = open_threaded((2,), disk=disk)
lease = hierarchy.acquire_blocking(0, [1, 2])
disk.wait_started(0, 1)
print("leaving")
"""


def test_the_interpreter_ends_with_a_hierarchy_left_open_and_a_read_that_never_ends():
    child = run_script(FORGOTTEN)
    assert (child.stdout, child.stderr, child.returncode) == ("leaving\n", "", 0)
