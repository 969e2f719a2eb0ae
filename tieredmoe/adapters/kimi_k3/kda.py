"""Kimi Delta Attention: a short convolution, then linear attention with a bounded decay.

(spec: Kimi-K3 modeling_kimi_linear.py, ``KimiDeltaAttention``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch.nn import functional

from tieredmoe.adapters.kimi_k3.delta_rule import Inputs, delta_rule, sub_chunk_length
from tieredmoe.adapters.kimi_k3.state import KdaState
from tieredmoe.adapters.norm import rms_norm

if TYPE_CHECKING:
    from tieredmoe.adapters.kimi_k3.config import KimiK3Config
    from tieredmoe.moe.linear import PackedLinear

_UNIT_EPS = 1e-6
"""Added to the sum of squares of a query or key, not to their mean (ml-explore/mlx-lm#1624)."""


@attrs.frozen(eq=False, kw_only=True)
class KdaWeights:
    """The weights of one layer, small ones as float32.

    ``convolution`` [3 width, kernel] is of q, k and v in this order, its last tap the current
    token's; ``negative_rates`` [heads] is the file's ``ssm_a``, which is ``-exp(A_log)`` already.
    """

    q: PackedLinear
    k: PackedLinear
    v: PackedLinear
    convolution: torch.Tensor
    decay_a: PackedLinear
    decay_b: PackedLinear
    decay_bias: torch.Tensor
    negative_rates: torch.Tensor
    strength: PackedLinear
    gate: PackedLinear
    norm: torch.Tensor
    output: PackedLinear


class KimiDeltaAttention:
    """One layer's linear attention; its state does not grow."""

    def __init__(self, weights: KdaWeights, config: KimiK3Config) -> None:
        self._w = weights
        self._config = config.kda
        self._norm = rms_norm(weights.norm, config.rms_eps)
        self._n_sub_chunk = sub_chunk_length(config.kda.gate_lower_bound)

    def new_state(self, n_context: int) -> KdaState:  # noqa: ARG002 (as of the other attention)
        """The state before the first token."""
        kda, like = self._config, self._w.norm
        return KdaState(
            memory=like.new_zeros((kda.n_heads, kda.head_dim, kda.head_dim)),
            window=like.new_zeros((kda.conv_kernel - 1, 3 * kda.width)),
        )

    def __call__(self, x: torch.Tensor, state: KdaState) -> tuple[torch.Tensor, KdaState]:
        """Attend from the next tokens ``x`` (normed, float32 [T, H]).

        Returns float32 [T, H] and the state after the tokens; ``state`` is left as it was.
        """
        w, heads = self._w, (self._config.n_heads, self._config.head_dim)
        streams, window = self._convolved(x, state.window)
        q, k, v = (s.unflatten(1, heads).transpose(0, 1) for s in streams.chunk(3, dim=1))
        inputs = Inputs(
            q=_unit(q) * self._config.head_dim**-0.5,
            k=_unit(k),
            v=v,
            g=self._log_decays(x),
            beta=w.strength(x).sigmoid().T,
        )
        out, memory = delta_rule(inputs, state.memory, n_sub_chunk=self._n_sub_chunk)
        gate = w.gate(x).sigmoid()
        gated = self._norm(out).transpose(0, 1).flatten(1) * gate
        return w.output(gated), KdaState(memory, window)

    def _convolved(
        self, x: torch.Tensor, window: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k and v side by side [T, 3 width] after the convolution, and the window after them."""
        w, n_new = self._w, x.shape[0]
        inputs = torch.cat((window, torch.cat((w.q(x), w.k(x), w.v(x)), dim=1)))
        total = torch.zeros_like(inputs[:n_new])
        for tap, weight in enumerate(w.convolution.T):
            total.addcmul_(inputs[tap : tap + n_new], weight)
        # Cloned, so that a state does not keep a whole chunk for its last few tokens.
        return functional.silu(total), inputs[n_new:].clone()

    def _log_decays(self, x: torch.Tensor) -> torch.Tensor:
        """How each head and key channel decays, float32 [heads, T, key], in (lower bound, 0)."""
        w, kda = self._w, self._config
        f = w.decay_b(w.decay_a(x)) + w.decay_bias
        rates = -w.negative_rates.view(1, -1, 1)
        gates = (rates * f.view(-1, kda.n_heads, kda.head_dim)).sigmoid()
        return kda.gate_lower_bound * gates.transpose(0, 1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _UNIT_EPS).rsqrt()
