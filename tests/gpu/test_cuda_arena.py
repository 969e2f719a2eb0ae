"""The arena on a GPU: bytes, table and fences are right in the order of streams."""

import asyncio

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

from cuda_stage import PACK, SPEC, Looks, cuda_arena, pinned_arena  # noqa: E402 (it needs torch)

from tieredmoe.errors import BudgetError, ConfigError, DeviceError  # noqa: E402
from tieredmoe.memory import PASSED, HostPool, Part  # noqa: E402
from tieredmoe.memory.cuda_device import open_device, pin  # noqa: E402
from tieredmoe.memory.cuda_driver import Driver  # noqa: E402
from tieredmoe.spec import ExpertKey  # noqa: E402
from tieredmoe.testing.tiny_pack import host_arena  # noqa: E402

A, B, C = ExpertKey(3, 0), ExpertKey(3, 1), ExpertKey(7, 5)


@pytest.fixture
def stage(cuda):
    stage = _Stage(cuda)
    yield stage
    stage.close()


class _Stage:
    """A host arena that holds A, B and C, and a device arena of two slots."""

    def __init__(self, device):
        self.host, self.pinned = pinned_arena(3, device)
        assert self.pinned.refused is None
        for slot_index, key in enumerate((A, B, C)):
            payload = PACK.payload(key)
            self.host.slot(slot_index).view[: len(payload)] = payload
        self.arena = cuda_arena(2, device, pinned=self.pinned)
        self.stream = torch.cuda.Stream()
        self.looks = Looks(self.arena)

    def copy(self, key, slot_index):
        source = self.host.slot((A, B, C).index(key))
        whole = (Part(0, 0, SPEC.layouts[key.layer].payload_nbytes),)
        return self.arena.copy_from(key, source, self.arena.slot(slot_index), whole)

    def table(self):
        torch.cuda.synchronize()
        rows = self.arena.table.cpu().tolist()
        return {
            (layer, expert): slot
            for layer, row in zip(SPEC.layers, rows, strict=True)
            for expert, slot in enumerate(row)
            if slot != -1
        }

    def close(self):
        torch.cuda.synchronize()
        self.host.close()
        self.arena.close()


def test_a_stream_that_waits_sees_the_bytes_through_the_table(stage):
    fence = stage.copy(A, 1)
    assert stage.arena.slot(1).ready is fence
    fence.wait_on(stage.stream)
    stage.looks.look(stage.stream, 3, [0])
    assert stage.looks.judge() == 1
    assert stage.table() == {A: 1}
    assert fence.passed()


def test_parts_go_where_they_say_and_nothing_else_is_written(stage):
    stage.arena.tensor.fill_(0xEE)
    torch.cuda.synchronize()
    source, target = stage.host.slot(0), stage.arena.slot(0)
    source.view[:256] = bytes(range(256))
    stage.arena.copy_from(A, source, target, [Part(1, 0, 3), Part(10, 5000, 4)]).wait_on(
        torch.cuda.current_stream()
    )
    seen = bytes(stage.arena.tensor[0].cpu().numpy())
    assert seen[:4] == bytes([1, 2, 3, 0xEE])
    assert seen[4999:5005] == bytes([0xEE, 10, 11, 12, 13, 0xEE])
    assert stage.arena.tensor[1].cpu().eq(0xEE).all()


def test_the_table_follows_the_slots(stage):
    stage.copy(A, 0)
    stage.copy(B, 1)
    assert stage.table() == {A: 0, B: 1}
    stage.copy(C, 0)
    assert stage.table() == {B: 1, C: 0}
    stage.copy(A, 1)
    assert stage.table() == {A: 1, C: 0}
    # A moves on to slot 0; taking its old slot must not take its entry back.
    stage.copy(A, 0)
    assert stage.table() == {A: 0}
    stage.copy(B, 1)
    assert stage.table() == {A: 0, B: 1}


