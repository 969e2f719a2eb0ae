"""The forward pass against stored runs: the published code's and an independent reference's."""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from kimi_k3_reference import K3Shape, random_weights
from kimi_k3_source import source_of
from model_runs import Recorder, go_on, load_source

from tieredmoe.adapters.kimi_k3 import KimiK3Adapter
from tieredmoe.adapters.kimi_k3.residuals import Bank

DATA = Path(__file__).parents[1] / "data" / "kimi_k3"
F32_SEED, BLOCKS_SEED = 20261130, 7  # of the stored runs; their weights are made anew

BLOCKS_SHAPE = K3Shape(
    vocab=512,
    hidden=256,
    kda_heads=4,
    kda_dim=64,
    q_rank=256,
    kv_rank=256,
    own_dim=64,
    shared_dim=32,
    value_dim=64,
    dense_width=512,
    n_experts=12,
    width=256,
    latent=256,
)
"""Every row a whole number of the real files' blocks, and as many KDA heads as heads."""

EPSILONS = {"f32": 1e-6, "blocks": 1e-6, "blocks_eps_1e5": 1e-5}
CHUNKS = ("at once", "token by token", "17, four tokens, the rest")


class Run(NamedTuple):
    logits: torch.Tensor
    recorder: Recorder
    state: object


@functools.cache
def oracle(name):
    with np.load(DATA / f"oracle_{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


@functools.cache
def source(kind):
    """``decoded`` is what the blocks decode to, as F32: the same numbers, read much faster."""
    if kind == "f32":
        return source_of(K3Shape(), random_weights(K3Shape(), F32_SEED))
    weights, made = blocks()
    return made if kind == "blocks" else source_of(BLOCKS_SHAPE, weights)


@functools.cache
def blocks():
    """Random blocks, and the weights that these decode to."""
    weights = random_weights(BLOCKS_SHAPE, BLOCKS_SEED)
    return weights, source_of(BLOCKS_SHAPE, weights, blocks=np.random.default_rng(BLOCKS_SEED))


@functools.cache
def loaded(kind, eps):
    return load_source(source(kind), KimiK3Adapter(latent_eps=eps))


@functools.cache
def computed(kind, how):
    """What the model makes of the stored tokens.

    From the blocks themselves it does not for the other epsilon, nor token by token: chunks of one
    token are among the third kind.
    """
    name = kind.split("_")[0]
    slow = kind == "blocks_eps_1e5" or (kind, how) == ("blocks", CHUNKS[1])
    model, experts = loaded("decoded" if slow else kind, EPSILONS[kind])
    tokens = oracle(name)["tokens"]
    n = len(tokens)
    lengths = {CHUNKS[0]: [n], CHUNKS[1]: [1] * n, CHUNKS[2]: [17, 1, 1, 1, 1, n - 21]}[how]
    recorder, state = Recorder(experts), model.new_state(n)
    return Run(go_on(model, recorder, tokens, state, lengths), recorder, state)


@pytest.mark.parametrize("how", CHUNKS)
@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("f32", "logits"),
        ("f32", "logits_published"),
        ("blocks", "logits"),
        ("blocks_eps_1e5", "logits_eps_1e5"),
    ],
)
def test_logits_equal_the_stored_ones_at_every_position(kind, want, how):
    error = computed(kind, how).logits - oracle(kind.split("_")[0])[want]
    assert error.abs().max() < 1e-3


def test_the_two_epsilons_in_use_give_different_logits():
    """Else the comparisons above could not tell which one is the default."""
    want = oracle("blocks")
    assert (want["logits"] - want["logits_eps_1e5"]).abs().max() > 0.5


@pytest.mark.parametrize("how", CHUNKS)
@pytest.mark.parametrize("kind", ["f32", "blocks"])
def test_experts_and_their_weights_equal_the_stored_ones(kind, how):
    want, recorder = oracle(kind), computed(kind, how).recorder
    for n, layer in enumerate(sorted(recorder._routed)):
        ids, weights = recorder.routing(layer)
        assert torch.equal(ids, want["router_ids"][n].long())
        assert (weights - want["router_weights"][n]).abs().max() < 1e-5


@pytest.mark.parametrize("how", CHUNKS)
def test_the_state_equals_the_stored_one_whatever_the_chunks(how):
    for layer, got in enumerate(computed("f32", how).state.layers):
        prefix = f"state{layer}."
        want = {k.removeprefix(prefix): v for k, v in oracle("f32").items() if prefix in k}
        if "S" in want:
            window = torch.cat([want[f"conv_{stream}"] for stream in "qkv"], dim=1)
            assert (got.memory - want["S"]).abs().max() < 1e-4
            assert (got.memory - want["S"].mT).abs().max() > 0.1  # rows are keys, not values
            assert (got.window - window).abs().max() < 1e-4
        else:
            # These latents are tiny before their norm, which so multiplies rounding errors: the
            # reference itself, run in float32, is off by 1.04e-4 here, at a value near 2.
            rows = torch.cat((want["lat"], want["pe"]), dim=1)
            torch.testing.assert_close(got.first(40), rows, atol=1e-4, rtol=1e-4)


def test_the_stream_after_every_layer_equals_the_stored_one(monkeypatch):
    """What every sub-block mixes its input from; so a fault shows in the layer where it is."""
    seen, mix = [], Bank.mix

    def watched(self, x, score):
        seen.append(x)
        return mix(self, x, score)

    monkeypatch.setattr(Bank, "mix", watched)
    computed.__wrapped__("f32", CHUNKS[0])
    after_layers = torch.stack(seen[2::2])  # two mixes in a layer, the next is of the one behind
    assert (after_layers - oracle("f32")["hidden"]).abs().max() < 1e-3
