"""A hierarchy on a stage: everything about it that can be checked is, at every step of its loop.

Every harness of this directory builds its scenarios on ``Stage``. After each callback of the loop
it asserts the invariants of every tier, that whatever is READY holds its own bytes (so nothing is
published early, nothing torn stays, no slot changes under a lease), that the disk writes into
filling slots only, and that a slot under a running copy stays pinned.
"""

import asyncio
import gc
from contextlib import asynccontextmanager
from itertools import count

from stage_memory import Memory, assert_copies_pinned, assert_reads_fill, memory_is_gone
from timeline import assert_whole

from tieredmoe.entry import READY
from tieredmoe.errors import ClosedError, ExpertLoadError, WorkingSetTooLargeError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.spec import PAGE_NBYTES, ExpertKey
from tieredmoe.testing.arena import LateArena
from tieredmoe.testing.disk import SimDisk
from tieredmoe.testing.loop import SimLoop
from tieredmoe.testing.stream import SimStream
from tieredmoe.testing.tiny_pack import TinyPack, tiny_spec
from tieredmoe.tier import Tier

SPEC = tiny_spec(layers=(0, 1), n_experts=6, role_nbytes=1360)
"""Records that fill their page but for 16 bytes: a read torn anywhere shows in the payload."""

PACK = TinyPack(SPEC)
PAYLOADS = {key: PACK.payload(key) for key in SPEC.keys()}
PAYLOAD_NBYTES = SPEC.layouts[0].payload_nbytes

MAX_STEPS = 20_000


def place_of(layer, expert):
    """Where a fault must be set to hit this expert."""
    return PACK.locate(ExpertKey(layer, expert)).offset


def sim_disk(**options):
    return SimDisk([PACK.image], **options)


