"""The indexer of compressed sparse attention: which compressed rows a token attends to.

It compresses the past by itself, to narrower keys, and scores each row by a weighted sum over its
heads of ``relu(q · k)``. The reference also applies a Hadamard rotation (which changes no product)
and fake-quantises to FP4 (parity with its training); like transformers and llama.cpp this does
neither. (spec: DeepSeek-V4 inference/model.py, ``Indexer``)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from tieredmoe.adapters.top_k import top_k

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.deepseek_v4.compressor import Compressor
    from tieredmoe.adapters.deepseek_v4.rope import Angles
    from tieredmoe.moe.linear import Linear


class IndexQueries(NamedTuple):
    """What each token looks for."""

    q: torch.Tensor
    """float32 [T, heads, d]"""
    weights: torch.Tensor
    """float32 [T, heads], scaled; may be negative"""

    def part(self, a: int, b: int) -> IndexQueries:
        """Those of tokens a to b - 1."""
        return IndexQueries(self.q[a:b], self.weights[a:b])


class Indexer:
    """One layer's indexer: ``q_b`` [heads d, R], ``weights`` [heads, H]; picks ``n_picks`` rows."""

    def __init__(
        self, q_b: Linear, weights: Linear, compressor: Compressor, *, n_picks: int
    ) -> None:
        self.q_b = q_b
        self.weights = weights
        self.compressor = compressor
        self.n_heads = weights.shape[0]
        self.n_picks = n_picks

    def queries(self, u: torch.Tensor, qr: torch.Tensor, angles: Angles) -> IndexQueries:
        """From normed input ``u`` [T, H] and normed low-rank query ``qr`` [T, R]; no norm on q."""
        q = self.q_b(qr).unflatten(1, (self.n_heads, -1))
        scale = 1 / math.sqrt(q.shape[2] * self.n_heads)
        return IndexQueries(angles.rotate_(q), self.weights(u) * scale)

    def pick(
        self, queries: IndexQueries, keys: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        """The ``n_picks`` best rows of each token, int64 [T, n_picks]; equal scores by row number.

        ``keys`` is [n, d] with n ≥ ``n_picks``, ``visible`` bool [T, n] or None for all. Rows that
        a token does not see come last, so they are picked only where it sees fewer than
        ``n_picks``.
        """
        products = (queries.q @ keys.T).relu_()
        scores = (queries.weights.unsqueeze(1) @ products).squeeze(1)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        return top_k(scores, self.n_picks)
