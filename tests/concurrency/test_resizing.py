"""A tier gives up slots and takes them again, whatever its experts are doing meanwhile."""

import asyncio
from contextlib import aclosing
from functools import partial

import pytest
from stage import SPEC, full, play, queued, sim_disk, take

from tieredmoe.admission import hopeless
from tieredmoe.entry import READY
from tieredmoe.errors import BudgetError, ClosedError, WorkingSetTooLargeError
from tieredmoe.policies import make_policy
from tieredmoe.residency import Residency
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.stream import SimStream

BOTH = pytest.mark.parametrize("late", [False, True])


async def use(stage, lease):
    await lease.ready()
    await stage.use(lease, lease.experts)


@BOTH
def test_idle_slots_are_given_up_at_once_and_taken_again(late):
    async def scenario(stage):
        await take(stage, 0, [0, 1, 2, 3])
        assert await stage.hierarchy.resize(2) == 2
        stats = stage.hierarchy.stats()
        assert stats.cache_capacity_experts == 2
        assert stats.resident_experts == 2
        assert stats.cache_evictions == 2
        with pytest.raises(WorkingSetTooLargeError):
            await stage.hierarchy.acquire(0, [0, 1, 2])
        await take(stage, 1, [0, 1])
        assert await stage.hierarchy.resize(4) == 4
        await take(stage, 1, [0, 1, 2, 3])
        assert stage.hierarchy.stats().resident_experts == 4

    play(scenario, (2, 4), late=late, trace_events=200)


@BOTH
def test_a_pinned_expert_keeps_its_slot_until_it_is_released(late):
    async def scenario(stage):
        lease = await full(stage)
        resizing = stage.spawn("resizing", stage.hierarchy.resize(2))
        await asyncio.sleep(1)
        assert not resizing.done()
        assert len(lease.slots) == 4
        await use(stage, lease)
        lease.release()
        await asyncio.sleep(1)
        assert resizing.result() == 2
        assert stage.top.residency.n_stranded == 0

    play(scenario, (2, 4), late=late)


def test_hits_on_an_expert_that_is_to_go_are_served_as_long_as_it_is_there():
    async def scenario(stage):
        lease = await full(stage)
        resizing = stage.spawn("resizing", stage.hierarchy.resize(2))
        await asyncio.sleep(0)
        last = next(e for e, slot in lease.slots.items() if slot.slot_index == 3)
        again = await stage.lease(0, [last])
        lease.release()
        await use(stage, again)
        assert not resizing.done()
        again.release()
        await asyncio.sleep(1)
        assert resizing.result() == 2

    play(scenario, (2, 4))


def test_an_expert_on_its_way_into_a_slot_that_is_to_go_lands_and_goes():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1, 2, 3])
        resizing = stage.spawn("resizing", stage.hierarchy.resize(2))
        await lease.ready()
        await stage.use(lease, lease.experts)
        assert not resizing.done()
        lease.release()
        assert await resizing == 2

    play(scenario, (4,))


def test_a_failed_fill_of_a_slot_given_up_frees_nothing():
    async def scenario(stage):
        lease = await stage.lease(0, [0, 1, 2, 3])
        resizing = stage.spawn("resizing", stage.hierarchy.resize(2))
        await asyncio.sleep(0)
        lease.release()  # what is queued is dropped, what runs lands unwanted
        assert await resizing == 2
        stage.hierarchy.check()

    play(scenario, (4,), disk=sim_disk(queue_depth=1))


def test_a_slot_given_up_is_never_a_victims_slot():
    async def scenario(stage):
        lease = await full(stage)
        stage.spawn("resizing", stage.hierarchy.resize(2))
        await asyncio.sleep(0)
        with stage.top.residency._mutex:  # released, and nobody has swept yet
            lease.release()
        async with stage.hierarchy.acquire(1, [0, 1]) as other:
            await other.ready()
            assert {slot.slot_index for slot in other.slots.values()} == {0, 1}

    play(scenario, (2, 4), trace_events=200)


