"""Every source there is keeps the promises of sources, and the contract sees who does not."""

import asyncio
import errno
from pathlib import Path

import pytest

from tieredmoe.backends import open_backend
from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.errors import ClosedError, ReadError
from tieredmoe.memory.protocol import Part
from tieredmoe.pack import PackSource, VerifiedSource
from tieredmoe.pack.layout import Extent
from tieredmoe.pack.manifest import digest_of
from tieredmoe.pack.records import in_envelopes, whole_record
from tieredmoe.policies import make_policy
from tieredmoe.source import RefusedFill
from tieredmoe.spec import Priority
from tieredmoe.testing import FaultySource, SimDisk, SimWorker, host_arena, sim_run
from tieredmoe.testing.contracts.queueing import QueueingSourceContract
from tieredmoe.testing.contracts.source import SourceContract
from tieredmoe.tier import Tier


class Records:
    """The records of ``pack``, with digests; those of ``broken`` lie beyond the file's end."""

    digest_of = staticmethod(digest_of)
    has_digests = True

    def __init__(self, pack, broken):
        self.spec = pack.spec
        self.image = pack.image
        self.data_files = [Path("experts.bin")]
        self._pack = pack
        self._broken = set(broken)

    def extents(self, key):
        where = self._pack.locate(key)
        if key in self._broken:
            where = where._replace(offset=len(self.image))
        return whole_record(where, self.spec.layouts[key.layer])

    def digests(self, key):
        payload = self._pack.payload(key)
        return [
            digest_of(payload[role.offset : role.offset + role.nbytes])
            for role in self.spec.layouts[key.layer].roles
        ]


class ScatteredRoles(Records):
    """The same experts with their roles in slabs that begin anywhere, as in a GGUF."""

    def __init__(self, pack, broken):
        super().__init__(pack, broken)
        self.image = bytearray(b"header of odd length")
        self._places = {}
        for key in pack.spec.keys():
            payload = pack.payload(key)
            for role in pack.spec.layouts[key.layer].roles:
                self._places[key, role.name] = len(self.image)
                self.image += payload[role.offset : role.offset + role.nbytes] + b"gap"
        self.image += bytes(-len(self.image) % 4096)

    def extents(self, key):
        layout = self.spec.layouts[key.layer]
        places = [Extent(0, self._places[key, r.name], r.nbytes) for r in layout.roles]
        if key in self._broken:
            places[1] = places[1]._replace(offset=len(self.image))
        return in_envelopes(places, layout)


def disk_source(pack, broken, **options):
    return PackSource(Records(pack, broken), SimDisk([pack.image], **options))


def tier(source, pack, n_slots):
    policy = make_policy("lru", n_slots=n_slots, layers=pack.spec.layers, top_k=pack.spec.top_k)
    arena = host_arena(n_slots, pack.spec.slot_nbytes)
    return Tier(name=f"of {n_slots}", source=source, arena=arena, policy=policy)


class OnVirtualTime(SourceContract):
    settle_s = 10.0

    def run(self, main):
        return sim_run(main)


class Queueing(QueueingSourceContract, OnVirtualTime):
    """On a disk that runs one read at a time."""


class TestPackInMemory(SourceContract):
    async def open_source(self, pack, *, broken):
        return PackSource(Records(pack, broken), MemoryBackend([pack.image], alignment=4096))


class TestPackInAFile(SourceContract):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        self.path = tmp_path / "experts.bin"

    async def open_source(self, pack, *, broken):
        self.path.write_bytes(pack.image)
        return PackSource(Records(pack, broken), open_backend("buffered", [self.path]))


class TestPackOnADisk(OnVirtualTime):
    async def open_source(self, pack, *, broken):
        return disk_source(pack, broken)


class TestPackOnADiskThatQueues(Queueing):
    async def open_source(self, pack, *, broken):
        return disk_source(pack, broken, queue_depth=1)


class TestRolesMovedWithinTheSlot(OnVirtualTime):
    arranged = True

    async def open_source(self, pack, *, broken):
        records = ScatteredRoles(pack, broken)
        disk = SimDisk([records.image], queue_depth=2)
        return PackSource(records, disk, arranged=self.arranged)


