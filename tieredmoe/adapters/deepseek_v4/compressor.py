"""Compression of past tokens into rows: one key (and value) per window of 4 or 128 tokens.

A window's row is a weighted mean of its tokens' values, the weights a softmax over the window for
each channel by itself. With overlap (ratio 4) each token has two values: one for its own window's
row and one for the next window's. (spec: DeepSeek-V4 inference/model.py, ``Compressor``)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tieredmoe.adapters.deepseek_v4.state import CompressorState
from tieredmoe.adapters.norm import rms_norm
from tieredmoe.adapters.rows import Rows

if TYPE_CHECKING:
    from tieredmoe.adapters.deepseek_v4.rope import Rope
    from tieredmoe.moe.linear import Linear


class Compressor:
    """One layer's compressor, or its indexer's.

    ``values`` and ``gates`` are matrices [width, H], ``position_bias`` is [ratio, width] and
    ``norm`` [d]. ``width`` is ``d``, or ``2 d`` with overlap: the first half then belongs to the
    next window, the second to the token's own.
    """

    def __init__(
        self,
        values: Linear,
        gates: Linear,
        position_bias: torch.Tensor,
        norm: torch.Tensor,
        *,
        rope: Rope,
        rms_eps: float,
    ) -> None:
        self.values = values
        self.gates = gates
        self.bias = position_bias
        self.norm = rms_norm(norm, rms_eps)
        self.rope = rope
        self.dim = norm.shape[0]
        self.ratio = position_bias.shape[0]
        self.overlaps = position_bias.shape[1] > self.dim

    def new_state(self, n_context: int) -> CompressorState:
        """The state before the first token of a sequence of at most ``n_context``."""
        bias = self.bias
        n_last = self.ratio if self.overlaps else 0
        return CompressorState(
            rows=Rows.empty(self.dim, n_context=n_context, ratio=self.ratio, device=bias.device),
            values=bias.new_empty((0, bias.shape[1])),
            gates=bias.new_empty((0, bias.shape[1])),
            last_values=bias.new_zeros((n_last, self.dim)),
            last_gates=bias.new_full((n_last, self.dim), -math.inf),
        )

    def advance(self, u: torch.Tensor, state: CompressorState) -> CompressorState:
        """The state after the tokens ``u`` [T, H], which come next: a row more per window closed.

        Row w is visible to position t if ``w < (t + 1) // ratio``, so to the token that closes it.
        """
        n_open, n_new = state.values.shape[0], u.shape[0]
        places = torch.arange(n_open, n_open + n_new, device=u.device) % self.ratio
        values = torch.cat((state.values, self.values(u)))
        gates = torch.cat((state.gates, self.gates(u) + self.bias[places]))
        n_windows = values.shape[0] // self.ratio
        if n_windows == 0:
            return CompressorState(state.rows, values, gates, state.last_values, state.last_gates)

        closed = n_windows * self.ratio
        windows = values[:closed].unflatten(0, (n_windows, self.ratio))
        weights = gates[:closed].unflatten(0, (n_windows, self.ratio))
        last_values, last_gates = state.last_values, state.last_gates
        if self.overlaps:
            windows, last_values = self._overlapped(windows, last_values)
            weights, last_gates = self._overlapped(weights, last_gates)
        rows = self.norm((windows * weights.softmax(1)).sum(1))
        first = state.rows.n * self.ratio
        positions = torch.arange(first, first + closed, self.ratio, device=u.device)
        return CompressorState(
            rows=state.rows.append(self.rope.at(positions).rotate_(rows)),
            # Cloned, so that a state does not keep a whole chunk's memory for its last few tokens.
            values=values[closed:].clone(),
            gates=gates[closed:].clone(),
            last_values=last_values,
            last_gates=last_gates,
        )

    def _overlapped(
        self, windows: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows [n, r, 2 d] as [n, 2 r, d]: the window before each one, then the window itself.

        Also gives what the window after them will need of the last one, [r, d].
        """
        for_next, own = windows.split(self.dim, dim=2)
        before = torch.cat((last.unsqueeze(0), for_next[:-1]))
        return torch.cat((before, own), dim=1), for_next[-1].clone()
