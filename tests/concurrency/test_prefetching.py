"""Prefetch against demand, in the same tick and the same slots: it never costs anybody anything."""

import asyncio

import pytest
from stage import SPEC, full, place_of, play, queued, sim_disk, take

from tieredmoe.entry import FILLING, READY
from tieredmoe.errors import ClosedError, ExpertLoadError
from tieredmoe.spec import Priority
from tieredmoe.testing.faults import FaultPlan
from tieredmoe.trace import EventKind

CHAINS = [(6,), (1, 6), (4, 6), (2, 2, 6)]


def counts(stage):
    return stage.hierarchy.stats().prefetch


@pytest.mark.parametrize("slots", CHAINS)
def test_a_prefetched_expert_is_a_hit_without_another_read(slots):
    async def scenario(stage):
        assert stage.hierarchy.prefetch(0, [0, 1]) == 2
        assert stage.hierarchy.prefetch(0, [0, 1]) == 0
        await asyncio.sleep(1)
        async with stage.hierarchy.acquire(0, [0, 1]) as lease:
            assert not lease.misses
            await stage.use(lease, [0, 1])
        stats = stage.hierarchy.stats()
        assert (stats.cache_hits, stats.cache_misses, stats.pack_reads) == (2, 0, 2)
        assert (counts(stage).issued, counts(stage).useful) == (2, 2)
        assert counts(stage).useful_bytes == 2 * SPEC.layouts[0].payload_nbytes

    play(scenario, slots, prefetch_slots=2)


@pytest.mark.parametrize("slots", CHAINS)
def test_demand_joins_what_is_on_its_way_and_that_goes_on_as_demand(slots):
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0, 1, 2])
        for expert in (0, 1, 2):
            assert stage.entry(0, expert).state is FILLING
        log = []
        stage.spawn("other", take(stage, 1, [0], log))
        await asyncio.sleep(0)
        async with stage.hierarchy.acquire(0, [2]) as lease:
            await lease.ready()
            await stage.use(lease, [2])
            assert stage.entry(0, 1) is None or stage.entry(0, 1).state is FILLING
        stats = stage.hierarchy.stats()
        assert (stats.cache_joins, stats.prefetch.late) == (1, 1)
        assert log == ["other"]

    play(scenario, slots, prefetch_slots=3, disk=sim_disk(queue_depth=1, jitter=0))


@pytest.mark.parametrize("slots", CHAINS)
def test_a_guess_displaces_neither_what_is_held_nor_what_is_used(slots):
    async def scenario(stage):
        lease = await full(stage)
        assert stage.hierarchy.prefetch(1, [0, 1]) == 0
        waiting = await queued(stage, "waiting", 1, [2])
        lease.release()
        assert stage.hierarchy.prefetch(1, [0, 1]) == 2, "nobody waits any more"
        await asyncio.wait({waiting})
        await stage.settle()
        for guesses in ([3, 4], [5, 0], [1, 3]):
            stage.hierarchy.prefetch(1, guesses)
            await stage.settle()
        kept = [e for e in range(SPEC.n_experts) if stage.entry(0, e) is not None]
        assert len(kept) == 3, "of six slots two are the ring's, one the last miss's"
        assert stage.entry(1, 2).state is READY

    play(scenario, slots, prefetch_slots=2)


@pytest.mark.parametrize("slots", CHAINS)
def test_while_anybody_waits_for_slots_every_guess_is_refused(slots):
    async def scenario(stage):
        lease = await stage.lease(0, range(4))
        waiting = await queued(stage, "waiting", 1, range(3))
        assert stage.hierarchy.prefetch(1, [3]) == 0
        lease.release()
        await asyncio.wait({waiting})

    play(scenario, slots, prefetch_slots=2)


@pytest.mark.parametrize("slots", CHAINS)
def test_demand_takes_slots_back_from_guesses_that_have_not_started(slots):
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0, 1])
        asked = stage.disk.stats().in_flight
        async with stage.hierarchy.acquire(1, range(6 - asked)) as lease:
            await lease.ready()
            await stage.use(lease, lease.slots)
        await take(stage, 1, range(6))

    play(scenario, slots, prefetch_slots=2, disk=sim_disk(queue_depth=1))


