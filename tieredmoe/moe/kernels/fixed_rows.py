"""Activation rows in device memory, made once and shared by every matrix of the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tieredmoe.moe.kernels.fixed_point import fix_rows
from tieredmoe.moe.kernels.formats import FLOATS, row_words

if TYPE_CHECKING:
    from tieredmoe.moe.kernels.device import Kernels


class FixedRows:
    """Room for ``n_rows`` rows of up to ``n_columns`` activations, in any order.

    ``words`` is int32 [n_rows, n_columns], zero at first; what an order does not need stays unused.
    """

    def __init__(
        self, n_rows: int, n_columns: int, *, device: torch.device, kernels: Kernels
    ) -> None:
        width = -(-n_columns // 4) * 4
        self.words = torch.zeros((n_rows, width), dtype=torch.int32, device=device)
        self._kernels = kernels
        self.order: int | None = None
        self.shape: tuple[int, int] = (0, 0)

    def fill(self, x: torch.Tensor, order: int) -> FixedRows:
        """Hold the rows of ``x`` [rows, columns], any float type, in ``order``; returns itself."""
        n_rows, n_columns = x.shape
        assert n_rows <= self.words.shape[0], (x.shape, self.words.shape)
        assert row_words(order, n_columns) <= self.words.shape[1], (x.shape, self.words.shape)
        assert x.stride(1) == 1, x.stride()
        n_part = part(n_columns, order, most=64)
        self._kernels.launch(
            fix_rows,
            (-(-n_columns // n_part), n_rows),
            (x, x.stride(0), self.words, self.words.stride(0)),
            (n_columns, n_part, order),
            {"num_warps": 1},
            variant=x.dtype,
        )
        self.order = order
        self.shape = (n_rows, n_columns)
        return self

    def __repr__(self) -> str:
        return f"<FixedRows {self.shape[0]}x{self.shape[1]} in order {self.order}>"


def part(n_columns: int, order: int, *, most: int = 256) -> int:
    """Columns that one program makes: a power of two that divides them, unless all are floats."""
    if order == FLOATS:
        return most
    return min(n_columns & -n_columns, most)
