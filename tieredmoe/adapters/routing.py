"""What every router ends in: experts chosen by biased scores, weighed by the plain ones.

Scores stay float32: rounded to bfloat16 they change the experts of one token in twenty
(sgl-project/sglang#33764).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tieredmoe.adapters.top_k import top_k

if TYPE_CHECKING:
    import torch


class Routing(NamedTuple):
    """The experts of each token and the weights of their outputs, both [T, k] in routing order."""

    ids: torch.Tensor
    weights: torch.Tensor


def choose(scores: torch.Tensor, bias: torch.Tensor, *, k: int, scale: float) -> Routing:
    """The ``k`` experts of highest biased score; ``scores`` float32 [T, E], ``bias`` [E].

    The bias decides who is chosen, not how much they weigh.
    """
    ids = top_k(scores + bias, k)
    return Routing(ids, chosen_weights(scores, ids, scale=scale))


def chosen_weights(scores: torch.Tensor, ids: torch.Tensor, *, scale: float) -> torch.Tensor:
    """The scores of ``ids`` [T, k], made to sum to ``scale`` for each token: float32 [T, k]."""
    chosen = scores.gather(1, ids)
    return chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scale