def test_a_guess_that_runs_is_waited_for_when_demand_needs_its_slot():
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0, 1])
        await take(stage, 1, range(4))
        assert counts(stage).wasted == 1, "it had begun"
        assert counts(stage).dropped == 1, "it had not"

    play(scenario, (4,), prefetch_slots=2, disk=sim_disk(queue_depth=1))


@pytest.mark.parametrize("slots", CHAINS)
def test_wrong_guesses_are_dropped_when_the_router_has_answered(slots):
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0, 1, 2])
        stage.hierarchy.prefetch(1, [5])
        stage.hierarchy.routed(0, [2])
        assert stage.entry(0, 1) is None
        assert stage.entry(0, 2) is not None
        await take(stage, 0, [2])
        assert counts(stage).dropped + counts(stage).wasted >= 1
        await stage.settle()
        running = len(slots) > 1  # at the bottom of a chain it goes on, and ends there
        n_read = counts(stage).issued - counts(stage).dropped
        assert n_read <= stage.disk.stats().reads <= n_read + running

    play(scenario, slots, prefetch_slots=3, disk=sim_disk(queue_depth=1))


def test_a_wrong_guess_that_has_landed_gives_its_slot_first():
    async def scenario(stage):
        await take(stage, 1, [0, 1])
        stage.hierarchy.prefetch(0, [0, 1])
        await stage.settle()
        stage.hierarchy.routed(0, [0])
        stage.hierarchy.prefetch(0, [2])
        assert stage.entry(0, 1) is None
        assert stage.entry(0, 0) is not None
        assert counts(stage).wasted == 1

    play(scenario, (4,), prefetch_slots=2)


def test_what_is_guessed_again_is_not_wrong_any_more():
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0, 1])
        await stage.settle()
        stage.hierarchy.routed(0, [])
        assert stage.hierarchy.prefetch(0, [0]) == 0
        stage.hierarchy.prefetch(0, [2])
        assert stage.entry(0, 1) is None
        assert stage.entry(0, 0) is not None

    play(scenario, (4,), prefetch_slots=2)


@pytest.mark.parametrize("slots", CHAINS)
def test_a_guess_that_fails_tells_nobody_and_leaves_nothing(slots):
    async def scenario(stage):
        assert stage.hierarchy.prefetch(0, [0, 1]) == 2
        await asyncio.sleep(1)
        assert stage.entry(0, 0) is None
        assert (counts(stage).failed, counts(stage).issued) == (1, 2)
        await take(stage, 0, [0, 1])

    faults = FaultPlan().at(0, place_of(0, 0))
    play(scenario, slots, prefetch_slots=2, disk=sim_disk(faults=faults), faulty=True)


@pytest.mark.parametrize("slots", CHAINS)
def test_a_guess_that_fails_fails_for_those_who_have_come_to_want_it(slots):
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0])
        async with stage.hierarchy.acquire(0, [0]) as lease:
            with pytest.raises(ExpertLoadError):
                await lease.ready()
        assert (counts(stage).late, counts(stage).failed) == (1, 0)
        await take(stage, 0, [0])

    faults = FaultPlan().at(0, place_of(0, 0))
    play(scenario, slots, prefetch_slots=2, disk=sim_disk(faults=faults), faulty=True)


@pytest.mark.parametrize("slots", CHAINS)
def test_closing_drops_guesses_and_refuses_more(slots):
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0, 1, 2])
        lease = await stage.lease(0, [1])
        await stage.close()
        assert stage.hierarchy.prefetch(0, [3]) == 0
        stage.hierarchy.routed(0, [3])
        with pytest.raises(ClosedError):
            await stage.hierarchy.acquire(0, [3])
        assert lease.released

    play(scenario, slots, prefetch_slots=3, disk=sim_disk(queue_depth=1))


@pytest.mark.parametrize("slots", [(1, 6), (2, 2, 6)])
def test_below_a_guess_makes_way_for_demand_and_comes_later(slots):
    async def scenario(stage):
        assert stage.hierarchy.prefetch(0, [0, 1, 2]) == 3
        landed = []
        async with stage.hierarchy.acquire(1, [0]) as lease:
            await lease.ready()
            landed = [e for e in range(3) if stage.entry(0, e).state is READY]
        assert landed in ([], [0]), "only what was being read came first"
        await stage.settle()
        assert [stage.entry(0, e).state for e in range(3)] == [READY] * 3
        assert counts(stage).dropped == 0

    play(scenario, slots, prefetch_slots=3, disk=sim_disk(queue_depth=1))


