"""What a step promises about its state, whatever happens to the step."""

import asyncio

import pytest
import torch
from failing_experts import Interrupted, Stuck
from model_runs import load, run

from tieredmoe.errors import ConfigError, ExpertLoadError, PromptTooLongError, TokenizerError
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.tiny_gguf import DeepSeekV4Shape, make_deepseek_v4

SHAPE = DeepSeekV4Shape(
    num_hidden_layers=3,
    compress_ratios=(0, 4, 128),
    num_hash_layers=1,
    max_position_embeddings=4096,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("steps") / "tiny.gguf"
    make_deepseek_v4(path, shape=SHAPE, seed=5)
    generator = torch.Generator().manual_seed(1)
    return *load(path), torch.randint(0, SHAPE.vocab_size, (140,), generator=generator)


def broken(layer, expert):
    return ExpertLoadError(ExpertKey(layer, expert), OSError("the disk is gone"))


@pytest.mark.parametrize("layer", range(3))
def test_a_step_that_failed_can_be_repeated_with_the_same_bits(tiny, layer):
    model, experts, tokens = tiny
    want = run(model, experts, tokens, [126, 5, 9])

    async def main():
        state = model.new_state(len(tokens))
        await model.forward(tokens[:126], state, experts, logits="none")
        for _ in range(2):
            with pytest.raises(ExpertLoadError, match="the disk is gone"):
                await model.forward(
                    tokens[126:131],
                    state,
                    Interrupted(experts, layer, broken(layer, 0)),
                    logits="all",
                )
            assert state.n_tokens == 126
        first = await model.forward(tokens[126:131], state, experts, logits="all")
        return torch.cat([first, await model.forward(tokens[131:], state, experts, logits="all")])

    assert torch.equal(asyncio.run(main()), want[126:])


def test_a_cancelled_step_gives_back_its_experts_and_leaves_the_state(tiny):
    model, experts, tokens = tiny

    async def main():
        state = model.new_state(len(tokens))
        stuck = Stuck(experts, layer=1)
        step = asyncio.create_task(model.forward(tokens[:8], state, stuck, logits="last"))
        await stuck.waiting.wait()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert stuck.lent == []
        assert state.n_tokens == 0

    asyncio.run(main())


def test_an_expert_that_fails_in_the_hands_of_the_model_is_given_back(tiny, monkeypatch):
    model, experts, tokens = tiny
    provider = Interrupted(experts, None, None)
    monkeypatch.setattr(experts, "record", lambda *_: torch.zeros(10, dtype=torch.uint8))

    async def main():
        with pytest.raises(ValueError, match="record of 10 bytes"):
            await model.forward(tokens[:8], model.new_state(8), provider, logits="last")
        return list(provider.lent)  # now, not when the loop closes what was forgotten

    assert asyncio.run(main()) == []


@pytest.mark.parametrize(("logits", "rows"), [("all", slice(None)), ("last", slice(-1, None))])
def test_logits_are_of_the_positions_asked_for(tiny, logits, rows):
    model, experts, tokens = tiny

    async def main():
        return await model.forward(tokens[:9], model.new_state(9), experts, logits=logits)

    torch.testing.assert_close(asyncio.run(main()), run(model, experts, tokens[:9])[rows])


def test_a_step_without_logits_still_moves_the_state(tiny):
    model, experts, tokens = tiny

    async def main():
        state = model.new_state(9)
        nothing = await model.forward(tokens[:9], state, experts, logits="none")
        return nothing.shape, state.n_tokens

    assert asyncio.run(main()) == ((0, SHAPE.vocab_size), 9)


def test_tokens_beyond_the_context_are_refused_before_anything_happens(tiny):
    model, experts, tokens = tiny

    async def main():
        state = model.new_state(10)
        await model.forward(tokens[:7], state, experts, logits="none")
        with pytest.raises(PromptTooLongError, match="11 tokens does not fit a context of 10"):
            await model.forward(tokens[7:11], state, experts, logits="last")
        await model.forward(tokens[7:10], state, experts, logits="last")
        return state.n_tokens

    assert asyncio.run(main()) == 10


@pytest.mark.parametrize("odd", [-1, SHAPE.vocab_size])
def test_a_token_outside_the_vocabulary_is_refused_by_its_id(tiny, odd):
    model, experts, _ = tiny
    step = model.forward(torch.tensor([3, odd]), model.new_state(8), experts, logits="last")
    with pytest.raises(TokenizerError, match=f"token id {odd} is outside .* of 320"):
        asyncio.run(step)


@pytest.mark.parametrize("n_context", [0, -5, 4097])
def test_a_context_that_the_model_cannot_have_is_refused(tiny, n_context):
    with pytest.raises(
        ConfigError, match=f"context of {n_context} tokens is not within 1 and 4096"
    ):
        tiny[0].new_state(n_context)


def test_two_sequences_of_one_model_do_not_see_each_other(tiny):
    model, experts, tokens = tiny
    other = tokens.flip(0)
    alone = run(model, experts, tokens, [100, 40])

    async def main():
        a, b = model.new_state(140), model.new_state(140)
        got = []
        for part in (slice(0, 100), slice(100, 140)):
            got.append(await model.forward(tokens[part], a, experts, logits="all"))
            await model.forward(other[part], b, experts, logits="none")
        return torch.cat(got)

    assert torch.equal(asyncio.run(main()), alone)


def test_a_state_takes_memory_for_the_tokens_it_has_and_not_for_its_context(tiny):
    model, experts, tokens = tiny

    def nbytes(state):
        return sum(
            rows._buffer.nbytes
            for layer in state.layers
            for rows in (compressor.rows for compressor in layer.compressed)
        )

    async def main():
        state = model.new_state(4096)
        empty = nbytes(state)
        await model.forward(tokens[:128], state, experts, logits="none")
        return empty, nbytes(state)

    empty, used = asyncio.run(main())
    assert empty == 0
    # CSA: room for 64 rows of 64 floats, and as much for the indexer; HCA: its most, 32 rows.
    assert used == 4 * (64 * 64 + 64 * 64 + 32 * 64)
