"""The same short scenario again and again, with something done to it one step later each time."""

import asyncio
from contextlib import aclosing
from itertools import count

import attrs
from stage import MAX_STEPS, SPEC, Stage, place_of, sim_disk, simulate, take
from stage_memory import Memory

from tieredmoe.spec import Priority
from tieredmoe.testing.faults import Fault, FaultPlan
from tieredmoe.testing.loop import SimLoop


@attrs.frozen
class Scenario:
    """``script(stage)`` starts the tasks named in ``cast``; each of them will be cancelled."""

    script: object
    cast: tuple[str, ...]
    slots: tuple[int, ...]
    late: bool = False
    keeps: bool = False
    queue_depth: int = 2
    faults: tuple[tuple[int, int], ...] = ()

    def __str__(self):
        late = " late" if self.late else ""
        keeps = " keeping" if self.keeps else ""
        return f"{self.script.__name__} {self.slots}{late}{keeps}"

    def stage(self, memory=None):
        plan = FaultPlan()
        for layer, expert in self.faults:
            plan.at(0, place_of(layer, expert), Fault("torn"))
        disk = sim_disk(queue_depth=self.queue_depth, faults=plan)
        return Stage(
            self.slots,
            late=self.late,
            disk=disk,
            memory=memory,
            faulty=bool(self.faults),
            prefetch_slots=2,
        )


def cancel_at_every_step(scenario, victim, *, twice=False):
    """Cancel ``victim`` after step n (``twice``: again one step later) for all n; how many."""
    return next(step for step in count(1) if not _cancel_at(scenario, victim, step, twice=twice))


def _cancel_at(scenario, victim, step, *, twice):
    loop = SimLoop(max_steps=MAX_STEPS)
    was_alive = []

    async def main():
        stage = scenario.stage()

        def cancel():
            task = stage.tasks.get(victim)
            was_alive.append(task is None or task.cancel())

        loop.at_step(step, cancel)
        if twice:
            loop.at_step(step + 1, cancel)
        await scenario.script(stage)
        await stage.finish()
        await stage.settle()
        if not (stage.closing or stage.faulty):
            await stage.still_serves()
        if not stage.top.closed:
            await stage.close()
        stage.assert_closed()

    simulate(main(), loop)
    return was_alive and was_alive[0]


def close_at_every_step(scenario, *, cancelled_after=None):
    """Close after step n, for all n until nothing is left to close in on; returns how many.

    With ``cancelled_after`` the close itself is cancelled so many steps later. However it goes,
    when the close has ended no byte may be written any more, and a new hierarchy opens at once in
    the same memory, on the same image.
    """
    return next(
        step for step in count(1) if not _close_at(scenario, step, cancelled_after=cancelled_after)
    )


def _close_at(scenario, step, *, cancelled_after):
    loop = SimLoop(max_steps=MAX_STEPS)
    memory = Memory(sum(scenario.slots))
    was_busy = []

    async def main():
        stage = scenario.stage(memory)

        def close():
            was_busy.append(not stage.tasks or any(not t.done() for t in stage.tasks.values()))
            stage.closing = True
            closing = stage.spawn("closing", stage.hierarchy.close())
            stage.spawn("reopening", reopen_after(closing))

        def cancel():
            stage.tasks["closing"].cancel()

        async def reopen_after(closing):
            await asyncio.wait({closing})
            if not stage.top.closed:  # cancelled before it began
                await stage.hierarchy.close()
            stage.assert_closed()
            memory.poison()
            await serves_again(scenario.stage(memory))

        loop.at_step(step, close)
        if cancelled_after is not None:
            loop.at_step(step + cancelled_after, cancel)
        async with stage.excused():
            await scenario.script(stage)
        await stage.finish()
        if not stage.closing:
            await stage.close()

    simulate(main(), loop)
    return was_busy and was_busy[0]


async def serves_again(stage):
    for layer in SPEC.layers:
        async with stage.excused():
            await take(stage, layer, range(stage.top.residency.n_slots))
    await stage.settle()
    await stage.close()


# ---- the scripts: whoever is not cancelled must be served


async def missing(stage):
    stage.call("caller", take, stage, 0, [0, 1], hold_s=1e-4)


async def hitting(stage):
    async with stage.excused():
        await take(stage, 0, [0, 1])
    stage.call("caller", take, stage, 0, [1, 0], hold_s=1e-4)


async def joining(stage):
    stage.call("first", take, stage, 0, [0, 1])
    stage.call("second", take, stage, 0, [1, 0])


async def queueing(stage):
    n = stage.top.residency.n_slots
    stage.call("holder", take, stage, 0, range(n), hold_s=1e-4)
    stage.call("head", take, stage, 1, range(n), hold_s=1e-4)
    stage.call("tail", take, stage, 1, [n - 1, n])


async def asking_for_more(stage):
    async def hold_and_ask():
        async with stage.hierarchy.acquire(0, [0]) as lease:
            await lease.ready()
            await take(stage, 0, [1])
            await stage.use(lease, [0])

    stage.call("holder", hold_and_ask)
    stage.call("other", take, stage, 1, [0], hold_s=4e-4)
    stage.call("queued", take, stage, 1, [1, 2])


async def streaming(stage):
    stage.call("stream", consume, stage, 0, range(4))


async def streaming_in_turns(stage):
    stage.call("one", consume, stage, 0, range(3), hold_s=5e-5)
    stage.call("two", consume, stage, 1, range(3))


