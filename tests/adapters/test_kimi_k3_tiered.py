"""Kimi-K3 through the tiers: the same bits at any cache size, and each expert once per chunk."""

import asyncio

import attrs
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from model_runs import CPU, Recorder

from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.tiered_experts import TieredExperts
from tieredmoe.backends import open_backend
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack import PackSource, create_pack, open_pack, open_virtual_pack
from tieredmoe.policies import POLICIES, make_policy
from tieredmoe.testing import KimiK3Shape, KimiK3Types, make_kimi_k3
from tieredmoe.testing.faulty import FaultySource
from tieredmoe.testing.tiny_pack import host_arena
from tieredmoe.tier import Tier

N_PREFILL, N_DECODE = 8, 2
TOP_K = 3
DENSE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "kda_head_dim": 32,
    "intermediate_size": 64,
    "num_experts_per_token": TOP_K,
    "attn_res_block_size": 2,
}
"""Small: what is not an expert costs time here and proves nothing."""

SHAPE = KimiK3Shape(num_hidden_layers=4, num_experts=12, **DENSE)
TYPES = attrs.evolve(KimiK3Types.uniform(Q.Q8_0), gate=Q.Q2_K, up=Q.Q2_K, down=Q.Q3_K)
"""Of the experts those of the real files."""

CYCLE = 3 * TOP_K
"""Lookups of one token: layer 0 is dense."""


class Made:
    """A small, three-shard Kimi-K3, untouched and packed, its model, and its dense run."""

    def __init__(self, folder, shape, types, seed):
        weights = make_kimi_k3(folder / "m.gguf", shape=shape, types=types, seed=seed, n_shards=3)
        self.shards = open_virtual_pack(weights.paths[1])
        asyncio.run(create_pack(weights.paths[0], folder / "m.pack"))
        self.pack = open_pack(folder / "m.pack")
        self.model = adapter_for(self.pack.metadata).load(self.pack, device=CPU)
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, shape.vocab_size, (64,), generator=generator)
        self.dense_experts = DenseExperts.load(self.pack)

    async def logits(self, experts, chunks):
        state = self.model.new_state(sum(map(len, chunks)))
        return torch.cat(
            [await self.model.forward(c, state, experts, logits="all") for c in chunks]
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("k3"), SHAPE, TYPES, seed=5)


@pytest.fixture(scope="module")
def chunks(made):
    return [made.tokens[:N_PREFILL], *made.tokens[N_PREFILL : N_PREFILL + N_DECODE].split(1)]


@pytest.fixture(scope="module")
def dense(made, chunks):
    return asyncio.run(made.logits(made.dense_experts, chunks))


async def with_hierarchy(records, n_slots, policy, use):
    """What ``use`` returns for a hierarchy of so many slots, poisoned before each fill."""
    spec = records.spec
    source = FaultySource(PackSource(records, open_backend("auto", records.data_files)))
    for name, n, nbytes in (
        ("lru", 4, records.slot_nbytes),
        (policy, n_slots, spec.slot_nbytes),
    ):
        chosen = make_policy(name, n_slots=n, layers=spec.layers, top_k=spec.top_k)
        tier = Tier(name=name, source=source, arena=host_arena(n, nbytes), policy=chosen)
        source = FaultySource(tier)
    async with Hierarchy(tier, spec) as hierarchy:
        result = await use(hierarchy)
        hierarchy.check()
        return result


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n_slots", [TOP_K, TOP_K * 3 // 2, CYCLE - 1, CYCLE + 1])
@pytest.mark.parametrize("form", ["pack", "shards"])
def test_logits_are_bit_equal_and_every_choice_is_executed(
    made, chunks, dense, form, n_slots, policy
):
    async def use(hierarchy):
        return await made.logits(TieredExperts(hierarchy), chunks), hierarchy.stats()

    got, stats = asyncio.run(with_hierarchy(getattr(made, form), n_slots, policy, use))
    assert torch.equal(got, dense)
    n_executed = (N_PREFILL + N_DECODE) * TOP_K
    assert stats.executed_experts == dict.fromkeys(range(1, 4), n_executed)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Few layers of many experts: 64 tokens choose most of them, and not all."""
    narrow = {"routed_expert_hidden_size": 32, "moe_intermediate_size": 32}
    shape = KimiK3Shape(num_hidden_layers=3, num_experts=96, **DENSE, **narrow)
    types = KimiK3Types.uniform(Q.Q8_0)
    return Made(tmp_path_factory.mktemp("wide"), shape, types, seed=6)


@pytest.mark.parametrize("n_slots", [TOP_K, 40, 2 * 96])
def test_a_chunk_of_64_fetches_each_expert_of_a_layer_once(wide, n_slots):
    """Also where the chunk's experts do not fit the cache and come in waves."""
    chunk = [wide.tokens]

    async def use(hierarchy):
        first = Recorder(TieredExperts(hierarchy))
        await wide.logits(first, chunk)
        cold = hierarchy.stats()
        await wide.logits(TieredExperts(hierarchy), chunk)
        return first, cold, hierarchy.stats().since(cold)

    recorder, cold, warm = asyncio.run(with_hierarchy(wide.pack, n_slots, "lfu_lru", use))
    distinct = [len(recorder.routing(layer)[0].unique()) for layer in wide.pack.spec.layers]
    assert all(TOP_K < n < 96 for n in distinct)
    assert (cold.pack_reads, cold.cache_hits) == (sum(distinct), 0)
    assert warm.pack_reads + warm.cache_hits == sum(distinct)
    assert (warm.pack_reads == 0) == (n_slots == 2 * 96)
