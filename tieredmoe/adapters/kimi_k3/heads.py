"""A matrix for each attention head, in the quantised bytes of one tensor.

Rejected: a ``PackedLinear`` per head (96 heads of two matrices in 24 layers are 4,608 small
products for each token), and dequantising at load (four times the memory or more).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tieredmoe.moe.linear import Linear

_BLOCK_FLOATS = 2**20
"""Weights (4 MiB) dequantised at a time."""


class HeadMatrices:
    """``n_heads`` matrices [outputs, inputs], one below the other in ``matrix``."""

    def __init__(self, matrix: Linear, n_heads: int) -> None:
        n_rows, n_inputs = matrix.shape
        self.matrix = matrix
        self.n_heads = n_heads
        self.shape = (n_rows // n_heads, n_inputs)
        """Outputs and inputs of a head."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Each head's ``x @ W.T``: float32 [T, heads, inputs] to [T, heads, outputs]."""
        n_outputs, n_inputs = self.shape
        n_block = max(1, _BLOCK_FLOATS // (n_outputs * n_inputs))
        out = x.new_empty((x.shape[0], self.n_heads, n_outputs))
        for a in range(0, self.n_heads, n_block):
            b = min(a + n_block, self.n_heads)
            rows = torch.arange(a * n_outputs, b * n_outputs, device=x.device)
            weights = self.matrix.rows(rows).view(b - a, n_outputs, n_inputs)
            out[:, a:b] = (x[:, a:b].transpose(0, 1) @ weights.mT).transpose(0, 1)
        return out
