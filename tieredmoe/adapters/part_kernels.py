# ruff: noqa: ANN001, ANN201, PLR0917
# (device code: the compiler infers types and inlines calls)
# mypy: ignore-errors
"""A packed matrix whose parts each meet a vector of their own: heads, output groups."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tieredmoe.moe.kernels.rows import row_dots


@triton.jit
def part_rows(
    matrix,
    x,
    x_stride: tl.int32,
    y,
    TYPE: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    ROW_NBYTES: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
    EMU: tl.constexpr,
):
    """Kernel: R of the N rows of one part times the part's activation row, into y [parts, N]."""
    part = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * R + tl.arange(0, R)
    row_byte = (part * N + tl.minimum(row, N - 1)) * ROW_NBYTES
    values = row_dots(TYPE, matrix, row_byte, (x + part * x_stride,), 1, K, R, C, EMU)
    tl.store(y + part * N + row, values[0], mask=row < N)
