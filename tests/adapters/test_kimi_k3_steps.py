"""What a step promises about its state and its experts, whatever happens to the step."""

import asyncio
import re

import numpy as np
import pytest
import torch
from failing_experts import Interrupted, Stuck
from kimi_k3_reference import K3Shape, random_weights
from kimi_k3_source import source_of
from model_runs import Recorder, load_source, run

from tieredmoe.adapters.kimi_k3 import heads, mla
from tieredmoe.adapters.routed_experts import run_routed
from tieredmoe.errors import ConfigError, ExpertLoadError, PromptTooLongError, TokenizerError
from tieredmoe.moe.linear import PackedLinear
from tieredmoe.spec import ExpertKey

SHAPE = K3Shape(n_layers=5, mla_layers=(1, 4), block=2, hidden=64, vocab=90)


@pytest.fixture(scope="module")
def tiny():
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, SHAPE.vocab, 60))
    return *load_source(source_of(SHAPE, random_weights(SHAPE, 5))), tokens


def tensors(state):
    """Copies of all that a state consists of."""
    return [
        part.clone()
        for layer in state.layers
        for part in (
            (layer.first(layer.n),) if hasattr(layer, "first") else (layer.memory, layer.window)
        )
    ]


@pytest.mark.parametrize("layer", [1, 2, 3, 4])
def test_a_step_that_failed_changed_nothing_and_can_be_repeated_with_the_same_bits(tiny, layer):
    model, experts, tokens = tiny
    want = run(model, experts, tokens, [20, 33, 1, 6])
    broken = ExpertLoadError(ExpertKey(layer, 0), OSError("the disk is gone"))

    async def main():
        state = model.new_state(len(tokens))
        await model.forward(tokens[:20], state, experts, logits="none")
        before = tensors(state)
        for part in (slice(20, 53), slice(20, 21)):
            provider = Interrupted(experts, layer, broken)
            with pytest.raises(ExpertLoadError, match="the disk is gone"):
                await model.forward(tokens[part], state, provider, logits="all")
            assert state.n_tokens == 20
            assert all(map(torch.equal, tensors(state), before))
        parts = tokens[20:].split([33, 1, 6])
        return torch.cat([await model.forward(p, state, experts, logits="all") for p in parts])

    assert torch.equal(asyncio.run(main()), want[20:])


def test_a_cancelled_step_gives_back_its_experts_and_leaves_the_state(tiny):
    model, experts, tokens = tiny

    async def main():
        state = model.new_state(len(tokens))
        stuck = Stuck(experts, layer=3)
        step = asyncio.create_task(model.forward(tokens[:8], state, stuck, logits="last"))
        await stuck.waiting.wait()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert stuck.lent == []
        assert state.n_tokens == 0
        assert not any(part.any() for part in tensors(state))

    asyncio.run(main())


class Watched(Recorder):
    """Notes what each layer asked for, and how many pairs it said to have executed."""

    def __init__(self, experts):
        super().__init__(experts)
        self.spec = experts.spec
        self.asked, self.n_executed = [], {}

    async def run(self, layer, x, routing, activation, *, meanwhile):
        self._routed.setdefault(layer, []).append(routing)
        return await run_routed(layer, x, routing, activation, self, meanwhile=meanwhile)

    def executed(self, layer, n_pairs):
        assert n_pairs == self._routed[layer][-1].ids.numel()
        self.n_executed[layer] = self.n_executed.get(layer, 0) + n_pairs

    def stream(self, layer, experts):
        self.asked.append((layer, list(experts)))
        return self._experts.stream(layer, experts)


def test_a_chunk_asks_once_in_each_routed_layer_for_its_distinct_experts(tiny):
    model, experts, tokens = tiny
    watched = Watched(experts)
    run(model, watched, tokens)
    assert [layer for layer, _ in watched.asked] == [1, 2, 3, 4]  # layer 0 is dense
    for layer, asked in watched.asked:
        assert asked == watched.routing(layer)[0].unique().tolist()


def test_every_token_executes_its_top_k_in_every_routed_layer(tiny):
    model, experts, tokens = tiny
    watched = Watched(experts)
    run(model, watched, tokens, [31, 1, 28])
    assert watched.n_executed == dict.fromkeys((1, 2, 3, 4), len(tokens) * SHAPE.top_k)


