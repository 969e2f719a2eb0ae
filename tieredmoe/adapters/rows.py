"""What a sequence leaves behind token by token: rows that are only ever added to.

Too large to copy in each step, so a step writes behind the committed rows, and the next attempt
overwrites what an abandoned one wrote. Rejected: allocating for the whole context at once (2^20
tokens are 14 GB in float32).
"""

from __future__ import annotations

import torch

_LEAST_ROWS = 64
"""What the first growth of a row buffer makes room for."""


class Rows:
    """Append-only rows, float32 [n, width], one per ``ratio`` tokens; appending makes a new object.

    There are at most ``limit``, what a context of ``n_context`` tokens needs. All objects of one
    line share a buffer that doubles when it is full. Appending to an object that is not the last of
    its line overwrites what the later ones held: keep one line per sequence, and ``copy`` to fork.
    """

    __slots__ = ("_buffer", "_ratio", "limit", "n")

    def __init__(self, buffer: torch.Tensor, n: int, *, ratio: int, limit: int) -> None:
        self._buffer = buffer
        self._ratio = ratio
        self.n = n
        self.limit = limit

    @classmethod
    def empty(cls, width: int, *, n_context: int, device: torch.device, ratio: int = 1) -> Rows:
        """No rows yet, and no memory taken."""
        buffer = torch.empty((0, width), device=device)
        return cls(buffer, 0, ratio=ratio, limit=n_context // ratio)

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
        return Rows(buffer, n, ratio=self._ratio, limit=self.limit)

    def copy(self, *, n_context: int) -> Rows:
        """The same rows in memory of their own, no more than they fill; for another context."""
        limit = n_context // self._ratio
        assert self.n <= limit, (self.n, limit)
        return Rows(self.first(self.n).clone(), self.n, ratio=self._ratio, limit=limit)

    def first(self, n: int) -> torch.Tensor:
        """The first ``n`` rows, a view [n, width]."""
        return self._buffer[:n]
