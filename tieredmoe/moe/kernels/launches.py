"""Launches: the kernels of one batch's experts with all their arguments, in the order of need."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tieredmoe.moe.dequant import row_nbytes
from tieredmoe.moe.kernels.ffn import activate, combine, expert_rows, gate_up
from tieredmoe.moe.kernels.fixed_rows import part
from tieredmoe.moe.kernels.tiles import gate_up_tile, row_tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tieredmoe.moe.activation import FusedActivation
    from tieredmoe.moe.kernels.fixed_rows import FixedRows
    from tieredmoe.moe.kernels.formats import Format
    from tieredmoe.moe.kernels.plan import ExpertPlan
    from tieredmoe.moe.kernels.workspace import Workspace
    from tieredmoe.spec import RoleSpec

N_UNITS = 32
"""Units of one launch: eight 64-bit arguments of four positions each."""


class Launches:
    """Binds a plan to one batch's tensors; see ``DeviceRoutedBatch`` for what they are."""

    def __init__(
        self,
        plan: ExpertPlan,
        activation: FusedActivation,
        *,
        ids: torch.Tensor,
        arena: torch.Tensor,
        slot_of: torch.Tensor,
        workspace: Workspace,
        is_sorted: bool,
    ) -> None:
        assert ids.is_contiguous(), ids.stride()
        # Kernels are compiled for records at multiples of 16.
        assert arena.data_ptr() % 16 == arena.stride(0) % 16 == 0, (
            arena.data_ptr(),
            arena.stride(),
        )
        assert arena.stride(1) == 1, arena.stride()
        assert arena.shape[1] >= plan.layout.payload_nbytes, (arena.shape, plan.layout)
        self._plan = plan
        self._activation = activation
        self._ids = ids
        self._work = workspace
        self._sorted = is_sorted
        spare = workspace.n_tokens * workspace.top_k
        pairs = (ids, workspace.order, ids.numel(), spare)
        # What every kernel on experts begins with: where experts are, which pairs want them.
        self._found = (arena, arena.stride(0), slot_of, *pairs)
        self._gate, self._up, self._down = plan.layout.roles

    def take(self, x: torch.Tensor) -> None:
        """Make the activation rows of ``x`` [T, H]."""
        assert self._plan.formats is not None
        gate, up, _ = self._plan.formats
        first, second = self._work.x
        first.fill(x, gate.order)
        if up.order != gate.order:
            second.fill(x, up.order)

    def run(self, positions: Sequence[int], *, n_together: int) -> None:
        """Execute the units at ``positions``, each of up to ``n_together`` pairs."""
        assert self._plan.formats is not None
        gate, up, down = self._plan.formats
        first, second = self._work.x
        for at in range(0, len(positions), N_UNITS):
            units = _Units.of(positions[at : at + N_UNITS], n_together)
            if self._plan.fused:
                self._gate_up(gate, down, units)
            else:
                self._rows(self._gate, gate, first, self._work.gate, units)
                rows = second if self._plan.two_orders else first
                self._rows(self._up, up, rows, self._work.up, units)
                self._activate(down)
            self._rows(self._down, down, self._work.h, self._work.y, units, is_last=True)

    def combine(self, weights: torch.Tensor, hidden: int, out: torch.Tensor | None) -> torch.Tensor:
        """The sum over k of all pairs' rows times ``weights`` [T, k], into ``out`` if given."""
        n_tokens, top_k = weights.shape
        assert weights.is_contiguous(), weights.stride()
        if out is None:
            out = self._work.out.view(-1)[: n_tokens * hidden].view(n_tokens, hidden)
        assert out.is_contiguous(), out.stride()
        n_part = 64
        self._work.kernels.launch(
            combine,
            (-(-hidden // n_part), n_tokens),
            (self._work.y, weights, out),
            (hidden, top_k, n_part),
            {"num_warps": 1},
        )
        return out

    def _gate_up(self, kind: Format, down: Format, units: _Units) -> None:
        n_rows, n_columns = self._gate.shape
        code, a, b = self._activation.constants
        tile = gate_up_tile(kind, n_columns, units.n_together, h_order=down.order)
        x, h = self._work.x[0].words, self._work.h.words
        self._work.kernels.launch(
            gate_up,
            (-(-n_rows // tile.R), units.n),
            (
                *self._found,
                x,
                x.stride(0),
                h,
                h.stride(0),
                self._gate.offset,
                self._up.offset,
                *units.selected,
            ),
            (
                self._work.top_k,
                kind.ggml_type,
                n_columns,
                n_rows,
                row_nbytes(kind.ggml_type, n_columns),
                down.order,
                code,
                a,
                b,
                units.n_together,
                tile.R,
                tile.C,
                self._sorted,
            ),
            tile.options,
        )

    def _rows(
        self,
        role: RoleSpec,
        kind: Format,
        x: FixedRows,
        y: torch.Tensor,
        units: _Units,
        *,
        is_last: bool = False,
    ) -> None:
        n_rows, n_columns = role.shape
        tile = row_tile(kind, n_columns, units.n_together)
        self._work.kernels.launch(
            expert_rows,
            (-(-n_rows // tile.R), units.n),
            (
                *self._found,
                x.words,
                x.words.stride(0),
                y,
                role.offset,
                *units.selected,
            ),
            (
                1 if is_last else self._work.top_k,
                kind.ggml_type,
                n_columns,
                n_rows,
                row_nbytes(kind.ggml_type, n_columns),
                units.n_together,
                tile.R,
                tile.C,
                self._sorted,
            ),
            tile.options,
        )

    def _activate(self, down: Format) -> None:
        """All pairs' rows, ready or not: those of other units are made again, or not yet read."""
        n_rows = self._gate.shape[0]
        code, a, b = self._activation.constants
        n_part = part(n_rows, down.order)
        h = self._work.h.words
        self._work.kernels.launch(
            activate,
            (-(-n_rows // n_part), self._ids.numel()),
            (self._work.gate, self._work.up, h, h.stride(0)),
            (n_rows, n_part, down.order, code, a, b),
            {"num_warps": 2},
        )


class _Units(NamedTuple):
    """What one launch works on."""

    n: int
    n_together: int
    selected: tuple[int, ...]

    @classmethod
    def of(cls, positions: Sequence[int], n_together: int) -> _Units:
        """Positions as launch arguments: 16 bits each, lowest first, in signed 64-bit numbers."""
        padded = [*positions, *[0] * (N_UNITS - len(positions))]
        packed = np.array(padded, np.uint16).view(np.int64)
        return cls(len(positions), n_together, tuple(packed.tolist()))
