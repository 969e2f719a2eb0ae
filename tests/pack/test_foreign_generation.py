"""A model generates from another system's pack what it generates from its own GGUF."""

import asyncio

import pytest
import torch

from tieredmoe import HierarchyConfig, open_hierarchy, open_model
from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.tiered_experts import TieredExperts
from tieredmoe.gguf import open_inventory
from tieredmoe.pack.foreign import open_foreign_pack
from tieredmoe.testing import DeepSeekV4Shape, KimiK3Shape, make_deepseek_v4, make_kimi_k3
from tieredmoe.testing.foreign_packs import make_ggmlmoe, make_sglang_v1

N_TOKENS = 8
DEEPSEEK, KIMI = DeepSeekV4Shape(num_hidden_layers=4), KimiK3Shape(num_hidden_layers=4)
CASES = [
    (make_deepseek_v4, DEEPSEEK, make_sglang_v1),
    (make_deepseek_v4, DEEPSEEK, make_ggmlmoe),
    (make_kimi_k3, KIMI, make_ggmlmoe),
]


@pytest.fixture(scope="module", params=CASES, ids=["deepseek-v1", "deepseek-ggml", "kimi-ggml"])
def made(request, tmp_path_factory):
    """A foreign pack, opened, and its model's GGUF."""
    make_model, shape, make_pack = request.param
    folder = tmp_path_factory.mktemp("model")
    weights = make_model(folder / "m.gguf", shape=shape, seed=5)
    make_pack(weights.paths[0], folder / "m.pack")
    return open_foreign_pack(folder / "m.pack"), weights.paths[0]


def config(pack, **options):
    vram = 2 * pack.spec.top_k * pack.spec.slot_nbytes
    return HierarchyConfig(vram=vram, reserve=0, stage_slots=2, **options)


def test_logits_are_bit_equal_to_the_dense_run(made):
    pack, gguf = made
    model = adapter_for(pack.metadata).load(pack, device=torch.device("cpu"))
    tokens = torch.arange(3, 3 + N_TOKENS)

    async def logits(experts):
        state = model.new_state(N_TOKENS)
        chunks = tokens.split([5, *[1] * (N_TOKENS - 5)])
        return torch.cat([await model.forward(c, state, experts, logits="all") for c in chunks])

    async def tiered():
        async with await open_hierarchy(pack, config(pack)) as hierarchy:
            found = await logits(TieredExperts(hierarchy))
            return found, hierarchy.stats()

    dense = asyncio.run(logits(DenseExperts.load(open_inventory(gguf))))
    found, stats = asyncio.run(tiered())
    assert torch.equal(found, dense)
    assert stats.pack_reads > 0
    assert stats.cache_evictions > 0


def test_the_same_tokens_are_generated(made):
    pack, gguf = made

    async def tokens(source, **options):
        async with await open_model(source, config(pack, **options)) as model:
            generation = model.generate([3, 4, 5], max_new_tokens=5, temperature=0)
            return [piece.token_id async for piece in generation]

    verify = "always" if pack.has_digests else "off"
    assert asyncio.run(tokens(pack, verify=verify)) == asyncio.run(tokens(gguf))
