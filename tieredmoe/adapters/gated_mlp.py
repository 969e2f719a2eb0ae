"""A feed-forward block from dense weights: a shared expert, or the whole block of a dense layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch

    from tieredmoe.moe.linear import Linear
    from tieredmoe.moe.reference import Activation


@attrs.frozen(eq=False)
class GatedMLP:
    """``down(activation(gate(x), up(x)))``: three matrices, none of them a routed expert's."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, H] to [T, H]."""
        return self.down(self.activation(self.gate(x), self.up(x)))