def test_an_admission_sweeps_before_it_counts_and_chooses():
    """What another thread has released a moment ago, the owner has not swept yet."""
    policy = make_policy("lru", n_slots=3, layers=SPEC.layers, top_k=2)
    residency = Residency(3, policy)
    entries = residency.admit([ExpertKey(0, expert) for expert in range(3)]).entries
    for entry in entries:
        residency.commit(entry)
    residency.resize(1)
    for entry in reversed(entries):
        residency.unpin(entry)
    (entry,) = residency.admit([ExpertKey(1, 0)]).entries
    assert entry.slot_index == 0
    assert residency.admit([ExpertKey(1, 1)]) is None
    residency.check()


def test_memory_goes_only_when_no_kernel_reads_it():
    async def scenario(stage):
        async with stage.hierarchy.acquire(0, [0, 1, 2, 3]) as lease:
            await lease.ready()
            stage.launch(lease, lease.experts, duration_s=1.0)
        begin = stage.loop.time()
        assert await stage.hierarchy.resize(2) == 2
        assert stage.loop.time() - begin > 0.9

    play(scenario, (2, 4), late=True)


def test_memory_goes_only_when_no_copy_writes_it():
    async def scenario(stage):
        stage.late._latency_s = 1.0
        lease = await stage.lease(0, [0, 1, 2, 3])
        await lease.ready()
        lease.release()
        assert await stage.hierarchy.resize(2) == 2
        assert not stage.late.copies

    play(scenario, (4, 4), late=True)


def test_growing_again_before_memory_went_takes_the_slots_back_as_they_are():
    async def scenario(stage):
        lease = await full(stage)
        shrinking = stage.spawn("shrinking", stage.hierarchy.resize(2))
        await asyncio.sleep(0)
        assert await stage.hierarchy.resize(4) == 4
        assert await shrinking == 4
        await use(stage, lease)
        lease.release()
        assert len(stage.top.residency.entries) == 4

    play(scenario, (2, 4))


def test_growing_lets_in_who_waits():
    async def scenario(stage):
        await stage.hierarchy.resize(2)
        lease = await full(stage)
        waiting = await queued(stage, "waiting", 1, [0])
        await stage.hierarchy.resize(3)
        await waiting
        lease.release()

    play(scenario, (2, 4))


