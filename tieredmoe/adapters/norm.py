"""Root-mean-square normalisation, with and without a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Norm = Callable[[torch.Tensor], torch.Tensor]


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps)`` over the last axis (spec: DeepSeek-V4 inference/model.py)."""
    return functional.rms_norm(x, x.shape[-1:], eps=eps)


@attrs.frozen(eq=False)
class RmsNorm:
    """``weight * rms(x)``; the weight is plain, nothing is added to it."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 [..., n], ``weight`` being [n]."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rms_norm(weight: torch.Tensor, eps: float) -> RmsNorm:
    """``weight * rms(x)`` as a function of x."""
    return RmsNorm(weight, eps)
