"""Each detail that implementations got wrong would be noticed: the wrong variant is far off."""

import attrs
import numpy as np
import pytest
import torch
from kimi_k3_reference import K3Shape, Reference, random_weights, rms, sigmoid
from kimi_k3_source import as_f32, source_of
from model_runs import Recorder, load_source, run

from tieredmoe.adapters.kimi_k3.feed_forward import SigmoidRouter
from tieredmoe.moe.linear import PackedLinear

SHAPE = K3Shape(scale=2.5)
SEED = 20261130
TOKENS = torch.arange(13, 13 + 7 * 32, 7) % SHAPE.vocab


def bf16(x):
    return torch.from_numpy(x).bfloat16().double().numpy()


def swiglu(_self, g, u):
    return g * sigmoid(g) * u


def unclamped_up(self, g, u):
    return self.s.beta * np.tanh(g / self.s.beta) * sigmoid(g) * u


def clamped_softplus(self, rates, f):
    return np.maximum(-rates * np.log1p(np.exp(f)), self.s.bound)


def error_before_decay(_self, S, q, k, v, decay, strength):
    error = v - np.einsum("hk,hkv->hv", k, S)
    S = S * decay[:, :, None] + np.einsum("hk,hv->hkv", strength[:, None] * k, error)
    return S, np.einsum("hk,hkv->hv", q, S)


def decay_of_values(self, S, q, k, v, decay, strength):
    S = S * decay[:, None, :] / decay[:, :, None]
    return Reference.delta(self, S, q, k, v, decay, strength)


def read_before_write(self, S, q, k, v, decay, strength):
    out = np.einsum("hk,hkv->hv", q, S * decay[:, :, None])
    return Reference.delta(self, S, q, k, v, decay, strength)[0], out


def reversed_taps(self, z, taps, n_new):
    return Reference.convolved(self, z, taps[:, ::-1], n_new)


def no_silu(self, z, taps, n_new):
    return sum(z[j : j + n_new] * taps[:, j] for j in range(self.s.kernel))


def unordered(choice):
    """A choice of experts by ``choice(scores, bias, s)`` -> ids, weights."""

    def chosen(self, scores, bias):
        ids, weights = choice(scores, bias, self.s)
        order = np.argsort(ids, -1)
        return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)

    return chosen


def top(scores, k):
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def normalised(scores, ids):
    weights = np.take_along_axis(scores, ids, -1)
    return weights / weights.sum(-1, keepdims=True)


def no_bias(scores, _bias, s):
    ids = top(scores, s.top_k)
    return ids, normalised(scores, ids) * s.scale


def bias_weighs(scores, bias, s):
    ids = top(scores + bias, s.top_k)
    return ids, normalised(scores + bias, ids) * s.scale


def not_normalised(scores, bias, s):
    ids = top(scores + bias, s.top_k)
    return ids, np.take_along_axis(scores, ids, -1) * s.scale


def no_scale(scores, bias, s):
    ids = top(scores + bias, s.top_k)
    return ids, normalised(scores, ids)


WRONG_LOGITS = {
    "T5: the mixed stream is banked": {"banked": lambda _self, _x, read: read},
    "T5: the stream goes on at a block's start": {"joined": lambda _self, x, y, *, starts: x + y},
    "T6: normed values are mixed": {"mixed": lambda _self, keys, _values: keys},
    "T6: raw values are scored": {"scored": lambda _self, _keys, values: values},
    "T7: the partial block is left out": {
        "last": lambda self, bank, _x: self.mix(bank[:-1], bank[-1], "model.output_attn_res")
    },
    "T8: the last stream is not mixed": {"last": lambda _self, _bank, x: x},
    "T9: no gate after linear attention": {"kda_gated": lambda _self, o, _x, _p: o},
    "T9: no gate after full attention": {"mla_gated": lambda _self, o, _x, _p: o},
    "T11: the rates are exponentiated twice": {"rates": lambda _self, a: np.exp(np.exp(a))},
    "T11: the rates are not exponentiated": {"rates": lambda _self, a: a},
    "T12: the score lacks the norm's weight": {
        "score": lambda self, name: self.w[name + "_proj.weight"][0]
    },
    "T15: SwiGLU in routed experts": {
        "activation": swiglu,
        "dense_activation": Reference.activation,
    },
    "T15: SwiGLU in dense blocks and shared experts": {"dense_activation": swiglu},
    "T15: the up part has no bound": {"activation": unclamped_up},
    "T16: the latents' norm is dropped": {"latent_norm": lambda _self, y, _weight: y},
    "T16: the latents' norm has no weight": {
        "latent_norm": lambda self, y, _w: rms(y, 1, self.s.eps)
    },
    "the bound clamps a softplus gate": {"log_decay": clamped_softplus},
    "the gate is unbounded": {"log_decay": lambda _self, rates, f: -rates * np.log1p(np.exp(f))},
    "the error is that of the state before its decay": {"delta": error_before_decay},
    "T20: values decay instead of keys": {"delta": decay_of_values},
    "the state is read before it is written": {"delta": read_before_write},
    "the convolution's taps are reversed": {"convolved": reversed_taps},
    "the convolution has no activation": {"convolved": no_silu},
    "scores are scaled by a head's own part": {"key_scale": lambda self: self.s.own_dim**-0.5},
    "the selection bias is ignored": {"choice": unordered(no_bias)},
}