@pytest.mark.parametrize("settled", [False, True])
def test_the_ring_follows_the_slots_there_are(settled):
    async def scenario(stage):
        assert counts(stage).slots == 4
        stage.hierarchy.prefetch(0, [0, 1, 2, 3])
        if settled:
            await stage.settle()
        await stage.hierarchy.resize(4)
        assert counts(stage).slots == 2
        await stage.settle()
        assert len(stage.top.residency.ring) <= 2
        await stage.hierarchy.resize(3)
        assert counts(stage).slots == 0
        assert stage.hierarchy.prefetch(0, [5]) == 0
        await stage.hierarchy.resize(8)
        assert counts(stage).slots == 4
        assert stage.hierarchy.prefetch(0, [0, 1, 2, 3, 4, 5]) >= 2

    for queue_depth in (1, 8):
        play(
            scenario, (8,), prefetch_slots=4, disk=sim_disk(queue_depth=queue_depth),
            trace_events=300,
        )  # fmt: skip


def test_what_made_way_keeps_its_place_among_guesses():
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0, 1, 2])
        landed = []
        for i in range(3):
            stage.when(lambda i=i: stage.entry(0, i).state is READY, lambda i=i: landed.append(i))
        await take(stage, 1, [0])
        await stage.settle()
        assert landed == [0, 1, 2]

    play(scenario, (2, 6), prefetch_slots=3, disk=sim_disk(queue_depth=1))


def test_a_guess_that_demand_wants_does_not_make_way_for_it():
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0, 1])
        await take(stage, 0, [1, 2, 3, 4])
        assert (counts(stage).late, counts(stage).dropped) == (1, 0)

    play(scenario, (4,), prefetch_slots=2, disk=sim_disk(queue_depth=1))


def test_demand_that_joins_what_was_given_up_above_is_not_in_its_own_way():
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0])
        stage.hierarchy.routed(0, [])
        first = await stage.lease(0, [0])
        await take(stage, 1, [0])
        await first.ready()
        assert counts(stage).demand_delay_s == 0
        first.release()
        stage.hierarchy.prefetch(0, [1])
        await take(stage, 1, [1])
        assert counts(stage).demand_delay_s > 0

    play(scenario, (3, 6), prefetch_slots=2)


def test_demand_is_no_prefetch():
    async def scenario(stage):
        with pytest.raises(ValueError, match="acquire"):
            stage.hierarchy.prefetch(0, [0], priority=Priority.DEMAND)
        with pytest.raises(ValueError, match="no expert 6"):
            stage.hierarchy.prefetch(0, [6])
        with pytest.raises(ValueError, match="layer 7"):
            stage.hierarchy.routed(7, [0])

    play(scenario)


def test_the_trace_tells_prefetches_from_demand():
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0])
        await take(stage, 0, [0, 1])
        told = [(e.kind, e.experts) for e in stage.hierarchy.trace() if e.tier == "tier 0"]
        assert told[:3] == [
            (EventKind.PREFETCHED, (0,)),
            (EventKind.FILLING, (0,)),
            (EventKind.FILLING, (1,)),
        ]

    play(scenario, (4,), prefetch_slots=2, trace_events=100)


@pytest.mark.parametrize("slots", [(6,), (2, 6), (2, 3, 6)])
def test_demand_that_finds_prefetch_in_flight_is_delayed_and_by_how_much_is_counted(slots):
    async def scenario(stage):
        stage.hierarchy.prefetch(0, [0])
        await take(stage, 1, [0])
        await stage.settle()
        delay_s = counts(stage).demand_delay_s
        assert 0.5e-4 < delay_s < 2e-4
        stage.hierarchy.prefetch(0, [1])
        await take(stage, 0, [1])
        await stage.settle()
        assert counts(stage).demand_delay_s == delay_s, "it was what demand wanted"

    play(scenario, slots, prefetch_slots=2, disk=sim_disk(latency_s=1e-4, jitter=0))
