"""The k largest, with ties decided by position: ``torch.topk`` leaves their order open."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the ``k`` largest along the last axis, largest first, equal ones by index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