WRONG_WEIGHTS = {
    "the selection bias weighs, too": {"choice": unordered(bias_weighs)},
    "weights are not normalised": {"choice": unordered(not_normalised)},
    "weights are not scaled": {"choice": unordered(no_scale)},
    "T14: the router computes in bfloat16": {"router_logits": lambda _self, x, w: bf16(x @ w.T)},
    "T14: the router's weights are bfloat16": {"router_logits": lambda _self, x, w: x @ bf16(w).T},
}


@pytest.fixture(scope="module")
def right():
    weights = random_weights(SHAPE, SEED)
    model, experts = load_source(source_of(SHAPE, weights))
    recorder = Recorder(experts)
    return weights, run(model, recorder, TOKENS).numpy(), recorder


def variant(weights, overrides, shape=SHAPE):
    wrong = type("Wrong", (Reference,), overrides)(shape, weights)
    return wrong.forward(TOKENS), wrong.routes


def test_the_reference_itself_agrees(right):
    weights, logits, _ = right
    assert np.abs(logits - variant(weights, {})[0]).max() < 1e-3


@pytest.mark.parametrize("trap", WRONG_LOGITS)
def test_a_wrong_variant_shows_in_the_logits(right, trap):
    weights, logits, _ = right
    wrong, _ = variant(weights, WRONG_LOGITS[trap])
    assert not np.abs(logits - wrong).max() < 2e-2


@pytest.mark.parametrize("trap", WRONG_WEIGHTS)
def test_a_wrong_router_shows_in_the_weights(right, trap):
    weights, _, recorder = right
    _, wrong = variant(weights, WRONG_WEIGHTS[trap])
    ids, router_weights = recorder.routing(1)
    same = (ids.numpy() == wrong[1][0]).all(1)
    assert same.any()
    assert np.abs(router_weights.numpy() - wrong[1][1])[same].max() > 1e-4


def test_t2_the_epsilon_of_a_key_is_added_to_the_sum_of_squares():
    weights = random_weights(SHAPE, SEED)
    for name in weights:
        if "q_conv1d" in name or "k_conv1d" in name:
            weights[name] = weights[name] * np.float32(1e-3)
    logits = run(*load_source(source_of(SHAPE, weights)), TOKENS).numpy()
    assert np.abs(logits - variant(weights, {})[0]).max() < 1e-3
    mean = {
        "unit": lambda _self, x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6 * x.shape[-1])
    }
    assert np.abs(logits - variant(weights, mean)[0]).max() > 2e-2


def test_t13_the_keys_matrices_are_stored_transposed():
    """Only where they are square can their orientation be mistaken; elsewhere shapes tell."""
    shape = attrs.evolve(SHAPE, own_dim=32, kv_rank=32)
    weights = random_weights(shape, SEED)
    source = source_of(shape, weights)
    want = variant(weights, {}, shape)[0]
    assert np.abs(run(*load_source(source), TOKENS).numpy() - want).max() < 1e-3
    name = "blk.3.attn_k_b.weight"
    keys = source.read(name).view(np.float32).reshape(source.tensors[name].shape)
    turned = source.changed(stored={name: as_f32(keys.transpose(0, 2, 1))})
    assert np.abs(run(*load_source(turned), TOKENS).numpy() - want).max() > 2e-2


def test_t14_a_selection_bias_that_bfloat16_cannot_tell_apart_decides():
    """All scores are equal; the biases differ by less than bfloat16 resolves near one."""
    raw, kind, _ = as_f32(np.zeros((8, 16)))
    gate = PackedLinear(torch.from_numpy(raw), kind, (8, 16))
    bias = 1 + torch.arange(8) * 1e-4
    ids, weights = SigmoidRouter(gate, bias, k=3, scale=1.0)(torch.zeros(1, 16))
    assert ids.tolist() == [[7, 6, 5]]
    assert bias.bfloat16().unique().numel() == 1
    assert torch.allclose(weights, torch.tensor(1 / 3))