@pytest.mark.parametrize(("logits", "rows"), [("all", slice(None)), ("last", slice(-1, None))])
def test_logits_are_of_the_positions_asked_for(tiny, logits, rows):
    model, experts, tokens = tiny
    step = model.forward(tokens[:9], model.new_state(9), experts, logits=logits)
    torch.testing.assert_close(asyncio.run(step), run(model, experts, tokens[:9])[rows])


def test_a_step_without_logits_still_moves_the_state(tiny):
    model, experts, tokens = tiny
    state = model.new_state(9)
    nothing = asyncio.run(model.forward(tokens[:9], state, experts, logits="none"))
    assert (nothing.shape, state.n_tokens) == ((0, SHAPE.vocab), 9)


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


@pytest.mark.parametrize("odd", [-1, SHAPE.vocab])
def test_a_token_outside_the_vocabulary_is_refused_by_its_id(tiny, odd):
    model, experts, _ = tiny
    step = model.forward(torch.tensor([3, odd]), model.new_state(8), experts, logits="last")
    with pytest.raises(TokenizerError, match=f"token id {odd} is outside .* of 90"):
        asyncio.run(step)


@pytest.mark.parametrize("n_context", [0, -5, 4097])
def test_a_context_that_the_model_cannot_have_is_refused(tiny, n_context):
    wanted = f"context of {n_context} tokens is not within 1 and 4096"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        tiny[0].new_state(n_context)


def test_two_sequences_of_one_model_do_not_see_each_other(tiny):
    model, experts, tokens = tiny
    other, alone = tokens.flip(0), run(model, experts, tokens, [40, 20])

    async def main():
        a, b, got = model.new_state(60), model.new_state(60), []
        for part in (slice(0, 40), slice(40, 60)):
            got.append(await model.forward(tokens[part], a, experts, logits="all"))
            await model.forward(other[part], b, experts, logits="none")
        return torch.cat(got)

    assert torch.equal(asyncio.run(main()), alone)


def test_t19_a_token_leaves_one_latent_and_one_shared_key_in_each_full_layer(tiny):
    model, experts, tokens = tiny
    state = model.new_state(4096)
    assert [state.layers[layer]._buffer.nbytes for layer in SHAPE.mla_layers] == [0, 0]
    asyncio.run(model.forward(tokens, state, experts, logits="none"))
    for layer in SHAPE.mla_layers:
        assert state.layers[layer].first(60).shape == (60, SHAPE.kv_rank + SHAPE.shared_dim)


def test_linear_layers_take_the_same_memory_however_long_the_sequence(tiny):
    model, experts, tokens = tiny
    state = model.new_state(60)
    before = [part.shape for part in tensors(state)[:2]]
    asyncio.run(model.forward(tokens, state, experts, logits="none"))
    assert [part.shape for part in tensors(state)[:2]] == before
    assert state.layers[0].window.untyped_storage().nbytes() == state.layers[0].window.nbytes


def test_scratch_is_bounded_and_the_length_of_query_blocks_does_not_matter(tiny, monkeypatch):
    model, experts, tokens = tiny
    want = run(model, experts, tokens, [40, 20])
    n_scores = []
    softmax = torch.Tensor.softmax

    def watched(scores, dim):
        n_scores.append(scores.numel())
        return softmax(scores, dim)

    monkeypatch.setattr(mla, "_SCRATCH_FLOATS", 1500)
    monkeypatch.setattr(torch.Tensor, "softmax", watched)
    torch.testing.assert_close(run(model, experts, tokens, [40, 20]), want, atol=1e-4, rtol=0)
    assert 700 < max(n_scores) <= 1500


def test_how_many_heads_are_unpacked_at_a_time_does_not_matter(tiny, monkeypatch):
    model, experts, tokens = tiny
    want = run(model, experts, tokens[:9])
    monkeypatch.setattr(heads, "_BLOCK_FLOATS", 3 * SHAPE.own_dim * SHAPE.kv_rank)  # 3 of 4
    torch.testing.assert_close(run(model, experts, tokens[:9]), want, atol=1e-4, rtol=0)


def test_dense_matrices_stay_in_their_files_bytes(tiny):
    layer = tiny[0]._layers[1]
    held = [layer.attention._w.q_a, layer.attention._w.keys.matrix, layer.ffn.latent.down]
    assert all(isinstance(matrix, PackedLinear) for matrix in held)
