"""A mirror survives the death of any of its copies, and says what died."""

import asyncio
import errno
import random
from itertools import pairwise

import pytest
from mirror_stage import MS, N_PAGES, PAGE, Mirror, always, now, scenario, warnings

from tieredmoe.backends.mirror_copy import AVOIDED_S_MAX, AVOIDED_S_MIN
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.spec import Priority
from tieredmoe.testing import Fault, FaultPlan, sim_run


@scenario({"faults": always()}, {})
async def test_a_dead_copy_loses_nothing_and_is_reported_once(mirror):
    for _round in range(5):
        await mirror.read(8)
        await asyncio.sleep(AVOIDED_S_MIN)
    dead, well = mirror.backend.drive_stats()
    assert (dead.reads, well.reads) == (0, 40)
    assert dead.failing
    assert not well.failing
    (message,) = warnings(mirror.caplog)
    assert "/a/x: read of 4096 bytes at offset" in message
    assert "EIO" in message
    assert "Drive /a is avoided" in message
    assert dead.errors == {"EIO": sum(dead.errors.values())}
    stats = mirror.backend.stats()
    assert stats.errors == {}
    assert stats.retries == dead.errors["EIO"]
    mirror.check()


@scenario({}, {})
async def test_a_copy_that_dies_in_mid_run_loses_nothing(mirror):
    await mirror.read(40)
    assert mirror.n_reads[0] > 0
    mirror.disks[0]._faults = always()
    await mirror.read(40)
    assert mirror.backend.drive_stats()[0].errors["EIO"] > 0
    assert len(warnings(mirror.caplog)) == 1
    mirror.check()


@pytest.mark.parametrize("kind", ["error", "torn", "eof"])
def test_however_a_copy_fails_the_other_overwrites_what_it_left(kind):
    async def main():
        mirror = Mirror({"faults": always(kind=kind)}, {})
        await mirror.read(16)
        mirror.check()
        await mirror.backend.close()

    sim_run(main())


@scenario({"faults": always()}, {"faults": always(errno.ETIMEDOUT)})
async def test_when_all_copies_fail_the_error_names_each(mirror):
    with pytest.raises(ReadError) as caught:
        await mirror.read()
    error = caught.value
    assert (error.path, error.offset, error.nbytes) == ("/a/x", 0, PAGE)
    assert (error.errno, error.kind) == (errno.EIO, "EIO")
    assert "none of 2 copies" in str(error)
    assert "/a/x: injected fault, error (EIO)" in str(error)
    assert "/b/x: injected fault, error (ETIMEDOUT)" in str(error)
    assert mirror.backend.stats().errors == {"EIO": 1}
    assert [drive.errors for drive in mirror.backend.drive_stats()] == [
        {"EIO": 1},
        {"ETIMEDOUT": 1},
    ]
    mirror.check([])


@scenario({"faults": always(times=1)}, {"faults": always(times=1)})
async def test_after_all_copies_have_failed_the_next_read_tries_them_again(mirror):
    with pytest.raises(ReadError):
        await mirror.read()
    await mirror.read()
    mirror.check(mirror.ops[1:])


@scenario({"nbytes_per_s": 100 * PAGE / MS}, {})
async def test_a_read_is_tried_once_on_each_copy_also_if_all_are_avoided(mirror):
    await mirror.read(40)
    dead, once = mirror.disks
    dead._faults, once._faults = always(), always(times=1)
    with pytest.raises(ReadError):
        await mirror.read()
    await mirror.read()
    errors = [drive.errors for drive in mirror.backend.drive_stats()]
    assert errors == [{"EIO": 2}, {"EIO": 1}]
    mirror.check(mirror.ops[:40] + mirror.ops[41:])


@scenario({"faults": always()}, {"faults": always()}, {})
async def test_of_three_copies_two_may_die(mirror):
    await mirror.read(30)
    assert mirror.n_reads == [0, 0, 30]
    assert len(warnings(mirror.caplog)) == 2
    mirror.check()


@scenario({"faults": FaultPlan().at(0, 0, Fault(), times=None)}, {})
async def test_a_copy_with_one_bad_place_goes_on_serving_the_others(mirror):
    await mirror.read()
    before = mirror.n_reads
    await asyncio.sleep(2 * AVOIDED_S_MIN)
    await asyncio.gather(*mirror.backend.submit([mirror.op(page) for page in range(1, 41)]))
    after = mirror.n_reads
    assert after[0] - before[0] > 10
    assert not mirror.backend.drive_stats()[0].failing
    mirror.check()


@scenario({"faults": always()}, {})
async def test_a_dead_copy_is_tried_ever_more_rarely(mirror):
    tried = []
    for _second in range(300):
        before = sum(mirror.backend.drive_stats()[0].errors.values())
        await mirror.read(2)
        if sum(mirror.backend.drive_stats()[0].errors.values()) > before:
            tried.append(now())
        await asyncio.sleep(AVOIDED_S_MIN / 2)
    waits = [later - earlier for earlier, later in pairwise(tried)]
    assert waits == sorted(waits)
    assert len(waits) >= 6
    assert waits[-1] < AVOIDED_S_MAX + 1
    mirror.check()


@scenario({"faults": always(times=1), "queue_depth": 8}, {})
async def test_failures_at_the_same_time_are_one(mirror):
    await mirror.read(16)
    assert mirror.backend.drive_stats()[0].errors == {"EIO": 8}
    await asyncio.sleep(AVOIDED_S_MIN)
    await mirror.read()
    assert not mirror.backend.drive_stats()[0].failing
    mirror.check()


