"""Sources and arenas of somebody else's making, which fail in ways of their own."""

import asyncio

import pytest
from stage import play, queued, sim_disk, take

from tieredmoe.errors import ClosedError, ExpertLoadError


class Meddler:
    """A source between two tiers whose ``read_into`` goes through ``meddle``."""

    def __init__(self, source, meddle):
        self.source = source
        self.meddle = meddle

    def read_into(self, requests, *, priority):
        del priority
        return self.meddle(self.source, requests)

    def parts(self, key):
        return self.source.parts(key)

    @property
    def counters(self):
        return self.source.counters

    async def close(self):
        await self.source.close()


CHAINS = [(2,), (1, 2), (2, 1, 2)]


@pytest.mark.parametrize("slots", CHAINS)
def test_a_source_that_refuses_a_batch_fails_its_experts_and_the_next_acquire_is_clean(slots):
    async def scenario(stage):
        def refuse(source, _):
            stage.top.source = source
            raise OSError(12, "no memory to submit with")

        stage.top.source = Meddler(stage.top.source, refuse)
        lease = await stage.lease(0, [0, 1])
        other = await stage.lease(0, [1])
        for future in (*lease.futures.values(), *other.futures.values()):
            with pytest.raises(ExpertLoadError, match="no memory to submit with"):
                await future
        assert stage.top.fills.n_failed == 2
        await take(stage, 0, [1])
        lease.release()
        other.release()

    play(scenario, slots)


def test_a_refused_fill_can_be_let_go_before_it_has_failed():
    async def scenario(stage):
        def refuse(source, _):
            stage.top.source = source
            raise OSError(12, "no memory to submit with")

        stage.top.source = Meddler(stage.top.source, refuse)
        lease = await stage.lease(0, [0, 1])
        lease.release()
        await take(stage, 0, [2])

    play(scenario, (3,))


@pytest.mark.parametrize("slots", [(2,), (2, 2), (2, 2, 2)])
def test_a_source_that_cancels_its_own_read_is_reported_as_closed_to_those_who_wait(slots):
    async def scenario(stage):
        def cancel(source, requests):
            fills = source.read_into(requests)
            assert fills[-1].drop_if_queued()
            return fills

        bottom = stage.tiers[0]
        bottom.source = Meddler(bottom.source, cancel)
        lease = await stage.lease(0, [0, 1])
        with pytest.raises(ClosedError, match="dropped"):
            await lease.futures[1]
        await lease.futures[0]
        bottom.source = bottom.source.source
        lease.release()

    play(scenario, slots, disk=sim_disk(queue_depth=1))


@pytest.mark.parametrize("late", [False, True])
def test_a_copy_that_cannot_be_enqueued_fails_its_expert_and_unpins_its_source(late):
    async def scenario(stage):
        copy_from = stage.top.arena.copy_from
        failing = [True]

        class Arena:
            n_slots = stage.top.arena.n_slots
            slot_nbytes = stage.top.arena.slot_nbytes

            @staticmethod
            def copy_from(key, source, target, parts):
                if failing:
                    failing.pop()
                    raise RuntimeError("the device is gone")
                return copy_from(key, source, target, parts)

        for i in range(stage.top.arena.n_slots):
            stage.top.arena.slot(i).arena = Arena
        lease = await stage.lease(0, [0, 1])
        with pytest.raises(ExpertLoadError, match="the device is gone"):
            await lease.futures[0]
        await lease.futures[1]
        await stage.use(lease, [1])
        for i in range(stage.top.arena.n_slots):
            stage.top.arena.slot(i).arena = stage.top.arena
        lease.release()

    play(scenario, (1, 2), late=late)


def test_a_tier_closed_underneath_refuses_and_takes_nothing_with_it():
    async def scenario(stage):
        async with stage.hierarchy.acquire(0, [0]) as lease:
            await lease.ready()
        below = stage.tiers[0]
        await below.close()
        stage.closing = True
        lease = await stage.lease(0, [0, 1])
        await lease.futures[0]
        with pytest.raises(ClosedError):
            await lease.futures[1]
        lease.release()

    play(scenario, (1, 2))


def test_those_who_wait_below_are_refused_when_that_tier_closes():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1])  # the second one waits for the staging slot
        stage.closing = True
        below = stage.spawn("closing", stage.tiers[0].close())
        with pytest.raises(ClosedError):
            await lease.futures[1]
        await asyncio.wait({below})
        lease.release()

    play(scenario, (1, 2))


def test_a_ticket_withdrawn_after_it_was_refused_changes_nothing():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1])
        waiting = await queued(stage, "waiting", 1, [0])
        stage.closing = True
        stage.top.shut()
        waiting.cancel()
        await asyncio.wait({waiting})
        lease.release()

    play(scenario, (2,))