async def failing(stage):
    stage.call("first", take, stage, 0, [0, 1])
    stage.call("second", take, stage, 0, [1, 2])
    stage.call("stream", consume, stage, 0, range(3))


async def timing_out(stage):
    async def patient_for(seconds):
        async with asyncio.timeout(seconds):
            await take(stage, 0, [0, 1])

    stage.call("one", patient_for, 1e-4)
    stage.call("two", patient_for, 3e-4)


async def awaiting_futures(stage):
    async def wait_for_each():
        async with stage.hierarchy.acquire(0, [0, 1]) as lease:
            for expert, future in lease.futures.items():
                await future
                await stage.use(lease, [expert])

    stage.call("one", wait_for_each)
    stage.call("two", wait_for_each)


async def letting_go(stage):
    async def look_and_leave():
        async with stage.hierarchy.acquire(0, [0, 1]):
            await asyncio.sleep(5e-5)

    stage.call("one", look_and_leave)
    stage.call("two", take, stage, 0, [2, 1])


async def guessing(stage):
    """Some is asked for in time, some too late, some never; and what was guessed has to go."""
    n = stage.top.residency.n_slots
    assert stage.hierarchy.prefetch(0, [0, 1]) > 0
    stage.call("user", take, stage, 0, [0, 2])
    stage.call("other", take, stage, 1, range(n), hold_s=1e-4)
    await asyncio.sleep(2e-4)
    stage.hierarchy.prefetch(1, [4], priority=Priority.CERTAIN)
    stage.hierarchy.prefetch(0, [4, 5], priority=Priority.CERTAIN)
    stage.call("late", take, stage, 0, [5, 3])
    stage.hierarchy.routed(0, [5])


async def going_round(stage):
    """What one evicts the other wants back."""

    async def one_by_one(experts):
        for expert in experts:
            await take(stage, 0, [expert])

    stage.call("one", one_by_one, (0, 1, 2, 3, 0))
    stage.call("two", one_by_one, (3, 2, 1))


async def closing(stage):
    stage.call("caller", take, stage, 0, [0, 1])
    stage.call("stream", consume, stage, 1, range(3))
    await asyncio.sleep(5e-5)
    stage.closing = True
    stage.spawn("closing", stage.hierarchy.close())
    await asyncio.wait({stage.tasks["closing"]})


async def consume(stage, layer, experts, *, hold_s=0.0):
    seen = []
    async with aclosing(stage.hierarchy.stream(layer, experts)) as leases:
        async for lease in leases:
            seen += lease.experts
            await stage.use(lease, lease.slots)
            await asyncio.sleep(hold_s)
    assert sorted(seen) == list(experts)


SCENARIOS = [
    Scenario(missing, ("caller",), (2,)),
    Scenario(missing, ("caller",), (1, 2)),
    Scenario(missing, ("caller",), (2, 1, 2), late=True),
    Scenario(hitting, ("caller",), (2,)),
    Scenario(hitting, ("caller",), (1, 2), late=True),
    Scenario(joining, ("first", "second"), (2,)),
    Scenario(joining, ("first", "second"), (1, 2)),
    Scenario(joining, ("first", "second"), (2, 3), late=True),
    Scenario(queueing, ("holder", "head", "tail"), (2,)),
    Scenario(queueing, ("holder", "head", "tail"), (1, 2)),
    Scenario(queueing, ("holder", "head", "tail"), (2, 2), late=True),
    Scenario(asking_for_more, ("holder", "other", "queued"), (2,)),
    Scenario(asking_for_more, ("holder", "other", "queued"), (1, 2), late=True),
    Scenario(streaming, ("stream",), (1,)),
    Scenario(streaming, ("stream",), (1, 2), late=True),
    Scenario(streaming, ("stream",), (2, 1, 3)),
    Scenario(streaming_in_turns, ("one", "two"), (2,)),
    Scenario(streaming_in_turns, ("one", "two"), (1, 2), late=True),
    Scenario(failing, ("first", "second", "stream"), (2,), faults=((0, 0), (0, 1))),
    Scenario(failing, ("first", "second", "stream"), (1, 3), faults=((0, 1),), late=True),
    Scenario(failing, ("first", "second"), (1, 1, 3), faults=((0, 0), (0, 0), (0, 2))),
    Scenario(timing_out, ("one", "two"), (1, 2)),
    Scenario(awaiting_futures, ("one", "two"), (2,)),
    Scenario(awaiting_futures, ("one", "two"), (1, 2), late=True),
    Scenario(letting_go, ("one", "two"), (3,), queue_depth=1),
    Scenario(letting_go, ("one", "two"), (2, 3), queue_depth=1),
    Scenario(guessing, ("user", "other", "late"), (4,), queue_depth=1),
    Scenario(guessing, ("user", "other", "late"), (1, 4)),
    Scenario(guessing, ("user", "other", "late"), (2, 2, 5), late=True),
    Scenario(guessing, ("user", "other"), (2, 4), faults=((0, 0), (0, 1), (1, 4))),
    Scenario(going_round, ("one", "two"), (3, 2), late=True, keeps=True),
    Scenario(going_round, ("one", "two"), (2, 2, 1), late=True, keeps=True),
    Scenario(closing, ("caller", "stream", "closing"), (2,), queue_depth=1),
    Scenario(closing, ("caller", "stream", "closing"), (1, 2), late=True),
]
"""Whatever callers do, in short chains, each with everyone who can be cancelled in it."""