@scenario({"faults": always(), "queue_depth": 1}, {"queue_depth": 1})
async def test_what_a_failing_copy_has_not_started_moves_at_once(mirror):
    await mirror.read(40)
    # The second had started by the time the first failure was told.
    assert sum(mirror.backend.drive_stats()[0].errors.values()) == 2
    mirror.check()


@scenario({"faults": always(kind="slow", delay_s=100.0), "queue_depth": 1}, {"queue_depth": 1})
async def test_a_copy_that_hangs_holds_up_only_what_it_has_started(mirror):
    reads = mirror.submit(40)
    await asyncio.sleep(50 * MS)
    assert sum(read.done() for read in reads) == 39
    await asyncio.gather(*reads)
    mirror.check()


@scenario({"faults": always(delay_s=1.0), "queue_depth": 1}, {"queue_depth": 1})
async def test_closing_starts_no_read_a_second_time(mirror):
    reads = mirror.submit(20)
    await asyncio.sleep(0)
    await mirror.backend.close()
    outcomes = await asyncio.gather(*reads, return_exceptions=True)
    assert [type(each) for each in outcomes].count(ReadError) == 1
    assert {type(each) for each in outcomes} == {ReadError, ClosedError, type(None)}
    assert not any("copies" in str(each) for each in outcomes)
    assert warnings(mirror.caplog) == [], "closing is no news of a drive"
    assert not mirror.disks[0]._owned
    n_closed = sum(isinstance(each, ClosedError) for each in outcomes)
    stats = mirror.backend.stats()
    assert (stats.reads + n_closed, stats.errors) == (19, {"EIO": 1})


@scenario({"faults": always()}, {"queue_depth": 1})
async def test_a_read_waiting_for_its_second_copy_can_be_dropped(mirror):
    hold = mirror.backend._copies[1]
    busy = hold.drive.backend.submit([mirror.op(n_pages=30)])
    reads = mirror.submit(2)
    await asyncio.sleep(5 * MS)
    assert [copy.reads != {} for copy in mirror.backend._copies] == [False, True]
    assert all(mirror.backend.drop(read) for read in reads)
    assert all(read.cancelled() for read in reads)
    assert not any(mirror.backend.drop(read) for read in reads)
    await asyncio.gather(*busy)
    await mirror.backend.drain()
    assert not mirror.disks[0]._owned


@scenario({"faults": always(delay_s=1.0), "queue_depth": 1}, {"queue_depth": 1})
async def test_a_promoted_read_stays_so_on_its_second_copy(mirror):
    ended = []
    (first,) = mirror.submit(1, priority=Priority.WARMUP)  # fails on /a after a second
    mirror.backend.promote(first)
    await asyncio.sleep(0.5)
    others = mirror.backend.submit(
        [mirror.op(i % N_PAGES) for i in range(1200)], priority=Priority.WARMUP
    )
    for i, read in enumerate([first, *others]):
        read.add_done_callback(lambda _, i=i: ended.append(i))
    await asyncio.gather(first, *others)
    assert ended.index(0) < 1100, "it went ahead of what waited"
    mirror.check()


@scenario({"faults": FaultPlan(seed=1, rate=1.0)}, {})
async def test_a_read_that_nobody_wants_any_more_is_not_tried_again(mirror):
    (read,) = mirror.submit(1)
    await asyncio.sleep(0)
    read.cancel()
    await mirror.backend.drain()
    assert mirror.n_reads == [0, 0]
    assert mirror.backend.stats().errors == {"EIO": 1}


@pytest.mark.parametrize("seed", range(40))
def test_no_storm_of_failures_drops_and_cancellations_breaks_anything(seed):
    source = random.Random(seed)
    faults = [Fault(), Fault("torn", delay_s=0.1), Fault("eof"), Fault("slow", delay_s=0.5)]
    n_drives = source.choice([2, 2, 3])
    drives = [
        {
            "faults": FaultPlan(seed=seed + i, rate=source.choice([0, 0.1, 0.5]), faults=faults),
            "queue_depth": source.choice([1, 4]),
            "seed": seed + i,
        }
        for i in range(n_drives)
    ]

    async def main():
        mirror = Mirror(*drives, jitter=1.0, latency_s=2 * MS)
        reads, dropped = [], []
        for _batch in range(30):
            ops = [mirror.op(source.randrange(60), source.randint(1, 4)) for _ in range(5)]
            priority = source.choice(list(Priority))
            reads += zip(ops, mirror.backend.submit(ops, priority=priority), strict=True)
            await asyncio.sleep(source.choice([0, 1, 5]) * MS)
            op, read = source.choice(reads)
            action = source.choice(["drop", "cancel", "promote", "nothing"])
            if action == "drop" and mirror.backend.drop(read):
                assert not any(d.writers_into(op.address, op.target.nbytes) for d in mirror.disks)
                dropped.append(read)
            elif action == "cancel":
                read.cancel()
            elif action == "promote":
                mirror.backend.promote(read)
        if seed % 2:
            await mirror.backend.close()
        await mirror.backend.drain()
        assert all(read.done() for _, read in reads)
        assert all(read.cancelled() for read in dropped)
        mirror.check(
            [op for op, read in reads if not read.cancelled() and read.exception() is None]
        )
        await mirror.backend.close()

    sim_run(main())
