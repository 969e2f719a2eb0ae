"""A disk with a gate, a backend over it, and reads whose bytes tell where they came from."""

import asyncio
import os
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from tieredmoe.backends import BackendInfo, ReadOp, ThreadsBackend
from tieredmoe.backends.datafile import DataFile

PAGE = 4096
N_PAGES = 64
POISON = 0xEE


class GatedDisk:
    """A ``preadv`` that holds every read at its gate, writes garbage first and keeps a record."""

    def __init__(self, *, is_open=False):
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.lock = threading.Lock()
        self.in_flight = {}
        self.window_seen = []
        self.offsets = []
        self.fail_with = {}
        self.is_open = is_open

    def __call__(self, fd, targets, offset):
        (target,) = targets
        token = object()
        with self.lock:
            self.in_flight[token] = target.nbytes
            self.window_seen.append(tuple(self.in_flight.values()))
            self.offsets.append(offset)
        target[:] = b"\x55" * target.nbytes
        self.entered.release()
        if not self.is_open:
            self.gate.acquire()
        try:
            if offset in self.fail_with:
                raise self.fail_with[offset]
            return os.preadv(fd, targets, offset)
        finally:
            with self.lock:
                del self.in_flight[token]

    async def wait_entered(self, n_reads=1):
        for _ in range(n_reads):
            await asyncio.to_thread(self.entered.acquire)

    def let_go(self, n_reads):
        self.gate.release(n_reads)


def op(memory, page, n_pages=1, *, at=None):
    """Read ``n_pages`` from ``page`` on to the same place of ``memory``, or to page ``at``."""
    start = (page if at is None else at) * PAGE
    target = memory.view[start : start + n_pages * PAGE]
    return ReadOp(0, page * PAGE, target, memory.address + start)


def assert_landed(read):
    first = read.offset // PAGE
    n_pages = read.target.nbytes // PAGE
    expected = np.repeat(np.arange(first, first + n_pages, dtype=np.uint8), PAGE)
    assert np.array_equal(np.frombuffer(read.target, np.uint8), expected)


def make(path, preadv=os.preadv, *, window_pages=16, **options):
    """A backend over ``path`` without the demands of a particular file system."""
    file = DataFile(path, os.open(path, os.O_RDONLY), direct=False, reason="asked")
    info = BackendInfo("threads", file.direct, PAGE, window_pages * PAGE, file.reason)
    return ThreadsBackend([file], info=info, preadv=preadv, **options)


@asynccontextmanager
async def opened(path, preadv=os.preadv, **options):
    backend = make(path, preadv, **options)
    try:
        yield backend
    finally:
        if isinstance(preadv, GatedDisk):
            preadv.let_go(10_000)
        await backend.close()


def run(scenario):
    """Run it on a fresh loop; whatever asyncio would only log fails the test."""
    complaints = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context)
        )
        await scenario()

    asyncio.run(main())
    assert complaints == []


def n_open_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def turn_the_loop():
    """Let every task run that can."""
    await asyncio.to_thread(threading.active_count)
