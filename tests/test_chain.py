"""The usual chain: what a configuration says reaches the part that it is about."""

import asyncio

import pytest

from tieredmoe import EventKind, HierarchyConfig, QueueFullError, open_hierarchy
from tieredmoe.testing import make_deepseek_v4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_deepseek_v4(tmp_path_factory.mktemp("chain") / "tiny.gguf", seed=1).paths[0]


def opened(model, use, **settings):
    async def main():
        config = HierarchyConfig(**{"vram": "1GiB", "reserve": 0, **settings})
        async with await open_hierarchy(model, config) as hierarchy:
            result = await use(hierarchy)
            hierarchy.check()
            return result

    return asyncio.run(main())


async def fill(hierarchy):
    async with hierarchy.acquire(0, [0, 1]) as lease:
        await lease.ready()


def test_the_limit_on_who_waits_is_kept(model):
    async def use(hierarchy):
        top_k = hierarchy.spec.top_k
        held = await hierarchy.acquire(0, range(top_k))
        waiting = asyncio.ensure_future(anext(hierarchy.stream(1, range(top_k)), None))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="1"):
            await asyncio.ensure_future(hierarchy.admit(2, hierarchy.keys(2, [0])))
        held.release()
        await waiting

    opened(model, use, vram=3 * 40960, waiting_max=1)


def test_the_trace_is_as_long_as_asked(model):
    async def use(hierarchy):
        await fill(hierarchy)
        return hierarchy.trace()

    events = opened(model, use, trace_events=4)
    assert len(events) == 4
    assert events[-1].kind is EventKind.RELEASED
    assert opened(model, use) == ()


def test_the_window_is_the_backends(model):
    async def use(hierarchy):
        return hierarchy.top.source._backend.info.window_nbytes

    assert opened(model, use, window="12KiB") == 12288


@pytest.mark.parametrize(("stage_slots", "n_tiers"), [(None, 1), (0, 1), (2, 2)])
def test_host_memory_is_staged_only_if_asked(model, stage_slots, n_tiers):
    async def use(hierarchy):
        await fill(hierarchy)
        return len(list(hierarchy._tiers())), hierarchy.stats().h2d_bytes

    found, copied = opened(model, use, stage_slots=stage_slots)
    assert found == n_tiers
    assert (copied > 0) == (n_tiers == 2)


@pytest.mark.parametrize("backend", ["threads", "buffered"])
def test_the_backend_is_the_one_that_was_asked_for(model, backend):
    async def use(hierarchy):
        return hierarchy.stats()

    stats = opened(model, use, backend=backend)
    assert (stats.backend, stats.direct_io) == (backend, backend == "threads")
    assert (stats.fallback_count, stats.fallbacks) == (0, ())
