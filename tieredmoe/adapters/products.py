"""Products of one token with dense weights that belong together: plain, or sharing on a device.

Several matrices read the same vector, a gated block is three of them around an activation, and the
heads of an attention each have a matrix. On a device each launch counts, and packed matrices can
share the vector's fixed-point form; so what belongs together is said together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.gated_mlp import GatedMLP
    from tieredmoe.moe.linear import Linear


class Products(Protocol):
    """How dense weights meet ``x``, float32 [n, inputs] with n a few tokens."""

    def shared(self, x: torch.Tensor, matrices: Sequence[Linear]) -> Sequence[torch.Tensor]:
        """``x`` times each of ``matrices``, which have as many inputs: float32 [n, outputs]."""

    def gated(self, x: torch.Tensor, mlp: GatedMLP) -> torch.Tensor:
        """``mlp(x)``, float32 [n, outputs]."""

    def each(self, x: torch.Tensor, matrix: Linear) -> torch.Tensor:
        """Row i of ``x`` times part i of ``matrix``: float32 [parts, outputs / parts].

        A part is the outputs / parts rows that follow those of the part before; ``x`` is
        [parts, inputs].
        """


class PlainProducts:
    """One after another, wherever the weights are."""

    def shared(self, x: torch.Tensor, matrices: Sequence[Linear]) -> Sequence[torch.Tensor]:
        """``x`` times each of ``matrices``."""
        return [matrix(x) for matrix in matrices]

    def gated(self, x: torch.Tensor, mlp: GatedMLP) -> torch.Tensor:
        """``mlp(x)``."""
        return mlp(x)

    def each(self, x: torch.Tensor, matrix: Linear) -> torch.Tensor:
        """Row i of ``x`` times part i of ``matrix``, which is dequantised as a whole."""
        weights = matrix.rows(torch.arange(matrix.shape[0], device=x.device))
        return (weights.view(len(x), -1, x.shape[1]) @ x.unsqueeze(2)).squeeze(2)
