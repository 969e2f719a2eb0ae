"""Whole models on a GPU: what they say, what memory they take, and that they give it back."""

import asyncio
import gc

import attrs
import pytest
import torch

from tieredmoe import HierarchyConfig, check_model, open_model
from tieredmoe.adapters import preflight
from tieredmoe.adapters.memory_plan import DEVICE_OVERHEAD_NBYTES
from tieredmoe.adapters.streamed_layers import layer_nbytes
from tieredmoe.testing import make_deepseek_v4, make_kimi_k3

pytestmark = pytest.mark.gpu

PROMPT = list(range(3, 60))


@pytest.fixture(scope="module", params=[make_deepseek_v4, make_kimi_k3], ids=["deepseek", "kimi"])
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("device") / "tiny.gguf"
    request.param(path, seed=2, tokenizer=None)
    return path


def config(vram="1GiB", **settings):
    return HierarchyConfig(device="cuda", vram=vram, reserve=0, **settings)


async def greedy(path, settings, *, n_new=24, chunk_length=16, n_context=512):
    """The tokens of an answer, and the model as it was before it was closed."""
    model = await open_model(path, settings, n_context=n_context, chunk_length=chunk_length)
    async with model:
        generation = model.generate(PROMPT, max_new_tokens=n_new)
        ids = [piece.token_id async for piece in generation]
        return ids, model.stats(), model.plan


def tokens(path, settings, **options):
    return asyncio.run(greedy(path, settings, **options))[0]


def test_greedy_tokens_are_those_of_every_cache_size(path, cuda):
    plan = check_model(path, config()).plan
    slot_nbytes, n_all = plan.tiers.slot_nbytes, plan.tiers.n_slots
    wanted, stats, _ = asyncio.run(greedy(path, config()))
    assert stats.cache_capacity_experts == n_all
    assert len(wanted) == 24
    for n_slots in (3, 5, n_all // 2):
        ids, stats, _ = asyncio.run(greedy(path, config(n_slots * slot_nbytes)))
        assert stats.cache_capacity_experts == n_slots
        assert stats.h2d_bytes > 0
        assert ids == wanted


def test_layers_that_stream_change_no_token(path, cuda, monkeypatch):
    slot_nbytes = check_model(path, config()).plan.tiers.slot_nbytes
    settings = config(4 * slot_nbytes)
    in_place, _, plan = asyncio.run(greedy(path, settings))
    assert plan.streamed == ()
    layers = plan.needs.dense.layers
    real = preflight.this_machine

    def smaller(settings):
        free_nbytes = plan.nbytes - layer_nbytes(layers[max(layers)])
        return attrs.evolve(real(settings), free_nbytes=free_nbytes)

    monkeypatch.setattr(preflight, "this_machine", smaller)
    streaming, stats, plan = asyncio.run(greedy(path, settings))
    assert len(plan.streamed) >= 4
    assert "ms per token" in str(plan)
    assert stats.cache_capacity_experts >= 3
    assert streaming == in_place


@pytest.fixture
def uncollected():
    """No garbage at first, and none is collected: what a test leaves is still there at its end."""
    gc.collect()
    torch.cuda.empty_cache()
    gc.disable()
    yield
    gc.enable()


def test_a_closed_model_gives_all_device_memory_back(path, cuda, uncollected):
    tokens(path, config())  # what the context, its libraries and the kernels' code take, stays
    free_nbytes = torch.cuda.mem_get_info(cuda)[0]
    allocated_nbytes = torch.cuda.memory_allocated(cuda)
    for _ in range(3):
        tokens(path, config())
    assert torch.cuda.memory_allocated(cuda) <= allocated_nbytes
    assert torch.cuda.mem_get_info(cuda)[0] >= free_nbytes - (8 << 20)


def test_a_plan_is_no_less_than_what_is_taken_and_not_much_more(path, cuda, uncollected):
    async def main():
        async with await open_model(path, config(), n_context=512, chunk_length=64) as model:
            async for _ in model.generate(PROMPT, max_new_tokens=16):
                pass
            # What a step allocates, torch keeps until the close: this is the peak.
            return model.plan, torch.cuda.mem_get_info(cuda)[0]

    plan, free_nbytes = asyncio.run(main())
    taken_nbytes = plan.machine.free_nbytes - free_nbytes
    assert taken_nbytes <= plan.nbytes
    # A model this small needs next to nothing of the allowance, which is for published widths.
    slack_nbytes = max(32 << 20, 0.15 * plan.nbytes)
    assert plan.nbytes - taken_nbytes <= DEVICE_OVERHEAD_NBYTES + slack_nbytes


def test_a_load_that_is_cancelled_leaves_no_device_memory_taken(path, cuda, monkeypatch):
    tokens(path, config())
    free_nbytes = torch.cuda.mem_get_info(cuda)[0]
    monkeypatch.setattr("tieredmoe.pack.progress.PROGRESS_INTERVAL_S", 0.0)

    async def main():
        task = asyncio.ensure_future(
            open_model(path, config(), progress=lambda done, total: task.cancel())
        )
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(main())
    gc.collect()  # the cancellation's traceback
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(cuda)[0] >= free_nbytes - (4 << 20)


def test_two_generations_side_by_side_do_not_disturb_each_other(path, cuda):
    async def main():
        async with await open_model(path, config(), n_context=512) as model:

            async def ids(prompt):
                return [p.token_id async for p in model.generate(prompt, max_new_tokens=8)]

            alone = [await ids([4, 5]), await ids([9] * 9)]
            together = await asyncio.gather(ids([4, 5]), ids([9] * 9))
            assert "cuda:0" in repr(model)
            return alone, together

    alone, together = asyncio.run(main())
    assert alone == together
