"""Block attention residuals: what a sub-block reads is a mix over depth, not the stream alone.

The layers form blocks. At a block's start the stream goes into a bank, and a new stream begins with
the attention's output. What each sub-block reads is a weighted mean of everything in the bank and
of the stream, the weights a softmax for each token. Nothing is carried from token to token.
(spec: Kimi-K3 modeling_kimi_linear.py, ``attn_res``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Bank:
    """The streams that earlier blocks ended with, for the tokens of one step; raw, not normed."""

    def __init__(self, eps: float) -> None:
        self._eps = eps
        self._values: list[torch.Tensor] = []
        self._scales: list[torch.Tensor] = []

    def keep(self, x: torch.Tensor) -> None:
        """Put the stream ``x`` [T, H] in: that of a block which is over."""
        self._values.append(x)
        self._scales.append(self._scale(x))

    def mix(self, x: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        """The mean of the bank and of ``x``, float32 [T, H]; ``x`` itself while the bank is empty.

        A weight is the softmax of ``score`` [H] times the value divided by its root mean square:
        the norm decides the weights alone, what is averaged are the raw values.
        """
        if not self._values:
            return x
        values = [*self._values, x]
        scales = [*self._scales, self._scale(x)]
        logits = [(v @ score) * scale for v, scale in zip(values, scales, strict=True)]
        return _weighted_sum(torch.stack(logits).softmax(0), values)

    def _scale(self, x: torch.Tensor) -> torch.Tensor:
        """``1 / sqrt(mean(x²) + eps)``, float32 [T]."""
        return (x.square().mean(1) + self._eps).rsqrt()


def _weighted_sum(weights: torch.Tensor, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of ``values``, each [T, H], by ``weights`` [n, T]; not stacked, which would copy."""
    total = values[0] * weights[0].unsqueeze(1)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total.addcmul_(value, weight.unsqueeze(1))
    return total
