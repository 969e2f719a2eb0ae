"""The forward pass against the float64 reference: other shapes, seeds, lengths and chunks."""

import functools
from typing import NamedTuple

import attrs
import numpy as np
import pytest
import torch
from kimi_k3_reference import K3Shape, Reference, random_weights
from kimi_k3_source import source_of
from model_runs import Recorder, cut_at, go_on, load_source

N = 130
SMALL = K3Shape(
    n_layers=4, mla_layers=(3,), hidden=64, vocab=96, dense_width=80, width=32, latent=48, q_rank=24
)


def evolved(**changes):
    return attrs.evolve(SMALL, **changes)


CASES = {
    "more KDA heads than heads": (evolved(), 1),
    "fewer KDA heads, no dense layer": (
        evolved(kda_heads=2, kda_dim=48, heads=7, value_dim=12, n_dense=0, block=2),
        2,
    ),
    "two dense layers, a wide top-k, another scale": (
        evolved(n_layers=6, mla_layers=(2, 4), n_dense=2, n_experts=24, top_k=9, scale=2.5),
        3,
    ),
    "every layer a block, square key matrices": (
        evolved(block=1, own_dim=32, kv_rank=32, heads=2, n_shared=1),
        4,
    ),
    "one block only, one expert for each token": (evolved(block=12, top_k=1, n_experts=5), 5),
    "linear attention alone, a window of two": (evolved(mla_layers=(), kernel=2, kda_heads=1), 6),
    "full attention alone": (evolved(mla_layers=(0, 1, 2, 3)), 7),
    "a bound that allows sub-chunks of four": (evolved(bound=-20.0), 8),
}
CHUNKS = {
    "at once": [N],
    "cut at 15, 16, 17, 63, 64, 65": cut_at(N, 15, 16, 17, 63, 64, 65),
    "a chunk, then token by token": [123] + [1] * 7,
}


class Run(NamedTuple):
    """A model, and what the reference makes of the same weights and tokens at once."""

    model: object
    experts: object
    tokens: torch.Tensor
    reference: Reference
    logits: np.ndarray


def run_of(shape, seed, weights):
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, shape.vocab, N))
    reference = Reference(shape, weights)
    logits = reference.forward(tokens)
    return Run(*load_source(source_of(shape, weights)), tokens, reference, logits)


@functools.cache
def run_of_case(case):
    shape, seed = CASES[case]
    return run_of(shape, seed, random_weights(shape, seed))


@functools.cache
def run_with_decay_bias(bias):
    weights = random_weights(SMALL, 9)
    weights |= {name: np.full_like(x, bias) for name, x in weights.items() if "dt_bias" in name}
    return run_of(SMALL, 9, weights)


def agree(run, chunks):
    """Assert that model and reference agree in logits, routing and state; give the state."""
    recorder, state = Recorder(run.experts), run.model.new_state(N)
    logits = go_on(run.model, recorder, run.tokens, state, chunks)
    assert np.abs(logits.numpy() - run.logits).max() < 1e-3
    assert tuple(run.reference.routes) == run.experts.spec.layers
    for layer, (ids, router_weights) in run.reference.routes.items():
        got_ids, got_weights = recorder.routing(layer)
        assert np.array_equal(got_ids, ids)
        assert np.abs(got_weights.numpy() - router_weights).max() < 1e-5
    for layer, (got, want) in enumerate(zip(state.layers, run.reference.state, strict=True)):
        if run.reference.s.is_kda(layer):
            pairs = zip((got.memory, got.window), want, strict=True)
        else:
            pairs = [(got.first(N), np.concatenate(want, axis=1))]
        for mine, theirs in pairs:
            np.testing.assert_allclose(mine.numpy(), theirs, atol=1e-4, rtol=1e-4)
    return state


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("case", CASES)
def test_logits_routing_and_state_equal_the_reference(case, chunks):
    agree(run_of_case(case), chunks)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("bias", [12.0, -12.0], ids=["forgets at once", "never forgets"])
def test_decays_at_either_end_of_their_range_overflow_nothing(bias, chunks):
    state = agree(run_with_decay_bias(bias), chunks)
    assert all(torch.isfinite(layer.memory).all() for layer in state.layers[:3])
