"""A copy of a sequence's state, in every architecture: a snapshot to go on from."""

import attrs
import numpy as np
import pytest
import torch
from kimi_k3_reference import K3Shape, random_weights
from kimi_k3_source import source_of
from model_runs import go_on, load, load_source

from tieredmoe.adapters.rows import Rows
from tieredmoe.errors import ConfigError
from tieredmoe.testing.tiny_gguf import DeepSeekV4Shape, make_deepseek_v4

N_CONTEXT = 200


@pytest.fixture(scope="module", params=["deepseek4", "kimi-k3"])
def tiny(request, tmp_path_factory):
    if request.param == "kimi-k3":
        shape = K3Shape(n_layers=4, mla_layers=(1,), block=2, hidden=64, vocab=90)
        loaded = load_source(source_of(shape, random_weights(shape, 6)))
    else:
        shape = DeepSeekV4Shape(
            num_hidden_layers=3, compress_ratios=(0, 4, 128), num_hash_layers=1, vocab_size=400
        )
        path = tmp_path_factory.mktemp("copies") / "tiny.gguf"
        make_deepseek_v4(path, shape=shape, seed=6)
        loaded = load(path)
    rng = np.random.default_rng(6)
    return *loaded, torch.from_numpy(rng.integers(0, 90, N_CONTEXT))


def begun(tiny, n_tokens):
    model, experts, tokens = tiny
    state = model.new_state(N_CONTEXT)
    if n_tokens:
        go_on(model, experts, tokens[:n_tokens], state)
    return state


@pytest.mark.parametrize("n_tokens", [0, 1, 63, 130])
def test_going_on_from_a_copy_gives_the_bits_of_going_on(tiny, n_tokens):
    model, experts, tokens = tiny
    state = begun(tiny, n_tokens)
    copy = state.copy()
    assert (copy.n_tokens, copy.n_context) == (n_tokens, N_CONTEXT)
    rest, lengths = tokens[n_tokens : n_tokens + 22], [17, 1, 1, 3]
    want = go_on(model, experts, rest, state, lengths)
    assert torch.equal(go_on(model, experts, rest, copy, lengths), want)


@pytest.mark.parametrize("first", ["the copy", "the original"])
def test_neither_sees_the_tokens_that_the_other_takes(tiny, first):
    model, experts, tokens = tiny
    rest, other = tokens[70:100], tokens[70:100].flip(0)
    want = go_on(model, experts, rest, begun(tiny, 70))
    state = begun(tiny, 70)
    copy = state.copy()
    disturbing, disturbed = (copy, state) if first == "the copy" else (state, copy)
    go_on(model, experts, other, disturbing, [1, 27, 1, 1])
    assert disturbed.n_tokens == 70
    assert torch.equal(go_on(model, experts, rest, disturbed), want)


def test_one_snapshot_serves_any_number_of_continuations(tiny):
    model, experts, tokens = tiny
    snapshot = begun(tiny, 70).copy()
    runs = [go_on(model, experts, tokens[70:90], snapshot.copy()) for _ in range(2)]
    assert torch.equal(*runs)
    assert snapshot.n_tokens == 70


def test_a_copy_may_have_a_longer_context(tiny):
    model, experts, tokens = tiny
    state = model.new_state(70)
    go_on(model, experts, tokens[:70], state)
    longer = state.copy(n_context=N_CONTEXT)
    assert longer.n_context == N_CONTEXT
    want = go_on(model, experts, tokens[70:], begun(tiny, 70))
    assert torch.equal(go_on(model, experts, tokens[70:], longer), want)


def test_a_copy_may_have_a_shorter_context_that_still_holds_its_tokens(tiny):
    assert begun(tiny, 70).copy(n_context=70).n_context == 70


@pytest.mark.parametrize("n_context", [69, 0, 10**9])
def test_a_context_that_cannot_be_is_refused_and_the_original_stays(tiny, n_context):
    state = begun(tiny, 70)
    with pytest.raises(ConfigError, match=f"context of {n_context} tokens is not within 70 and"):
        state.copy(n_context=n_context)
    assert state.n_tokens == 70


def held(part):
    """Every tensor that holds a part of a state, in a state of either model."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, Rows):
        yield part._buffer
    elif isinstance(part, tuple):
        for item in part:
            yield from held(item)
    else:
        for field in attrs.fields(type(part)):
            yield from held(getattr(part, field.name))


def test_a_copy_has_memory_of_its_own_for_the_tokens_it_has_and_no_more(tiny):
    model, experts, tokens = tiny
    state = model.new_state(N_CONTEXT)
    go_on(model, experts, tokens[:70], state, [60, 10])  # the second chunk doubles buffers
    original, copy = list(held(state.layers)), list(held(state.copy().layers))
    assert len(copy) == len(original) >= 7
    assert sum(part.nbytes for part in copy) < sum(part.nbytes for part in original)
    memory = {part.data_ptr() for part in copy if part.numel()}
    assert memory.isdisjoint(part.data_ptr() for part in original)