class TestRolesLeftForTheCopyToArrange(TestRolesMovedWithinTheSlot):
    arranged = False


class TestVerified(OnVirtualTime):
    mode = "always"
    records = Records

    async def open_source(self, pack, *, broken):
        records = self.records(pack, broken)
        source = PackSource(records, SimDisk([records.image], queue_depth=2))
        return VerifiedSource(source, records, mode=self.mode, worker=SimWorker(1e-4))


class TestVerifiedOnFirstRead(TestVerified):
    mode = "first_read"


class TestVerifiedScatteredRoles(TestVerified):
    records = ScatteredRoles


class TestVerifiedThatQueues(Queueing):
    async def open_source(self, pack, *, broken):
        records = Records(pack, broken)
        source = PackSource(records, SimDisk([records.image], queue_depth=1))
        return VerifiedSource(source, records, mode="always", worker=SimWorker(1e-6))


class TestScatteredRolesThatQueue(Queueing):
    async def open_source(self, pack, *, broken):
        records = ScatteredRoles(pack, broken)
        return PackSource(records, SimDisk([records.image], queue_depth=1))


class TestATierWithSlotsForSomeThatQueues(Queueing):
    async def open_source(self, pack, *, broken):
        return tier(disk_source(pack, broken, queue_depth=1), pack, 3)


class TestAChainThatQueues(Queueing):
    async def open_source(self, pack, *, broken):
        return tier(tier(disk_source(pack, broken, queue_depth=1), pack, 4), pack, 2)


class TestFaultyThatQueues(Queueing):
    counts_failures = False

    async def open_source(self, pack, *, broken):
        errors = dict.fromkeys(broken, OSError("injected"))
        return FaultySource(disk_source(pack, (), queue_depth=1), failure=errors.get)


class TestATierOfOneSlot(Queueing):
    async def open_source(self, pack, *, broken):
        return tier(disk_source(pack, broken, queue_depth=1), pack, 1)


class TestATierThatHoldsAll(OnVirtualTime):
    async def open_source(self, pack, *, broken):
        return tier(disk_source(pack, broken), pack, 24)


class TestAChainOfTiers(OnVirtualTime):
    async def open_source(self, pack, *, broken):
        return tier(tier(disk_source(pack, broken), pack, 12), pack, 2)


class TestFaulty(OnVirtualTime):
    counts_failures = False

    async def open_source(self, pack, *, broken):
        errors = {
            key: ReadError(path="x", offset=0, nbytes=1, errno=errno.EIO, fact="injected")
            for key in broken
        }
        return FaultySource(disk_source(pack, (), queue_depth=2), failure=errors.get)


class TestATierOverAFaultySource(OnVirtualTime):
    counts_failures = False

    async def open_source(self, pack, *, broken):
        return tier(await TestFaulty().open_source(pack, broken=broken), pack, 3)


# ---- the contract has teeth


class Liar:
    """Passes everything on, and lies as its subclasses please."""

    def __init__(self, source):
        self.source = source

    def read_into(self, requests, *, priority=Priority.DEMAND):
        return self.source.read_into(requests, priority=priority)

    def parts(self, key):
        return self.source.parts(key)

    @property
    def counters(self):
        return self.source.counters

    async def close(self):
        await self.source.close()


class Early(Liar):
    """Says that it is done before it is."""

    def read_into(self, requests, **options):
        started = self.source.read_into(requests, **options)
        for fill in (fills := [RefusedFill(OSError()) for _ in started]):
            fill.done.exception()
            fill.done = asyncio.get_running_loop().create_future()
            fill.done.set_result(None)
        return fills


class Shuffling(Liar):
    def read_into(self, requests, **options):
        return self.source.read_into(requests, **options)[::-1]


class DropsWhatRuns(Liar):
    def read_into(self, requests, **options):
        fills = self.source.read_into(requests, **options)
        return [Dropped(fill) for fill in fills]


