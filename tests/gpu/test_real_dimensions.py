"""Models of real widths and record sizes on a device: what a cache's size must not change."""

import asyncio
import gc

import pytest
import torch

from tieredmoe import HierarchyConfig
from tieredmoe.adapters import open_model
from tieredmoe.testing import make_synthetic, text_like_tokens

pytestmark = pytest.mark.gpu

MODELS = {"deepseek-v4-flash": (6, 24, 2), "kimi-k3": (16, 48, 1)}
"""Top-k, and how many experts and routed layers the models here have."""


@pytest.fixture(params=MODELS)
def model(request, cuda, tmp_path):
    top_k, n_experts, n_routed = MODELS[request.param]
    made = make_synthetic(
        request.param,
        tmp_path / "m.gguf",
        n_layers=2,
        n_experts=n_experts,
        vocab_size=4096,
        tokenizer=None,
    )
    yield made, top_k, n_experts * n_routed
    for path in made.paths:
        path.unlink()


async def greedy(made, n_slots, *, n_prompt=40, n_new=32):
    """The ids of a greedy answer, and the counters of the run."""
    config = HierarchyConfig(device="cuda", vram=n_slots * made.expert_nbytes, reserve=0)
    async with await open_model(made.paths[0], config) as language:
        answer = language.generate(
            text_like_tokens(n_prompt, vocab_size=4096), max_new_tokens=n_new
        )
        async for _ in answer:
            pass
        return answer.token_ids, language.stats()


def test_greedy_text_is_the_same_from_top_k_slots_to_everything(model):
    made, top_k, n_records = model
    wanted, with_all = asyncio.run(greedy(made, n_records))
    assert len(wanted) == 32
    assert with_all.cache_evictions == 0
    for n_slots in (top_k, n_records // 2, n_records - 1):
        ids, stats = asyncio.run(greedy(made, n_slots))
        assert ids == wanted
        assert stats.cache_capacity_experts == n_slots
        assert stats.cache_evictions > 0 or n_slots == n_records - 1


def test_a_model_gives_back_the_memory_it_took(model):
    made, top_k, _ = model
    asyncio.run(greedy(made, top_k, n_new=4))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    gc.disable()  # what is closed is free at once
    try:
        for _ in range(2):
            asyncio.run(greedy(made, top_k, n_new=4))
    finally:
        gc.enable()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    assert before - after < 16 << 20
