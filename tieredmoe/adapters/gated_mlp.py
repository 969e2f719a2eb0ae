"""A feed-forward block from dense weights: a shared expert, or the whole block of a dense layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tieredmoe.moe.linear import PackedLinear
    from tieredmoe.moe.reference import Activation


class GatedMLP:
    """``down(activation(gate(x), up(x)))``: three matrices, none of them a routed expert's."""

    def __init__(
        self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: Activation
    ) -> None:
        self._gate = gate
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, H] to [T, H]."""
        return self._down(self._activation(self._gate(x), self._up(x)))
