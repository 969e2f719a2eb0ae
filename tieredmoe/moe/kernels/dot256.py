# ruff: noqa: ANN001, ANN201, ANN202, PLR0917, RUF005
# (device code: the compiler infers types, prunes branches, knows no unpacking, inlines calls)
# mypy: ignore-errors
"""What decoded units of K-quants are for: products with activations, or their values in memory.

Within a group of 64 weights everything is an integer, scales included, so the order of additions
cannot show; two float multiplications end a group. High and low bytes of the activations are
summed apart: together they could pass 2^31 (Q6_K).
"""

import triton
import triton.language as tl

from tieredmoe.moe.kernels.blocks256 import (
    common_step,
    has_minimum,
    offset,
    step,
    unit_d,
    unit_dmin,
    unit_minimum,
    unit_scale,
    unit_word,
)
from tieredmoe.moe.kernels.words import dp4a, load_pair, masked_load


@triton.jit
def _sixteen(words, x, high, low, PLANE: tl.constexpr, K: tl.constexpr, EMU: tl.constexpr):
    """Add four words of weights times the x words of planes PLANE..PLANE+3 to ``high``, ``low``."""
    for i in tl.static_range(4):
        xh, xl = load_pair(x + 2 * (PLANE + i) * (K // 64))
        high = dp4a(words[i], xh[:, None], high, True, EMU)
        low = dp4a(words[i], xl[:, None], low, True, EMU)
    return high, low


@triton.jit
def _zeros(like, M: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(M):
        zeros = zeros + (like * 0,)
    return zeros


@triton.jit
def _sub_unit(
    TYPE: tl.constexpr,
    unit,
    u,
    xs,
    highs,
    lows,
    mins,
    s: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    EMU: tl.constexpr,
):
    """Add scale * (weights . x) and minimum * sum(x) of sub-unit ``s`` to the M integer sums."""
    SUM: tl.constexpr = K // 2 + 2 * s * (K // 64)
    ZERO: tl.constexpr = offset(TYPE) * step(TYPE, s)
    words = (
        unit_word(TYPE, unit, s, 0),
        unit_word(TYPE, unit, s, 1),
        unit_word(TYPE, unit, s, 2),
        unit_word(TYPE, unit, s, 3),
    )
    scale = unit_scale(TYPE, unit, s)
    new_highs = ()
    new_lows = ()
    new_mins = ()
    for m in tl.static_range(M):
        high = tl.zeros_like(scale)
        low = tl.zeros_like(scale)
        if ZERO != 0 or has_minimum(TYPE):
            sum_high, sum_low = load_pair(xs[m] + SUM + 2 * u)
        if ZERO != 0:
            high = high + (sum_high * ZERO)[:, None]
            low = low + (sum_low * ZERO)[:, None]
        high, low = _sixteen(words, xs[m] + 2 * u, high, low, 4 * s, K, EMU)
        new_highs = new_highs + (highs[m] + scale * high,)
        new_lows = new_lows + (lows[m] + scale * low,)
        if has_minimum(TYPE):
            all16 = (sum_high * 256 + sum_low)[:, None]
            new_mins = new_mins + (mins[m] + unit_minimum(TYPE, unit, s) * all16,)
        else:
            new_mins = new_mins + (mins[m],)
    return new_highs, new_lows, new_mins


@triton.jit
def dot_units(
    TYPE: tl.constexpr,
    unit,
    u,
    live,
    xs,
    sums,
    M: tl.constexpr,
    K: tl.constexpr,
    EMU: tl.constexpr,
):
    """Add the products of ``unit`` with each of the M activation rows to ``sums``.

    Only where ``live`` (None: everywhere). ``xs`` are M pointers to fixed-point rows, ``sums`` M
    float32 [C, R]; returns the new sums.
    """
    d = unit_d(TYPE, unit)
    for pair in tl.static_range(2):
        highs = _zeros(unit[0], M)
        lows = _zeros(unit[0], M)
        mins = _zeros(unit[0], M)
        highs, lows, mins = _sub_unit(TYPE, unit, u, xs, highs, lows, mins, 2 * pair, M, K, EMU)
        highs, lows, mins = _sub_unit(TYPE, unit, u, xs, highs, lows, mins, 2 * pair + 1, M, K, EMU)
        new_sums = ()
        for m in tl.static_range(M):
            at = xs[m] + K // 2 + K // 8 + pair * (K // 128) + u // 2
            dx = masked_load(at, live).to(tl.float32, bitcast=True)
            part = dx * (1.0 / common_step(TYPE, 2 * pair))
            total = highs[m].to(tl.float32) * 256.0 + lows[m].to(tl.float32)
            value = sums[m] + (d * part[:, None]) * total
            if has_minimum(TYPE):
                value = value - (unit_dmin(TYPE, unit) * dx[:, None]) * mins[m].to(tl.float32)
            new_sums = new_sums + (value,)
        sums = new_sums
    return sums


@triton.jit
def store_units(TYPE: tl.constexpr, unit, u, out, row_mask):
    """Write the 64 values of each unit, float32, to ``out`` [1, R] + their places in the row."""
    p = out + (256 * (u // 4) + 128 * (u % 4 // 2) + 16 * (u % 2))[:, None]
    d = unit_d(TYPE, unit)
    for s in tl.static_range(4):
        exact = unit_scale(TYPE, unit, s) // (common_step(TYPE, s) // step(TYPE, s))
        scale = d * exact.to(tl.float32)
        for i in tl.static_range(4):
            word = unit_word(TYPE, unit, s, i)
            for b in tl.static_range(4):
                q = ((word >> (8 * b)) & 255) // step(TYPE, s) + offset(TYPE)
                value = q.to(tl.float32) * scale
                if has_minimum(TYPE):
                    minimum = unit_minimum(TYPE, unit, s).to(tl.float32)
                    value = value - unit_dmin(TYPE, unit) * minimum
                tl.store(p + (32 * s + 4 * i + b), value, mask=row_mask)
