"""What a model computes through the tiers is bit for bit what it computes from memory."""

import asyncio

import pytest
import torch
from gguf import GGMLQuantizationType

from tieredmoe import HierarchyConfig, open_hierarchy
from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.tiered_experts import TieredExperts
from tieredmoe.backends import open_backend
from tieredmoe.gguf import open_inventory
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack import PackSource, create_pack, open_pack, open_virtual_pack
from tieredmoe.pack.tensors import TensorLoader
from tieredmoe.policies import POLICIES, make_policy
from tieredmoe.testing.faulty import FaultySource
from tieredmoe.testing.tiny_gguf import DeepSeekV4Shape, TypeMix, make_deepseek_v4
from tieredmoe.testing.tiny_pack import host_arena
from tieredmoe.tier import Tier

N_PREFILL, N_DECODE = 40, 6
EXPERT_TYPES = {
    (1, "gate"): GGMLQuantizationType.Q4_0,
    (2, "down"): GGMLQuantizationType.F16,
    (3, "gate"): GGMLQuantizationType.Q8_0,
    (3, "up"): GGMLQuantizationType.IQ4_NL,
    (5, "up"): GGMLQuantizationType.F32,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small model whose layers and roles are of different types, packed; and its dense logits."""
    folder = tmp_path_factory.mktemp("model")
    shape = DeepSeekV4Shape(num_hash_layers=2)
    weights = make_deepseek_v4(
        folder / "m.gguf", shape=shape, types=TypeMix(experts=EXPERT_TYPES), seed=11, n_shards=2
    )
    inventory = open_inventory(weights.paths[0])
    asyncio.run(create_pack(inventory, folder / "m.pack"))
    pack = open_pack(folder / "m.pack")
    model = adapter_for(pack.metadata).load(pack, device=torch.device("cpu"))
    tokens = torch.randint(
        0, shape.vocab_size, (N_PREFILL + N_DECODE,), generator=torch.Generator().manual_seed(3)
    )
    dense = asyncio.run(logits(model, tokens, DenseExperts.load(inventory)))
    return pack, model, tokens, dense


async def logits(model, tokens, experts):
    """All logits: the prefill in chunks of 17, then token by token."""
    state = model.new_state(len(tokens))
    chunks = [*tokens[:N_PREFILL].split(17), *tokens[N_PREFILL:].split(1)]
    return torch.cat(
        [await model.forward(c, state, experts, logits="all") for c in chunks if len(c)]
    )


def tiered_logits(made, slots, policy, *, records=None, keeps=False):
    """The same through a hierarchy whose slots are poisoned before every fill.

    With ``keeps``, lower tiers keep what those above evict, and only what is read is poisoned.
    """
    pack, model, tokens, _ = made
    records = records or pack
    spec = pack.spec

    async def main():
        backend = open_backend("auto", records.data_files)
        source = FaultySource(PackSource(records, backend, arranged=len(slots) == 1))
        for i, n_slots in enumerate(slots):
            name = policy if i == len(slots) - 1 else "lru"
            chosen = make_policy(name, n_slots=n_slots, layers=spec.layers, top_k=spec.top_k)
            arena = host_arena(n_slots, spec.slot_nbytes if i else records.slot_nbytes)
            top = i == len(slots) - 1
            tier = Tier(
                name=name, source=source, arena=arena, policy=chosen, keeps=keeps and not top
            )
            source = tier if keeps else FaultySource(tier)
        async with Hierarchy(tier, spec) as hierarchy:
            result = await logits(model, tokens, TieredExperts(hierarchy))
            hierarchy.check()
            return result, hierarchy.stats()

    return asyncio.run(main())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [(2, 3), (8, 4), (1, 5), (7,), (30, 4, 9), (4, 25), (8, 48)])
def test_logits_are_bit_equal_to_the_dense_run_at_every_cache_size(made, slots, policy):
    got, _ = tiered_logits(made, slots, policy)
    assert torch.equal(got, made[3])


@pytest.mark.parametrize("slots", [(2, 3), (7,), (30, 4, 9), (8, 48)])
def test_logits_are_bit_equal_through_a_virtual_pack_too(made, slots):
    records = open_virtual_pack(made[0].path.with_name("m-00002-of-00002.gguf"))
    got, stats = tiered_logits(made, slots, "lfu_lru", records=records)
    assert torch.equal(got, made[3])
    assert stats.pack_reads >= stats.resident_experts


@pytest.mark.parametrize("slots", [(4, 5), (8, 4), (30, 4), (12, 6, 5)])
@pytest.mark.parametrize("virtual", [False, True])
def test_logits_are_bit_equal_whatever_a_ram_tier_keeps(made, slots, virtual):
    records = made[0]
    if virtual:
        records = open_virtual_pack(made[0].path.with_name("m-00002-of-00002.gguf"))
    got, stats = tiered_logits(made, slots, "lru", records=records, keeps=True)
    assert torch.equal(got, made[3])
    assert stats.copied_back > 0


@pytest.fixture(scope="module")
def beginning(made):
    """Few tokens, and the logits of their dense run."""
    pack, model, tokens, _ = made
    source = open_inventory(pack.path.with_name("m-00001-of-00002.gguf"))
    tokens = tokens[:20]
    return tokens, asyncio.run(logits(model, tokens, DenseExperts.load(source)))


@pytest.mark.parametrize(
    ("n_shards", "alignment"), [(1, 8), (2, 32), (3, 64), (4, 4096), (5, 16), (6, 128), (7, 32)]
)
def test_shards_and_alignment_change_nothing(made, beginning, tmp_path, n_shards, alignment):
    """Dense weights come through the backend here, and experts from where they lie."""
    weights = make_deepseek_v4(
        tmp_path / "m.gguf",
        shape=DeepSeekV4Shape(num_hash_layers=2),
        types=TypeMix(experts=EXPERT_TYPES),
        seed=11,
        n_shards=n_shards,
        alignment=alignment,
    )
    records = open_virtual_pack(weights.paths[-1])
    loader = TensorLoader(records)
    model = adapter_for(records.metadata).load(loader, device=torch.device("cpu"))
    tokens, dense = beginning
    got, _ = tiered_logits((made[0], model, tokens, None), (4, 9), "lru", records=records)
    assert torch.equal(got, dense)


def test_every_token_executes_its_top_k_in_every_layer(made):
    pack, _, tokens, _ = made
    _, stats = tiered_logits(made, (2, 3), "lfu_lru")
    assert stats.executed_experts == dict.fromkeys(pack.spec.layers, len(tokens) * pack.spec.top_k)
    assert stats.cache_evictions > 0


def test_a_chunk_reads_each_expert_once_however_many_tokens_want_it(made):
    _, stats = tiered_logits(made, (8, 48), "lfu_lru")
    assert stats.pack_reads == stats.cache_misses == stats.resident_experts


def test_a_step_that_was_cancelled_and_repeated_is_audited_for_what_it_computed(made):
    pack, model, tokens, _ = made

    async def main():
        config = HierarchyConfig(vram="1GiB", reserve=0)
        async with await open_hierarchy(pack, config) as hierarchy:
            experts = TieredExperts(hierarchy)
            state = model.new_state(len(tokens))
            step = asyncio.ensure_future(model.forward(tokens[:3], state, experts, logits="last"))
            await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait({step})
            assert step.cancelled()
            cancelled = sum(hierarchy.stats().executed_experts.values())
            await model.forward(tokens[:3], state, experts, logits="last")
            return cancelled, hierarchy.stats().executed_experts

    cancelled, executed = asyncio.run(main())
    assert cancelled == 0
    assert set(executed.values()) == {3 * pack.spec.top_k}
