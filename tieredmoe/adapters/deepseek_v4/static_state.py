"""The state of one sequence in buffers that never move, and its way from and to ``LayerState``.

Everything that a token writes lies where the committed past is not read from at its position: its
own place in a ring, the row behind the last. So a token that failed half-way may be entered again.
What is written is masked by the position alone, never cut to a length, so shapes stay the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tieredmoe.adapters.deepseek_v4.config import CSA, HCA, SLIDING
from tieredmoe.adapters.deepseek_v4.rope import Rope
from tieredmoe.adapters.deepseek_v4.state import CompressorState, LayerState
from tieredmoe.adapters.rows import Rows

if TYPE_CHECKING:
    from tieredmoe.adapters.deepseek_v4.compressor import Compressor
    from tieredmoe.adapters.deepseek_v4.config import DeepSeekV4Config

_FLOAT_NBYTES = 4


class Moment:
    """The token that is being decoded: its id and position, and what follows from the position.

    ``token`` and ``position`` are int64 [1] on the model's device, where others put them.
    ``turns`` float32 [4, pairs, 2] holds cosines and sines: of sliding layers (row ``PLAIN``), of
    compressed layers at the position itself (``COMPRESSED``), and at the first position of its
    window (``window_turn``).
    """

    PLAIN, COMPRESSED = 0, 1

    def __init__(
        self, config: DeepSeekV4Config, *, token: torch.Tensor, position: torch.Tensor
    ) -> None:
        device = position.device
        plain = Rope.plain(config.rope, device).frequencies
        compressed = Rope.compressed(config.rope, device).frequencies
        self._frequencies = torch.stack((plain, compressed, compressed, compressed))
        self._granularity = torch.tensor([1, 1, CSA, HCA], device=device)
        self.token = token
        self.position = position
        self.turns = torch.zeros((*self._frequencies.shape, 2), device=device)

    @staticmethod
    def window_turn(ratio: int) -> int:
        """The row of ``turns`` for windows of ``ratio`` tokens."""
        return 2 + (CSA, HCA).index(ratio)

    def turn(self) -> None:
        """Make the rest follow from the position."""
        positions = self.position - self.position % self._granularity
        angles = positions.float().unsqueeze(1) * self._frequencies
        self.turns.copy_(torch.view_as_real(torch.polar(torch.ones_like(angles), angles)))


class StaticCompressor:
    """One compressor's tokens of the open window (and the one before it), and its rows.

    ``values`` and ``gates`` [places, width] are a ring over positions: ``ratio`` places, or twice
    as many where windows overlap. Gates have the position bias added and are -inf where nothing has
    been written, so that a softmax leaves those places out. ``rows`` [n, d] is given by the owner:
    row w is visible from the position on that closes window w, and finite everywhere.
    """

    def __init__(self, compressor: Compressor, rows: torch.Tensor) -> None:
        n_places = compressor.ratio * (2 if compressor.overlaps else 1)
        width = compressor.bias.shape[1]
        self.compressor = compressor
        self.rows = rows
        self.values = rows.new_zeros((n_places, width))
        self.gates = rows.new_full((n_places, width), -math.inf)

    def load(self, state: CompressorState) -> None:
        """Become ``state``."""
        ratio, n = self.compressor.ratio, state.rows.n
        self.rows[:n].copy_(state.rows.first(n))
        self.rows[n:].zero_()
        self.values.zero_()
        self.gates.fill_(-math.inf)
        n_open = state.values.shape[0]
        own = self._window(n)
        self.values[own][:n_open] = state.values
        self.gates[own][:n_open] = state.gates
        if self.compressor.overlaps:
            before, dim = self._window(n + 1), self.compressor.dim
            assert state.last_values.shape[0] == ratio, state.last_values.shape
            self.values[before][:, :dim] = state.last_values
            self.gates[before][:, :dim] = state.last_gates

    def unload(self, *, n_tokens: int, n_context: int) -> CompressorState:
        """The state after ``n_tokens``, in memory of its own."""
        ratio, dim = self.compressor.ratio, self.compressor.dim
        n, n_open = divmod(n_tokens, ratio)
        own = self._window(n)
        n_last = ratio if self.compressor.overlaps else 0
        before = self._window(n + 1)
        rows = Rows(self.rows[:n], n, ratio=ratio, limit=n_context // ratio)
        return CompressorState(
            rows=rows.copy(n_context=n_context),
            values=self.values[own][:n_open].clone(),
            gates=self.gates[own][:n_open].clone(),
            last_values=self.values[before][:n_last, :dim].clone(),
            last_gates=self.gates[before][:n_last, :dim].clone(),
        )

    def _window(self, n: int) -> slice:
        """The places of window ``n``; of two, those of the window after it are those before it."""
        ratio = self.compressor.ratio
        start = n * ratio % self.values.shape[0]
        return slice(start, start + ratio)


class StaticLayer:
    """One layer's state: ``keys`` [window + rows, D], a ring of the window and compressed rows.

    ``compressors`` are none on sliding layers, one on HCA layers (its rows the second part of
    ``keys``), and on CSA layers a second one, the indexer's.
    """

    def __init__(
        self,
        compressors: tuple[Compressor, ...],
        *,
        n_window: int,
        head_dim: int,
        n_capacity: int,
        device: torch.device,
    ) -> None:
        n_rows = _n_rows(compressors[0].ratio if compressors else SLIDING, n_capacity)
        self.n_window = n_window
        self.keys = torch.zeros((n_window + n_rows, head_dim), device=device)
        self.window = self.keys[:n_window]
        rows = (
            self.keys[n_window:],
            *(self.keys.new_zeros((n_rows, c.dim)) for c in compressors[1:]),
        )
        self.compressors = tuple(
            StaticCompressor(compressor, mine)
            for compressor, mine in zip(compressors, rows, strict=bool(compressors))
        )

    def load(self, state: LayerState, *, n_tokens: int) -> None:
        """Become ``state``, the layer's after ``n_tokens``."""
        self.window.zero_()
        self.window[self._places(n_tokens, state.window.shape[0])] = state.window
        for static, compressed in zip(self.compressors, state.compressed, strict=True):
            static.load(compressed)

    def unload(self, *, n_tokens: int, n_context: int) -> LayerState:
        """The layer's state after ``n_tokens``, in memory of its own."""
        n_kept = min(n_tokens, self.n_window - 1)
        return LayerState(
            window=self.window[self._places(n_tokens, n_kept)],
            compressed=tuple(
                static.unload(n_tokens=n_tokens, n_context=n_context) for static in self.compressors
            ),
        )

    def _places(self, n_tokens: int, n_last: int) -> torch.Tensor:
        """Where the last ``n_last`` of ``n_tokens`` lie in the ring."""
        device = self.keys.device
        return torch.arange(n_tokens - n_last, n_tokens, device=device) % self.n_window


def static_state_nbytes(config: DeepSeekV4Config, n_capacity: int) -> int:
    """Bytes of the buffers that hold a sequence of up to ``n_capacity`` tokens."""
    sizes = config.attention
    n_floats = 0
    for ratio in sizes.compress_ratios:
        n_rows = _n_rows(ratio, n_capacity)
        n_floats += (sizes.sliding_window + n_rows) * sizes.head_dim
        if ratio == HCA:
            n_floats += 2 * HCA * sizes.head_dim
        if ratio == CSA:
            n_floats += n_rows * sizes.indexer_dim
            n_floats += 2 * (2 * CSA) * (2 * (sizes.head_dim + sizes.indexer_dim))
    return n_floats * _FLOAT_NBYTES


def _n_rows(ratio: int, n_capacity: int) -> int:
    """Rows that ``n_capacity`` tokens close, and the one that the next token may write."""
    return 0 if ratio == SLIDING else -(-n_capacity // ratio)
