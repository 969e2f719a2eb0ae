"""The late arena is as late, as strict and as tell-tale as it says."""

import asyncio

import pytest

from tieredmoe.memory.fences import PASSED
from tieredmoe.memory.protocol import Part
from tieredmoe.spec import PAGE_NBYTES, ExpertKey
from tieredmoe.testing.arena import LateArena
from tieredmoe.testing.loop import SimCallbackError, sim_run
from tieredmoe.testing.stream import LateFence, SimStream
from tieredmoe.testing.tiny_pack import host_arena

KEY = ExpertKey(0, 0)
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
        fence = late.copy_from(KEY, source, target, (Part(0, 8, 16), Part(32, 64, 8)))
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
            fence = late.copy_from(KEY, source.slot(i), late.slot(0), WHOLE)
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
        late.copy_from(KEY, filled().slot(0), slot, WHOLE)
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
        late.copy_from(KEY, source.slot(0), late.slot(0), WHOLE)
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


def test_a_copy_waits_for_readers_of_before_not_for_those_of_what_it_brings():
    async def main():
        late = LateArena(1, PAGE_NBYTES)
        slot = late.slot(0)
        before = slot.idle = LateFence()
        late.copy_from(KEY, filled().slot(0), slot, WHOLE)
        slot.idle = LateFence()  # of a kernel that waits for this copy
        before.pass_now()
        await asyncio.sleep(1)
        assert set(slot.view) == {1}

    sim_run(main())


@pytest.mark.parametrize("what", ["ready", "idle"])
def test_giving_back_a_slot_in_use_is_found(what):
    late = LateArena(2, PAGE_NBYTES)
    setattr(late.slot(1), what, LateFence())
    late.resize(2)
    with pytest.raises(AssertionError, match="slot 1 was given back while it was used"):
        late.resize(1)


def test_what_was_given_back_is_poisoned():
    late = LateArena(2, PAGE_NBYTES)
    for i in range(2):
        late.slot(i).view[:] = b"\x07" * PAGE_NBYTES
    late.resize(1)
    assert [set(late.slot(i).view) for i in range(2)] == [{7}, {0xA5}]


def test_closing_under_a_reader_is_found():
    late = LateArena(1, PAGE_NBYTES)
    late.slot(0).idle = LateFence()
    with pytest.raises(AssertionError, match="closed while slot 0 is read"):
        late.close()


def test_a_stream_runs_its_work_in_order_and_fences_stand_between():
    async def main():
        stream, log = SimStream(), []
        first = LateFence()
        stream.wait_for(first)
        stream.run(
            lambda: log.append(f"looks at {asyncio.get_running_loop().time():g}"), duration_s=2
        )
        fence = LateArena(1, PAGE_NBYTES).fence(stream)
        fence.on_passed(lambda: log.append("passed"))
        assert stream.n_pending == 3
        await asyncio.sleep(1)
        assert log == []
        first.pass_now()
        await stream.synchronize()
        assert log == ["looks at 1", "looks at 3", "passed"]
        assert stream.n_pending == 0

    sim_run(main())


def test_nothing_is_behind_what_is_no_stream():
    assert LateArena(1, PAGE_NBYTES).fence(None).passed()


def test_fences_of_one_stream_cover_those_before():
    async def main():
        stream = SimStream()
        stream.wait_for(LateFence())
        first, second = stream.fence(), stream.fence()
        assert second.covers(first)
        assert not first.covers(second)
        assert first.covers(PASSED)
        assert not first.covers(LateFence())

    sim_run(main())


def copied_out(meddle=lambda *_: None):
    """Copy slot 0, which holds ones, out into an empty host slot; ``meddle`` in between."""
    late = LateArena(2, PAGE_NBYTES, latency_s=1e-3)

    async def main():
        host = host_arena(2)
        late.slot(0).view[:] = b"\x01" * PAGE_NBYTES
        target = host.slot(1)
        fence = late.copy_out(late.slot(0), target, WHOLE)
        assert target.ready is fence
        assert late.slot(0).idle.covers(fence)
        assert len(late.copies_back) == 1
        assert set(target.view) == {0xFE}
        meddle(late, target)
        await asyncio.sleep(1)
        assert fence.passed()
        assert set(target.view) == {1}
        late.check()

    return late, main()


def test_a_copy_out_brings_its_bytes_with_its_fence():
    _, main = copied_out()
    sim_run(main)


def test_a_copy_into_a_slot_waits_for_the_copy_out_of_it():
    def meddle(late, _):
        late.copy_from(KEY, filled().slot(0), late.slot(0), WHOLE)

    _, main = copied_out(meddle)
    sim_run(main)


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (lambda late, _: late.slot(0).view.__setitem__(7, 0), "the source was rewritten"),
        (lambda _, target: target.view.__setitem__(7, 0), "somebody wrote into the target"),
        (lambda late, _: late.close(), "closed with 1 copies running"),
    ],
)
def test_what_disturbs_a_copy_out_is_found(write, found):
    late, main = copied_out(write)
    with pytest.raises((SimCallbackError, AssertionError)):
        sim_run(main)
    assert any(found in each for each in late.violations)


def test_a_copy_up_takes_the_bytes_that_a_copy_out_brings_it():
    async def main():
        late = LateArena(2, PAGE_NBYTES, latency_s=1e-3)
        host = host_arena(1)
        late.slot(0).view[:] = b"\x05" * PAGE_NBYTES
        late.copy_out(late.slot(0), host.slot(0), WHOLE)
        fence = late.copy_from(KEY, host.slot(0), late.slot(1), WHOLE)
        await asyncio.sleep(1)
        assert fence.passed()
        assert set(late.slot(1).view) == {5}
        late.check()

    sim_run(main())