class Stage:
    """A hierarchy of ``slots`` (from the disk up) under constant inspection, and its tasks by name.

    ``late`` makes the top tier a device, whose copies end later; with ``keeps`` all tiers below
    keep what is evicted above them. ``faulty`` and ``closing`` say which errors a caller may meet.
    ``options`` are the hierarchy's.
    """

    def __init__(
        self,
        slots,
        *,
        policy="lru",
        late=False,
        keeps=False,
        disk=None,
        memory=None,
        faulty=False,
        **options,
    ):
        assert not (late and len(slots) == 1), "a disk cannot read into a device"
        self.disk = disk or sim_disk()
        self.memory = memory or Memory(sum(slots))
        self.faulty = faulty
        self.closing = False
        self.leases = []
        self.tasks = {}
        self.outcomes = []
        source = PackSource(PACK, self.disk)
        self.tiers = []
        for i, n_slots in enumerate(slots):
            top = i == len(slots) - 1
            arena = LateArena(n_slots, PAGE_NBYTES) if top and late else self.memory.carve(n_slots)
            name = policy if top else "lru"
            chosen = make_policy(name, n_slots=n_slots, layers=SPEC.layers, top_k=SPEC.top_k)
            source = Tier(
                name=f"tier {i}",
                source=source,
                arena=arena,
                policy=chosen,
                policy_name=name,
                keeps=keeps and not top,
            )
            self.tiers.append(source)
        self.top = source
        self.late = self.top.arena if late else None
        self.streams = [SimStream(), SimStream()]
        self._n_launched = 0
        self.hierarchy = Hierarchy(self.top, SPEC, **options)
        self._views = [
            (tier, [tier.arena.slot(i) for i in range(tier.arena.n_slots)]) for tier in self.tiers
        ]
        self.loop = asyncio.get_running_loop()
        if isinstance(self.loop, SimLoop):
            self.loop.on_step(self.watch)

    # ---- inspection

    def watch(self):
        """Assert everything that must hold between any two callbacks."""
        self.hierarchy.check()
        for tier, slots in self._views:
            if memory_is_gone(tier.arena):
                continue
            for key, entry in tier.residency.entries.items():
                slot = slots[entry.slot_index]
                if entry.state is READY and slot.ready.passed():
                    held = bytes(slot.view[:PAYLOAD_NBYTES])
                    assert held == PAYLOADS[key], f"{tier.name}: {entry} holds other bytes"
        self._watch_writers()

    def _watch_writers(self):
        tier, slots = self._views[0]
        if memory_is_gone(tier.arena):
            assert not self.disk.stats().in_flight, "the memory is gone, the reads are not"
            return
        assert_reads_fill(tier, slots, self.disk)
        if self.late is not None:
            assert_copies_pinned(self.late, self.tiers[-2])

    def holds(self, lease, expert):
        """Assert that ``expert`` is there; on a device, only if its copy has ended."""
        slot = lease.slots[expert]
        assert slot.ready.passed()
        right = PAYLOADS[ExpertKey(lease.layer, expert)]
        assert bytes(slot.view[:PAYLOAD_NBYTES]) == right, f"expert {expert} has other bytes"

    def launch(self, lease, experts, *, duration_s=2e-4):
        """A kernel on one of two streams: it looks at the experts as it begins and as it ends.

        Nobody waits for it, so the lease may be released, and its slots wanted, in between.
        """
        slots = {expert: slot for expert, slot in lease.slots.items() if expert in experts}
        if not slots:
            return
        stream = self.streams[self._n_launched % len(self.streams)]
        self._n_launched += 1
        lease.wait_on(stream)

        def look():
            for expert, slot in slots.items():
                seen = bytes(slot.view[:PAYLOAD_NBYTES])
                assert seen == PAYLOADS[ExpertKey(lease.layer, expert)], f"a kernel saw {seen[:8]}"

        stream.run(look, duration_s=duration_s)

    async def use(self, lease, experts):
        """What a kernel does: order a stream after the copies, then read the bytes."""
        if self.late is not None:
            self.launch(lease, experts)
            stream = SimStream()
            lease.wait_on(stream)
            await stream.synchronize()
        for expert in experts:
            if expert in lease.slots:
                self.holds(lease, expert)
            else:
                assert lease.released, f"expert {expert} landed and is not there"

    def quiet(self):
        """Whether nothing is in flight anywhere."""
        disk = self.disk.stats()
        return not (
            disk.in_flight
            or disk.queued
            or (self.late is not None and (self.late.copies or self.late.copies_back))
            or any(stream.n_pending for stream in self.streams)
            or any(tier.transfers.n for tier in self.tiers)
        )

    def at_rest(self):
        """Assert that nothing is left of anything."""
        self.watch()
        assert self.quiet()
        assert not self.hierarchy._leases.owners, "leases are left"
        for tier in self.tiers:
            assert not tier._queue, f"{tier} has a queue"
            for entry in tier.residency.entries.values():
                assert entry.pins == 0, f"{tier.name}: {entry} is still pinned"
                assert entry.state is READY, f"{tier.name}: {entry} is still filling"
        for lease in self.leases:
            assert lease.released
            assert all(future.done() for future in lease.futures.values()), "a future never ended"
            arrived = [expert for expert, _ in lease._arrived]
            assert len(arrived) == len(set(arrived)), "an expert arrived twice"
        if events := self.hierarchy.trace():
            assert_whole(events, self.tiers)
        self.disk.check()
        if self.late is not None:
            self.late.check()

    async def settle(self):
        """Wait, holding nothing, until nothing is in flight; then everything must be at rest."""
        for _ in range(1000):
            if self.quiet():
                break
            await asyncio.sleep(1e-4)
        self.at_rest()

    async def still_serves(self):
        """Assert that no slot is lost: a set as large as the tier is served, and right."""
        experts = range(min(SPEC.n_experts, self.top.residency.n_slots))
        for layer in SPEC.layers:
            async with self.hierarchy.acquire(layer, experts) as lease:
                await lease.ready()
                await self.use(lease, experts)
        await self.settle()

    # ---- playing

    def when(self, condition, action):
        """Call ``action`` once, right after the callback in which ``condition`` first holds."""
        actions = [action]

        def hook():
            if actions and condition():
                actions.pop()()

        self.loop.on_step(hook)

    def entry(self, layer, expert, *, tier=-1):
        """The entry of an expert in a tier (from the disk up), or None."""
        return self.tiers[tier].residency.entries.get(ExpertKey(layer, expert))

    def spawn(self, name, work):
        self.tasks[name] = asyncio.get_running_loop().create_task(work, name=name)
        return self.tasks[name]

    def call(self, name, function, *args, **options):
        """Let a caller do ``function``, with what may happen to a caller excused."""

        async def caller():
            async with self.excused():
                await function(*args, **options)

        return self.spawn(name, caller())

    async def finish(self):
        """Wait for all tasks; raise what went wrong in them. Cancelled ones are well."""
        while pending := [task for task in self.tasks.values() if not task.done()]:
            await asyncio.wait(pending)
        for task in self.tasks.values():
            if not task.cancelled():
                task.result()

    def failure_of(self, name):
        """What the ended task ``name`` raised, which is thereby expected; None if it ended well."""
        return self.tasks.pop(name).exception()

    async def lease(self, layer, experts):
        lease = await self.hierarchy.acquire(layer, experts)
        self.leases.append(lease)
        return lease

    @asynccontextmanager
    async def excused(self):
        """Let pass the errors that a caller may meet here; every other one is a finding."""
        try:
            yield
        except ExpertLoadError:
            assert self.faulty, "a load failed on a disk without faults"
            self.outcomes.append("failed")
        except ClosedError:
            assert self.closing, "closed, and nobody closed it"
            self.outcomes.append("closed")
        except WorkingSetTooLargeError:
            self.outcomes.append("too large")
        except TimeoutError:
            self.outcomes.append("timed out")
        except asyncio.CancelledError:
            self.outcomes.append("cancelled")
            raise
        else:
            self.outcomes.append("served")

    async def close(self):
        """Close; afterwards nothing may be left, and no byte of the memory may change any more."""
        self.closing = True
        await self.hierarchy.close()
        self.assert_closed()

    def assert_closed(self):
        self.at_rest()
        assert self.hierarchy.closed
        assert all(memory_is_gone(tier.arena) for tier in self.tiers)


