# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# (device code: the compiler infers types, prunes branches, knows no unpacking, inlines calls)
# mypy: ignore-errors
"""Activations in 16-bit fixed point: made by one kernel, and by the epilogue of another.

A row is pairs of words, high and low bytes of four activations, one plane of pairs after another in
the order in which weight words need them; then pairs of sums of both; then the groups' scales.
Within a group the largest value becomes 32639, which two signed bytes just hold, so a value is off
by at most 1/65278 of its group's largest. A group with an infinite or undefined value gets an
undefined scale, so a broken input shows in the output.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tieredmoe.moe.kernels.formats import (
    ORDER_FLOATS,
    ORDER_NIBBLES,
    ORDER_QUARTERS,
)


@triton.jit
def store_row_part(v, start, row, K: tl.constexpr, N: tl.constexpr, ORDER: tl.constexpr):
    """Write ``v``, float32 [N], as elements ``start``.. of the activation row at ``row`` (int32*).

    ``N`` is a whole number of groups of the order, ``start`` a multiple of it.
    """
    if ORDER == ORDER_FLOATS:
        e = start + tl.arange(0, N)
        tl.store(row + (e % 8) * (K // 8) + e // 8, v.to(tl.int32, bitcast=True), mask=e < K)
    elif ORDER == ORDER_QUARTERS:
        _store_quarters(tl.reshape(v, [N // 64, 64]), start // 64, row, K, N // 64)
    else:
        _store_small(tl.reshape(v, [N // 32, 32]), start // 32, row, K, N // 32, ORDER)


@triton.jit
def _fixed(v):
    """Groups ``v`` [G, n] as integers, high bytes, low bytes, and the scales [G]."""
    largest = tl.max(tl.abs(v), 1)
    # A scale is never subnormal: those are too coarse for the largest value to become 32639. Adding
    # zero times each value makes it undefined where a value is not finite.
    scale = tl.maximum(largest, 4e-34) / 32639.0 + tl.sum(v * 0.0, 1)
    q = tl.floor(v / scale[:, None] + 0.5).to(tl.int32)
    low = ((q + 128) & 255) - 128
    return (q - low) >> 8, low, scale


@triton.jit
def _store_small(v, g0, row, K: tl.constexpr, G: tl.constexpr, ORDER: tl.constexpr):
    """Groups of 32: planes of words, sums, scales."""
    N: tl.constexpr = K // 32
    high, low, scale = _fixed(v)
    group = g0 + tl.arange(0, G)
    e = tl.arange(0, 32)
    if ORDER == ORDER_NIBBLES:
        in_half = e % 16
        plane = 2 * (in_half // 4) + (in_half % 4) // 2
        byte = 2 * (in_half % 2) + e // 16
    else:
        plane = e // 4
        byte = e % 4
    at = (plane[None, :] * N + group[:, None]) * 8 + byte[None, :]
    planes = row.to(tl.pointer_type(tl.int8))
    tl.store(planes + at, high.to(tl.int8))
    tl.store(planes + (at + 4), low.to(tl.int8))
    sums = row + K // 2
    tl.store(sums + 2 * group, tl.sum(high, 1))
    tl.store(sums + (2 * group + 1), tl.sum(low, 1))
    tl.store(sums + 2 * N + group, scale.to(tl.int32, bitcast=True))


@triton.jit
def _store_quarters(v, g0, row, K: tl.constexpr, G: tl.constexpr):
    """Groups of 64, words ordered by the K-quants' units; sums per 16."""
    high, low, scale = _fixed(v)
    group = g0 + tl.arange(0, G)
    element = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    s = element % 128 // 32
    unit = 2 * (element // 128) + element % 32 // 16
    plane = 4 * s + element % 16 // 4
    at = (plane * (K // 64) + unit) * 8 + element % 4
    planes = row.to(tl.pointer_type(tl.int8))
    tl.store(planes + at, high.to(tl.int8))
    tl.store(planes + (at + 4), low.to(tl.int8))
    sixteenth = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    at16 = (sixteenth % 8 // 2) * (K // 64) + 2 * (sixteenth // 8) + sixteenth % 2
    sums = row + K // 2 + 2 * at16
    tl.store(sums, tl.sum(tl.reshape(high, [G, 4, 16]), 2))
    tl.store(sums + 1, tl.sum(tl.reshape(low, [G, 4, 16]), 2))
    scales = row + K // 2 + K // 8 + (group % 2) * (K // 128) + group // 2
    tl.store(scales, scale.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["x_stride"], do_not_specialize_on_alignment=["x"])
def fix_rows(
    x,
    x_stride: tl.int64,
    rows,
    row_stride: tl.int32,
    K: tl.constexpr,
    N: tl.constexpr,
    ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: rows of ``x`` (any float type, grid axis 1) as activation rows; N elements each."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * N
    e = start + tl.arange(0, N)
    v = tl.load(x + t * x_stride + e, mask=e < K, other=0.0).to(tl.float32)
    store_row_part(v, start, rows + t * row_stride, K, N, ORDER)
