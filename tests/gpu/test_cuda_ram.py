"""A RAM tier below a GPU: whatever goes up and comes back down, kernels see the right bytes."""

import asyncio
import random

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

from cuda_stage import PACK, SPEC, WORDS, Looks, cuda_arena, pinned_arena  # noqa: E402 (torch)

from tieredmoe import HierarchyConfig, open_hierarchy  # noqa: E402
from tieredmoe.backends.memory import MemoryBackend  # noqa: E402
from tieredmoe.entry import READY  # noqa: E402
from tieredmoe.hierarchy import Hierarchy  # noqa: E402
from tieredmoe.memory import Part  # noqa: E402
from tieredmoe.memory.cuda import CudaArena  # noqa: E402
from tieredmoe.pack.source import PackSource  # noqa: E402
from tieredmoe.policies import make_policy  # noqa: E402
from tieredmoe.spec import ExpertKey  # noqa: E402
from tieredmoe.testing import make_deepseek_v4  # noqa: E402
from tieredmoe.threaded import ThreadedHierarchy  # noqa: E402
from tieredmoe.tier import Tier  # noqa: E402

A, B = ExpertKey(3, 0), ExpertKey(3, 1)
NBYTES = SPEC.layouts[3].payload_nbytes
WHOLE = (Part(0, 0, NBYTES),)


async def open_chain(n_slots, ram_slots, device, **options):
    """VRAM of ``n_slots`` over a RAM tier of ``ram_slots`` over a disk in memory."""
    ram, pinned = pinned_arena(ram_slots, device)
    arena = cuda_arena(n_slots, device, pinned=pinned)
    source = PackSource(PACK, MemoryBackend([PACK.image], alignment=4096))
    for name, each in (("ram", ram), ("top", arena)):
        policy = make_policy("lru", n_slots=each.n_slots, layers=SPEC.layers, top_k=SPEC.top_k)
        source = Tier(name=name, source=source, arena=each, policy=policy, keeps=name == "ram")
    return Hierarchy(source, SPEC, **options)


def random_steps(hierarchy, *, n_steps, seed):
    """Acquire, look on one of two streams, release at once, so that slots are wanted under use."""
    rng = random.Random(seed)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    looks = Looks(hierarchy.arena)
    n_looks = 0
    for step in range(n_steps):
        layer = rng.choice(SPEC.layers)
        experts = rng.sample(range(SPEC.n_experts), rng.randint(1, 3))
        with hierarchy.acquire_blocking(layer, experts) as lease:
            if rng.random() < 0.2:
                continue
            stream = rng.choice(streams)
            for expert in lease.as_completed_blocking():
                lease.wait_on(stream)
                looks.look(stream, layer, [expert], slowly=rng.random() < 0.02)
        if step % 100 == 99:
            n_looks += looks.judge()
    return n_looks + looks.judge()


@pytest.mark.parametrize("slots", [(5, 9), (3, 4), (8, 16)])
def test_thousands_of_steps_through_all_three_see_nothing_stale_or_torn(cuda, slots):
    with ThreadedHierarchy.open(lambda: open_chain(*slots, cuda)) as hierarchy:
        assert random_steps(hierarchy, n_steps=2000, seed=sum(slots)) > 2000
        stats = hierarchy.stats()
        assert stats.ram_hits > 100
        assert stats.copied_back > 50
        assert stats.d2h_bytes == stats.copied_back * NBYTES
        assert stats.pack_reads == stats.tiers[1].misses


def test_what_is_kept_on_the_host_has_its_own_bytes(cuda):
    async def main():
        async with await open_chain(4, 12, cuda) as hierarchy:
            rng = random.Random(7)
            ram = hierarchy.top.source
            for _ in range(200):
                layer = rng.choice(SPEC.layers)
                async with hierarchy.acquire(layer, rng.sample(range(8), 2)) as lease:
                    await lease.ready()
                    lease.wait_on(torch.cuda.current_stream())
            torch.cuda.synchronize()
            await asyncio.sleep(0.05)
            assert not ram.transfers.n
            held = [e for e in ram.residency.entries.values() if e.state is READY]
            assert len(held) == 12
            for entry in held:
                seen = bytes(ram.slots[entry.slot_index].view[:NBYTES])
                assert seen == bytes(WORDS[entry.key].numpy()), entry
            assert hierarchy.stats().copied_back > 10

    asyncio.run(main())