def play(scenario, slots=(2, 4), **options):
    """Play ``scenario(stage)`` in virtual time; whatever it does, nothing may be left of it."""

    async def main():
        stage = Stage(slots, **options)
        result = await scenario(stage)
        await stage.finish()
        await stage.settle()
        if not stage.closing:
            await stage.still_serves()
        await stage.close()
        return result

    return simulate(main())


def simulate(main, loop=None):
    """Run ``main`` on ``loop``, by default a fresh one.

    Now and then it sweeps up what earlier runs left in cycles: what a loop does not collect within
    its run ages at once, and thousands of runs would slow down the last of them fourfold.
    """
    if next(_runs) % 100 == 0:
        gc.collect()
    return (loop or SimLoop(max_steps=MAX_STEPS)).run(main)


_runs = count(1)


async def take(stage, layer, experts, log=None, *, hold_s=0.0):
    """A caller who acquires, uses and releases; noted in ``log`` when he is let in."""
    async with stage.hierarchy.acquire(layer, experts) as lease:
        if log is not None:
            log.append(asyncio.current_task().get_name())
        await lease.ready()
        await stage.use(lease, experts)
        if hold_s:
            await asyncio.sleep(hold_s)
            await stage.use(lease, experts)


async def full(stage):
    """A lease, landed, on as many slots as the top tier has."""
    lease = await stage.lease(0, range(stage.top.residency.n_slots))
    await lease.ready()
    return lease


async def queued(stage, name, layer, experts, log=None):
    """A task of ``take`` that stands in the queue by now."""
    task = stage.spawn(name, take(stage, layer, experts, log))
    await asyncio.sleep(0)
    assert not task.done()
    return task
