"""A hierarchy over a real pack whose disk is simulated and whose bytes can be made wrong.

At every step of the loop, whatever is READY in any tier holds the bytes that were packed.
"""

import asyncio

from tieredmoe.entry import READY
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack import PackSource, VerifiedSource, open_pack
from tieredmoe.policies import make_policy
from tieredmoe.spec import ROLES, ExpertKey
from tieredmoe.testing import SimDisk, SimWorker, host_arena, sim_run
from tieredmoe.tier import Tier


class Image:
    """A data file in memory; some of its bytes arrive wrong, for a number of reads or always."""

    def __init__(self, data):
        self.data = data
        self.wrong = {}
        self.n_reads = 0

    def spoil(self, offset, *, times=None):
        """Flip a bit of the byte at ``offset`` in the next ``times`` reads of it (None: all)."""
        self.wrong[offset] = times

    def __call__(self, offset, nbytes):
        self.n_reads += 1
        content = bytearray(self.data[offset : offset + nbytes])
        for place, left in self.wrong.items():
            if offset <= place < offset + nbytes and left != 0:
                content[place - offset] ^= 0x10
                self.wrong[place] = None if left is None else left - 1
        return bytes(content)


class Stage:
    """``slots`` from the disk up; not ``watched`` where wrong bytes are let through on purpose."""

    def __init__(
        self,
        path,
        *,
        mode="always",
        slots=(2, 4),
        repair=None,
        faults=None,
        delay_s=1e-3,
        queue_depth=8,
        watched=True,
    ):
        self.pack = open_pack(path)
        self.images = [Image(file.read_bytes()) for file in self.pack.data_files]
        self.disk = SimDisk(
            self.images, paths=self.pack.data_files, faults=faults, queue_depth=queue_depth
        )
        self.worker = SimWorker(delay_s)
        self.source = VerifiedSource(
            PackSource(self.pack, self.disk),
            self.pack,
            mode=mode,
            worker=self.worker,
            repair=repair(self.pack) if repair else None,
        )
        self.tiers = []
        source, spec = self.source, self.pack.spec
        for n_slots in slots:
            source = Tier(
                name=f"tier {len(self.tiers)}",
                source=source,
                arena=host_arena(n_slots, spec.slot_nbytes),
                policy=make_policy("lru", n_slots=n_slots, layers=spec.layers, top_k=spec.top_k),
            )
            self.tiers.append(source)
        self.hierarchy = Hierarchy(source, spec)
        self.loop = asyncio.get_running_loop()
        if watched:
            self.loop.on_step(self.watch)

    def watch(self):
        for tier in self.tiers:
            tier.check()
            for key, entry in tier.residency.entries.items():
                if entry.state is READY and tier.arena._region is not None:
                    held = bytes(tier.arena.slot(entry.slot_index).view)
                    assert self.payload_in(held) == self.right(key), f"{tier.name}: {entry}"

    def payload_in(self, record):
        return record[: self.pack.spec.layouts[0].payload_nbytes]

    def right(self, key):
        where = self.pack.locate(key)
        data = self.images[where.file_index].data
        return self.payload_in(data[where.offset : where.offset + where.nbytes])

    def place(self, layer, expert, role="gate"):
        """File, offset, nbytes of a role; ``role="padding"`` is what follows the last."""
        where = self.pack.locate(ExpertKey(layer, expert))
        layout = self.pack.spec.layouts[layer]
        begin, nbytes = layout.payload_nbytes, where.nbytes - layout.payload_nbytes
        if role in ROLES:
            begin, nbytes = layout.by_name[role].offset, layout.by_name[role].nbytes
        return where.file_index, where.offset + begin, nbytes

    def spoil(self, layer, expert, role="gate", *, times=None):
        file_index, offset, nbytes = self.place(layer, expert, role)
        self.images[file_index].spoil(offset + nbytes - 1, times=times)

    def heal(self):
        for image in self.images:
            image.wrong.clear()

    async def bytes_of(self, layer, expert):
        async with self.hierarchy.acquire(layer, [expert]) as lease:
            await lease.ready()
            return self.payload_in(bytes(lease.slots[expert].view))

    async def serves(self, layer, expert):
        return await self.bytes_of(layer, expert) == self.right(ExpertKey(layer, expert))

    def entry(self, layer, expert, *, tier=0):
        return self.tiers[tier].residency.entries.get(ExpertKey(layer, expert))

    async def until(self, condition):
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(1e-5)
        raise AssertionError("it never came to that")

    def at_rest(self):
        assert not self.source._running
        assert not self.worker.n_running
        assert not self.hierarchy._leases.owners
        for tier in self.tiers:
            assert not tier.transfers.n
            assert not tier._queue
            for entry in tier.residency.entries.values():
                assert (entry.pins, entry.state) == (0, READY)
        self.disk.check()


def counted(stage):
    """Failed reads by kind, records that arrived wrong, repairs."""
    stats = stage.hierarchy.stats()
    assert stats.io_errors == sum(stats.read_errors.values())
    return dict(stats.read_errors), stats.digest_mismatches, stats.repaired


def play(scenario, path, **options):
    """Play ``scenario(stage)``; nothing is left of it, and every slot still serves."""

    async def main():
        stage = Stage(path, **options)
        result = await scenario(stage)
        if not stage.hierarchy.top.closed:
            await stage.until(lambda: not any(tier.transfers.n for tier in stage.tiers))
            stage.at_rest()
            await stage.hierarchy.close()
        stage.at_rest()
        assert stage.worker.closed
        return result

    return sim_run(main(), collect_garbage=False)
