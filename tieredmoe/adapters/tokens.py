"""The token ids of one step, checked before anything is computed from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.errors import TokenizerError

if TYPE_CHECKING:
    import torch


def require_step_tokens(tokens: torch.Tensor, n_vocab: int) -> None:
    """Raise ``TokenizerError`` that names an id outside a vocabulary of ``n_vocab``.

    ``tokens`` are int64 [T], T ≥ 1, of one sequence.
    """
    assert tokens.dim() == 1, "tokens are ids of one sequence, int64 [T]"
    assert tokens.shape[0] > 0, "a step needs a token"
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= n_vocab:
        odd = lowest if lowest < 0 else highest
        raise TokenizerError(f"token id {odd} is outside the model's vocabulary of {n_vocab}")
