"""A weight matrix that stays in its file's quantised bytes and is dequantised on use.

8 GB of dense weights stay 8 GB: each call turns a block of rows at a time into float32, multiplies
and drops it. Blocks are cut by the shape alone, so a product depends on the input and the weights,
never on what ran before. Rejected: ``torch.nn.Linear`` (parameters, autograd and float storage are
all in the way) and dequantising at load (four times the memory).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from gguf import GGMLQuantizationType

from tieredmoe.moe.dequant import dequantise, row_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

_HOST_BLOCK_NBYTES = 2**20
"""float32 bytes dequantised at a time on the CPU: what stays in its cache (from 32 MiB on, page
faults and cache misses made it three to six times slower, on MXFP4 and Q8_0 alike)."""

_DEVICE_BLOCK_NBYTES = 2**26
"""The same elsewhere: large enough that kernel launches do not count, far below a head's 2 GB."""


class Linear(Protocol):
    """A weight matrix W of ``shape`` (outputs, inputs), wherever and however its bytes are kept."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T``: float32 ``[..., inputs]`` to float32 ``[..., outputs]``."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64, any shape) of W as float32 ``[*ids.shape, inputs]``."""

    def split(self, n_parts: int) -> Sequence[Linear]:
        """Matrices of equally many consecutive rows, ``n_parts`` of them, over the same bytes."""


class PackedLinear:
    """``x @ W.T`` in float32 for a matrix ``W`` of shape (outputs, inputs) kept as GGUF bytes.

    ``raw`` is uint8 holding exactly the matrix; it is neither copied nor changed (F32 bytes whose
    alignment forbids their use in place are copied once, here). Raises ``UnsupportedModelError``
    for an unknown type and ``ValueError`` when ``raw`` does not fit ``shape``.
    """

    __slots__ = ("_ggml_type", "_raw", "shape")

    def __init__(self, raw: torch.Tensor, ggml_type: int, shape: tuple[int, int]) -> None:
        n_rows, n_columns = shape
        expected = n_rows * row_nbytes(ggml_type, n_columns)
        if raw.dtype != torch.uint8 or raw.numel() != expected:
            raise ValueError(
                f"a {GGMLQuantizationType(ggml_type).name} matrix of shape {shape} is "
                f"{expected} bytes, not {raw.numel()} elements of {raw.dtype}"
            )
        self.shape = shape
        self._ggml_type = ggml_type
        self._raw = raw.reshape(n_rows, -1)
        if ggml_type == GGMLQuantizationType.F32:
            self._raw = dequantise(raw, ggml_type, shape).view(torch.uint8)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T``: float32 ``[..., inputs]`` to float32 ``[..., outputs]``."""
        n_rows, n_columns = self.shape
        if self._ggml_type == GGMLQuantizationType.F32:
            return x @ self._raw.view(torch.float32).T
        on_host = self._raw.device.type == "cpu"
        block_nbytes = _HOST_BLOCK_NBYTES if on_host else _DEVICE_BLOCK_NBYTES
        n_block = max(1, block_nbytes // (4 * n_columns))
        if n_rows <= n_block:
            return x @ self._values(self._raw).T
        out = x.new_empty((*x.shape[:-1], n_rows))
        for start in range(0, n_rows, n_block):
            weights = self._values(self._raw[start : start + n_block])
            out[..., start : start + n_block] = x @ weights.T
        return out

    def __repr__(self) -> str:
        kind = GGMLQuantizationType(self._ggml_type).name
        return f"<PackedLinear {kind} {self.shape[0]}x{self.shape[1]}, {self._raw.numel()} bytes>"

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64, any shape) of W as float32 ``[*ids.shape, inputs]``.

        Only these rows are dequantised: this is an embedding lookup.
        """
        return self._values(self._raw[ids.reshape(-1)]).view(*ids.shape, self.shape[1])

    def split(self, n_parts: int) -> Sequence[PackedLinear]:
        """The matrix as ``n_parts`` matrices of equally many consecutive rows, sharing its bytes.

        ``n_parts`` divides the number of rows.
        """
        n_rows, n_columns = self.shape
        assert n_rows % n_parts == 0, (self.shape, n_parts)
        shape = (n_rows // n_parts, n_columns)
        return [PackedLinear(part, self._ggml_type, shape) for part in self._raw.chunk(n_parts)]

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        return dequantise(rows, self._ggml_type, (rows.shape[0], self.shape[1]))
