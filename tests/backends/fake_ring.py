"""A ring whose kernel is the test: it refuses, holds and answers as it is told."""

import asyncio
import ctypes
import os
from contextlib import asynccontextmanager, suppress

from gated import PAGE

from tieredmoe.backends.datafile import DataFile
from tieredmoe.backends.protocol import BackendInfo
from tieredmoe.backends.uring import UringBackend


class FakeRing:
    """Reads of ``n_entries`` at most wait for ``submit``; ``held`` are the kernel's until let go.

    ``refusals`` are the errnos of the next submissions (0: take it), ``takes`` how many entries
    each takes at most, ``answers`` the results by offset of the next reads there.
    """

    def __init__(self, *, n_entries=256, is_open=False):
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.n_entries = n_entries
        self.is_open = is_open
        self.queue = []
        self.held = {}
        self.done = []
        self.refusals = []
        self.takes = []
        self.answers = {}
        self.submitted = []
        self.n_submits = 0
        self.n_wakes = 0
        self.closed = False

    @property
    def n_unsubmitted(self):
        return len(self.queue)

    def prep_read(self, fd, *, address, nbytes, offset, tag):
        if len(self.queue) == self.n_entries:
            return False
        self.queue.append((tag, fd, address, nbytes, offset))
        return True

    def submit(self):
        assert not self.closed
        self.n_submits += 1
        code = self.refusals.pop(0) if self.refusals else 0
        if code:
            raise OSError(code, os.strerror(code))
        n = self.takes.pop(0) if self.takes else len(self.queue)
        for entry in self.queue[:n]:
            self.held[entry[0]] = entry
            self.submitted.append(entry[4])
        del self.queue[:n]
        if self.is_open:
            self.let_go()

    def retract(self):
        tags = [entry[0] for entry in self.queue]
        self.queue.clear()
        return tags

    def clear_event(self):
        self.n_wakes += 1
        with suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)

    def reap(self):
        assert not self.closed
        done, self.done = self.done[:64], self.done[64:]
        return done

    def close(self):
        assert not self.held, "the ring goes away under reads in flight"
        self.closed = True
        os.close(self.event_fd)

    def let_go(self, n_reads=10_000):
        """Complete the oldest reads held, with their bytes or the answer scripted for them."""
        for tag in list(self.held)[:n_reads]:
            self.done.append((tag, self._perform(*self.held.pop(tag)[1:])))
            os.eventfd_write(self.event_fd, 1)

    def _perform(self, fd, address, nbytes, offset):
        script = self.answers.get(offset)
        answer = script.pop(0) if script else nbytes
        if answer < 0:
            return answer
        content = os.pread(fd, min(answer, nbytes), offset)
        ctypes.memmove(address, content, len(content))
        return len(content)


def make(path, ring, *, window_pages=16, **options):
    file = DataFile(path, os.open(path, os.O_RDONLY), direct=False, reason="asked")
    info = BackendInfo("uring", file.direct, PAGE, window_pages * PAGE, file.reason)
    return UringBackend([file], info=info, ring=ring, n_entries=ring.n_entries, **options)


@asynccontextmanager
async def opened(path, ring, **options):
    backend = make(path, ring, **options)
    try:
        yield backend
    finally:
        ring.is_open = True
        ring.let_go()
        await backend.close()
        assert ring.closed


async def landing(ring, n_reads=10_000):
    """Let reads go and let the loop see them."""
    ring.let_go(n_reads)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
