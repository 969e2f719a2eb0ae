"""The late arena is as late, as strict and as tell-tale as it says."""

import asyncio

import pytest

from tieredmoe.memory.protocol import Part
from tieredmoe.spec import PAGE_NBYTES
from tieredmoe.testing.arena import LateArena, LateFence, SimStream
from tieredmoe.testing.loop import SimCallbackError, sim_run
from tieredmoe.testing.tiny_pack import host_arena

WHOLE = (Part(0, 0, PAGE_NBYTES),)


def filled(n_slots=2):
    """A host arena whose slot i holds the byte i + 1."""
    arena = host_arena(n_slots)
    for i in range(n_slots):
        arena.slot(i).view[:] = bytes([i + 1]) * PAGE_NBYTES
    return arena


def test_the_bytes_are_wrong_until_the_fence_has_passed_and_right_then():
    async def main():
        source = filled().slot(0)
        late = LateArena(1, PAGE_NBYTES, latency_s=1)
        target = late.slot(0)
        fence = late.copy_from(source, target, (Part(0, 8, 16), Part(32, 64, 8)))
        assert target.ready is fence
        assert not fence.passed()
        assert 1 not in target.view
        await SimStream().synchronize()
        stream = SimStream()
        fence.wait_on(stream)
        await stream.synchronize()
        assert fence.passed()
        right = bytes(target.view[8:24]) + bytes(target.view[64:72])
        assert right == bytes([1]) * 24
        assert list(target.view).count(1) == 24
        assert set(target.view) == {1, 0xA5}
        late.check()
        late.close()
        late.close()

    sim_run(main())


def test_copies_end_in_the_order_in_which_they_were_enqueued():
    async def main():
        source = filled()
        late = LateArena(1, PAGE_NBYTES, latency_s=1)
        order = []
        for i in range(2):
            fence = late.copy_from(source.slot(i), late.slot(0), WHOLE)
            fence.on_passed(lambda i=i: order.append((i, late.slot(0).view[0])))
        assert len(late.copies) == 2
        await asyncio.sleep(3)
        assert order == [(0, 1), (1, 2)]
        assert repr(late) == "<LateArena 1 slots, 0 copies running>"

    sim_run(main())


def test_a_copy_waits_for_the_idle_fence_of_its_target():
    async def main():
        late = LateArena(1, PAGE_NBYTES)
        slot = late.slot(0)
        reading = slot.idle = LateFence()
        late.copy_from(filled().slot(0), slot, WHOLE)
        await asyncio.sleep(1)
        assert set(slot.view) == {0xA5}
        reading.pass_now()
        await asyncio.sleep(1)
        assert set(slot.view) == {1}

    sim_run(main())


def test_a_fence_calls_each_callback_once_also_when_it_has_passed():
    fence = LateFence()
    calls = []
    fence.on_passed(lambda: calls.append("before"))
    fence.pass_now()
    fence.on_passed(lambda: calls.append("after"))
    assert calls == ["before", "after"]


def violation(meddle):
    """What the arena says if ``meddle(source, target, arena)`` happens during a copy."""
    late = LateArena(2, PAGE_NBYTES)

    async def main():
        source = filled()
        late.copy_from(source.slot(0), late.slot(0), WHOLE)
        meddle(source.slot(0), late.slot(0), late)
        await asyncio.sleep(1)

    with pytest.raises((SimCallbackError, AssertionError)):
        sim_run(main())
    with pytest.raises(AssertionError, match="; ".join(late.violations)):
        late.check()
    return late.violations


def test_a_source_rewritten_under_a_copy_is_found():
    def meddle(source, *_):
        source.view[7] = 0

    assert violation(meddle) == ["the source was rewritten under the copy of slot 0 to slot 0"]


def test_a_target_written_by_somebody_else_is_found():
    def meddle(_, target, __):
        target.view[7] = 0

    assert violation(meddle) == [
        "somebody wrote into the target under the copy of slot 0 to slot 0"
    ]


def test_closing_while_copies_run_is_found():
    assert violation(lambda *them: them[2].close()) == ["closed with 1 copies running"]
