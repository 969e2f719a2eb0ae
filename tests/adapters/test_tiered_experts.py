"""What the tiers hand to a model on the host, in whatever thread they run."""

import asyncio

import pytest
import torch
from toy_step import LAYERS, TOP_K, ToyModel, ToyPack, decoded, toy_spec

from tieredmoe.adapters.tiered_experts import TieredExperts
from tieredmoe.backends.memory import MemoryBackend
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.pack.source import PackSource
from tieredmoe.policies import make_policy
from tieredmoe.testing.tiny_pack import host_arena
from tieredmoe.threaded import ThreadedHierarchy
from tieredmoe.tier import Tier

PACK = ToyPack(toy_spec())
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


async def tiers(n_slots):
    spec = PACK.spec
    source = PackSource(PACK, MemoryBackend([PACK.image]))
    policy = make_policy("lru", n_slots=n_slots, layers=spec.layers, top_k=spec.top_k)
    arena = host_arena(n_slots, spec.slot_nbytes)
    return Hierarchy(
        Tier(name="top", source=source, arena=arena, policy=policy, policy_name="lru"), spec
    )


async def run(hierarchy, n_prompt):
    """Logits of a prompt and of the tokens behind it, and how many pairs were booked."""
    model, experts, tokens = ToyModel(), TieredExperts(hierarchy), torch.tensor(TOKENS)
    state = model.new_state(20)
    first = await model.forward(tokens[:n_prompt], state, experts, logits="all")
    rest = await decoded(model, state, experts, TOKENS[n_prompt:])
    return torch.cat([first, rest]), dict(hierarchy.stats().executed_experts)


@pytest.mark.parametrize("n_slots", [2, 5, 18])
def test_tiers_on_a_thread_of_their_own_give_the_same_bits(n_slots):
    async def in_loop():
        async with await tiers(18) as hierarchy:
            return await run(hierarchy, 4)

    async def in_thread():
        async with await ThreadedHierarchy.aopen(lambda: tiers(n_slots)) as hierarchy:
            return await run(hierarchy, 4)

    (wanted, booked), (logits, booked_in_thread) = asyncio.run(in_loop()), asyncio.run(in_thread())
    assert torch.equal(logits, wanted)
    assert booked == booked_in_thread == dict.fromkeys(LAYERS, TOP_K * len(TOKENS))
