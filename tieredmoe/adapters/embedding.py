"""The token embedding: rows looked up on the host, delivered to where the model computes.

A token needs one row of a table of up to a gigabyte, so on a device the table would take the room
of dozens of experts to save the copy of a few kilobytes a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from gguf import GGMLQuantizationType

from tieredmoe.moe.dequant import row_nbytes, unpacked_by_host
from tieredmoe.moe.linear import PackedLinear

if TYPE_CHECKING:
    import numpy as np


class Embedding:
    """A table [vocab, H] in host memory, ``raw`` in its file's bytes; rows are for ``device``.

    ``row_type`` and ``row_nbytes`` are what single rows are packed in: the table's own type, or
    float32 where ``device`` could not unpack that.
    """

    def __init__(
        self, raw: torch.Tensor, ggml_type: int, shape: tuple[int, int], *, device: torch.device
    ) -> None:
        self.shape = shape
        self._table = PackedLinear(raw, ggml_type, shape)
        self._packed: np.ndarray | None = None
        self.row_type = int(ggml_type)
        if unpacked_by_host(ggml_type):
            self.row_type = int(GGMLQuantizationType.F32)
        else:
            self._packed = raw.view(shape[0], -1).numpy()
        self.row_nbytes = row_nbytes(self.row_type, shape[1])
        self._device = device

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of ``tokens`` (int64 [T]) as float32 [T, H] on the device.

        Tokens on the host cost no wait for the device. No part of a recorded graph.
        """
        return self._table.rows(tokens.cpu()).to(self._device)

    def packed_row(self, token_id: int) -> np.ndarray:
        """One row as uint8 [row_nbytes], on the host; only to be read."""
        if self._packed is not None:
            row: np.ndarray = self._packed[token_id]
            return row
        values = self._table.rows(torch.tensor([token_id]))
        return values.view(torch.uint8).view(-1).numpy()

    def __repr__(self) -> str:
        return f"<Embedding {self._table!r} for {self._device}>"
