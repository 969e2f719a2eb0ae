"""A mirror of real files, and one under a hierarchy: a copy dies, and nobody feels it."""

import asyncio
import os
import random
import shutil

import pytest
from mirror_stage import FILE, N_PAGES, PAGE, warnings

from tieredmoe.backends import ReadOp, open_backend
from tieredmoe.backends.drives import Drive
from tieredmoe.backends.mirror import MirrorBackend, open_mirror
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.spec import ExpertKey
from tieredmoe.testing import Fault, FaultPlan, SimDisk, sim_run
from tieredmoe.testing.contracts.target import Target
from tieredmoe.testing.tiny_pack import TinyPack, tiny_hierarchy, tiny_spec


@pytest.fixture
def copies(tmp_path):
    """The same file in two directories."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(FILE)
    return {tmp_path / name: [tmp_path / name / "x"] for name in ("a", "b")}


async def read_all(backend, n_reads=200):
    targets = [Target() for _ in range(n_reads)]
    ops = [target.op(0, i % N_PAGES * PAGE) for i, target in enumerate(targets)]
    for begin in range(0, n_reads, 10):
        await asyncio.gather(*backend.submit(ops[begin : begin + 10]))
    for op in ops:
        assert op.target == FILE[op.offset : op.offset + PAGE]


def buffered(files):
    return open_backend("buffered", files)


@pytest.mark.parametrize("death", ["truncated", "descriptor closed"])
def test_a_real_copy_that_is_killed_in_mid_run_loses_nothing(copies, caplog, death):
    dead = next(iter(copies))

    async def main():
        backend = await open_mirror(copies, buffered)
        await read_all(backend)
        assert all(drive.reads > 0 for drive in backend.drive_stats())
        if death == "truncated":
            os.truncate(copies[dead][0], 0)
        else:
            fd = backend._copies[0].drive.backend._files[0].fd
            os.close(fd)
            # Whoever opens a file next must not be read from in its place, or be closed.
            os.dup2(os.open(dead, os.O_RDONLY | os.O_DIRECTORY), fd)
        await read_all(backend)
        stats, (first, second) = backend.stats(), backend.drive_stats()
        assert stats.errors == {}
        assert stats.reads == first.reads + second.reads == 400
        assert sum(first.errors.values()) == stats.retries > 0
        assert second.errors == {}
        await backend.close()

    asyncio.run(main())
    (message,) = warnings(caplog)
    assert str(copies[dead][0]) in message


def test_a_copy_that_cannot_be_opened_is_left_out_at_warning(copies, caplog):
    gone = next(iter(copies))
    shutil.rmtree(gone)

    async def main():
        backend = await open_mirror(copies, buffered)
        await read_all(backend)
        assert len(backend.drive_stats()) == 1
        await backend.close()

    asyncio.run(main())
    (message,) = warnings(caplog)
    assert f"is left out: {gone}/x" in message


def test_without_any_copy_that_opens_the_error_is_that_of_the_first(copies):
    for directory in copies:
        shutil.rmtree(directory)

    async def main():
        with pytest.raises(ReadError, match=r"/a/x.*No such file"):
            await open_mirror(copies, buffered)

    asyncio.run(main())


def test_an_error_in_opening_leaves_no_copy_open(copies):
    opened = []

    def open_files(files):
        if opened:
            raise ValueError("no more")
        opened.append(buffered(files))
        return opened[-1]

    async def main():
        with pytest.raises(ValueError, match="no more"):
            await open_mirror(copies, open_files)
        with pytest.raises(ClosedError):
            opened[0].submit([ReadOp(0, 0, memoryview(bytearray(PAGE)), 0)])

    asyncio.run(main())


# ---- a whole chain


@pytest.mark.parametrize("seed", range(3))
def test_a_hierarchy_over_a_mirror_does_not_feel_a_copy_die(seed):
    source = random.Random(seed)
    pack = TinyPack(tiny_spec())

    async def main():
        disks = [SimDisk([pack.image], paths=[f"/{name}/x"], seed=seed) for name in "ab"]
        disks[1]._owned = disks[0]._owned
        mirror = MirrorBackend([Drive(f"/{i}", disk) for i, disk in enumerate(disks)])
        hierarchy, _ = tiny_hierarchy(pack, (2, 6), disk=mirror)
        async with hierarchy:
            for step in range(60):
                if step == 20:
                    disks[0]._faults = FaultPlan(rate=1.0, faults=[Fault(), Fault("torn")])
                layer, experts = source.randrange(3), source.sample(range(8), 2)
                async with hierarchy.acquire(layer, experts) as lease:
                    await lease.ready()
                    for expert in experts:
                        right = pack.payload(ExpertKey(layer, expert))
                        assert lease.slots[expert].view[: len(right)] == right
            stats = hierarchy.stats()
            assert (stats.io_errors, stats.read_errors) == (0, {})
            assert stats.retries == sum(mirror.drive_stats()[0].errors.values()) > 0
        for disk in disks:
            disk.check()

    sim_run(main())
