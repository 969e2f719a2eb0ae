"""Multi-head latent attention without positions, its output gated.

Keys and values of all heads come from one latent vector per token, so that is what is kept: queries
are taken to the latents' space, and the weighted sum of latents from there to the heads' values.
The results are those of expanded keys and values, with 576 floats per token in place of 30,720.
(spec: Kimi-K3 modeling_kimi_linear.py, ``KimiMLAAttention``)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import torch

from tieredmoe.adapters.rows import Rows

if TYPE_CHECKING:
    from tieredmoe.adapters.kimi_k3.config import KimiK3Config
    from tieredmoe.adapters.kimi_k3.heads import HeadMatrices
    from tieredmoe.adapters.norm import RmsNorm
    from tieredmoe.moe.linear import Linear

_SCRATCH_FLOATS = 2**24
"""Floats (64 MiB) that the scores of a block of queries may take."""


@attrs.frozen(eq=False, kw_only=True)
class MlaWeights:
    """The weights of one layer; the norms' epsilon is that of the latents.

    ``keys`` takes a head's query to the latents' space (the file's ``attn_k_b``, stored transposed
    for this), ``values`` a latent to the head's value.
    """

    q_a: Linear
    q_a_norm: RmsNorm
    q_b: Linear
    kv_a: Linear
    kv_a_norm: RmsNorm
    keys: HeadMatrices
    values: HeadMatrices
    gate: Linear
    output: Linear


class LatentAttention:
    """One layer's full attention; its state is a row of latent and shared key for each token."""

    def __init__(self, weights: MlaWeights, config: KimiK3Config) -> None:
        self._w = weights
        self._config = config.mla

    @property
    def weights(self) -> MlaWeights:
        """Its weights."""
        return self._w

    def new_state(self, n_context: int) -> Rows:
        """The state before the first token of a sequence of at most ``n_context``."""
        device = self._w.kv_a_norm.weight.device
        return Rows.empty(self._config.row_width, n_context=n_context, device=device)

    def __call__(self, x: torch.Tensor, state: Rows) -> tuple[torch.Tensor, Rows]:
        """Attend from the next tokens ``x`` (normed, float32 [T, H]).

        Returns float32 [T, H] and the state after the tokens; ``state`` is left as it was.
        """
        w, mla = self._w, self._config
        latents, shared_keys = w.kv_a(x).split((mla.kv_lora_rank, mla.shared_dim), dim=1)
        after = state.append(torch.cat((w.kv_a_norm(latents), shared_keys), dim=1))

        q = w.q_b(w.q_a_norm(w.q_a(x))).unflatten(1, (mla.n_heads, mla.key_dim))
        own, shared = q.split((mla.own_dim, mla.shared_dim), dim=2)
        queries = torch.cat((w.keys(own), shared), dim=2)
        out = w.values(self._attend(queries, after))
        return w.output(out.flatten(1) * w.gate(x).sigmoid()), after

    def _attend(self, queries: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Weighted means of latents, float32 [T, heads, rank], block of queries by block."""
        n_new, n_heads, _ = queries.shape
        rank = self._config.kv_lora_rank
        n_block = max(1, _SCRATCH_FLOATS // (n_heads * rows.n))
        out = queries.new_empty((n_new, n_heads, rank))
        for a in range(0, n_new, n_block):
            b = min(a + n_block, n_new)
            n_before = rows.n - n_new + a
            keys = rows.first(n_before + b - a)
            scores = (queries[a:b] @ keys.T).mul_(self._config.key_dim**-0.5)
            if b - a > 1:
                scores[:, :, n_before:].masked_fill_(_future(b - a, scores.device), -math.inf)
            out[a:b] = scores.softmax(2) @ keys[:, :rank]
        return out


def _future(n: int, device: torch.device) -> torch.Tensor:
    """Which of ``n`` tokens each of them must not see: bool [n, 1, n], any head."""
    token = torch.arange(n, device=device)
    return (token > token.unsqueeze(1)).unsqueeze(1)
