"""The delta rule: sub-chunks equal the recurrence, overflow nothing, see no future."""

import numpy as np
import pytest
import torch

from tieredmoe.adapters.kimi_k3.delta_rule import Inputs, delta_rule, sub_chunk_length

HEADS, KEY, VALUE = 3, 24, 20


def inputs(n_tokens, *, g=None, seed=0):
    """Random ones; log-decays spread over (-5, 0), or all ``g``."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=rng)

    q, k = (torch.nn.functional.normalize(normal(HEADS, n_tokens, KEY), dim=2) for _ in range(2))
    decays = -5 * (2 * normal(HEADS, n_tokens, KEY)).sigmoid()
    if g is not None:
        decays = torch.full_like(decays, g)
    strength = normal(HEADS, n_tokens).sigmoid()
    return Inputs(q, k, normal(HEADS, n_tokens, VALUE), decays, strength)


def state(seed=1):
    return torch.randn((HEADS, KEY, VALUE), generator=torch.Generator().manual_seed(seed))


def recurrence(chunk, before):
    """The definition in float64."""
    q, k, v, g, beta = (x.double().numpy() for x in chunk)
    S, out = before.double().numpy(), np.empty(chunk.v.shape)
    for t in range(q.shape[1]):
        S = S * np.exp(g[:, t])[:, :, None]
        error = v[:, t] - np.einsum("hk,hkv->hv", k[:, t], S)
        S = S + np.einsum("hk,hv->hkv", beta[:, t, None] * k[:, t], error)
        out[:, t] = np.einsum("hk,hkv->hv", q[:, t], S)
    return torch.from_numpy(out), torch.from_numpy(S)


def assert_close(got, want, atol=2e-6):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("n_sub_chunk", [1, 4, 16])
@pytest.mark.parametrize("n_tokens", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_sub_chunks_of_any_length_equal_the_recurrence(n_tokens, n_sub_chunk):
    chunk = inputs(n_tokens)
    assert_close(delta_rule(chunk, state(), n_sub_chunk=n_sub_chunk), recurrence(chunk, state()))


@pytest.mark.parametrize("g", [-5.0, -4.999, -1e-6, 0.0])
def test_130_tokens_at_the_ends_of_the_decays_range_equal_the_recurrence(g):
    chunk = inputs(130, g=g)
    assert_close(delta_rule(chunk, state(), n_sub_chunk=16), recurrence(chunk, state()), atol=2e-5)


def test_channels_that_keep_beside_channels_that_forget_equal_the_recurrence():
    chunk = inputs(130)
    chunk.g[:, :, ::2], chunk.g[:, :, 1::2] = -5.0, -1e-4
    chunk.g[:, 40:50] = -5.0
    assert_close(delta_rule(chunk, state(), n_sub_chunk=16), recurrence(chunk, state()))


def test_t18_longer_sub_chunks_would_overflow():
    out, after = delta_rule(inputs(130, g=-5.0), state(), n_sub_chunk=64)
    assert not (out.isfinite().all() and after.isfinite().all())


@pytest.mark.parametrize(
    ("bound", "n_tokens"), [(-5.0, 16), (-1.0, 16), (-10.0, 8), (-20.0, 4), (-80.0, 1)]
)
def test_the_length_of_sub_chunks_follows_the_bound(bound, n_tokens):
    assert sub_chunk_length(bound) == n_tokens


@pytest.mark.parametrize("cut", [1, 7, 16, 17, 40])
def test_later_tokens_change_no_earlier_output(cut):
    """Their decays included: a sub-chunk is centred at a token that earlier ones do not see."""
    chunk, other = inputs(48), inputs(48, g=-5.0, seed=5)
    changed = Inputs(
        *(torch.cat((a[:, :cut], b[:, cut:]), 1) for a, b in zip(chunk, other, strict=True))
    )
    got = delta_rule(changed, state(), n_sub_chunk=16)[0][:, :cut]
    want = delta_rule(chunk, state(), n_sub_chunk=16)[0][:, :cut]
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_the_state_given_is_left_as_it_was():
    before = state()
    for n_tokens in (1, 40):
        delta_rule(inputs(n_tokens), before, n_sub_chunk=16)
    assert torch.equal(before, state())
