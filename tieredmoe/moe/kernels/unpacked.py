"""Experts through float32 matrices in bounded scratch memory: any type, any number of tokens.

For types without a kernel (the IQ family and other rare ones) and for many tokens of one expert,
where unpacking once costs less than decoding for every few of them. One matrix at a time is in
scratch. Types with a decoder are unpacked by it; for the others the record is copied from its slot,
found through the device table as everywhere, and ``dequantise`` does the rest with torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.moe.dequant import dequantise, row_nbytes
from tieredmoe.moe.kernels.rows import unpack_rows
from tieredmoe.moe.kernels.tiles import unpack_tile

if TYPE_CHECKING:
    import torch

    from tieredmoe.moe.activation import FusedActivation
    from tieredmoe.moe.kernels.device import Kernels
    from tieredmoe.moe.kernels.formats import Format
    from tieredmoe.moe.kernels.plan import ExpertPlan
    from tieredmoe.moe.kernels.workspace import Workspace
    from tieredmoe.spec import RoleSpec


class UnpackedExperts:
    """The resident experts of a layer as functions of float32 rows."""

    def __init__(
        self,
        plan: ExpertPlan,
        activation: FusedActivation,
        arena: torch.Tensor,
        slot_of: torch.Tensor,
        workspace: Workspace,
    ) -> None:
        self._plan = plan
        self._activation = activation
        self._arena = arena
        self._slot_of = slot_of
        self._work = workspace

    def execute(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """The FFN of ``expert``: float32 [n, H] to [n, H]; undefined where it is not resident."""
        gate, up, down = self._plan.layout.roles
        if not self._plan.has_kernels:
            self._copy_record(expert)
        g = x @ self._matrix(gate, expert, 0).T
        u = x @ self._matrix(up, expert, 1).T
        return self._activation(g, u) @ self._matrix(down, expert, 2).T

    def _copy_record(self, expert: int) -> None:
        """Bring the record to a fixed place: on the host nobody knows its slot."""
        work = self._work
        slot = self._slot_of[expert : expert + 1].clamp(min=0)
        record = work.record[:, : self._plan.layout.stride]
        record.copy_(self._arena[:, : record.shape[1]].index_select(0, slot))

    def _matrix(self, role: RoleSpec, expert: int, i: int) -> torch.Tensor:
        n_rows, n_columns = role.shape
        if self._plan.formats is None:
            raw = self._work.record[0, role.offset : role.offset + role.nbytes]
            return dequantise(raw, role.ggml_type, role.shape)
        out = self._work.scratch[: n_rows * n_columns].view(n_rows, n_columns)
        unpack(
            self._plan.formats[i],
            out,
            arena=self._arena,
            slot_of=self._slot_of,
            expert=expert,
            offset=role.offset,
            kernels=self._work.kernels,
        )
        return out


def unpack(
    kind: Format,
    out: torch.Tensor,
    *,
    arena: torch.Tensor,
    slot_of: torch.Tensor,
    expert: int,
    offset: int,
    kernels: Kernels,
) -> None:
    """Rows at ``offset`` of the slot of ``expert`` as float32 ``out``, bits as ``dequantise``'s."""
    n_rows, n_columns = out.shape
    tile = unpack_tile(kind, n_columns)
    grid = (-(-n_rows // tile.R), n_columns // kind.n_unit // tile.C)
    kernels.launch(
        unpack_rows,
        grid,
        (arena, arena.stride(0), slot_of, expert, offset, out, n_rows),
        (
            kind.ggml_type,
            n_columns,
            row_nbytes(kind.ggml_type, n_columns),
            tile.R,
            tile.C,
        ),
        # Without fused operations the bits are dequantise's.
        {**tile.options, "enable_fp_fusion": False},
    )
