"""One sequence in buffers that never move, so that recorded work on a device finds them again.

A token must be repeatable until it counts, so it writes only what the past does not need: a KDA
layer has two sets of matrices and the token at position p reads set ``p % 2`` and writes the other;
the window of its convolutions is a ring with a place more than the window is long; an MLA layer
writes row p. Which set and which place follow from the position on the device.

The published model's matrices are 434 MB, read once and written once for each token, and 868 MB
with their double. Rejected: one set, to which a token's correction is applied when the next one
reads it (half the memory for a third state of a matrix, "corrected by a token that may not count"),
and copying the committed matrices aside before each token (twice the traffic).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from tieredmoe.adapters.kimi_k3.state import KdaState
from tieredmoe.adapters.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.kimi_k3.config import KimiK3Config

    LayerState = KdaState | Rows


def static_nbytes(config: KimiK3Config, n_capacity: int) -> int:
    """Bytes of a ``StaticState``."""
    kda, n_kda = config.kda, sum(config.is_kda)
    n_floats_kda = kda.width * (2 * kda.head_dim + 3 * kda.conv_kernel)
    n_floats_mla = n_capacity * config.mla.row_width
    return 4 * (n_kda * n_floats_kda + (config.n_layers - n_kda) * n_floats_mla)


@attrs.frozen(eq=False)
class StaticKda:
    """One KDA layer: ``memory`` float32 [2, heads, key, value], ``ring`` [kernel, 3 width].

    With n tokens the sequence's matrices are ``memory[n % 2]``, and the inputs of the convolutions
    of token t lie in ``ring[t % kernel]`` for the last kernel - 1 tokens.
    """

    memory: torch.Tensor
    ring: torch.Tensor

    def load(self, state: KdaState, *, n_tokens: int) -> None:
        """Become ``state`` after ``n_tokens``."""
        self.memory[n_tokens % 2].copy_(state.memory)
        for place, row in zip(self._places(n_tokens), state.window, strict=True):
            self.ring[place].copy_(row)

    def unload(self, *, n_tokens: int) -> KdaState:
        """The state after ``n_tokens``, in memory of its own."""
        window = self.ring.new_empty((len(self.ring) - 1, self.ring.shape[1]))
        for place, row in zip(self._places(n_tokens), window, strict=True):
            row.copy_(self.ring[place])
        return KdaState(self.memory[n_tokens % 2].clone(), window)

    def _places(self, n_tokens: int) -> list[int]:
        """Where the window's tokens lie in the ring, oldest first."""
        n_ring = len(self.ring)
        return [t % n_ring for t in range(n_tokens + 1 - n_ring, n_tokens)]


@attrs.frozen(eq=False)
class StaticRows:
    """One MLA layer: ``rows`` float32 [capacity, width], finite beyond the sequence's end."""

    rows: torch.Tensor

    def load(self, state: Rows, *, n_tokens: int) -> None:
        """Become ``state``, which has ``n_tokens``."""
        assert state.n == n_tokens, (state.n, n_tokens)
        self.rows[:n_tokens].copy_(state.first(n_tokens))
        self.rows[n_tokens:].zero_()

    def unload(self, *, n_tokens: int, n_context: int) -> Rows:
        """The first ``n_tokens`` in memory of their own, for a sequence of ``n_context``."""
        return Rows(self.rows[:n_tokens].clone(), n_tokens, ratio=1, limit=n_context)


class StaticState:
    """The layers of one sequence of at most ``n_capacity`` tokens; empty at first."""

    def __init__(self, config: KimiK3Config, n_capacity: int, *, device: torch.device) -> None:
        kda = config.kda
        memory_shape = (2, kda.n_heads, kda.head_dim, kda.head_dim)
        ring_shape = (kda.conv_kernel, 3 * kda.width)
        rows_shape = (n_capacity, config.mla.row_width)

        def zeros(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self.layers: tuple[StaticKda | StaticRows, ...] = tuple(
            StaticKda(zeros(memory_shape), zeros(ring_shape))
            if is_kda
            else StaticRows(zeros(rows_shape))
            for is_kda in config.is_kda
        )
        self.n_capacity = n_capacity

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(
            layer.rows.nbytes
            if isinstance(layer, StaticRows)
            else layer.memory.nbytes + layer.ring.nbytes
            for layer in self.layers
        )

    def load(self, layers: Sequence[LayerState], *, n_tokens: int) -> None:
        """Become the sequence of ``n_tokens``, at most the capacity, whose states these are."""
        assert n_tokens <= self.n_capacity, (n_tokens, self.n_capacity)
        for mine, state in zip(self.layers, layers, strict=True):
            if isinstance(mine, StaticKda):
                assert isinstance(state, KdaState), state
                mine.load(state, n_tokens=n_tokens)
            else:
                assert isinstance(state, Rows), state
                mine.load(state, n_tokens=n_tokens)

    def unload(self, *, n_tokens: int, n_context: int) -> tuple[LayerState, ...]:
        """The layers' states after ``n_tokens``, in memory of their own."""
        return tuple(
            layer.unload(n_tokens=n_tokens)
            if isinstance(layer, StaticKda)
            else layer.unload(n_tokens=n_tokens, n_context=n_context)
            for layer in self.layers
        )

    def __repr__(self) -> str:
        return f"<StaticState of {self.n_capacity} tokens, {self.nbytes} bytes>"
