"""The activations between gate/up and down of a routed expert, as data.

Each is also the plain torch function, so the same object serves a kernel, the paths without one and
a reference. Rejected: passing a Python function (no kernel can be made from it).
"""

from __future__ import annotations

import attrs
import torch

from tieredmoe.moe.reference import clamped_swiglu


@attrs.frozen
class SwiGLU:
    """``silu(min(g, limit)) * clamp(u, -limit, limit)``; plain SwiGLU where ``limit`` is None."""

    limit: float | None = None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Element by element, float32."""
        return clamped_swiglu(self.limit)(gate, up)

    @property
    def constants(self) -> tuple[int, float, float]:
        """The kernel's code of the function and its two constants."""
        return 0, self.limit or 0.0, 0.0


@attrs.frozen
class SiTU:
    """``beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)`` (Kimi-K3)."""

    beta: float = 4.0
    linear_beta: float = 25.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Element by element, float32."""
        bounded = self.linear_beta * torch.tanh(up / self.linear_beta)
        return self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate) * bounded

    @property
    def constants(self) -> tuple[int, float, float]:
        """The kernel's code of the function and its two constants."""
        return 1, self.beta, self.linear_beta


FusedActivation = SwiGLU | SiTU
