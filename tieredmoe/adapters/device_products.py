"""Products of one token with packed weights on a device, in as few launches as can be.

Activation rows are made once for all matrices that read a vector, and matrices that lie back to
back in memory are multiplied as one: a launch costs as long as the reading of 10 MB. Results are
bit for bit those of one matrix after the other. Rejected: joining matrices when they are loaded
(types differ within a group from file to file; what lies together is known when all lie).

Imports Triton, so only what runs on a device imports this.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import torch

from tieredmoe.adapters.part_kernels import part_rows
from tieredmoe.adapters.products import PlainProducts
from tieredmoe.moe.activation import SiTU, SwiGLU
from tieredmoe.moe.dequant import row_nbytes
from tieredmoe.moe.kernels import DeviceLinear, FixedRows
from tieredmoe.moe.kernels.ffn import activate
from tieredmoe.moe.kernels.fixed_rows import part
from tieredmoe.moe.kernels.tiles import matrix_tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.gated_mlp import GatedMLP
    from tieredmoe.moe.activation import FusedActivation
    from tieredmoe.moe.kernels import LinearWorkspace
    from tieredmoe.moe.linear import Linear

N_ROWS_MAX = 32
"""More rows of ``x`` than this are none of a decode step's."""


class DeviceProducts:
    """``Products`` over ``DeviceLinear`` matrices, all of one workspace, and any others.

    ``workspace`` is theirs; its activation rows are overwritten by every call. Activations of a
    gated block are rounded to the same 16 bits as ``DeviceLinear``'s own. ``each`` has room for
    ``n_parts`` parts of ``n_part_inputs`` inputs, and does without kernels beyond that.
    """

    def __init__(
        self, workspace: LinearWorkspace, *, n_parts: int = 0, n_part_inputs: int = 0
    ) -> None:
        self._work = workspace
        self._plain = PlainProducts()
        self._parts = FixedRows(
            n_parts,
            n_part_inputs,
            device=workspace.rows.words.device,
            kernels=workspace.kernels,
        )
        # By the matrices' identities, and holding on to them, so that those stay theirs.
        self._groups: dict[tuple[int, ...], tuple[_Group, ...]] = {}

    def shared(self, x: torch.Tensor, matrices: Sequence[Linear]) -> Sequence[torch.Tensor]:
        """``x`` times each of ``matrices``."""
        assert len(x) <= N_ROWS_MAX, x.shape
        key = tuple(map(id, matrices))
        if key not in self._groups:
            self._groups[key] = _groups(matrices)
        products: dict[int, torch.Tensor] = {}
        rows = None
        for group in self._groups[key]:
            joined = group.joined
            if joined is None:
                products[group.first] = group.matrices[0](x)
                continue
            assert joined.kind is not None
            if rows is None or rows.order != joined.kind.order:
                rows = self._work.rows.fill(x, joined.kind.order)
            parts = joined.multiply(rows, out=_room(x, joined)).split(group.sizes, dim=1)
            products.update(enumerate(parts, start=group.first))
        return [products[i] for i in range(len(matrices))]

    def gated(self, x: torch.Tensor, mlp: GatedMLP) -> torch.Tensor:
        """``mlp(x)``; its activation is made as activation rows at once."""
        gate, up = self.shared(x, (mlp.gate, mlp.up))
        down, activation = mlp.down, mlp.activation
        if (
            not isinstance(down, DeviceLinear)
            or down.kind is None
            or not isinstance(activation, SiTU | SwiGLU)
            or len(x) > 1  # gate and up may then be parts of longer rows
        ):
            return down(activation(gate, up))
        rows = self._activated(gate, up, activation, down.kind.order)
        return down.multiply(rows, out=_room(x, down))

    def each(self, x: torch.Tensor, matrix: Linear) -> torch.Tensor:
        """Row i of ``x`` times part i of ``matrix``."""
        n_parts, n_inputs = x.shape
        room = self._parts.words.shape
        if (
            not isinstance(matrix, DeviceLinear)
            or matrix.kind is None
            or n_parts > room[0]
            or n_inputs > room[1]
        ):
            return self._plain.each(x, matrix)
        kind, n_outputs = matrix.kind, matrix.shape[0] // n_parts
        rows = self._parts.fill(x, kind.order)
        out = torch.empty((n_parts, n_outputs), dtype=torch.float32, device=x.device)
        tile = matrix_tile(kind, n_inputs, 1)
        n_row = row_nbytes(kind.ggml_type, n_inputs)
        self._work.kernels.launch(
            part_rows,
            (-(-n_outputs // tile.R), n_parts),
            (matrix.raw, rows.words, rows.words.stride(0), out),
            (kind.ggml_type, n_inputs, n_outputs, n_row, tile.R, tile.C),
            tile.options,
        )
        return out

    def _activated(
        self, gate: torch.Tensor, up: torch.Tensor, activation: FusedActivation, order: int
    ) -> FixedRows:
        """The activation of ``gate`` and ``up`` [1, width] as activation rows."""
        n_rows, width = gate.shape
        rows, (code, a, b) = self._work.rows, activation.constants
        n_part = part(width, order, most=64)
        self._work.kernels.launch(
            activate,
            (-(-width // n_part), n_rows),
            (gate, up, rows.words, rows.words.stride(0)),
            (width, n_part, order, code, a, b),
            {"num_warps": 1},
        )
        rows.order, rows.shape = order, (n_rows, width)
        return rows


@attrs.frozen(eq=False)
class _Group:
    """Consecutive matrices from number ``first`` on that are one, ``joined``; None: no kernel."""

    first: int
    matrices: list[Linear]
    joined: DeviceLinear | None

    @property
    def sizes(self) -> list[int]:
        """Outputs of each."""
        return [matrix.shape[0] for matrix in self.matrices]


def _groups(matrices: Sequence[Linear]) -> tuple[_Group, ...]:
    """Runs of ``matrices`` that lie back to back, those of one order after each other."""
    runs: list[list[Linear]] = []
    for i, matrix in enumerate(matrices):
        if i > 0 and _continues(runs[-1], matrix):
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    groups, first = [], 0
    for run in runs:
        groups.append(_Group(first, run, _joined(run)))
        first += len(run)

    def order(group: _Group) -> int:
        kind = None if group.joined is None else group.joined.kind
        return -1 if kind is None else kind.order

    return tuple(sorted(groups, key=order))


def _continues(run: Sequence[Linear], matrix: Linear) -> bool:
    """Whether the bytes of ``matrix`` follow those of ``run``, of one type, in one allocation."""
    joined = [*run, matrix]
    parts = [part for part in joined if isinstance(part, DeviceLinear) and part.kind is not None]
    if len(parts) < len(joined):
        return False
    return (
        all(
            a.ggml_type == b.ggml_type
            and a.raw.untyped_storage().data_ptr() == b.raw.untyped_storage().data_ptr()
            and a.raw.data_ptr() + a.raw.numel() == b.raw.data_ptr()
            and a.shape[0] % 4 == 0  # the product's parts begin at multiples of 16 bytes
            for a, b in pairwise(parts)
        )
        and _together(parts).kind is not None
    )


def _joined(run: Sequence[Linear]) -> DeviceLinear | None:
    parts = [part for part in run if isinstance(part, DeviceLinear) and part.kind is not None]
    return _together(parts) if parts else None


def _together(parts: Sequence[DeviceLinear]) -> DeviceLinear:
    """The matrix of all rows of ``parts``, over the same bytes."""
    first = parts[0]
    if len(parts) == 1:
        return first
    nbytes = sum(part.raw.numel() for part in parts)
    raw = first.raw.view(-1).as_strided((nbytes,), (1,))
    shape = (sum(part.shape[0] for part in parts), first.shape[1])
    return DeviceLinear(raw, first.ggml_type, shape, workspace=first.workspace)


def _room(x: torch.Tensor, matrix: DeviceLinear) -> torch.Tensor:
    return torch.empty((len(x), matrix.shape[0]), dtype=torch.float32, device=x.device)
