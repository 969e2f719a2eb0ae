"""An expert that three reads bring is there or it is not: landing, failing, dropping, arranging."""

import asyncio
import ctypes
import random

import pytest
from small_moe import MIXED, make_small_moe

from tieredmoe.backends.protocol import BackendInfo, ReadStats
from tieredmoe.entry import READY
from tieredmoe.errors import ClosedError, ExpertLoadError, ReadError
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.memory.protocol import Part
from tieredmoe.pack import PackSource, open_virtual_pack
from tieredmoe.pack.fills import arrange
from tieredmoe.policies import make_policy
from tieredmoe.spec import ExpertKey
from tieredmoe.testing import Fault, FaultPlan, SimDisk, host_arena, sim_run
from tieredmoe.tier import Tier

KEY = ExpertKey(1, 2)


class Stagehand:
    """A backend whose reads start, land and fail when they are told to."""

    def __init__(self, paths):
        self.info = BackendInfo("hand", direct=True, alignment=4096, window_nbytes=1, reason="")
        self.files = [path.read_bytes() for path in paths]
        self.reads = []
        self.ops = {}
        self.started = set()
        self.on_drop = lambda read: None
        self.closed = False

    def submit(self, batch, **_):
        if self.closed:
            raise ClosedError("closed")
        reads = [asyncio.get_running_loop().create_future() for _ in batch]
        self.reads += reads
        self.ops.update(zip(reads, batch, strict=True))
        return reads

    def drop(self, read):
        if read.done() or read in self.started:
            return False
        read.cancel()
        self.on_drop(read)
        return True

    def start(self, *numbers):
        self.started.update(self.reads[i] for i in numbers)

    async def land(self, *numbers):
        for i in numbers:
            op = self.ops[self.reads[i]]
            content = self.files[op.file_index][op.offset : op.offset + op.target.nbytes]
            op.target[: len(content)] = content
            self.reads[i].set_result(None)
        await settle()

    async def fail(self, number, error):
        self.reads[number].set_exception(error)
        await settle()

    def stats(self):
        return ReadStats(0, 0, 0, 0, {}, 0, 0)

    async def close(self):
        self.closed = True


async def settle():
    for _ in range(3):
        await asyncio.sleep(0)


def eio(offset=0):
    return ReadError(path="m.gguf", offset=offset, nbytes=1, errno=5, fact="injected")


@pytest.fixture
def model(tmp_path):
    return make_small_moe(tmp_path / "m.gguf", n_shards=2, types=MIXED)


def play(model, scenario, **options):
    """Play ``scenario(hand, fill, slot, source)`` with one fill of ``KEY`` under way."""

    async def main():
        virtual = open_virtual_pack(model.paths[0])
        hand = Stagehand(model.paths)
        source = PackSource(virtual, hand, **options)
        slot = host_arena(1, virtual.slot_nbytes).slot(0)
        (fill,) = source.read_into([(KEY, slot)])
        assert len(hand.reads) == 3
        await scenario(hand, fill, slot, source)

    asyncio.run(main())


def right(model):
    return b"".join(model.slabs[*KEY[:1], role, KEY.expert] for role in ("gate", "up", "down"))


def counted(source):
    counters = source.counters
    return counters.pack_reads, counters.pack_read_bytes, dict(counters.read_errors)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_it_is_whole_when_the_last_read_has_landed_and_not_before(model, order):
    async def scenario(hand, fill, slot, source):
        for i in order[:2]:
            await hand.land(i)
            assert not fill.done.done()
        await hand.land(order[2])
        assert fill.done.done()
        assert bytes(slot.view[: len(right(model))]) == right(model)
        asked = sum(hand.ops[read].target.nbytes for read in hand.reads)
        assert counted(source) == (1, asked, {})
        assert source.counters.pack_payload_bytes == len(right(model))

    play(model, scenario)


def test_left_as_it_was_read_its_parts_say_where_everything_is(model):
    async def scenario(hand, fill, slot, source):
        await hand.land(0, 1, 2)
        record = bytearray(len(right(model)))
        for begin, target, nbytes in source.parts(KEY):
            record[target : target + nbytes] = slot.view[begin : begin + nbytes]
        assert bytes(record) == right(model)
        assert bytes(slot.view[: len(record)]) != right(model)

    play(model, scenario, arranged=False)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_failed_read_fails_it_once_when_no_other_can_write_any_more(model, bad):
    async def scenario(hand, fill, slot, source):
        hand.start(0, 1, 2)
        await hand.fail(bad, eio(bad))
        others = [i for i in range(3) if i != bad]
        for i in others:
            assert not fill.done.done()
            await hand.land(i)
        assert fill.done.exception().offset == bad
        assert counted(source)[2] == {"EIO": 1}
        assert source.counters.pack_payload_bytes == 0

    play(model, scenario)


