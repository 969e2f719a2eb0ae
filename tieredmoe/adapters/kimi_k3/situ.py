"""SiTU, the activation of every feed-forward block of Kimi-K3: a SwiGLU that cannot run away."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tieredmoe.moe.reference import Activation


def situ(*, beta: float, linear_beta: float) -> Activation:
    """``beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)``.

    ``g`` and ``u`` are the gate's and the up matrix's outputs (spec: Kimi-K3
    modeling_kimi_linear.py, ``hidden_act`` "situ").
    """

    def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        bounded = (up / linear_beta).tanh() * linear_beta
        return (gate / beta).tanh() * beta * gate.sigmoid() * bounded

    return activation
