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

if TYPE_CHECKING:
    from tieredmoe.adapters.kimi_k3.config import KdaConfig, KimiK3Config
    from tieredmoe.adapters.norm import RmsNorm
    from tieredmoe.moe.linear import Linear

UNIT_EPS = 1e-6
"""Added to the sum of squares of a query or key, not to their mean (ml-explore/mlx-lm#1624)."""


@attrs.frozen(eq=False, kw_only=True)
class KdaWeights:
    """The weights of one layer, small ones as float32.

    ``convolution`` [3 width, kernel] is of q, k and v in this order, its last tap the current
    token's; ``negative_rates`` [heads] is the file's ``ssm_a``, which is ``-exp(A_log)`` already.
    """

    q: Linear
    k: Linear
    v: Linear
    convolution: torch.Tensor
    decay_a: Linear
    decay_b: Linear
    decay_bias: torch.Tensor
    negative_rates: torch.Tensor
    strength: Linear
    gate: Linear
    norm: RmsNorm
    output: Linear


class KimiDeltaAttention:
    """One layer's linear attention; its state does not grow."""

    def __init__(self, weights: KdaWeights, config: KimiK3Config) -> None:
        self._w = weights
        self._config = config.kda
        self._n_sub_chunk = sub_chunk_length(config.kda.gate_lower_bound)

    @property
    def weights(self) -> KdaWeights:
        """Its weights."""
        return self._w

    def new_state(self, n_context: int) -> KdaState:  # noqa: ARG002 (as of the other attention)
        """The state before the first token."""
        kda, like = self._config, self._w.norm.weight
        return KdaState(
            memory=like.new_zeros((kda.n_heads, kda.head_dim, kda.head_dim)),
            window=like.new_zeros((kda.conv_kernel - 1, 3 * kda.width)),
        )

    def __call__(self, x: torch.Tensor, state: KdaState) -> tuple[torch.Tensor, KdaState]:
        """Attend from the next tokens ``x`` (normed, float32 [T, H]).

        Returns float32 [T, H] and the state after the tokens; ``state`` is left as it was.
        """
        w = self._w
        streams, window = self._convolved(x, state.window)
        decays = w.decay_b(w.decay_a(x))
        inputs = recurrence_inputs(streams, decays, w.strength(x), w, self._config)
        out, memory = delta_rule(inputs, state.memory, n_sub_chunk=self._n_sub_chunk)
        return w.output(gated_heads(out, w.gate(x), w.norm)), KdaState(memory, window)

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


def recurrence_inputs(
    streams: torch.Tensor,
    decays: torch.Tensor,
    strengths: torch.Tensor,
    weights: KdaWeights,
    config: KdaConfig,
) -> Inputs:
    """What the recurrence takes, from the convolved q, k and v side by side, ``streams``.

    ``decays`` [T, width] and ``strengths`` [T, heads] are what their matrices give.
    """
    heads = (config.n_heads, config.head_dim)
    q, k, v = (s.unflatten(1, heads).transpose(0, 1) for s in streams.chunk(3, dim=1))
    rates = -weights.negative_rates.view(1, -1, 1)
    # Log-decays of each head and key channel are within (lower bound, 0).
    gates = (rates * (decays + weights.decay_bias).unflatten(1, heads)).sigmoid()
    return Inputs(
        q=_unit(q) * config.head_dim**-0.5,
        k=_unit(k),
        v=v,
        g=config.gate_lower_bound * gates.transpose(0, 1),
        beta=strengths.sigmoid().T,
    )


def gated_heads(out: torch.Tensor, gate: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """The recurrence's outputs [heads, T, value], normed and gated: float32 [T, width]."""
    return norm(out).transpose(0, 1).flatten(1) * gate.sigmoid()


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()