def test_addresses_are_fit_for_wide_loads_and_never_change(stage):
    arena = stage.arena
    before = arena.tensor.data_ptr(), arena.slot_of(4).data_ptr()
    assert arena.tensor.shape == (2, SPEC.slot_nbytes)
    assert before[0] % 256 == 0
    assert arena.tensor.stride(0) % 256 == 0
    assert arena.slot(1).address == before[0] + SPEC.slot_nbytes
    arena.resize(1)
    arena.resize(2)
    assert (arena.tensor.data_ptr(), arena.slot_of(4).data_ptr()) == before


def overwrite_under_a_reader(stage):
    """Copy over a slot that a slow kernel reads; returns whether the kernel saw what it should."""
    stage.copy(A, 0).wait_on(stage.stream)
    torch.cuda.synchronize()
    words = stage.arena.tensor[0].view(torch.int64)
    with torch.cuda.stream(stage.stream):
        torch.cuda._sleep(20_000_000)
        seen = words.sum()
    stage.arena.slot(0).idle = stage.arena.fence(stage.stream)
    right = int(torch.frombuffer(bytearray(stage.host.slot(0).view), dtype=torch.int64).sum())
    stage.copy(B, 0)
    torch.cuda.synchronize()
    return seen.item() == right


def test_a_copy_waits_for_those_who_read_what_was_there(stage):
    assert overwrite_under_a_reader(stage)


def test_without_that_wait_the_reader_would_see_other_bytes(stage, monkeypatch):
    """The test above can fail: the kernel is slow enough and the copy fast enough."""
    monkeypatch.setattr("tieredmoe.memory.cuda_events.EventFence.wait_on", lambda *_: None)
    assert not overwrite_under_a_reader(stage)


def test_a_fence_is_told_in_the_loop_and_behind_its_copy(stage):
    async def main():
        passed = asyncio.Event()
        thread = []
        with torch.cuda.stream(stage.stream):
            torch.cuda._sleep(20_000_000)
        stage.arena.slot(0).idle = stage.arena.fence(stage.stream)
        fence = stage.copy(A, 0)
        fence.on_passed(lambda: (thread.append(asyncio.get_running_loop()), passed.set()))
        assert not fence.passed()
        await passed.wait()
        assert fence.passed()
        assert thread == [asyncio.get_running_loop()]
        fence.on_passed(lambda: thread.append("at once"))
        assert thread[1:] == ["at once"]

    asyncio.run(main())


def test_many_fences_are_told_once_each(stage):
    async def main():
        told = []
        done = asyncio.Event()
        for number in range(300):
            fence = stage.copy((A, B)[number % 2], number % 2)
            fence.on_passed(lambda number=number: told.append(number))
        fence.on_passed(done.set)
        await done.wait()
        assert sorted(told) == list(range(300))

    asyncio.run(main())


def test_fences_of_one_stream_cover_each_other_and_of_two_do_not(stage):
    other = torch.cuda.Stream()
    first, second = stage.arena.fence(stage.stream), stage.arena.fence(stage.stream)
    foreign = stage.arena.fence(other)
    assert second.covers(first)
    assert not first.covers(second)
    assert first.covers(PASSED)
    assert not first.covers(foreign)
    assert not foreign.covers(first)
    torch.cuda.synchronize()
    assert first.passed()
    assert foreign.passed()


def test_shrinking_gives_memory_back_at_once_and_leaves_the_rest_alone(cuda):
    n_slots = 1024
    arena = cuda_arena(n_slots, cuda)
    arena.tensor[0].fill_(7)
    torch.cuda.synchronize()
    free_before, _ = torch.cuda.mem_get_info(cuda)
    arena.resize(256)
    free_after, _ = torch.cuda.mem_get_info(cuda)
    assert free_after - free_before >= 256 << 20  # of 384 MiB, in pieces of 64
    arena.resize(n_slots)
    arena.tensor[1023].fill_(9)
    torch.cuda.synchronize()
    assert arena.tensor[0].eq(7).all()
    assert arena.tensor[1023].eq(9).all()
    arena.close()
    assert torch.cuda.mem_get_info(cuda)[0] >= free_after


def test_what_is_given_up_leaves_the_table(stage):
    stage.copy(A, 0)
    stage.copy(B, 1)
    torch.cuda.synchronize()
    stage.arena.resize(1)
    assert stage.table() == {A: 0}


