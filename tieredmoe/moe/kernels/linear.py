"""A dense quantised matrix on the device: the same decoders as the routed experts'.

Few rows of x are multiplied with packed weights directly; more go through float32 weights, a
bounded run of rows of W at a time, and torch. Types without a kernel stay with
``PackedLinear``, which has the same interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tieredmoe.moe.dequant import row_nbytes
from tieredmoe.moe.kernels.device import Kernels
from tieredmoe.moe.kernels.ffn import matrix_rows
from tieredmoe.moe.kernels.fixed_rows import FixedRows
from tieredmoe.moe.kernels.plan import readable
from tieredmoe.moe.kernels.tiles import N_TOGETHER_MAX, matrix_tile, together
from tieredmoe.moe.kernels.unpacked import unpack
from tieredmoe.moe.linear import PackedLinear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.moe.kernels.formats import Format

SCRATCH_NBYTES = 2**26
"""float32 weights at a time: large enough that launches do not count."""

N_PACKED_MAX = 32
"""Up to so many rows of x, decoding weights for every few of them costs less than unpacking."""


class LinearWorkspace:
    """What matrices of up to ``n_columns`` columns share: activation rows, scratch, a table.

    One product uses it at a time, on one stream.
    """

    def __init__(self, n_columns: int, *, device: torch.device) -> None:
        self.kernels = Kernels(device)
        self.rows = FixedRows(N_PACKED_MAX, n_columns, device=device, kernels=self.kernels)
        self.scratch = torch.zeros(
            max(SCRATCH_NBYTES // 4, n_columns), dtype=torch.float32, device=device
        )
        self.slot_of = torch.zeros(1, dtype=torch.int32, device=device)
        """A matrix is the only expert of an arena with one slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.rows.words.nbytes + self.scratch.nbytes


class DeviceLinear:
    """``x @ W.T`` in float32 for a matrix ``W`` (outputs, inputs) kept as GGUF bytes on a device.

    ``raw`` is uint8 holding exactly the matrix, neither copied nor kept in another form: what is
    written there later counts. Where it starts at no multiple of 16 it has no kernel (``kind`` is
    None) and ``PackedLinear`` does the work. Activations are rounded to 16 bits relative to the
    largest of 32 or 64 neighbours (not for F16 and BF16 weights, nor for many rows). Raises
    ``ValueError`` when ``raw`` does not fit ``shape``; see ``readable`` for what can be served.
    """

    __slots__ = ("_packed", "_row_nbytes", "ggml_type", "kind", "raw", "shape", "workspace")

    def __init__(
        self,
        raw: torch.Tensor,
        ggml_type: int,
        shape: tuple[int, int],
        *,
        workspace: LinearWorkspace,
    ) -> None:
        self._packed = PackedLinear(raw, ggml_type, shape)
        self._row_nbytes = row_nbytes(ggml_type, shape[1])
        self.ggml_type = ggml_type
        self.kind: Format | None = None if raw.data_ptr() % 16 else readable(ggml_type, shape)
        self.raw = raw
        self.shape = shape
        self.workspace = workspace

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ W.T``: floats ``[..., inputs]`` to float32 ``[..., outputs]``, ``out`` if given."""
        n_rows, n_columns = self.shape
        flat = x.reshape(-1, n_columns)
        if out is None:
            out = torch.empty((*x.shape[:-1], n_rows), dtype=torch.float32, device=x.device)
        y = out.view(-1, n_rows)
        if self.kind is None:
            y.copy_(self._packed(flat.float()))
        elif len(flat) > N_PACKED_MAX:
            self._through_scratch(self.kind, flat.float(), y)
        else:
            self.multiply(self.workspace.rows.fill(flat, self.kind.order), out=y)
        return out

    def multiply(self, rows: FixedRows, *, out: torch.Tensor) -> torch.Tensor:
        """The product with activation rows, which other matrices of the same order may share.

        ``rows`` are in the order of ``self.kind``, which is not None; ``out`` is float32
        [rows, outputs].
        """
        n_rows, n_columns = self.shape
        kind = self.kind
        assert kind is not None, self
        n_x = rows.shape[0]
        assert rows.order == kind.order, (rows, kind)
        assert rows.shape[1] == n_columns, (rows, self)
        m = together(min(n_x, N_TOGETHER_MAX))
        tile = matrix_tile(kind, n_columns, m)
        self.workspace.kernels.launch(
            matrix_rows,
            (-(-n_x // m), -(-n_rows // tile.R)),
            (self.raw, rows.words, rows.words.stride(0), out, n_x),
            (kind.ggml_type, n_columns, n_rows, self._row_nbytes, m, tile.R, tile.C),
            tile.options,
        )
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64, any shape) of W as float32 ``[*ids.shape, inputs]``."""
        return self._packed.rows(ids)

    def split(self, n_parts: int) -> Sequence[DeviceLinear]:
        """The matrix as ``n_parts`` matrices of equally many consecutive rows, sharing its bytes.

        ``n_parts`` divides the number of rows.
        """
        n_rows, n_columns = self.shape
        assert n_rows % n_parts == 0, (self.shape, n_parts)
        shape = (n_rows // n_parts, n_columns)
        kind = self.ggml_type
        return [
            DeviceLinear(part, kind, shape, workspace=self.workspace)
            for part in self.raw.view(-1).chunk(n_parts)
        ]

    def _through_scratch(self, kind: Format, x: torch.Tensor, y: torch.Tensor) -> None:
        n_rows, n_columns = self.shape
        scratch = self.workspace.scratch
        n_run = scratch.numel() // n_columns
        for start in range(0, n_rows, n_run):
            n = min(n_run, n_rows - start)
            weights = scratch[: n * n_columns].view(n, n_columns)
            unpack(
                kind,
                weights,
                arena=self.raw.view(1, -1),
                slot_of=self.workspace.slot_of,
                expert=0,
                offset=start * self._row_nbytes,
                kernels=self.workspace.kernels,
            )
            torch.matmul(x, weights.T, out=y[:, start : start + n])

    def __repr__(self) -> str:
        return f"<DeviceLinear over {self._packed!r}>"
