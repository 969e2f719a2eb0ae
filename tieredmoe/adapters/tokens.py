"""The token ids of one step, checked before anything is computed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.errors import TokenizerError

if TYPE_CHECKING:
    import torch


def require_step_tokens(tokens: torch.Tensor, n_vocab: int) -> list[int]:
    """The ids in ``tokens``, int64 [T], T ≥ 1, of one sequence.

    Raises ``TokenizerError`` that names an id outside a vocabulary of ``n_vocab``.
    """
    assert tokens.dim() == 1, "tokens are ids of one sequence, int64 [T]"
    assert tokens.shape[0] > 0, "a step needs a token"
    ids = tokens.tolist()  # a token alone, the usual case, costs less so than two reductions
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= n_vocab:
        odd = lowest if lowest < 0 else highest
        raise TokenizerError(f"token id {odd} is outside the model's vocabulary of {n_vocab}")
    return ids