class Dropped:
    def __init__(self, fill):
        self.done = asyncio.get_running_loop().create_future()
        fill.done.add_done_callback(self._ended)

    def _ended(self, done):
        if self.done.done():
            done.cancelled() or done.exception()
        elif done.exception():
            self.done.set_exception(done.exception())
        else:
            self.done.set_result(None)

    def drop_if_queued(self):
        return self.done.cancel()


class LeavesAGap(Liar):
    def parts(self, key):
        (part,) = self.source.parts(key)
        return [Part(0, 0, part.nbytes - 8)]


class ClosesNothing(Liar):
    async def close(self):
        pass


class Reopens(Liar):
    def read_into(self, requests, **options):
        try:
            return self.source.read_into(requests, **options)
        except ClosedError:
            return []


class CountsNothing(Liar):
    @property
    def counters(self):
        return type(self.source.counters)(backend="none", direct_io=False)


class GivesUpTheClose(Liar):
    closing = False

    async def close(self):
        if not self.closing:
            self.closing = True
            await self.source.close()


class FailsAndGoesOn(Liar):
    """A fill fails at once, and its read goes on."""

    def read_into(self, requests, **options):
        fills = list(self.source.read_into(requests, **options))
        for i, (key, slot) in enumerate(requests):
            if key == (1, 3):
                fills[i] = RefusedFill(OSError("no"))
                asyncio.get_running_loop().call_later(1e-3, self._write, slot)
        return fills

    @staticmethod
    def _write(slot):
        slot.view[:1] = b"x"


class Impatient(Liar):
    """Takes everything for demand."""

    def read_into(self, requests, *, priority=Priority.DEMAND):
        del priority
        return self.source.read_into(requests)


class Wrapped:
    """A fill that passes everything on."""

    def __init__(self, fill):
        self.fill = fill
        self.done = fill.done

    def promote(self):
        self.fill.promote()

    def drop_if_queued(self):
        return self.fill.drop_if_queued()


class Deaf(Liar):
    """Hears of no promotion."""

    def read_into(self, requests, **options):
        return [DeafFill(fill) for fill in self.source.read_into(requests, **options)]


class DeafFill(Wrapped):
    def promote(self):
        pass


class DropsNothing(Liar):
    def read_into(self, requests, **options):
        return [Stubborn(fill) for fill in self.source.read_into(requests, **options)]


class Stubborn(Wrapped):
    def drop_if_queued(self):
        return False


@pytest.mark.parametrize(
    ("liar", "promise"),
    [
        (Impatient, "demand_goes_before_all_prefetch"),
        (Deaf, "a_promoted_fill_goes_as_demand"),
        (DropsNothing, "what_waits_can_be_dropped"),
    ],
)
def test_a_source_that_ignores_who_is_in_a_hurry_is_found_by_its_test(liar, promise):
    class Lying(Queueing):
        async def open_source(self, pack, *, broken):
            return liar(disk_source(pack, broken, queue_depth=1))

    (name,) = [name for name in dir(Lying) if promise in name]
    with pytest.raises(AssertionError):
        getattr(Lying(), name)()


@pytest.mark.parametrize(
    ("liar", "promise"),
    [
        (Early, "the_bytes_are_right_when_done_resolves"),
        (Shuffling, "the_bytes_are_right_when_done_resolves"),
        (DropsWhatRuns, "a_dropped_fill_never_writes"),
        (LeavesAGap, "its_parts_are_the_whole_payload"),
        (ClosesNothing, "closing_ends_every_fill"),
        (Reopens, "a_closed_source_refuses"),
        (CountsNothing, "counters_add_up"),
        (GivesUpTheClose, "a_cancelled_close_can_be_finished"),
        (FailsAndGoesOn, "a_failed_fill_is_one_fill"),
    ],
)
def test_a_source_that_breaks_a_promise_is_found_by_its_test(liar, promise):
    class Lying(OnVirtualTime):
        async def open_source(self, pack, *, broken):
            return liar(disk_source(pack, broken, queue_depth=2))

    (name,) = [name for name in dir(Lying) if promise in name]
    options = {"n_closers": 1} if "closing" in promise else {}
    with pytest.raises((AssertionError, ValueError)):
        getattr(Lying(), name)(**options)
