"""What a layer sees beyond its sliding window: every compressed row, or those its indexer picks.

Tokens inside the window are seen twice, raw and compressed; that is the model's design.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from tieredmoe.adapters.deepseek_v4.compressor import Compressor
    from tieredmoe.adapters.deepseek_v4.indexer import Indexer
    from tieredmoe.adapters.deepseek_v4.rope import Angles
    from tieredmoe.adapters.deepseek_v4.state import CompressorState


class Chunk(NamedTuple):
    """The tokens of one step, as one layer's attention sees them."""

    start: int
    """position of the first token"""
    u: torch.Tensor
    """normed input, float32 [T, H]"""
    qr: torch.Tensor
    """normed low-rank queries, float32 [T, R]"""
    angles: Angles
    """of the layer's rope at the tokens' positions"""


class Keys(NamedTuple):
    """Keys (and values) that a block of queries attends to, and which query sees which."""

    keys: torch.Tensor
    """float32 [n, D] for all queries, or [Q, n, D], each query's own"""
    visible: torch.Tensor | None
    """bool [Q, n]; None where every query sees every key"""


BlockKeys = Callable[[int, int], Keys]
"""From the numbers a and b of a chunk's tokens to the keys of queries a to b - 1."""


class Past(Protocol):
    """The compressed past of one layer."""

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """What makes its rows, then what makes its indexer's if it has one."""

    @property
    def indexer(self) -> Indexer | None:
        """What picks among the rows; None where all are seen."""

    def new_state(self, n_context: int) -> tuple[CompressorState, ...]:
        """The states before the first token of a sequence of at most ``n_context``."""

    def advance(
        self, chunk: Chunk, states: tuple[CompressorState, ...]
    ) -> tuple[CompressorState, ...]:
        """The states after ``chunk``; ``states`` are left as they were."""

    def block_keys(self, chunk: Chunk, states: tuple[CompressorState, ...]) -> BlockKeys:
        """What the queries of ``chunk`` see, given the ``states`` after it."""

    def floats_per_query(self, n_tokens: int, *, n_heads: int) -> int:
        """Scratch floats that a query takes in a sequence of ``n_tokens``, its scores included."""


class HeavilyCompressedPast:
    """HCA: every row whose window has been closed."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self.compressors = (compressor,)
        self.indexer = None

    def new_state(self, n_context: int) -> tuple[CompressorState, ...]:
        """One state, the compressor's."""
        return (self._compressor.new_state(n_context),)

    def advance(
        self, chunk: Chunk, states: tuple[CompressorState, ...]
    ) -> tuple[CompressorState, ...]:
        """Close the windows that ``chunk`` fills."""
        return (self._compressor.advance(chunk.u, states[0]),)

    def block_keys(self, chunk: Chunk, states: tuple[CompressorState, ...]) -> BlockKeys:
        """All closed windows' rows, each query its own."""
        ratio = self._compressor.ratio

        def keys(a: int, b: int) -> Keys:
            n, visible = _visible(chunk, a, b, ratio)
            return Keys(states[0].rows.first(n), visible)

        return keys

    def floats_per_query(self, n_tokens: int, *, n_heads: int) -> int:
        """A score for each head and row."""
        return n_heads * (n_tokens // self._compressor.ratio)


class SparsePast:
    """CSA: of the rows whose window has been closed, those that the indexer picks."""

    def __init__(self, compressor: Compressor, indexer: Indexer, *, head_dim: int) -> None:
        self._compressor = compressor
        self.compressors = (compressor, indexer.compressor)
        self.indexer = indexer
        self._head_dim = head_dim

    def new_state(self, n_context: int) -> tuple[CompressorState, ...]:
        """Two states, the compressor's and the indexer's."""
        return tuple(compressor.new_state(n_context) for compressor in self.compressors)

    def advance(
        self, chunk: Chunk, states: tuple[CompressorState, ...]
    ) -> tuple[CompressorState, ...]:
        """Close the windows that ``chunk`` fills, for the attention and for the indexer."""
        return (
            self._compressor.advance(chunk.u, states[0]),
            self.indexer.compressor.advance(chunk.u, states[1]),
        )

    def block_keys(self, chunk: Chunk, states: tuple[CompressorState, ...]) -> BlockKeys:
        """All visible rows while there are no more than the indexer may pick, then its picks."""
        queries = self.indexer.queries(chunk.u, chunk.qr, chunk.angles)
        rows, index_rows = (state.rows for state in states)
        ratio = self._compressor.ratio

        def keys(a: int, b: int) -> Keys:
            n, visible = _visible(chunk, a, b, ratio)
            if n <= self.indexer.n_picks:
                return Keys(rows.first(n), visible)
            picks = self.indexer.pick(queries.part(a, b), index_rows.first(n), visible)
            picked_visible = None if visible is None else visible.gather(1, picks)
            return Keys(rows.first(n)[picks], picked_visible)

        return keys

    def floats_per_query(self, n_tokens: int, *, n_heads: int) -> int:
        """A score for each head and row; with picking, the picked rows and the indexer's scores."""
        n_rows = n_tokens // self._compressor.ratio
        n_picks = self.indexer.n_picks
        if n_rows <= n_picks:
            return n_heads * n_rows
        return n_picks * (n_heads + self._head_dim) + n_rows * self.indexer.n_heads


def _visible(chunk: Chunk, a: int, b: int, ratio: int) -> tuple[int, torch.Tensor | None]:
    """How many rows n the queries a to b - 1 see, and who sees which: bool [b - a, n], None: all.

    A row is visible from the position on that closes its window, so the last query sees all n.
    """
    first, n = (chunk.start + a + 1) // ratio, (chunk.start + b) // ratio
    if first == n:
        return n, None
    device = chunk.u.device
    n_seen = torch.arange(chunk.start + a + 1, chunk.start + b + 1, device=device) // ratio
    return n, torch.arange(n, device=device) < n_seen.unsqueeze(1)
