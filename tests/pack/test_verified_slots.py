"""While a record is checked or repaired, its slot belongs to the fill: nothing takes it away."""

import asyncio

import pytest
from verified_stage import play

from tieredmoe.errors import ClosedError
from tieredmoe.testing import Fault, FaultPlan


@pytest.mark.parametrize("slots", [(4,), (2, 4)])
def test_a_fill_being_checked_cannot_be_dropped_and_lands_cold(path, slots):
    async def scenario(stage):
        lease = await stage.hierarchy.acquire(0, [1])
        await stage.until(lambda: stage.worker.n_running)
        assert not stage.entry(0, 1).fill.drop_if_queued()
        lease.release()
        assert stage.worker.n_running == 1
        await stage.until(lambda: not stage.worker.n_running)
        await asyncio.sleep(0.01)
        assert await stage.serves(0, 1)
        assert stage.hierarchy.stats().pack_reads == 1

    play(scenario, path, slots=slots)


def test_a_fill_being_repaired_cannot_be_dropped_and_lands_cold(path, gguf):
    async def scenario(stage):
        stage.spoil(0, 1)
        lease = await stage.hierarchy.acquire(0, [1])
        await stage.until(lambda: stage.worker.n_done == 2 and stage.worker.n_running)
        assert not stage.entry(0, 1).fill.drop_if_queued()
        lease.release()
        await stage.until(lambda: stage.hierarchy.stats().repaired)
        await asyncio.sleep(0.01)
        assert await stage.serves(0, 1)
        assert stage.hierarchy.stats().repaired == 1

    play(scenario, path, repair=gguf)


def test_a_queued_second_read_that_nobody_wants_any_more_is_dropped(path):
    async def scenario(stage):
        file_index, offset, _ = stage.place(1, 0)
        stage.disk._faults.at(file_index, offset, Fault("slow", delay_s=1.0))
        stage.spoil(0, 1)
        lease = await stage.hierarchy.acquire(0, [1])
        await stage.until(lambda: stage.worker.n_running)
        other = await stage.hierarchy.acquire(1, [0])  # it takes the disk's only place
        await stage.until(lambda: stage.disk.stats().queued)
        lease.release()
        assert not stage.disk.stats().queued
        assert stage.entry(0, 1) is None
        await other.ready()
        other.release()
        stage.heal()
        assert await stage.serves(0, 1)

    play(scenario, path, slots=(4,), queue_depth=1, faults=FaultPlan())


@pytest.mark.parametrize("n_before", [0, 1, 2], ids=["check", "second check", "repair"])
@pytest.mark.parametrize("slots", [(4,), (2, 4)])
def test_closing_waits_for_what_is_being_checked_or_repaired(path, gguf, n_before, slots):
    async def scenario(stage):
        stage.spoil(0, 1)
        await stage.hierarchy.acquire(0, [1])
        await stage.until(lambda: stage.worker.n_done == n_before and stage.worker.n_running)
        closing = asyncio.ensure_future(stage.hierarchy.close())
        while stage.worker.n_running:
            assert not closing.done()
            assert stage.tiers[0].arena._region is not None, "the memory went away under a check"
            await asyncio.sleep(1e-4)
        await closing

    play(scenario, path, repair=gguf, slots=slots)


def test_closing_the_source_itself_waits_for_its_checks_and_refuses_second_reads(path):
    async def scenario(stage):
        stage.spoil(0, 1)
        lease = await stage.hierarchy.acquire(0, [1])
        await stage.until(lambda: stage.worker.n_running)
        await stage.source.close()
        assert not stage.worker.n_running
        assert stage.worker.closed
        with pytest.raises(ClosedError):
            await lease.ready()
        lease.release()
        with pytest.raises(ClosedError):
            await stage.bytes_of(0, 2)

    play(scenario, path, slots=(4,))


@pytest.mark.parametrize("spoiled", [None, 1, 99], ids=["sound", "once", "always"])
@pytest.mark.parametrize("slots", [(2,), (1, 2)])
def test_an_acquire_cancelled_at_any_step_leaves_nothing_wrong(path, gguf, spoiled, slots):
    async def scenario(stage, step=None):
        stage.spoil(0, 1, times=spoiled or 0)
        task = asyncio.ensure_future(stage.serves(0, 1))
        if step is not None:
            stage.loop.at_step(stage.loop.steps + step, task.cancel)
        other = asyncio.ensure_future(stage.serves(0, 1))
        await asyncio.wait({task, other})
        assert other.result()
        assert task.cancelled() or task.result()
        return stage.loop.steps

    for step in range(play(scenario, path, slots=slots, repair=gguf)):
        play(lambda stage, step=step: scenario(stage, step), path, slots=slots, repair=gguf)


@pytest.mark.parametrize("slots", [(2,), (1, 2)])
def test_a_close_at_any_step_leaves_nothing_wrong(path, gguf, slots):
    async def scenario(stage, step=None):
        stage.spoil(0, 1)
        task = asyncio.ensure_future(stage.serves(0, 1))
        closing = []
        if step is not None:
            close = stage.hierarchy.close
            stage.loop.at_step(
                stage.loop.steps + step, lambda: closing.append(asyncio.ensure_future(close()))
            )
        await asyncio.wait({task})
        if closing:
            await closing[0]
        if task.exception() is None:
            assert task.result()
        else:
            assert isinstance(task.exception(), ClosedError)
        return stage.loop.steps

    for step in range(play(scenario, path, slots=slots, repair=gguf)):
        play(lambda stage, step=step: scenario(stage, step), path, slots=slots, repair=gguf)
