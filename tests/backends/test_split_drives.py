"""Files on several drives: each read goes to its own, and the counters say which did what."""

import asyncio
import gc
import random

import pytest

from tieredmoe.backends import open_backend
from tieredmoe.backends.drives import Drive, DrivesBackend, SplitBackend, open_split
from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.spec import Priority
from tieredmoe.testing import Fault, FaultPlan, SimDisk, sim_run
from tieredmoe.testing.contracts.target import Target

PAGE = 4096
FILES = [random.Random(i).randbytes(16 * PAGE) for i in range(3)]


def disk(*numbers, **options):
    return SimDisk([FILES[i] for i in numbers], paths=[f"/x{i}" for i in numbers], **options)


def two_drives(**options):
    """File 0 on drive a, files 1 and 2 on drive b."""
    return SplitBackend(
        [Drive("/a", disk(0, **options)), Drive("/b", disk(1, 2, **options), n_files=2)]
    )


def test_counters_per_drive_add_up_to_the_totals():
    async def main():
        backend = two_drives(faults=FaultPlan().at(0, 5 * PAGE, Fault(), times=2))
        source = random.Random(1)
        ops = [Target(2).op(source.randrange(3), source.randrange(14) * PAGE) for _ in range(200)]
        outcomes = await asyncio.gather(*backend.submit(ops), return_exceptions=True)
        drives, total = backend.drive_stats(), backend.stats()
        assert [drive.directory for drive in drives] == ["/a", "/b"]
        assert all(drive.reads > 50 for drive in drives)
        assert total.reads == sum(drive.reads for drive in drives) == outcomes.count(None)
        assert total.read_nbytes == sum(drive.read_nbytes for drive in drives)
        n_failed = sum(isinstance(outcome, ReadError) for outcome in outcomes)
        assert total.errors == {"EIO": n_failed}
        assert sum(sum(drive.errors.values()) for drive in drives) == n_failed > 0
        for op, outcome in zip(ops, outcomes, strict=True):
            if outcome is None:
                assert op.target == FILES[op.file_index][op.offset : op.offset + 2 * PAGE]
        await backend.close()

    sim_run(main())


def test_counters_can_be_taken_between_two_moments():
    async def main():
        backend = two_drives(faults=FaultPlan().at(0, 0, Fault(), times=None))
        assert isinstance(backend, DrivesBackend)
        seen = []
        for n_reads in (3, 5):
            reads = backend.submit([Target().op(0, page * PAGE) for page in range(n_reads)])
            await asyncio.gather(*reads, return_exceptions=True)
            seen.append(backend.drive_stats()[0])
        counted = seen[1].since(seen[0])
        assert (counted.reads, counted.read_nbytes, counted.errors) == (4, 4 * PAGE, {"EIO": 1})

    sim_run(main())


def test_a_slow_drive_does_not_hold_up_the_reads_of_another():
    async def main():
        slow = disk(0, nbytes_per_s=1e3, queue_depth=1)
        backend = SplitBackend([Drive("/slow", slow), Drive("/fast", disk(1))])
        ops = [Target().op(i % 2, 0) for i in range(20)]
        reads = backend.submit(ops)
        await asyncio.gather(*reads[1::2])
        assert not any(read.done() for read in reads[::2])
        await backend.drain()

    sim_run(main())


def test_drain_waits_for_every_drive():
    async def main():
        backend = SplitBackend([Drive("/fast", disk(0)), Drive("/slow", disk(1, nbytes_per_s=1e3))])
        reads = backend.submit([Target().op(i, 0) for i in range(2)])
        await backend.drain()
        assert all(read.done() for read in reads)

    sim_run(main())


def test_promoting_reaches_the_drive_of_the_read():
    async def main():
        backend = two_drives(queue_depth=1)
        ended = []
        reads = backend.submit([Target().op(2, 0) for _ in range(10)], priority=Priority.WARMUP)
        for i, read in enumerate(reads):
            read.add_done_callback(lambda _, i=i: ended.append(i))
        backend.promote(reads[9])
        await backend.drain()
        await asyncio.sleep(0)
        assert ended.index(9) == 1

    sim_run(main())


def test_closing_refuses_on_all_drives_before_it_waits_for_any():
    async def main():
        backend = SplitBackend(
            [Drive(f"/{i}", disk(i, queue_depth=1, nbytes_per_s=1e3)) for i in range(2)]
        )
        reads = backend.submit([Target().op(i % 2, 0) for i in range(20)])
        await backend.close()
        closed = [isinstance(read.exception(), ClosedError) for read in reads]
        assert closed == [False, False] + [True] * 18

    sim_run(main())


class Refusing(MemoryBackend):
    def submit(self, batch, *, priority=Priority.DEMAND):
        raise ClosedError("this drive is gone")


def test_a_drive_that_refuses_after_others_have_started_fails_its_own_reads_only():
    async def main():
        backend = SplitBackend(
            [Drive("/a", MemoryBackend(FILES[:1])), Drive("/b", Refusing(FILES[1:2]))]
        )
        well, refused = backend.submit([Target().op(0, 0), Target().op(1, 0)])
        await well
        assert isinstance(refused.exception(), ClosedError)
        del refused
        with pytest.raises(ClosedError, match="is gone"):
            backend.submit([Target().op(1, 0)])
        await backend.close()

    complaints = []

    async def watched():
        asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c))
        await main()
        gc.collect()

    asyncio.run(watched())
    assert complaints == []


def test_what_is_open_is_closed_if_a_drive_cannot_be_opened(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}").write_bytes(FILES[i])
    opened = []

    def open_files(files):
        opened.append(open_backend("buffered", files))
        return opened[-1]

    drives = {tmp_path / "a": [tmp_path / "0"], tmp_path / "b": [tmp_path / "gone"]}

    async def main():
        with pytest.raises(ReadError, match="gone"):
            await open_split(drives, open_files)
        with pytest.raises(ClosedError):
            opened[0].submit([Target().op(0, 0)])

    asyncio.run(main())


def test_the_backend_says_what_the_least_of_its_drives_is():
    async def main():
        backend = SplitBackend(
            [Drive("/a", disk(0)), Drive("/b", MemoryBackend(FILES[1:2], alignment=512))]
        )
        info = backend.info
        assert (info.name, info.direct, info.alignment) == ("sim+memory", False, 4096)
        assert info.reason == "split of 2: a simulated disk, files held in memory"

    sim_run(main())