def test_the_first_of_several_errors_is_told(model):
    async def scenario(hand, fill, slot, source):
        hand.start(0, 1, 2)
        await hand.fail(1, eio(1))
        await hand.fail(0, eio(0))
        await hand.fail(2, eio(2))
        assert fill.done.exception().offset == 1
        assert counted(source)[2] == {"EIO": 1}

    play(model, scenario)


def test_reads_that_have_not_started_are_spared_once_one_has_failed(model):
    async def scenario(hand, fill, slot, source):
        hand.start(0)
        await hand.fail(0, eio())
        assert fill.done.exception().errno == 5
        assert [read.cancelled() for read in hand.reads] == [False, True, True]
        asked = hand.ops[hand.reads[0]].target.nbytes
        assert counted(source) == (1, asked, {"EIO": 1})

    play(model, scenario)


def test_none_started_means_all_are_dropped(model):
    async def scenario(hand, fill, slot, source):
        assert fill.drop_if_queued()
        await settle()
        assert fill.done.cancelled()
        assert all(read.cancelled() for read in hand.reads)
        assert counted(source) == (0, 0, {})
        assert not fill.drop_if_queued()

    play(model, scenario)


@pytest.mark.parametrize("landed", [False, True])
def test_one_started_means_none_is_dropped_and_it_completes(model, landed):
    async def scenario(hand, fill, slot, source):
        hand.start(0)
        if landed:
            await hand.land(0)
        assert not fill.drop_if_queued()
        assert not any(read.cancelled() for read in hand.reads)
        await hand.land(*range(landed, 3))
        assert fill.done.result() is None
        assert bytes(slot.view[: len(right(model))]) == right(model)

    play(model, scenario)


@pytest.mark.parametrize("overtaking", [1, 2])
def test_a_read_that_starts_while_others_are_dropped_brings_them_back(model, overtaking):
    async def scenario(hand, fill, slot, source):
        hand.on_drop = lambda read: hand.start(overtaking)
        assert not fill.drop_if_queued()
        await settle()
        dropped = [i for i in range(3) if hand.reads[i].cancelled()]
        assert dropped == list(range(overtaking))
        assert len(hand.reads) == 3 + len(dropped)
        await hand.land(*range(overtaking, 3))
        assert not fill.done.done()
        await hand.land(*range(3, len(hand.reads)))
        assert fill.done.result() is None
        assert bytes(slot.view[: len(right(model))]) == right(model)
        asked = sum(hand.ops[hand.reads[i]].target.nbytes for i in range(3))
        assert counted(source) == (1, asked, {})

    play(model, scenario)


def test_what_cannot_be_brought_back_fails_it_once_the_running_read_has_ended(model):
    async def scenario(hand, fill, slot, source):
        def overtaken(_):
            hand.start(1)
            hand.closed = True

        hand.on_drop = overtaken
        assert not fill.drop_if_queued()
        await settle()
        assert not fill.done.done()
        await hand.land(1)
        assert isinstance(fill.done.exception(), ClosedError)
        assert counted(source)[2] == {}

    play(model, scenario)


def test_a_read_that_the_backend_itself_cancels_fails_it_as_closed(model):
    async def scenario(hand, fill, slot, source):
        hand.start(1, 2)
        hand.reads[0].cancel()
        await settle()
        await hand.land(1, 2)
        assert isinstance(fill.done.exception(), ClosedError)

    play(model, scenario)


# --- arranging


def test_an_expert_that_cannot_be_brought_to_its_places_fails_and_does_not_hang(model, monkeypatch):
    def no_memory(target, source, nbytes):
        raise MemoryError

    async def scenario(hand, fill, slot, source):
        monkeypatch.setattr(ctypes, "memmove", no_memory)
        hand.start(0, 1, 2)
        await hand.land(0, 1, 2)
        assert isinstance(fill.done.exception(), MemoryError)
        assert counted(source)[2] == {"MemoryError": 1}

    play(model, scenario)


@pytest.mark.parametrize(
    "parts",
    [
        [Part(5, 0, 50), Part(60, 50, 40), Part(150, 90, 50)],  # downwards, overlapping itself
        [Part(80, 0, 60), Part(0, 60, 70), Part(150, 130, 50)],  # the first hides the second
        [Part(100, 0, 50), Part(50, 50, 50), Part(0, 100, 50)],  # backwards
        [Part(0, 10, 90), Part(100, 100, 40)],  # upwards, within itself
    ],
)
def test_parts_go_to_their_places_whatever_they_overlap(parts):
    slot = host_arena(1).slot(0)
    before = bytes(random.Random(7).randbytes(4096))
    slot.view[:] = before
    arrange(slot, parts)
    for part in parts:
        got = bytes(slot.view[part.target_offset : part.target_offset + part.nbytes])
        assert got == before[part.source_offset : part.source_offset + part.nbytes]