def test_who_can_never_fit_any_more_is_refused():
    async def scenario(stage):
        lease = await full(stage)
        await queued(stage, "large", 1, [0, 1, 2])
        small = await queued(stage, "small", 1, [0, 1])
        resizing = stage.spawn("resizing", stage.hierarchy.resize(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        failure = stage.failure_of("large")
        assert isinstance(failure, WorkingSetTooLargeError)
        assert failure.n_slots == 2
        assert not small.done()
        lease.release()
        await small
        await resizing

    play(scenario, (2, 4))


def test_holders_that_would_wait_for_each_other_are_refused():
    async def scenario(stage):
        async def hold_and_ask(layer):
            async with stage.hierarchy.acquire(layer, [0, 1]) as lease:
                await lease.ready()
                await asyncio.sleep(0.1)
                await take(stage, layer, [2])

        for layer in SPEC.layers:
            stage.spawn(f"holder {layer}", hold_and_ask(layer))
        third = await stage.lease(0, [3])
        await asyncio.sleep(0.2)
        resizing = stage.spawn("resizing", stage.hierarchy.resize(3))
        await asyncio.sleep(0.1)
        refused = [
            name
            for name in ("holder 0", "holder 1")
            if stage.tasks[name].done()
            and isinstance(stage.tasks[name].exception(), WorkingSetTooLargeError)
        ]
        assert refused
        for name in refused:
            stage.failure_of(name)
        third.release()
        await resizing

    play(scenario, (2, 5))


def test_a_stream_goes_on_in_smaller_waves():
    """It stands in the queue for two of eight slots, and there is one in the end."""

    async def scenario(stage):
        leases = [await stage.lease(0, range(6)), await stage.lease(1, [4, 5])]
        seen = []

        async def consume():
            async with aclosing(stage.hierarchy.stream(1, range(4))) as waves:
                async for wave in waves:
                    await stage.use(wave, wave.experts)
                    seen.extend(wave.experts)

        task = stage.spawn("stream", consume())
        await asyncio.sleep(1)
        assert [len(ticket.keys) for ticket in stage.top._queue] == [2]
        stage.top.resize(1, partial(hopeless, stage.hierarchy._leases))
        await asyncio.sleep(0)
        for lease in leases:
            lease.release()
        await task
        assert sorted(seen) == list(range(4))

    play(scenario, (2, 8))


def test_a_release_in_another_thread_lets_the_memory_go():
    async def scenario(stage):
        await take(stage, 0, [0, 1, 2, 3])
        keys = [ExpertKey(0, e) for e in range(4)]
        lease = stage.hierarchy.hits(0, keys, owner="a thread")
        resizing = stage.spawn("resizing", stage.hierarchy.resize(2))
        await asyncio.sleep(0)
        lease.release_landed(stage.loop.call_soon)
        assert await resizing == 2

    play(scenario, (2, 4))


def test_closing_ends_a_resize_that_waits():
    async def scenario(stage):
        await full(stage)
        stage.spawn("resizing", stage.hierarchy.resize(2))
        await asyncio.sleep(0)
        stage.closing = True
        await stage.hierarchy.close()
        await asyncio.sleep(0)
        assert isinstance(stage.failure_of("resizing"), ClosedError)
        with pytest.raises(ClosedError):
            await stage.hierarchy.resize(3)

    play(scenario, (2, 4))


def test_a_cancelled_resize_goes_on_without_its_caller():
    async def scenario(stage):
        lease = await full(stage)
        resizing = stage.spawn("resizing", stage.hierarchy.resize(2))
        await asyncio.sleep(0)
        resizing.cancel()
        await asyncio.sleep(0)
        lease.release()
        await asyncio.sleep(1)
        assert not stage.top.backing.shrinking
        assert stage.top.residency.n_slots == 2

    play(scenario, (2, 4))


def test_sizes_that_cannot_be_are_refused_with_the_numbers():
    async def scenario(stage):
        with pytest.raises(BudgetError, match=r"1 slots are fewer .* needs \(2\)"):
            await stage.hierarchy.resize(1)
        with pytest.raises(ValueError, match="opened with 4 slots, not 5"):
            await stage.hierarchy.resize(5)
        assert await stage.hierarchy.resize(4) == 4

    play(scenario, (2, 4))


def test_memory_that_cannot_be_had_again_changes_nothing():
    async def scenario(stage):
        await stage.hierarchy.resize(2)
        resize = stage.late.resize

        def refuse(n_slots):
            raise BudgetError(f"no memory for {n_slots} slots")

        stage.late.resize = refuse
        with pytest.raises(BudgetError, match="no memory for 3"):
            await stage.hierarchy.resize(3)
        assert stage.top.residency.n_slots == 2
        stage.late.resize = resize
        assert await stage.hierarchy.resize(3) == 3

    play(scenario, (2, 4), late=True)


def test_what_stays_is_what_was_in_the_slots_that_stay():
    async def scenario(stage):
        lease = await full(stage)
        kept = {e for e, slot in lease.slots.items() if slot.slot_index < 2}
        lease.release()
        await stage.hierarchy.resize(2)
        there = {
            key.expert for key, entry in stage.top.residency.entries.items() if entry.state is READY
        }
        assert there == kept
        stream = SimStream()
        async with stage.hierarchy.acquire(0, kept) as again:
            again.wait_on(stream)
            await stream.synchronize()
            assert stage.hierarchy.stats().cache_hits == 2

    play(scenario, (2, 4), late=True)
