"""What a sequence leaves behind: attention windows, compressed rows, half-filled windows.

A step never changes a state; it makes the next one from it and commits it when all layers are done.
A step that fails or is cancelled half-way has therefore done nothing, and may be tried again. What
would be too large to copy, the compressed rows, is append-only: a step writes behind the committed
rows, and the next attempt overwrites what an abandoned one wrote.

Rejected: caches updated in place (a load error in layer 20 would leave layers 0 to 19 one token
ahead), and allocating for the whole context at once (2^20 tokens are 14 GB in float32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from tieredmoe.errors import PromptTooLongError

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST_ROWS = 64
"""What the first growth of a row buffer makes room for."""


class Rows:
    """Append-only rows, float32 [n, width], at most ``limit``; appending makes a new object.

    All objects of one line share a buffer that doubles when it is full. Appending to an object that
    is not the last of its line overwrites what the later ones held: keep one line per sequence.
    """

    __slots__ = ("_buffer", "limit", "n")

    def __init__(self, buffer: torch.Tensor, n: int, *, limit: int) -> None:
        self._buffer = buffer
        self.n = n
        self.limit = limit

    @classmethod
    def empty(cls, width: int, *, limit: int, device: torch.device) -> Rows:
        """No rows yet, and no memory taken."""
        return cls(torch.empty((0, width), device=device), 0, limit=limit)

    def append(self, rows: torch.Tensor) -> Rows:
        """These rows with ``rows`` [m, width] behind them; costs O(m) but for rare doublings."""
        n = self.n + rows.shape[0]
        assert n <= self.limit, (n, self.limit)
        buffer = self._buffer
        if n > buffer.shape[0]:
            n_room = min(self.limit, max(n, 2 * buffer.shape[0], _LEAST_ROWS))
            buffer = torch.empty((n_room, rows.shape[1]), device=rows.device)
            buffer[: self.n] = self._buffer[: self.n]
        buffer[self.n : n] = rows
        return Rows(buffer, n, limit=self.limit)

    def first(self, n: int) -> torch.Tensor:
        """The first ``n`` rows, a view [n, width]."""
        return self._buffer[:n]


@attrs.frozen(eq=False)
class CompressorState:
    """One compressor: the ``rows`` it has emitted, and the tokens of its window still open.

    ``values`` and ``gates`` are [m, width] for the m tokens of the open window. Overlapping windows
    also need the last closed one: ``last_values`` and ``last_gates`` [ratio, d] (the position bias
    added), before the first window zeros and -inf; empty without overlap.
    """

    rows: Rows
    values: torch.Tensor
    gates: torch.Tensor
    last_values: torch.Tensor
    last_gates: torch.Tensor


@attrs.frozen(eq=False)
class LayerState:
    """One layer: the last ``sliding_window - 1`` keys [m, head_dim], and its compressors' states.

    Keys are values, so they are stored once. ``compressed`` is what the layer's ``Past`` made:
    nothing on sliding layers, one state on HCA layers, the rows' and the indexer's on CSA layers.
    """

    window: torch.Tensor
    compressed: tuple[CompressorState, ...]


class DecodeState:
    """One sequence in one model. Made by ``Model.new_state``; only that model understands it."""

    def __init__(self, layers: Sequence[LayerState], *, n_context: int) -> None:
        self._layers = tuple(layers)
        self._n_tokens = 0
        self._n_context = n_context

    @property
    def n_tokens(self) -> int:
        """Tokens of all committed steps."""
        return self._n_tokens

    @property
    def n_context(self) -> int:
        """Tokens it may hold at most."""
        return self._n_context

    @property
    def layers(self) -> tuple[LayerState, ...]:
        """The layers' states after the committed steps."""
        return self._layers

    def check_room(self, n_new: int) -> None:
        """Raise ``PromptTooLongError`` if ``n_new`` more tokens do not fit."""
        if self._n_tokens + n_new > self._n_context:
            raise PromptTooLongError(n_prompt=self._n_tokens + n_new, n_context=self._n_context)

    def commit(self, layers: Sequence[LayerState], *, start: int, n_new: int) -> None:
        """Make ``layers`` the state after a step that added ``n_new`` tokens at ``start``."""
        assert start == self._n_tokens, "two steps ran on one state at the same time"
        self._layers = tuple(layers)
        self._n_tokens += n_new

    def __repr__(self) -> str:
        return f"<DecodeState {self._n_tokens}/{self._n_context} tokens>"
