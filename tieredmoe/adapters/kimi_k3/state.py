"""What a KDA layer leaves behind: a matrix for each head, whatever the sequence's length.

An MLA layer leaves ``Rows``, one per token. The published model's 69 KDA layers take 465 MB per
sequence (434 MB of it the matrices), its 24 MLA layers 55 kB per token. A step makes the next
matrices beside the committed ones, so while one runs a sequence takes up to 465 MB more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch


@attrs.frozen(eq=False)
class KdaState:
    """One layer: ``memory`` float32 [heads, key, value] and the ``window`` of its convolutions.

    ``window`` [kernel - 1, 3 width] holds the last tokens' q, k and v before the convolution,
    zeros before the first token.
    """

    memory: torch.Tensor
    window: torch.Tensor

    def copy(self, *, n_context: int) -> KdaState:  # noqa: ARG002 (LayerState's; any length fits)
        """The same in memory of its own."""
        return KdaState(self.memory.clone(), self.window.clone())
