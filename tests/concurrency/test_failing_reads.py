"""A read that fails, against everything else that can happen in the same tick."""

import asyncio

import pytest
from stage import place_of, play, queued, sim_disk, take

from tieredmoe.entry import FILLING
from tieredmoe.errors import ExpertLoadError
from tieredmoe.testing.faults import Fault, FaultPlan


@pytest.mark.parametrize("kind", ["error", "torn", "eof"])
@pytest.mark.parametrize("slots", [(1,), (1, 1), (2, 1)])
def test_a_failure_grants_the_one_who_waits_for_its_slot_in_the_same_tick(slots, kind):
    async def scenario(stage):
        lease = await stage.lease(0, [0])
        waiting = await queued(stage, "waiting", 1, [1])
        with pytest.raises(ExpertLoadError):
            await lease.futures[0]
        assert stage.entry(0, 0) is None
        assert stage.entry(1, 1).pins == 1
        await waiting
        assert lease.slots == {}
        lease.release()

    faults = FaultPlan().at(0, place_of(0, 0), Fault(kind))
    play(scenario, slots, disk=sim_disk(faults=faults), faulty=True)


def test_a_fill_that_fails_between_the_grant_and_the_wakeup_reaches_its_waiter():
    async def scenario(stage):
        holding = await stage.lease(0, [0])
        await holding.ready()
        failing = await stage.lease(0, [1])
        waiting = await queued(stage, "waiting", 0, [1, 2])
        read = stage.entry(0, 1).fill.done
        stage.when(read.done, holding.release)
        await asyncio.wait({waiting})
        assert isinstance(stage.failure_of("waiting"), ExpertLoadError)
        failing.release()

    faults = FaultPlan().at(0, place_of(0, 1))
    play(scenario, (2,), disk=sim_disk(faults=faults), faulty=True)


def test_a_failure_and_a_cancel_in_one_tick_leave_the_other_waiter_his_error():
    async def scenario(stage):
        cancelled = stage.spawn("cancelled", take(stage, 0, [0]))
        other = stage.spawn("other", take(stage, 0, [0]))
        await asyncio.sleep(0)
        read = stage.entry(0, 0).fill.done
        stage.when(read.done, cancelled.cancel)
        await asyncio.wait({cancelled, other})
        assert cancelled.cancelled()
        assert isinstance(stage.failure_of("other"), ExpertLoadError)

    for slots in ((2,), (1, 2)):
        faults = FaultPlan().at(0, place_of(0, 0))
        play(scenario, slots, disk=sim_disk(faults=faults), faulty=True)


def test_a_failed_expert_is_read_again_by_the_next_acquire_in_the_same_tick():
    async def scenario(stage):
        lease = await stage.lease(0, [0])
        again = []
        read = stage.entry(0, 0)
        stage.when(
            lambda: read.state is not FILLING,
            lambda: again.append(stage.spawn("again", take(stage, 0, [0]))),
        )
        with pytest.raises(ExpertLoadError):
            await lease.ready()
        lease.release()
        await stage.finish()
        assert again[0].result() is None
        assert stage.disk.stats().reads == 1

    for slots in ((2,), (1, 2), (3, 1, 2)):
        faults = FaultPlan().at(0, place_of(0, 0))
        play(scenario, slots, disk=sim_disk(faults=faults), faulty=True)
