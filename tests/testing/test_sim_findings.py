"""Every way in which a simulated run must not end quietly."""

import asyncio
import gc
import weakref

import pytest

from tieredmoe.testing.loop import (
    SimCallbackError,
    SimDeadlock,
    SimError,
    SimLeakError,
    SimLoop,
    SimStepLimitError,
    sim_run,
)


def now():
    return asyncio.get_running_loop().time()


async def forever():
    await asyncio.get_running_loop().create_future()


async def answer():
    return 42


# ---- hangs


def test_a_hang_is_an_error_that_names_tasks_and_places():
    async def inner(future):
        await future

    async def stream():
        yield 1
        await asyncio.Event().wait()

    async def reader():
        async for _ in stream():
            pass

    async def main():
        async with asyncio.TaskGroup() as group:
            group.create_task(inner(asyncio.get_running_loop().create_future()), name="alice")
            group.create_task(reader(), name="bobby")

    with pytest.raises(SimDeadlock) as caught:
        sim_run(main())
    alice, bob, outermost = str(caught.value).splitlines()[1:]
    assert "3 tasks pending" in str(caught.value)
    assert alice.startswith("  alice at test_sim_findings.py:")
    assert "inner, on <Future pending" in alice
    assert bob.startswith("  bobby at locks.py:")
    assert "stream < " in bob
    assert "reader, on <Future pending" in bob
    assert "main" in outermost


def test_two_locks_taken_crosswise_are_found_at_once():
    async def take(first, second):
        async with first:
            await asyncio.sleep(1)
            async with second:
                pass

    async def main():
        a, b = asyncio.Lock(), asyncio.Lock()
        await asyncio.gather(take(a, b), take(b, a))

    with pytest.raises(SimDeadlock, match="at t=1 s; 3 tasks pending"):
        sim_run(main())


def test_tasks_of_a_hung_program_are_cancelled_before_the_error_arrives():
    cancelled = []

    async def main():
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.append("main")
            raise

    with pytest.raises(SimDeadlock):
        sim_run(main())
    assert cancelled == ["main"]


def test_a_task_that_hangs_again_when_cancelled_is_noted_on_the_first_error():
    async def main():
        try:
            await forever()
        finally:
            await forever()

    with pytest.raises(SimDeadlock) as caught:
        sim_run(main())
    assert any("SimDeadlock" in note for note in caught.value.__notes__)


def test_spinning_is_an_error_too():
    async def main():
        while True:  # noqa: ASYNC110 (the bug)
            await asyncio.sleep(0)

    with pytest.raises(SimStepLimitError, match="no end after 1000 steps"):
        sim_run(main(), max_steps=1000)


# ---- what must not be lost


def test_the_result_of_main_is_returned_and_its_exception_raised():
    async def fail():
        raise KeyError("gone")

    assert sim_run(answer()) == 42
    with pytest.raises(KeyError, match="gone"):
        sim_run(fail())


def test_an_exception_in_a_callback_ends_the_run_at_that_step():
    async def main():
        asyncio.get_running_loop().call_later(1, lambda: 1 / 0)
        await asyncio.sleep(1000)

    loop = SimLoop()
    with pytest.raises(SimCallbackError, match="Exception in callback") as caught:
        loop.run(main())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert loop.time() == 1


@pytest.mark.parametrize("in_cycle", [False, True])
def test_an_exception_that_nobody_fetched_fails_the_run(in_cycle):
    async def main():
        future = asyncio.get_running_loop().create_future()
        future.set_exception(ValueError("lost"))
        if in_cycle:
            holder = [future]
            holder.append(holder)

    with pytest.raises(SimCallbackError, match="never retrieved") as caught:
        sim_run(main())
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_run_without_a_collection_leaves_cycles_to_the_next():
    async def main():
        future = asyncio.get_running_loop().create_future()
        future.set_exception(ValueError("lost"))
        holder = [future]
        holder.append(holder)
        return weakref.ref(future)

    left = sim_run(main(), collect_garbage=False)()
    assert left is not None, "something has collected it"
    assert str(left.exception()) == "lost"  # fetched, so that whoever collects it stays quiet


def test_a_task_that_failed_unseen_fails_the_run():
    async def fail():
        raise ValueError("lost")

    async def main():
        task = asyncio.create_task(fail())
        await asyncio.sleep(0)
        del task
        await asyncio.sleep(1)

    with pytest.raises(SimCallbackError, match="never retrieved"):
        sim_run(main())


def test_tasks_that_outlive_main_are_leaks():
    async def main():
        asyncio.create_task(forever(), name="stray")  # noqa: RUF006 (the leak)
        await asyncio.sleep(0)
        return 42

    with pytest.raises(SimLeakError, match=r"1 tasks pending\n  stray at .* in forever"):
        sim_run(main())
    assert sim_run(main(), allow_leaks=True) == 42


def test_a_leaked_task_that_fails_when_cancelled_is_heard():
    async def stubborn():
        try:
            await forever()
        finally:
            raise ValueError("in the way")

    async def main():
        asyncio.create_task(stubborn())  # noqa: RUF006 (the leak)
        await asyncio.sleep(0)

    with pytest.raises(SimCallbackError, match="while it was cancelled") as caught:
        sim_run(main(), allow_leaks=True)
    assert isinstance(caught.value.__cause__, ValueError)


def test_asynchronous_generators_are_closed():
    closed = []

    async def numbers():
        try:
            yield 1
        finally:
            await asyncio.sleep(1)
            closed.append(True)

    kept = []

    async def main():
        kept.append(numbers())
        await anext(kept[0])

    sim_run(main())
    assert closed == [True]


def test_a_run_leaves_no_running_loop_and_its_own_is_closed():
    loop = SimLoop()
    loop.run(answer())
    assert loop.is_closed()
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_a_run_inside_a_running_loop_is_refused():
    async def main():
        with pytest.raises(RuntimeError, match="inside a running event loop"):
            sim_run(answer())

    asyncio.run(main())


def test_the_collector_is_as_it_was():
    gc.unfreeze()
    sim_run(answer())
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        sim_run(answer())
        assert gc.get_freeze_count() >= frozen - 100  # objects that died since
    finally:
        gc.unfreeze()


def test_every_finding_is_a_failed_assertion():
    for finding in (SimDeadlock, SimStepLimitError, SimLeakError, SimCallbackError):
        assert issubclass(finding, SimError)
        assert issubclass(finding, AssertionError)