# --- in a hierarchy, over a disk that is worse than a real one


class Stage:
    """A hierarchy over a virtual pack; whatever is READY in its top tier is right, always."""

    def __init__(self, model, *, slots, faults=None, seed=0, queue_depth=2):
        self.model = model
        self.virtual = open_virtual_pack(model.paths[0])
        files = [path.read_bytes() for path in model.paths]
        self.disk = SimDisk(
            files, paths=model.paths, faults=faults, seed=seed, queue_depth=queue_depth
        )
        source = PackSource(self.virtual, self.disk, arranged=len(slots) == 1)
        spec = self.virtual.spec
        for i, n_slots in enumerate(slots):
            nbytes = self.virtual.slot_nbytes if i == 0 else spec.slot_nbytes
            source = Tier(
                name=f"tier {i}",
                source=source,
                arena=host_arena(n_slots, nbytes),
                policy=make_policy("lru", n_slots=n_slots, layers=spec.layers, top_k=spec.top_k),
            )
        self.top = source
        self.hierarchy = Hierarchy(source, spec)
        asyncio.get_running_loop().on_step(self.watch)

    def watch(self):
        if self.top.closed:
            return
        self.top.check()
        for key, entry in self.top.residency.entries.items():
            if entry.state is READY:
                self.check_slot(key, self.top.arena.slot(entry.slot_index))

    def check_slot(self, key, slot):
        for role in self.virtual.spec.layouts[key.layer].roles:
            got = bytes(slot.view[role.offset : role.offset + role.nbytes])
            assert got == self.model.slabs[key.layer, role.name, key.expert], key

    async def serves(self, layer, experts):
        async with self.hierarchy.acquire(layer, experts) as lease:
            await lease.ready()
            for expert in experts:
                self.check_slot(ExpertKey(layer, expert), lease.slots[expert])


@pytest.mark.parametrize("slots", [(3,), (2, 3)])
@pytest.mark.parametrize("kind", ["error", "torn", "eof"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_fault_in_one_of_three_reads_fails_that_expert_alone(model, slots, kind, which):
    virtual = open_virtual_pack(model.paths[0])
    bad = virtual.extents(KEY).envelopes[which]
    place = bad.offset + bad.nbytes // 2

    async def main():

        stage = Stage(model, slots=slots, faults=FaultPlan().at(bad.file_index, place, Fault(kind)))
        async with stage.hierarchy:
            async with stage.hierarchy.acquire(KEY.layer, [0, KEY.expert]) as lease:
                await lease.futures[0]
                with pytest.raises(ExpertLoadError) as caught:
                    await lease.futures[KEY.expert]
            error = caught.value.__cause__
            assert error.path == model.paths[bad.file_index]
            assert error.offset <= place < error.offset + error.nbytes
            assert str(error.path) in str(caught.value)
            assert KEY not in stage.top.residency.entries
            await stage.serves(KEY.layer, [KEY.expert, 0])
            stats = stage.hierarchy.stats()
            assert (stats.io_errors, sum(stats.read_errors.values())) == (1, 1)
        stage.disk.check()

    sim_run(main(), collect_garbage=False)


@pytest.mark.parametrize("slots", [(2,), (1, 2), (3, 4)])
@pytest.mark.parametrize("seed", range(8))
def test_storms_of_cancelled_acquires_leave_right_bytes_and_nothing_behind(model, slots, seed):
    async def main():
        dice = random.Random(seed)
        stage = Stage(model, slots=slots, seed=seed, faults=FaultPlan(seed=seed, rate=0.05))

        async def one():
            layer = dice.choice(stage.virtual.spec.layers)
            try:
                await stage.serves(layer, dice.sample(range(4), k=dice.randint(1, 2)))
            except ExpertLoadError:
                return

        async with stage.hierarchy:
            tasks = []
            for _ in range(60):
                tasks.append(asyncio.ensure_future(one()))
                await asyncio.sleep(dice.uniform(0, 2e-4))
                if dice.random() < 0.5:
                    dice.choice(tasks).cancel()
            await asyncio.wait(tasks)
            await stage.disk.drain()
            for layer in stage.virtual.spec.layers:
                stage.disk._faults._rate = 0.0
                await stage.serves(layer, [0, 3])
            stage.hierarchy.check()
        assert stage.disk.stats().in_flight == 0
        stage.disk.check()
        for task in tasks:
            assert task.cancelled() or task.exception() is None

    sim_run(main(), collect_garbage=False)
