"""A mirror of simulated drives, which know of each other's memory, on virtual time."""

import asyncio
import errno
import logging
import random

from tieredmoe.backends.drives import Drive
from tieredmoe.backends.mirror import MirrorBackend
from tieredmoe.testing import Fault, FaultPlan, SimDisk, sim_run
from tieredmoe.testing.contracts.target import Target

PAGE = 4096
N_PAGES = 64
FILE = random.Random(0).randbytes(N_PAGES * PAGE)
MS = 1e-3


def always(errno_=errno.EIO, *, times=None, **fault):
    """Every place of the file is bad, for so many reads each."""
    plan = FaultPlan()
    for page in range(N_PAGES):
        plan.at(0, page * PAGE, Fault(errno=errno_, **fault), times=times)
    return plan


class Mirror:
    """A mirror of simulated drives ``/a``, ``/b``, …, which know of each other's memory."""

    def __init__(self, *drives, **common):
        names = [f"/{chr(ord('a') + i)}" for i in range(len(drives))]
        settings = {"latency_s": 0.0, "jitter": 0.0, "nbytes_per_s": PAGE / MS} | common
        self.disks = [
            SimDisk([FILE], paths=[f"{name}/x"], **(settings | drive))
            for name, drive in zip(names, drives, strict=True)
        ]
        for disk in self.disks[1:]:
            # One table for all: a second read into the memory of a first is a violation.
            disk._owned = self.disks[0]._owned
        self.backend = MirrorBackend(
            [Drive(name, disk) for name, disk in zip(names, self.disks, strict=True)]
        )
        self.ops = []

    def op(self, page=0, n_pages=1):
        op = Target(n_pages).op(0, page * PAGE)
        self.ops.append(op)
        return op

    def submit(self, n_reads, **options):
        return self.backend.submit([self.op(i % N_PAGES) for i in range(n_reads)], **options)

    async def read(self, n_reads=1):
        await asyncio.gather(*self.submit(n_reads))

    @property
    def n_reads(self):
        return [drive.reads for drive in self.backend.drive_stats()]

    def check(self, ops=None):
        for op in self.ops if ops is None else ops:
            assert op.target == FILE[op.offset : op.offset + op.target.nbytes]
        for disk in self.disks:
            disk.check()
        assert not self.disks[0]._owned
        stats = self.backend.stats()
        assert (stats.in_flight, stats.queued) == (0, 0)
        assert stats.reads == sum(self.n_reads)
        assert stats.read_nbytes == sum(d.read_nbytes for d in self.backend.drive_stats())
        assert all(not copy.rate.outstanding_nbytes for copy in self.backend._copies)


def scenario(*drives, **common):
    """Runs a test's coroutine function with such a mirror on virtual time, and checks the end."""

    def decorate(body):
        def test(caplog):
            async def main():
                mirror = Mirror(*drives, **common)
                mirror.caplog = caplog
                with caplog.at_level(logging.DEBUG, "tieredmoe"):
                    await body(mirror)
                await mirror.backend.close()

            sim_run(main())

        test.__name__ = body.__name__
        return test

    return decorate


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def now():
    return asyncio.get_running_loop().time()
