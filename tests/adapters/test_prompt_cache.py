"""Prompt re-use: a turn starts where a snapshot ends, and only if it continues it exactly."""

import asyncio

import attrs
import pytest
import torch

from tieredmoe import ConfigError, HierarchyConfig, PromptCache, create_pack, open_model
from tieredmoe.testing import make_deepseek_v4

SMALL = HierarchyConfig(vram="1GiB", reserve=0)
PROMPT = list(range(3, 17))


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """A tiny DeepSeek-V4 without a tokenizer: prompts are ids."""
    folder = tmp_path_factory.mktemp("cached")
    weights = make_deepseek_v4(folder / "tiny.gguf", seed=7, tokenizer=None)
    asyncio.run(create_pack(weights.paths[0], folder / "tiny.pack"))
    return folder / "tiny.pack"


async def run(model, prompt, cache=None, *, n=4, **settings):
    generation = model.generate(prompt, max_new_tokens=n, cache=cache, **settings)
    async for _ in generation:
        pass
    return generation


def with_model(pack, scenario):
    async def main():
        async with await open_model(pack, SMALL) as model:
            return await scenario(model)

    return asyncio.run(main())


def test_the_next_turn_prefills_only_what_is_new_and_says_the_same(pack):
    async def scenario(model):
        cache = PromptCache()
        first = await run(model, PROMPT, cache)
        # The last token was chosen but never fed: the state ends before it.
        turn = [*PROMPT, *first.token_ids, 50, 51, 52]
        return first, await run(model, turn, cache), await run(model, turn)

    first, cached, fresh = with_model(pack, scenario)
    assert cached.token_ids == fresh.token_ids
    n_known = len(PROMPT) + len(first.token_ids) - 1
    assert (cached.report.n_reused, cached.report.n_prefilled) == (n_known, 4)
    assert (fresh.report.n_reused, fresh.report.n_prefilled) == (0, n_known + 4)


def test_a_turn_that_drops_the_answer_goes_on_from_the_prompt(pack):
    """Chat formats leave an earlier turn's thinking out of the next prompt."""

    async def scenario(model):
        cache = PromptCache()
        await run(model, PROMPT, cache)
        turn = [*PROMPT, 60, 61]
        return await run(model, turn, cache), await run(model, turn)

    cached, fresh = with_model(pack, scenario)
    assert cached.report.n_reused == len(PROMPT)
    assert cached.token_ids == fresh.token_ids


@pytest.mark.parametrize("changed_at", [0, 7, len(PROMPT) - 1])
def test_a_prompt_that_differs_in_one_token_gets_nothing(pack, changed_at):
    async def scenario(model):
        cache = PromptCache()
        await run(model, PROMPT, cache)
        other = [*PROMPT, 60, 61]
        other[changed_at] += 1
        return await run(model, other, cache), await run(model, other)

    cached, fresh = with_model(pack, scenario)
    assert cached.report.n_reused == 0
    assert cached.token_ids == fresh.token_ids


def test_a_prompt_known_in_full_is_computed_again(pack):
    """Its logits are not kept, and a state cannot take back its last token."""

    async def scenario(model):
        cache = PromptCache()
        first = await run(model, PROMPT, cache)
        return first, await run(model, PROMPT, cache)

    first, again = with_model(pack, scenario)
    assert again.report.n_reused == 0
    assert again.token_ids == first.token_ids


def test_one_snapshot_serves_many_continuations_side_by_side(pack):
    async def scenario(model):
        cache = PromptCache(n_max=8)
        await run(model, PROMPT, cache)
        turns = [[*PROMPT, 70 + i, 80 + i] for i in range(3)]
        cached = await asyncio.gather(*(run(model, turn, cache) for turn in turns))
        return cached, [await run(model, turn) for turn in turns]

    cached, fresh = with_model(pack, scenario)
    assert [g.report.n_reused for g in cached] == [len(PROMPT)] * 3
    assert [g.token_ids for g in cached] == [g.token_ids for g in fresh]


def test_a_cancelled_generation_leaves_what_it_had_computed(pack):
    async def scenario(model):
        cache = PromptCache()
        generation = model.generate(PROMPT, max_new_tokens=30, cache=cache)
        pieces = aiter(generation)
        for _ in range(3):
            await anext(pieces)
        await pieces.aclose()
        turn = [*PROMPT, *generation.token_ids, 9]
        return await run(model, turn, cache), await run(model, turn)

    cached, fresh = with_model(pack, scenario)
    assert cached.report.n_reused == len(PROMPT) + 2
    assert cached.token_ids == fresh.token_ids


def test_a_longer_context_than_the_snapshot_had_is_no_hindrance(pack):
    async def scenario(model):
        cache = PromptCache()
        await run(model, PROMPT, cache, n=2, n_context=len(PROMPT) + 2)
        turn = [*PROMPT, *range(100, 130)]
        return await run(model, turn, cache), await run(model, turn)

    cached, fresh = with_model(pack, scenario)
    assert cached.report.n_reused == len(PROMPT)
    assert cached.token_ids == fresh.token_ids


def test_it_keeps_no_more_than_it_may(pack):
    async def scenario(model):
        cache = PromptCache(n_max=1)
        for start in range(3):
            await run(model, [start, *PROMPT], cache)
            assert len(cache) == 1
        cache.clear()
        return len(cache)

    assert with_model(pack, scenario) == 0


def test_states_of_one_model_are_not_given_to_another(pack):
    async def scenario(model):
        cache = PromptCache()
        await run(model, PROMPT, cache)
        async with await open_model(pack, SMALL) as other:
            with pytest.raises(ConfigError, match="another model"):
                await run(other, PROMPT, cache)

    with_model(pack, scenario)


def test_a_cache_given_to_another_model_does_not_hide_how_a_generation_ends(pack):
    async def scenario(model):
        cache = PromptCache()
        pieces = aiter(model.generate(PROMPT, max_new_tokens=30, cache=cache))
        await anext(pieces)
        cache.clear()
        cache.keep(object(), [1], FakeState(1))
        await pieces.aclose()
        assert len(cache) == 1

    with_model(pack, scenario)


@pytest.mark.parametrize("n_max", [0, -1, True, 1.5, "2", None])
def test_a_senseless_limit_is_refused(n_max):
    with pytest.raises(ConfigError, match="n_max"):
        PromptCache(n_max)


class FakeState:
    """Stands for a state; counts tokens."""

    def __init__(self, n_tokens):
        self.n_tokens = n_tokens

    def copy(self, *, n_context):
        return attrs.make_class("Copy", ["n_tokens", "n_context"])(self.n_tokens, n_context)


def test_the_longest_snapshot_wins_and_what_was_used_stays():
    cache, model = PromptCache(n_max=2), object()
    cache.keep(model, [1, 2], FakeState(2))
    cache.keep(model, [1, 2, 3], FakeState(3))
    assert cache.longest(model, [1, 2, 3, 4], n_context=9).n_tokens == 3
    assert cache.longest(model, [1, 2, 4], n_context=9).n_tokens == 2
    cache.keep(model, [5], FakeState(1))  # [1, 2, 3] was used longest ago
    assert cache.longest(model, [1, 2, 3, 4], n_context=9).n_tokens == 2
    assert cache.longest(model, [7], n_context=9) is None


def test_tokens_given_as_tensor_elements_are_found(pack):
    async def scenario(model):
        cache = PromptCache()
        await run(model, torch.tensor(PROMPT), cache)
        return await run(model, torch.tensor([*PROMPT, 4]), cache)

    assert with_model(pack, scenario).report.n_reused == len(PROMPT)
