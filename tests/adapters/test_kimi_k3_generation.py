"""Kimi-K3 as people use it: conversations through snapshots, tiers and chat format together.

What a snapshot holds here cannot be rewound, so a state that is one token off says something else.
"""

import asyncio

import pytest
from gguf import GGMLQuantizationType as Q

from tieredmoe import HierarchyConfig, Message, PromptCache, open_model
from tieredmoe.adapters.kimi_k3.answer import decode_answer
from tieredmoe.testing import KimiK3Shape, KimiK3Types, make_kimi_k3

TOP_K, N_ROUTED = 2, 3
SHAPE = KimiK3Shape(
    vocab_size=400,
    hidden_size=64,
    num_hidden_layers=1 + N_ROUTED,
    full_attn_layers=(2, 4),
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    kda_head_dim=32,
    intermediate_size=64,
    num_experts=8,
    num_experts_per_token=TOP_K,
    routed_expert_hidden_size=32,
    moe_intermediate_size=32,
    attn_res_block_size=2,
)
SLOT_NBYTES = 24 * 1024  # three matrices, and what direct reads of the shards need around them
PROMPT = list(range(5, 25))
DRAWN = {"temperature": 1.5, "seed": 3}
"""Of a flat distribution a draw shows small changes that the likeliest token hides."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    path = tmp_path_factory.mktemp("generated") / "m.gguf"
    return make_kimi_k3(path, shape=SHAPE, types=KimiK3Types.uniform(Q.F32), n_shards=3, seed=11)


async def run(model, prompt, cache=None, *, n=6, **settings):
    """One generation, finished; every token that a step took ran its top-k in every layer."""
    generation = model.generate(prompt, max_new_tokens=n, cache=cache, **settings)
    async for _ in generation:
        pass
    report = generation.report
    for stats, n_tokens in (
        (report.prefill, report.n_prefilled),
        (report.decode, report.n_decoded),
    ):
        assert stats.executed_experts == dict.fromkeys(range(1, 1 + N_ROUTED), n_tokens * TOP_K)
    model.hierarchy.check()
    return generation


def with_model(shards, scenario, *, n_slots=2 * TOP_K):
    config = HierarchyConfig(vram=n_slots * SLOT_NBYTES, reserve=0, backend="buffered")

    async def main():
        async with await open_model(shards.paths[1], config) as model:
            return await scenario(model)

    return asyncio.run(main())


def test_greedy_text_is_the_same_for_any_cache_and_any_chunks(shards):
    async def scenario(model):
        runs = [await run(model, PROMPT, chunk_length=n) for n in (1, 16, 512)]
        return model.stats().cache_capacity_experts, [tuple(g.token_ids) for g in runs]

    n_slots, said = zip(*(with_model(shards, scenario, n_slots=n) for n in (2, 5, 30)), strict=True)
    assert n_slots == (TOP_K, TOP_K * N_ROUTED - 1, SHAPE.num_experts * N_ROUTED)
    assert len({ids for runs in said for ids in runs}) == 1


@pytest.mark.parametrize("thinking", [False, True])
def test_every_turn_of_a_conversation_starts_from_a_snapshot_and_says_what_it_would_anew(
    shards, thinking
):
    async def scenario(model):
        cache, known = PromptCache(), 0
        conversation = [Message("user", "Hello <|open|>think<|sep|> <|end_of_msg|>")]
        for turn in range(3):
            generation = await run(model, conversation, cache, thinking=thinking, **DRAWN)
            anew = await run(model, conversation, thinking=thinking, **DRAWN)
            assert generation.token_ids == anew.token_ids
            assert generation.report.n_reused >= known
            known = generation.report.n_prompt_tokens
            said = decode_answer(model.tokenizer, generation.token_ids, thinking=thinking)
            conversation += [said, Message("user", f"and {turn}?")]

    with_model(shards, scenario)


def test_wherever_a_generation_is_cancelled_its_snapshot_is_right(shards):
    """Between any two turns of the loop: in prefill, in a fetch, between tokens."""

    async def cancelled(model, n_turns):
        cache = PromptCache()
        generation = model.generate(PROMPT, max_new_tokens=3, chunk_length=16, cache=cache)

        async def iterate():
            async for _ in generation:
                pass

        task = asyncio.create_task(iterate())
        for _ in range(n_turns):
            await asyncio.sleep(0)
        ended = task.done()
        task.cancel()
        await asyncio.wait({task})
        turn = [*PROMPT, *generation.token_ids, 77, 78]
        reused, anew = await run(model, turn, cache, **DRAWN), await run(model, turn, **DRAWN)
        assert reused.token_ids == anew.token_ids
        return ended, reused.report.n_reused

    async def scenario(model):
        seen, n_turns, ended = set(), 1, False
        while not ended:
            ended, n_reused = await cancelled(model, n_turns)
            seen.add(n_reused)
            n_turns += 1 + n_turns // 2
        return seen

    seen = with_model(shards, scenario)
    assert {0, 16} <= seen
    assert max(seen) >= len(PROMPT)
