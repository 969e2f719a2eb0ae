"""Virtual time and steps."""

import asyncio
import threading

import pytest

from tieredmoe.testing.loop import (
    SimLoop,
    sim_run,
)


def now():
    return asyncio.get_running_loop().time()


async def forever():
    await asyncio.get_running_loop().create_future()


async def answer():
    return 42


# ---- time


def test_a_year_of_sleep_takes_two_callbacks_more():
    async def main():
        loop = asyncio.get_running_loop()
        before = loop.steps
        await asyncio.sleep(365 * 86400)
        return loop.time(), loop.steps - before

    assert sim_run(main()) == (365 * 86400, 2)


def test_sleepers_wake_in_order_of_their_times():
    async def main():
        woken = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            woken.append((seconds, now()))

        async with asyncio.TaskGroup() as group:
            for seconds in (3, 1, 2, 0.5):
                group.create_task(sleeper(seconds))
        return woken

    assert sim_run(main()) == [(0.5, 0.5), (1, 1), (2, 2), (3, 3)]


def test_timers_of_one_time_run_in_the_order_in_which_they_were_set():
    async def main():
        ran = []
        for i in range(100):
            asyncio.get_running_loop().call_at(1.0, ran.append, i)
        await asyncio.sleep(2)
        return ran

    assert sim_run(main()) == list(range(100))


def test_a_timer_in_the_past_does_not_turn_time_back():
    async def main():
        await asyncio.sleep(5)
        loop = asyncio.get_running_loop()
        fired = loop.create_future()
        loop.call_at(1.0, lambda: fired.set_result(loop.time()))
        return await fired

    assert sim_run(main()) == 5.0


def test_ready_callbacks_run_first_in_first_out():
    async def main():
        ran = []
        for i in range(10):
            asyncio.get_running_loop().call_soon(ran.append, i)
        await asyncio.sleep(0)
        return ran

    assert sim_run(main()) == list(range(10))


def test_a_timeout_costs_its_time_and_no_more():
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(forever(), 30)
        async with asyncio.timeout(1000):
            await asyncio.sleep(1)
        return now()

    assert sim_run(main()) == 31


def test_cancelled_timers_are_forgotten_and_the_others_kept():
    async def main():
        loop = asyncio.get_running_loop()
        fired = []
        for i in range(300):
            loop.call_later(i, fired.append, i)
        for _ in range(10_000):
            loop.call_later(1e9, print).cancel()
            assert len(loop._timers) < 700
        await asyncio.sleep(1000)
        assert fired == list(range(300))

    sim_run(main())


def test_a_timer_cancelled_when_it_is_due_does_not_run():
    async def main():
        loop = asyncio.get_running_loop()
        fired = []
        handles = []
        loop.call_at(1, lambda: handles.pop().cancel())
        handles.append(loop.call_at(1, fired.append, "second"))
        await asyncio.sleep(2)
        assert fired == []

    sim_run(main())


def test_the_same_program_makes_the_same_steps():
    async def main():
        loop = asyncio.get_running_loop()
        trace = []
        loop.on_step(lambda: trace.append((loop.steps, loop.time())))
        queue = asyncio.Queue(maxsize=2)

        async def produce():
            for i in range(20):
                await queue.put(i)
                await asyncio.sleep(i % 3)

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            for _ in range(20):
                await queue.get()
        return trace

    assert sim_run(main()) == sim_run(main())


# ---- steps


def test_hooks_run_after_every_step():
    async def main():
        loop = asyncio.get_running_loop()
        seen = []
        loop.on_step(lambda: seen.append(loop.steps))
        for _ in range(5):
            await asyncio.sleep(0)
        return seen

    loop = SimLoop()
    assert loop.run(main())[:6] == [1, 2, 3, 4, 5, 6]


def test_a_failing_hook_ends_the_run():
    class BrokenError(Exception):
        pass

    steps = []

    def check():
        steps.append(len(steps) + 1)
        if len(steps) == 3:
            raise BrokenError

    async def main():
        for _ in range(10):
            await asyncio.sleep(0)

    with pytest.raises(BrokenError):
        sim_run(main(), on_step=check)
    assert steps == [1, 2, 3]


def test_an_action_runs_right_after_its_step():
    async def main(ran):
        loop = asyncio.get_running_loop()
        loop.at_step(loop.steps, lambda: ran.append(("same", loop.steps)))
        for _ in range(6):
            await asyncio.sleep(0)

    loop = SimLoop()
    ran = []
    for step in (3, 0, 2):
        loop.at_step(step, lambda step=step: ran.append((step, loop.steps)))
    loop.at_step(1000, lambda: ran.append("never"))
    loop.run(main(ran))
    assert ran == [(0, 0), ("same", 1), (2, 2), (3, 3)]


def test_an_action_acts_even_where_the_next_step_is_far_away_or_never_comes():
    async def main():
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        loop.at_step(loop.steps, lambda: waiting.set_result(loop.time()))
        return await waiting

    assert sim_run(main()) == 0


def test_an_action_for_a_step_that_is_over_is_refused():
    async def main():
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="step 1 is over, the loop has made 2"):
            asyncio.get_running_loop().at_step(1, print)

    sim_run(main())


def test_cancelling_at_every_step_reaches_every_await():
    """As harnesses use it: an undisturbed run gives the number of steps, then one run for each."""
    reached = set()

    async def work():
        try:
            await asyncio.sleep(1)
            reached.add("after the first")
            await asyncio.sleep(1)
            reached.add("after the second")
        except asyncio.CancelledError:
            reached.add("cancelled")
            raise

    async def main(at):
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(work())
        if at is not None:
            loop.at_step(at, task.cancel)
        await asyncio.wait({task})
        return loop.steps, task.cancelled()

    n_steps, _ = sim_run(main(None))
    outcomes = [sim_run(main(at))[1] for at in range(1, n_steps + 1)]
    assert outcomes[0] is True
    assert outcomes[-1] is False
    assert reached == {"after the first", "after the second", "cancelled"}


# ---- what a loop on virtual time has not


def test_threads_are_refused():
    async def main():
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="no threads to run"):
            await asyncio.to_thread(print)
        errors = []

        def call():
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert errors == ["SimLoop runs on virtual time and takes no calls of other threads"]
        ran = []
        loop.call_soon_threadsafe(ran.append, 1)
        await asyncio.sleep(0)
        assert ran == [1]

    sim_run(main())


def test_sockets_are_refused():
    async def main():
        with pytest.raises((NotImplementedError, RuntimeError)):
            await asyncio.open_connection("127.0.0.1", 9)

    sim_run(main())


def test_a_closed_loop_sets_no_timers():
    loop = SimLoop()
    loop.run(answer())
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)


def test_it_runs_under_the_standard_runner_and_in_debug_mode():
    async def main():
        await asyncio.sleep(100)
        return now()

    with asyncio.Runner(loop_factory=SimLoop, debug=True) as runner:
        assert runner.run(main()) == 100
