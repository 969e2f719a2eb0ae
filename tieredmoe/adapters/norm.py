"""Root-mean-square normalisation, with and without a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Norm = Callable[[torch.Tensor], torch.Tensor]


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps)`` over the last axis (spec: DeepSeek-V4 inference/model.py)."""
    return functional.rms_norm(x, x.shape[-1:], eps=eps)


def rms_norm(weight: torch.Tensor, eps: float) -> Norm:
    """``weight * rms(x)``; the weight is plain, nothing is added to it."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    return norm