def test_that_test_fails_if_slots_are_written_before_they_are_copied_out(cuda, monkeypatch):
    """The copy out is made to wait for a slow kernel, and nobody waits for it."""
    copy_out = CudaArena.copy_out

    def late_and_unwaited(self, source, target, parts):
        idle = source.idle
        with torch.cuda.stream(self._copies_out):
            torch.cuda._sleep(20_000_000)
        fence = copy_out(self, source, target, parts)
        source.idle = idle
        return fence

    monkeypatch.setattr(CudaArena, "copy_out", late_and_unwaited)
    with (
        ThreadedHierarchy.open(lambda: open_chain(3, 6, cuda)) as hierarchy,
        pytest.raises(AssertionError, match=r"first|then"),
    ):
        random_steps(hierarchy, n_steps=300, seed=3)
    torch.cuda.synchronize()


def test_a_copy_up_waits_for_the_copy_back_that_it_reads(cuda):
    async def main():
        host, pinned = pinned_arena(2, cuda)
        arena = cuda_arena(2, cuda, pinned=pinned)
        host.slot(0).view[:NBYTES] = PACK.payload(A)
        arena.copy_from(A, host.slot(0), arena.slot(0), WHOLE)
        with torch.cuda.stream(arena._copies_out):
            torch.cuda._sleep(50_000_000)
        back = arena.copy_out(arena.slot(0), host.slot(1), WHOLE)
        up = arena.copy_from(A, host.slot(1), arena.slot(1), WHOLE)
        assert not back.passed()
        passed = asyncio.Event()
        up.on_passed(passed.set)
        await passed.wait()
        assert back.passed()
        assert bytes(arena.tensor[1, :NBYTES].cpu().numpy()) == PACK.payload(A)
        host.close()
        arena.close()

    asyncio.run(main())


def test_both_directions_of_the_link_are_busy_at_once(cuda):
    """A copy in does not wait behind one out of another slot that has not begun."""

    async def main():
        host, pinned = pinned_arena(3, cuda)
        arena = cuda_arena(2, cuda, pinned=pinned)
        host.slot(0).view[:NBYTES] = PACK.payload(A)
        host.slot(1).view[:NBYTES] = PACK.payload(B)
        arena.copy_from(A, host.slot(0), arena.slot(0), WHOLE)
        torch.cuda.synchronize()
        with torch.cuda.stream(arena._copies_out):
            torch.cuda._sleep(200_000_000)
        out = arena.copy_out(arena.slot(0), host.slot(2), WHOLE)
        into = arena.copy_from(B, host.slot(1), arena.slot(1), WHOLE)
        passed = asyncio.Event()
        into.on_passed(passed.set)
        await passed.wait()
        assert not out.passed()
        torch.cuda.synchronize()
        assert bytes(host.slot(2).view[:NBYTES]) == PACK.payload(A)
        host.close()
        arena.close()

    asyncio.run(main())


def test_memory_that_is_not_registered_is_not_copied_back_into(cuda):
    async def main():
        async with await open_chain(3, 6, cuda) as hierarchy:
            hierarchy.arena.copies_out = False  # as where registering was refused
            for step in range(60):
                async with hierarchy.acquire(SPEC.layers[step % 3], [step % 8]) as lease:
                    await lease.ready()
            assert hierarchy.stats().copied_back == 0

    asyncio.run(main())


def test_a_model_is_served_through_vram_and_ram_as_from_the_host(cuda, tmp_path):
    path = make_deepseek_v4(tmp_path / "tiny.gguf", seed=1).paths[0]

    async def main():
        on_gpu = HierarchyConfig(
            device="cuda", vram="200KiB", reserve=0, ram="720KiB", window="72KiB"
        )
        on_host = HierarchyConfig(vram="8MiB", reserve=0, stage_slots=4)
        rng = random.Random(1)
        async with (
            await open_hierarchy(path, on_gpu) as hierarchy,
            await open_hierarchy(path, on_host) as right,
        ):
            for _ in range(300):
                layer, experts = rng.choice(hierarchy.spec.layers), rng.sample(range(8), 3)
                nbytes = hierarchy.spec.layouts[layer].payload_nbytes
                async with (
                    hierarchy.acquire(layer, experts) as lease,
                    right.acquire(layer, experts) as other,
                ):
                    await lease.ready()
                    await other.ready()
                    lease.wait_on(torch.cuda.current_stream())
                    for expert in experts:
                        seen = hierarchy.arena.tensor[lease.slots[expert].slot_index][:nbytes].cpu()
                        assert bytes(seen.numpy()) == bytes(other.slots[expert].view[:nbytes])
            stats = hierarchy.stats()
            assert stats.tiers[1].name == "ram"
            assert stats.ram_hits > 50
            assert stats.copied_back > 20

    asyncio.run(main())