def test_more_than_the_gpu_has_is_refused_with_numbers_and_nothing_stays(cuda):
    free, total = torch.cuda.mem_get_info(cuda)
    with pytest.raises(BudgetError, match=r"GiB|MiB"):
        cuda_arena(total // SPEC.slot_nbytes + 1, cuda)
    assert torch.cuda.mem_get_info(cuda)[0] >= free - (64 << 20)


def test_memory_that_is_not_registered_works_too(cuda):
    host = host_arena(1, SPEC.slot_nbytes)
    payload = PACK.payload(A)
    host.slot(0).view[: len(payload)] = payload
    arena = cuda_arena(1, cuda)
    looks, stream = Looks(arena), torch.cuda.Stream()
    fence = arena.copy_from(A, host.slot(0), arena.slot(0), (Part(0, 0, len(payload)),))
    fence.wait_on(stream)
    looks.look(stream, 3, [0])
    assert looks.judge() == 1
    arena.close()


def test_a_graph_can_be_captured_while_copies_run(stage):
    async def main():
        graph = torch.cuda.CUDAGraph()
        out = torch.zeros((), dtype=torch.int64, device=stage.arena.device)
        fences = [stage.copy((A, B)[i % 2], i % 2) for i in range(50)]
        told = asyncio.Event()
        fences[-1].on_passed(told.set)
        with torch.cuda.graph(graph, stream=stage.stream, capture_error_mode="thread_local"):
            out.copy_(stage.arena.tensor[0].view(torch.int64).sum())
        fences += [stage.copy((A, B)[i % 2], i % 2) for i in range(50)]
        await told.wait()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        words = torch.frombuffer(bytearray(PACK.payload(A)), dtype=torch.int64)
        rest = stage.arena.tensor[0][words.numel() * 8 :].view(torch.int64).sum().item()
        assert out.item() == words.sum().item() + rest

    asyncio.run(main())


def test_closing_twice_is_harmless_and_a_closed_arena_takes_nothing(stage):
    slot = stage.arena.slot(0)
    stage.close()
    stage.arena.close()
    with pytest.raises(AssertionError, match="closed"):
        stage.arena.slot(0)
    with pytest.raises(AssertionError, match="closed"):
        stage.arena.copy_from(A, slot, slot, ())
    assert "closed" in repr(stage.arena)


def test_a_device_that_is_not_there_is_named_with_those_that_are(cuda):
    with pytest.raises(ConfigError, match=r"cuda:99.*cuda:0 \("):
        open_device("cuda:99")
    assert open_device("cuda").index == 0


def test_memory_that_cannot_be_registered_says_so(cuda, monkeypatch, caplog):
    def refuse(self, name, *arguments):
        if name == "cuMemHostRegister_v2":
            raise DeviceError(name, 304, "CUDA_ERROR_OPERATING_SYSTEM")
        return call(self, name, *arguments)

    call = Driver.__call__
    monkeypatch.setattr(Driver, "__call__", refuse)
    pool = HostPool.allocate(4 << 20)
    with pin(pool, device=cuda, record_nbytes=4096) as pinned:
        assert isinstance(pinned.refused, DeviceError)
        assert "4 MiB of host memory could not be registered" in caplog.text
    with pytest.raises(DeviceError, match="cuMemHostRegister"):
        pin(pool, device=cuda, record_nbytes=4096, strict=True)
    pool.close()


def test_a_registration_that_was_forgotten_is_no_mere_refusal(cuda):
    """The driver would copy from pages that are gone: never silently."""
    pool = HostPool.allocate(4 << 20)
    with pin(pool, device=cuda, record_nbytes=4096), pytest.raises(DeviceError, match="712"):
        pin(pool, device=cuda, record_nbytes=4096)
    pool.close()


def test_registered_memory_is_pinned_for_torch_too(cuda):
    pool = HostPool.allocate(4 << 20)
    with pin(pool, device=cuda, record_nbytes=4096):
        region = pool.carve(4096)
        tensor = torch.frombuffer(region.view, dtype=torch.uint8)
        assert tensor.is_pinned()
    assert not tensor.is_pinned()
    del tensor
    pool.close()
