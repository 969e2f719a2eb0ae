"""Leases on experts on a GPU: what kernels read under a lease is never stale, never torn."""

import asyncio
import gc
import random
import threading

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

from cuda_stage import SPEC, Looks, open_tiers  # noqa: E402 (it needs torch)

from tieredmoe import HierarchyConfig, open_hierarchy  # noqa: E402
from tieredmoe.errors import BudgetError  # noqa: E402
from tieredmoe.testing import make_deepseek_v4  # noqa: E402
from tieredmoe.threaded import ThreadedHierarchy  # noqa: E402


def random_steps(hierarchy, *, n_steps, seed):
    """Acquire, look slowly on either stream, release at once; every look is judged at the end."""
    rng = random.Random(seed)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    looks = Looks(hierarchy.arena)
    for step in range(n_steps):
        layer = rng.choice(SPEC.layers)
        experts = rng.sample(range(SPEC.n_experts), rng.randint(1, 3))
        with hierarchy.acquire_blocking(layer, experts) as lease:
            for stream in rng.sample(streams, rng.randint(1, 2)):
                if rng.random() < 0.5:
                    lease.wait()
                    lease.wait_on(stream)
                    looks.look(stream, layer, experts, slowly=rng.random() < 0.3)
                else:
                    for expert in lease.as_completed_blocking():
                        lease.wait_on(stream)
                        looks.look(stream, layer, [expert], slowly=rng.random() < 0.3)
        if step % 50 == 49:
            looks.judge()
    looks.judge()


@pytest.mark.parametrize("slots", [(3, 1), (5, 3)])
def test_kernels_on_two_streams_never_see_a_stale_or_torn_expert(cuda, slots):
    with ThreadedHierarchy.open(lambda: open_tiers(*slots, cuda)) as hierarchy:
        random_steps(hierarchy, n_steps=200, seed=slots[0])
        stats = hierarchy.stats()
        assert stats.cache_evictions > 100
        assert stats.h2d_bytes == stats.pack_payload_bytes


def test_that_test_fails_if_released_slots_are_not_waited_for(cuda, monkeypatch):
    monkeypatch.setattr("tieredmoe.lease.Lease.fences", lambda _: ())
    with (
        ThreadedHierarchy.open(lambda: open_tiers(3, 3, cuda)) as hierarchy,
        pytest.raises(AssertionError, match=r"first|then"),
    ):
        random_steps(hierarchy, n_steps=200, seed=3)
    torch.cuda.synchronize()


def test_that_test_fails_if_the_copies_are_not_waited_for(cuda, monkeypatch):
    monkeypatch.setattr("tieredmoe.lease.Lease.wait_on", lambda *_: None)
    with (
        ThreadedHierarchy.open(lambda: open_tiers(3, 3, cuda)) as hierarchy,
        pytest.raises((AssertionError, RuntimeError)),
    ):
        random_steps(hierarchy, n_steps=200, seed=3)


def test_a_lease_that_garbage_collection_releases_is_waited_for_too(cuda):
    async def forget(hierarchy, stream, looks):
        async with hierarchy.acquire(3, [0, 1]) as lease:
            await lease.ready()
            lease.wait_on(stream)
            looks.look(stream, 3, [0, 1])
            await asyncio.get_running_loop().create_future()

    def abandon(hierarchy, stream, looks):
        coroutine = forget(hierarchy, stream, looks)
        for _ in range(1000):
            try:
                coroutine.send(None)
            except (RuntimeError, StopIteration):
                break
        return coroutine

    async def main():
        async with await open_tiers(2, 2, cuda) as hierarchy:
            looks, stream = Looks(hierarchy.arena), torch.cuda.Stream()
            async with hierarchy.acquire(3, [0, 1]) as lease:
                await lease.ready()
                lease.wait_on(stream)
            cycle = [abandon(hierarchy, stream, looks)]
            cycle.append(cycle)
            del cycle
            collector = threading.Thread(target=gc.collect)
            collector.start()
            collector.join()
            async with hierarchy.acquire(4, [2, 3]) as lease:  # takes both slots
                await lease.ready()
                lease.wait_on(stream)
                looks.look(stream, 4, [2, 3])
            looks.judge()

    asyncio.run(main())


def test_a_shrunk_cache_serves_on_and_its_memory_is_free(cuda):
    with ThreadedHierarchy.open(lambda: open_tiers(24, 4, cuda)) as hierarchy:
        random_steps(hierarchy, n_steps=60, seed=1)
        assert hierarchy.resize_blocking(4) == 4
        assert hierarchy.stats().cache_capacity_experts == 4
        random_steps(hierarchy, n_steps=60, seed=2)
        assert hierarchy.resize_blocking(24) == 24
        random_steps(hierarchy, n_steps=60, seed=3)


def test_resizing_waits_for_a_lease_and_for_the_kernels_that_read(cuda):
    with ThreadedHierarchy.open(lambda: open_tiers(6, 4, cuda)) as hierarchy:
        looks, stream = Looks(hierarchy.arena), torch.cuda.Stream()
        leases = [hierarchy.acquire_blocking(layer, [0, 1]) for layer in SPEC.layers]
        for lease in leases:
            lease.wait()
            lease.wait_on(stream)
            looks.look(stream, lease.layer, [0, 1])
        resized = threading.Thread(target=hierarchy.resize_blocking, args=(2,))
        resized.start()
        resized.join(0.05)
        assert resized.is_alive()
        for lease in leases:
            lease.release()
        resized.join(10)
        assert not resized.is_alive()
        looks.judge()


def test_a_model_is_served_from_the_gpu_as_from_the_host(cuda, tmp_path):
    """The whole chain, over a GGUF whose roles lie apart: the copy brings them together."""
    path = make_deepseek_v4(tmp_path / "tiny.gguf", seed=1).paths[0]

    async def main():
        on_gpu = HierarchyConfig(device="cuda", vram="8MiB", reserve=0, strict=False)
        on_host = HierarchyConfig(vram="8MiB", reserve=0, stage_slots=4)
        async with (
            await open_hierarchy(path, on_gpu) as hierarchy,
            await open_hierarchy(path, on_host) as reference,
        ):
            assert hierarchy.spec == reference.spec
            assert not any("pinned" in each for each in hierarchy.stats().fallbacks)
            for layer in hierarchy.spec.layers:
                nbytes = hierarchy.spec.layouts[layer].payload_nbytes
                for expert in range(hierarchy.spec.n_experts):
                    async with (
                        hierarchy.acquire(layer, [expert]) as lease,
                        reference.acquire(layer, [expert]) as right,
                    ):
                        await lease.ready()
                        await right.ready()
                        lease.wait_on(torch.cuda.current_stream())
                        slot = lease.slots[expert]
                        seen = hierarchy.arena.tensor[slot.slot_index][:nbytes].cpu()
                        assert bytes(seen.numpy()) == bytes(right.slots[expert].view[:nbytes])

    asyncio.run(main())


def test_a_budget_below_one_layer_is_refused_with_numbers(cuda, tmp_path):
    path = make_deepseek_v4(tmp_path / "tiny.gguf", seed=1).paths[0]
    free, _ = torch.cuda.mem_get_info(cuda)
    with pytest.raises(BudgetError, match="one layer needs 3"):
        asyncio.run(open_hierarchy(path, HierarchyConfig(device="cuda", vram="4KiB")))
    with pytest.raises(BudgetError, match="reserve"):
        asyncio.run(open_hierarchy(path, HierarchyConfig(device="cuda", reserve=free + 2**34)))
