"""A threaded hierarchy over a file in memory whose reads can be held, and looks into its loop."""

import asyncio
import errno
import os
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from tieredmoe.backends import BackendInfo, ThreadsBackend
from tieredmoe.backends.datafile import DataFile
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.spec import PAGE_NBYTES, ExpertKey
from tieredmoe.testing.tiny_pack import TinyPack, host_arena, tiny_spec
from tieredmoe.threaded import ThreadedHierarchy
from tieredmoe.tier import Tier

SPEC = tiny_spec(layers=(0, 1), n_experts=8, role_nbytes=1360)
PACK = TinyPack(SPEC)
PAYLOADS = {key: PACK.payload(key) for key in SPEC.keys()}
PAYLOAD_NBYTES = SPEC.layouts[0].payload_nbytes
PATIENCE = 30
"""Seconds after which a wait that must end is given up as hung; nothing here is timed by it."""


class HeldDisk:
    """A ``preadv`` that writes garbage first, and the right bytes when it is let."""

    def __init__(self):
        self.started = {}
        self.free = {}
        self.bad = set()
        for key in SPEC.keys():
            offset = PACK.locate(key).offset
            self.started[offset] = threading.Event()
            self.free[offset] = threading.Event()
            self.free[offset].set()

    def hold(self, layer, *experts):
        for expert in experts:
            self.free[place(layer, expert)].clear()

    def let_go(self, layer, *experts):
        for expert in experts:
            self.free[place(layer, expert)].set()

    def let_all_go(self):
        for event in self.free.values():
            event.set()

    def wait_started(self, layer, *experts):
        for expert in experts:
            assert self.started[place(layer, expert)].wait(PATIENCE)

    def spoil(self, layer, expert):
        self.bad.add(place(layer, expert))

    def repair(self):
        self.bad.clear()

    def __call__(self, fd, targets, offset):
        (target,) = targets
        target[:] = b"\x55" * target.nbytes
        self.started[offset].set()
        assert self.free[offset].wait(PATIENCE), "nobody lets this read go"
        if offset in self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, targets, offset)


def place(layer, expert):
    return PACK.locate(ExpertKey(layer, expert)).offset


def making(slots, *, disk=os.preadv, policy="lru", **options):
    """What ``ThreadedHierarchy.open`` takes: a chain over ``PACK``, ``slots`` from the disk up."""

    async def make():
        fd = os.memfd_create("experts")
        os.write(fd, PACK.image)
        file = DataFile(Path(f"/proc/self/fd/{fd}"), fd, direct=False, reason="asked")
        info = BackendInfo("threads", False, PAGE_NBYTES, 1 << 20, file.reason)
        source = PackSource(PACK, ThreadsBackend([file], info=info, preadv=disk, n_threads=8))
        for i, n_slots in enumerate(slots):
            last = i == len(slots) - 1
            chosen = (
                make_policy(policy, n_slots=n_slots, layers=SPEC.layers, top_k=SPEC.top_k)
                if isinstance(policy, str) or not last
                else policy
            )
            source = Tier(name=f"tier {i}", source=source, arena=host_arena(n_slots), policy=chosen)
        return Hierarchy(source, SPEC, **options)

    return make


def right(lease, *experts):
    """Whether ``experts`` are in the slots of ``lease`` with their own bytes."""
    slots = lease.slots
    return all(
        bytes(slots[expert].view[:PAYLOAD_NBYTES]) == PAYLOADS[ExpertKey(lease.layer, expert)]
        for expert in experts or lease.experts
    )


def resident(hierarchy, layer, *experts):
    """Bring ``experts`` in and let go of them."""
    with hierarchy.acquire_blocking(layer, experts, timeout=PATIENCE) as lease:
        lease.wait(PATIENCE)


def in_loop(hierarchy, look):
    """``look(core)`` run in the I/O thread, after all that was posted before."""
    seen = Future()

    def run():
        try:
            seen.set_result(look(hierarchy._hierarchy))
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            seen.set_exception(error)

    hierarchy._thread.post(run)
    return seen.result(PATIENCE)


@contextmanager
def blocked_loop(hierarchy):
    """The I/O thread stands still, as if a callback took that long."""
    standing, go = threading.Event(), threading.Event()

    def stand():
        standing.set()
        go.wait()

    hierarchy._thread.post(stand)
    assert standing.wait(PATIENCE)
    try:
        yield
    finally:
        go.set()


def wait_queued(hierarchy, n_tickets):
    """Return when ``n_tickets`` stand in the queue of the top tier."""
    wait_until(lambda: in_loop(hierarchy, lambda core: len(core.top._queue)) == n_tickets)


def wait_until(come):
    """Return when another thread has made ``come()`` true."""
    end = monotonic() + PATIENCE
    while not come():
        assert monotonic() < end, "it does not come"


def tiers(core):
    tier = core.top
    while isinstance(tier, Tier):
        yield tier
        tier = tier.source


def assert_at_rest(hierarchy):
    """Once all reads have ended: nobody holds anything, nothing waits, all invariants hold."""
    done = Future()

    async def settle(core):
        for tier in tiers(core):
            await tier.transfers.drain()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not core._leases.owners
        assert not core._leases.waiting
        for tier in tiers(core):
            tier.check()
            assert not tier._queue
            assert all(not entry.pins for entry in tier.residency.entries.values()), tier

    def start(core):
        task = asyncio.get_running_loop().create_task(settle(core))
        task.add_done_callback(lambda task: done.set_result(task.exception()))

    in_loop(hierarchy, start)
    assert done.result(PATIENCE) is None


def assert_nothing_left(hierarchy):
    """After the end: nothing pinned, nothing filling, nobody waiting."""
    core = hierarchy._hierarchy
    for tier in tiers(core):
        tier.check()
        assert not tier._queue
        assert all(not entry.pins for entry in tier.residency.entries.values())
    assert not core._leases.owners


def thread(target, *args):
    """``target(*args)`` in a thread of its own; the future of what it returns."""
    outcome = Future()

    def run():
        try:
            outcome.set_result(target(*args))
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def open_threaded(slots, **options):
    return ThreadedHierarchy.open(making(slots, **options))


def io_threads():
    """Threads of ours that are alive."""
    return [t for t in threading.enumerate() if t.name.startswith("tieredmoe")]


def acquire(hierarchy, layer, expert):
    hierarchy.acquire_blocking(layer, [expert])


def stream(hierarchy, layer, expert):
    next(hierarchy.stream_blocking(layer, [expert]))


async def acquire_awaitable(hierarchy, layer, expert):
    await hierarchy.acquire(layer, [expert])


async def stream_awaitable(hierarchy, layer, expert):
    await anext(hierarchy.stream(layer, [expert]))


def awaited(work):
    """``work`` as a function that runs it in a loop of its own."""
    return lambda *args: asyncio.run(work(*args))
