"""What a layer leaves behind: its attention window, compressed rows, half-filled windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.rows import Rows


@attrs.frozen(eq=False)
class CompressorState:
    """One compressor: the ``rows`` it has emitted, and the tokens of its window still open.

    ``values`` and ``gates`` are [m, width] for the m tokens of the open window, the position bias
    added to the gates. Overlapping windows also need the last closed one: ``last_values`` and
    ``last_gates`` [ratio, d], before the first window zeros and -inf; empty without overlap.
    """

    rows: Rows
    values: torch.Tensor
    gates: torch.Tensor
    last_values: torch.Tensor
    last_gates: torch.Tensor

    def copy(self, *, n_context: int) -> CompressorState:
        """The same in memory of its own, for a sequence of at most ``n_context`` tokens."""
        return CompressorState(
            rows=self.rows.copy(n_context=n_context),
            values=self.values.clone(),
            gates=self.gates.clone(),
            last_values=self.last_values.clone(),
            last_gates=self.last_gates.clone(),
        )


@attrs.frozen(eq=False)
class LayerState:
    """One layer: the last ``sliding_window - 1`` keys [m, head_dim], and its compressors' states.

    Keys are values, so they are stored once. ``compressed`` is what the layer's ``Past`` made:
    nothing on sliding layers, one state on HCA layers, the rows' and the indexer's on CSA layers.
    """

    window: torch.Tensor
    compressed: tuple[CompressorState, ...]

    def copy(self, *, n_context: int) -> LayerState:
        """The same in memory of its own, for a sequence of at most ``n_context`` tokens."""
        compressed = tuple(state.copy(n_context=n_context) for state in self.compressed)
        return LayerState(self.window.clone(), compressed)
