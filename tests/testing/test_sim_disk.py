"""The simulated disk keeps a backend's contract, and is as nasty as it claims."""

import asyncio
import errno

import pytest

from tieredmoe.backends.protocol import ReadOp
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.testing.contracts.backend import BackendContract
from tieredmoe.testing.contracts.target import POISON, Target
from tieredmoe.testing.disk import SimDisk
from tieredmoe.testing.faults import Fault, FaultPlan
from tieredmoe.testing.loop import SimCallbackError, sim_run

N = 4096
FILE = bytes(range(256)) * (64 * N // 256)


class TestSimDisk(BackendContract):
    @pytest.fixture(params=[{}, {"queue_depth": 1, "jitter": 0}], autouse=True)
    def _settings(self, request):
        self.settings = request.param

    async def open_backend(self, paths):
        return SimDisk([path.read_bytes() for path in paths], paths=paths, **self.settings)

    def run(self, main):
        return sim_run(main)


def now():
    return asyncio.get_running_loop().time()


def test_no_byte_is_right_before_the_end_and_none_changes_after_it():
    async def main():
        loop = asyncio.get_running_loop()
        disk = SimDisk([FILE], seed=7)
        target = Target(4)
        (future,) = disk.submit([target.op(0, N)])
        right = FILE[N : 5 * N]
        seen = []
        loop.on_step(lambda: seen.append((future.done(), bytes(target.view))))
        await future
        before = [memory for done, memory in seen if not done]
        assert len(before) >= 1
        for memory in before:
            soiled = [a != POISON for a in memory]
            assert any(soiled)
            assert all(a != b for a, b, s in zip(memory, right, soiled, strict=True) if s)
        assert before[-1] == bytes(255 - a for a in right)  # midway, all of it is wrong
        assert target.view == right
        target.view[:] = bytes(4 * N)
        await asyncio.sleep(100)
        assert target.view == bytes(4 * N)

    sim_run(main())


def test_submit_soils_memory_at_once():
    async def main():
        disk = SimDisk([FILE], seed=7)
        target = Target(4)
        (future,) = disk.submit([target.op(0, 0)])
        assert not target.untouched()
        await future

    sim_run(main())


def test_the_pipe_gives_its_rate_and_no_more():
    async def main():
        disk = SimDisk([FILE], nbytes_per_s=1e6, latency_s=1e-3, queue_depth=4)
        await asyncio.gather(*disk.submit([Target().op(0, i * N) for i in range(50)]))
        assert now() == pytest.approx(50 * N / 1e6, rel=0.05)

    sim_run(main())


def test_a_read_alone_takes_latency_and_transfer():
    async def main():
        disk = SimDisk([FILE], nbytes_per_s=1e6, latency_s=1e-3, jitter=0)
        await disk.submit([Target().op(0, 0)])[0]
        assert now() == pytest.approx(1e-3 + N / 1e6)

    sim_run(main())


def order_of_completion(seed, **settings):
    async def main():
        disk = SimDisk([FILE], seed=seed, **settings)
        ended = []
        for i, future in enumerate(disk.submit([Target().op(0, i * N) for i in range(16)])):
            future.add_done_callback(lambda _done, i=i: ended.append(i))
        await disk.drain()
        await asyncio.sleep(0)
        return ended, now()

    return sim_run(main())


def test_reads_end_out_of_order_as_the_seed_says():
    first = order_of_completion(1)
    assert sorted(first[0]) == list(range(16))
    assert first[0] != list(range(16))
    assert order_of_completion(1) == first
    assert order_of_completion(2) != first


def test_without_jitter_reads_end_in_order():
    assert order_of_completion(1, jitter=0)[0] == list(range(16))


def test_the_queue_depth_and_the_window_bound_what_is_in_flight():
    async def most_in_flight(**settings):
        disk = SimDisk([FILE], **settings)
        seen = []
        asyncio.get_running_loop().on_step(lambda: seen.append(disk.stats().in_flight))
        disk.submit([Target(2).op(0, i * N) for i in range(30)])
        await disk.drain()
        return max(seen)

    assert sim_run(most_in_flight(queue_depth=3)) == 3
    assert sim_run(most_in_flight(window_nbytes=5 * 2 * N)) == 5
    assert sim_run(most_in_flight(window_nbytes=1)) == 2, "one alone would idle the disk"


def test_two_reads_into_overlapping_memory_are_a_violation():
    async def main():
        disk = SimDisk([FILE], queue_depth=1)
        target = Target(4)
        overlapping = ReadOp(0, 0, target.view[2 * N :], target.address + 2 * N)
        futures = disk.submit([Target().op(0, 0), target.op(0, 8 * N)])  # the second is queued
        with pytest.raises(AssertionError, match="still being read into from file 0, offset 32768"):
            disk.submit([Target().op(0, 0), overlapping])
        assert len(disk.violations) == 1
        with pytest.raises(AssertionError, match="still being read into"):
            disk.check()
        assert (disk.stats().in_flight, disk.stats().queued) == (1, 1)
        await asyncio.gather(*futures)
        disk.submit([overlapping])  # now the memory is free
        await disk.drain()

    sim_run(main())


def test_two_reads_of_one_batch_may_not_overlap_either():
    async def main():
        disk = SimDisk([FILE])
        target = Target()
        with pytest.raises(AssertionError, match="still being read into"):
            disk.submit([target.op(0, 0), target.op(0, N)])
        assert target.untouched()
        assert disk.writers_into(target.address, N) == ()

    sim_run(main())


def test_neighbouring_memory_is_no_overlap():
    async def main():
        disk = SimDisk([FILE])
        whole = Target(3)
        parts = [
            ReadOp(0, i * N, whole.view[i * N :][:N], whole.address + i * N) for i in (1, 0, 2)
        ]
        await asyncio.gather(*disk.submit(parts))
        assert whole.view == FILE[: 3 * N]
        disk.check()

    sim_run(main())


def test_an_address_that_is_not_the_targets_is_a_violation():
    async def main():
        disk = SimDisk([FILE])
        target, other = Target(), Target()
        with pytest.raises(AssertionError, match="is not that of the target"):
            disk.submit([ReadOp(0, 0, target.view, other.address)])

    sim_run(main())


@pytest.mark.parametrize("at", ["start", "midway"])
def test_somebody_else_writing_into_a_target_is_a_violation(at):
    disk = SimDisk([FILE], seed=3, latency_s=1e-3, nbytes_per_s=N / 1e-3)

    async def main():
        target = Target(8)
        (future,) = disk.submit([target.op(0, 0)])
        await asyncio.sleep(0 if at == "start" else 2e-3)
        target.view[:] = bytes([POISON]) * target.view.nbytes
        await future

    with pytest.raises(SimCallbackError, match="somebody wrote into a target"):
        sim_run(main())
    assert len(disk.violations) == 1


def test_writers_into_finds_reads_queued_and_in_flight():
    async def main():
        disk = SimDisk([FILE], queue_depth=1)
        targets = [Target(2) for _ in range(3)]
        ops = [target.op(0, 0) for target in targets]
        futures = disk.submit(ops)
        for op in ops:
            assert disk.writers_into(op.address, 2 * N) == (op,)
            assert disk.writers_into(op.address + 2 * N - 1, 1) == (op,)
            assert op not in disk.writers_into(op.address + 2 * N, 1)
            assert op not in disk.writers_into(op.address - 1, 1)
        await futures[0]
        assert disk.writers_into(ops[0].address, 2 * N) == ()
        await disk.close()
        assert not any(disk.writers_into(op.address, 2 * N) for op in ops)

    sim_run(main())


def test_a_cancelled_read_still_writes_and_is_still_known_as_a_writer():
    async def main():
        disk = SimDisk([FILE])
        target = Target()
        (future,) = disk.submit([target.op(0, 0)])
        future.cancel()
        await asyncio.sleep(0)
        assert len(disk.writers_into(target.address, N)) == 1
        await disk.drain()
        assert target.view == FILE[:N]
        assert disk.writers_into(target.address, N) == ()

    sim_run(main())


def test_a_view_released_by_its_owner_is_still_written():
    async def main():
        disk = SimDisk([FILE])
        target = Target()
        with target.view[:] as view:
            (future,) = disk.submit([ReadOp(0, 0, view, target.address)])
        await future
        assert target.view == FILE[:N]
        assert disk.writers_into(target.address, N) == ()

    sim_run(main())


def test_close_drops_the_queue_and_waits_for_reads_in_flight():
    async def main():
        disk = SimDisk([FILE], queue_depth=2, latency_s=1.0, jitter=0)
        targets = [Target() for _ in range(5)]
        futures = disk.submit([target.op(0, 0) for target in targets])
        await disk.close()
        assert now() >= 1.0
        outcomes = [type(future.exception()) for future in futures]
        assert outcomes == [type(None)] * 2 + [ClosedError] * 3
        assert [target.untouched() for target in targets] == [False] * 2 + [True] * 3

    sim_run(main())


def test_a_dropped_read_makes_room_for_what_stood_behind_it():
    async def main():
        disk = SimDisk([FILE], window_nbytes=3 * N)
        big, small = Target(3), Target()
        ops = [Target().op(0, 0), Target().op(0, 0), big.op(0, 0), small.op(0, 0)]
        _, _, waiting, behind = disk.submit(ops)
        assert disk.stats().queued == 2
        assert disk.drop(waiting)
        assert (disk.stats().in_flight, disk.stats().queued) == (3, 0)
        await behind
        await disk.drain()
        assert big.untouched()
        assert disk.writers_into(big.address, 3 * N) == ()

    sim_run(main())


def test_files_may_be_functions_and_end_where_these_give_less():
    def content(offset, nbytes):
        return FILE[offset : offset + nbytes]

    async def main():
        disk = SimDisk([content])
        target = Target(2)
        await disk.submit([target.op(0, 62 * N)])[0]
        assert target.view == FILE[62 * N :]
        with pytest.raises(ReadError, match="sim:0: read of 8192 bytes at offset 258048"):
            await disk.submit([target.op(0, 63 * N)])[0]

    sim_run(main())


def outcome_of(fault, *, delay_of=None):
    async def main():
        disk = SimDisk([FILE], jitter=0, faults=FaultPlan(seed=1).at(0, 5 * N, fault))
        target = Target(4)
        op = target.op(0, 4 * N)
        begin = now()
        (future,) = disk.submit([op])
        await asyncio.wait({future})
        took = now() - begin
        memory = bytes(target.view)
        await disk.submit([op])[0]  # the fault is used up, and the memory free again
        assert target.view == FILE[4 * N : 8 * N]
        return future.exception(), memory, took, disk.stats()

    return sim_run(main())


def test_a_failed_read_leaves_garbage_and_names_its_facts():
    error, memory, _, stats = outcome_of(Fault(errno=errno.ENODATA))
    assert isinstance(error, ReadError)
    assert (error.path, error.offset, error.nbytes) == ("sim:0", 4 * N, 4 * N)
    assert error.errno == errno.ENODATA
    assert all(a != b for a, b in zip(memory, FILE[4 * N : 8 * N], strict=True))
    assert (stats.reads, stats.errors) == (1, {"ENODATA": 1})


def test_a_torn_read_leaves_a_mixture():
    error, memory, _, stats = outcome_of(Fault("torn"))
    assert error.errno == errno.EIO
    right = FILE[4 * N : 8 * N]
    assert memory[: 2 * N] == right[: 2 * N]
    assert all(a != b for a, b in zip(memory[2 * N :], right[2 * N :], strict=True))
    assert stats.errors == {"EIO": 1}


def test_a_file_cut_short_is_an_end_of_file():
    error, _, _, stats = outcome_of(Fault("eof"))
    assert error.errno == 0
    assert (stats.short_reads, stats.errors) == (1, {"eof": 1})


def test_a_slow_read_is_late_and_well():
    error, memory, took, stats = outcome_of(Fault("slow", delay_s=5.0))
    assert error is None
    assert memory == FILE[4 * N : 8 * N]
    assert 5.0 < took < 5.1
    assert stats.errors == {}
