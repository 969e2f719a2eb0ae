"""Kimi Delta Attention's recurrence, token by token and in sub-chunks.

For each head, with a state ``S`` [key, value], a log-decay ``g`` for each key channel and a write
strength ``beta``::

    S = exp(g_t) S                              decays, along the keys
    S = S + beta_t k_t (v_t - k_t^T S)^T        corrects what the decayed state answers to k_t
    o_t = q_t^T S                               reads after the write

A sub-chunk does the same for up to sixteen tokens at once. With ``G`` the sum of the log-decays up
to and with a token, the corrections ``U`` of all its tokens solve a triangular system, and outputs
and the state after it are products of matrices::

    A_ti = beta_t (k_t e^(G_t - c))·(k_i e^(c - G_i)) for i < t
    (1 + A) U = beta (V - (K e^G) S)
    O = (Q e^G) S + tril((Q e^(G - c))(K e^(c - G))^T) U
    S = e^(G_last) S + (K e^(G_last - G))^T U

for any ``c``. Without one, ``e^(-G)`` grows along a longer chunk until, at a log-decay of -5, it
passes float32 with the eighteenth token. Hence the short sub-chunks, whose length follows the bound
of the decays; and ``c`` is ``G`` at the middle token, which keeps both factors far from the ends of
float32, subnormal numbers included. One token goes through the recurrence, which is what decoding
does. Everything is float32.
(source: fla-org/flash-linear-attention ``ops/kda/naive.py``; "Kimi Linear", Moonshot AI 2025)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

_LENGTH_MAX = 16
"""Tokens of a sub-chunk at most."""

_EXPONENT_MAX = 80.0
"""How far log-decays may add up in a sub-chunk; factors are then within ``e^40`` and ``e^-40``."""


class Inputs(NamedTuple):
    """What the recurrence takes of T tokens: float32 [heads, T, dim], ``beta`` [heads, T].

    ``q`` is scaled and, like ``k``, of unit length; ``g`` is the log-decay, not above 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def sub_chunk_length(gate_lower_bound: float) -> int:
    """Tokens of a sub-chunk when every log-decay is above ``gate_lower_bound``."""
    return max(1, min(_LENGTH_MAX, int(_EXPONENT_MAX / -gate_lower_bound)))


def delta_rule(
    inputs: Inputs, state: torch.Tensor, *, n_sub_chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [heads, T, value] and the state after the T tokens; ``state`` is left as it was.

    ``state`` is float32 [heads, key, value]. Sub-chunks are ``n_sub_chunk`` tokens long; the length
    changes results by rounding only.
    """
    if inputs.q.shape[1] == 1 or n_sub_chunk == 1:
        return _recurrent(inputs, state)
    return _chunked(inputs, state, n_sub_chunk)


def _recurrent(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = inputs
    decay = g.exp()
    outputs = torch.empty_like(v)
    for t in range(q.shape[1]):
        now = slice(t, t + 1)
        state = state * decay[:, t].unsqueeze(2)
        error = v[:, now] - k[:, now] @ state
        state = state + k[:, now].mT @ (error * beta[:, now].unsqueeze(2))
        outputs[:, now] = q[:, now] @ state
    return outputs, state


def _chunked(
    inputs: Inputs, state: torch.Tensor, n_sub_chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    n_tokens = inputs.q.shape[1]
    q, k, v, g, beta = (_sub_chunks(x, n_sub_chunk) for x in inputs)
    G = g.cumsum(2)
    centred = G - G[:, :, n_sub_chunk // 2, None]
    decay, k_out, beta = G.exp(), k * (-centred).exp(), beta.unsqueeze(3)
    q_in, k_in = q * decay, k * decay

    # The solver reads below the diagonal only, and takes the diagonal for ones.
    system = beta * ((k * centred.exp()) @ k_out.mT)
    solved = torch.linalg.solve_triangular(
        system, beta * torch.cat((v, k_in), dim=3), upper=False, unitriangular=True
    )
    from_values, from_state = solved.split((v.shape[3], k.shape[3]), dim=3)
    reads = ((q * centred.exp()) @ k_out.mT).tril()
    last = decay[:, :, -1:]
    k_after = k * (G[:, :, -1:] - G).exp()

    outputs = torch.empty_like(v)
    for i in range(q.shape[1]):
        corrections = from_values[:, i] - from_state[:, i] @ state
        outputs[:, i] = q_in[:, i] @ state + reads[:, i] @ corrections
        state = last[:, i].mT * state + k_after[:, i].mT @ corrections
    return outputs.flatten(1, 2)[:, :n_tokens], state


def _sub_chunks(x: torch.Tensor, n_sub_chunk: int) -> torch.Tensor:
    """[heads, T, ...] as [heads, n, n_sub_chunk, ...]: zeros after the last token change nothing.

    A token of zeros does not decay (``exp(0)``), writes nothing and its output is dropped.
    """
    missing = -x.shape[1] % n_sub_chunk
    padded = functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, missing))
    return padded.reshape(x.shape[0], -1, n_sub_chunk, *x.shape[2:])
