# ruff: noqa: ANN001, ANN201, ANN202, PLR0911, PLR0917, PLR1714, RET505, RUF005
# (device code: the compiler infers types, prunes branches, knows no unpacking, inlines calls)
# mypy: ignore-errors
"""Decoders of blocks of 256 weights (Q2_K to Q6_K), and what a row of them does with x.

A lane takes a *unit*, a quarter of a block: weights 128h + 32s + 16t + 0..15 for s = 0..3, which
share 16 bytes of two-bit fields; unit 4 * block + 2h + t. Every K-quant is read in these units, so
all share one order of activations. For each s a decoder yields four words of weight bytes, an
integer scale and, where the type has them, an integer minimum; weights may stay where they lie in
their byte (times 4 or 16) with scales made up for it. Formulas: ggml, ggml-quants.c.
"""

import triton
import triton.language as tl

from tieredmoe.moe.kernels.formats import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from tieredmoe.moe.kernels.words import funnel, half


@triton.jit
def _run(p, shift, mask, EMU: tl.constexpr):
    """Four words at any even byte: aligned words, funnel-shifted by 0 or 16 bits."""
    a0 = tl.load(p, mask=mask)
    a1 = tl.load(p + 1, mask=mask)
    a2 = tl.load(p + 2, mask=mask)
    a3 = tl.load(p + 3, mask=mask)
    a4 = tl.load(p + 4, mask=mask)
    return (
        funnel(a0, a1, shift, EMU),
        funnel(a1, a2, shift, EMU),
        funnel(a2, a3, shift, EMU),
        funnel(a3, a4, shift, EMU),
    )


@triton.jit
def _aligned_run(p, mask):
    return (
        tl.load(p, mask=mask),
        tl.load(p + 1, mask=mask),
        tl.load(p + 2, mask=mask),
        tl.load(p + 3, mask=mask),
    )


@triton.jit
def _load_q2_k(p32, row_byte, u, mask):
    """16 bytes of scale and minimum nibbles, 64 of two-bit weights, d, dmin."""
    p = p32 + ((row_byte >> 2)[None, :] + ((u // 4) * 21)[:, None])
    to_half = (8 * (u % 2))[:, None]
    scales = p + (2 * (u % 4 // 2))[:, None]
    d = tl.load(p + 20, mask=mask)
    return _aligned_run(p + (4 + 4 * (u % 4))[:, None], mask) + (
        tl.load(scales, mask=mask) >> to_half,
        tl.load(scales + 1, mask=mask) >> to_half,
        half(d),
        half(d >> 16),
    )


@triton.jit
def _load_q3_k(p32, row_byte, u, mask, EMU: tl.constexpr):
    """32 bytes of third bits, 64 of two-bit weights, 12 of six-bit scales, d."""
    byte = row_byte[None, :] + ((u // 4) * 110)[:, None]
    p = p32 + (byte >> 2)
    shift = (byte & 2) << 3
    t = u % 2
    h = u % 4 // 2
    m0, m1, m2, m3 = _run(p + (4 * t)[:, None], shift, mask, EMU)
    s0 = tl.load(p + 24, mask=mask)
    s1 = tl.load(p + 25, mask=mask)
    s2 = tl.load(p + 26, mask=mask)
    s3 = tl.load(p + 27, mask=mask)
    to_scale = (8 * t + 4 * h)[:, None]
    to_bit = (4 * h)[:, None]
    return _run(p + (8 + 4 * (u % 4))[:, None], shift, mask, EMU) + (
        m0 >> to_bit,
        m1 >> to_bit,
        m2 >> to_bit,
        m3 >> to_bit,
        funnel(s0, s1, shift, EMU) >> to_scale,
        funnel(s1, s2, shift, EMU) >> to_scale,
        funnel(s2, s3, shift, EMU) >> to_scale,
        half(s3 >> shift),
    )


@triton.jit
def _scales_and_mins(p, h, mask):
    """The six-bit scales and minima of s = 0..3 of half ``h``, one byte each (Q4_K, Q5_K)."""
    a = tl.load(p + 1, mask=mask)
    b = tl.load(p + 2, mask=mask)
    c = tl.load(p + 3, mask=mask)
    first = (h == 0)[:, None]
    scales = tl.where(first, a & 0x3F3F3F3F, (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030))
    mins = tl.where(first, b & 0x3F3F3F3F, ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030))
    return scales, mins


@triton.jit
def _load_q4_k(p32, row_byte, u, mask):
    """d, dmin, 12 bytes of six-bit scales and minima, 128 of nibbles."""
    p = p32 + ((row_byte >> 2)[None, :] + ((u // 4) * 36)[:, None])
    h = u % 4 // 2
    d = tl.load(p, mask=mask)
    q = p + (4 + 16 * h + 4 * (u % 2))[:, None]
    return (
        _aligned_run(q, mask)
        + _aligned_run(q + 8, mask)
        + _scales_and_mins(p, h, mask)
        + (half(d), half(d >> 16))
    )


@triton.jit
def _load_q5_k(p32, row_byte, u, mask):
    """As Q4_K, with 32 bytes of fifth bits before the nibbles."""
    p = p32 + ((row_byte >> 2)[None, :] + ((u // 4) * 44)[:, None])
    h = u % 4 // 2
    d = tl.load(p, mask=mask)
    q = p + (12 + 16 * h + 4 * (u % 2))[:, None]
    m0, m1, m2, m3 = _aligned_run(p + (4 + 4 * (u % 2))[:, None], mask)
    to_bit = (4 * h)[:, None]
    return (
        _aligned_run(q, mask)
        + _aligned_run(q + 8, mask)
        + _scales_and_mins(p, h, mask)
        + (half(d), half(d >> 16), m0 >> to_bit, m1 >> to_bit, m2 >> to_bit, m3 >> to_bit)
    )


@triton.jit
def _load_q6_k(p32, row_byte, u, mask, EMU: tl.constexpr):
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, d."""
    byte = row_byte[None, :] + ((u // 4) * 210)[:, None]
    p = p32 + (byte >> 2)
    shift = (byte & 2) << 3
    t = u % 2
    h = u % 4 // 2
    low = p + (16 * h + 4 * t)[:, None]
    scales = p + (48 + 2 * h)[:, None]
    s0 = tl.load(scales, mask=mask)
    s1 = tl.load(scales + 1, mask=mask)
    s2 = tl.load(scales + 2, mask=mask)
    to_half = (8 * t)[:, None]
    return (
        _run(low, shift, mask, EMU)
        + _run(low + 8, shift, mask, EMU)
        + _run(p + (32 + 8 * h + 4 * t)[:, None], shift, mask, EMU)
        + (
            funnel(s0, s1, shift, EMU) >> to_half,
            funnel(s1, s2, shift, EMU) >> to_half,
            half(tl.load(p + 52, mask=mask) >> shift),
        )
    )


@triton.jit
def load_unit(TYPE: tl.constexpr, p32, row_byte, u, mask, EMU: tl.constexpr):
    """Units ``u`` [C] of the rows at ``row_byte`` [R]: the type's fields, each [C, R].

    Undefined, and not read, where ``mask`` is false.
    """
    if TYPE == Q2_K:
        return _load_q2_k(p32, row_byte, u, mask)
    elif TYPE == Q3_K:
        return _load_q3_k(p32, row_byte, u, mask, EMU)
    elif TYPE == Q4_K:
        return _load_q4_k(p32, row_byte, u, mask)
    elif TYPE == Q5_K:
        return _load_q5_k(p32, row_byte, u, mask)
    else:
        return _load_q6_k(p32, row_byte, u, mask, EMU)


@triton.constexpr_function
def step(TYPE, s):
    """What one is in the weight bytes of sub-unit ``s``: weights may stay shifted left."""
    if TYPE == Q2_K:
        return (1, 4, 16, 64)[s]
    if TYPE == Q3_K:
        return (1, 4, 16, 16)[s]
    return 1


@triton.constexpr_function
def common_step(TYPE, s):
    """The larger step of the two sub-units that share a group of activations."""
    return max(step(TYPE, s & 2), step(TYPE, s | 1))


@triton.constexpr_function
def offset(TYPE):
    """What a weight byte of zero stands for, in steps."""
    return -4 if TYPE == Q3_K else (-32 if TYPE == Q6_K else 0)


@triton.constexpr_function
def has_minimum(TYPE):
    """Whether a minimum is subtracted."""
    return TYPE in (Q2_K, Q4_K, Q5_K)


@triton.jit
def unit_word(TYPE: tl.constexpr, unit, s: tl.constexpr, i: tl.constexpr):
    """Four weight bytes, 128h + 32s + 16t + 4i and the next three, unsigned, times ``step``."""
    if TYPE == Q2_K:
        return unit[i] & (0x03030303 << (2 * s) if s < 3 else -0x3F3F3F40)
    elif TYPE == Q3_K:
        q = unit[i]
        m = unit[4 + i]
        if s == 0:
            return (q & 0x03030303) | ((m << 2) & 0x04040404)
        elif s == 1:
            return (q & 0x0C0C0C0C) | ((m << 3) & 0x10101010)
        elif s == 2:
            return (q & 0x30303030) | ((m << 4) & 0x40404040)
        else:
            return ((q >> 2) & 0x30303030) | ((m << 3) & 0x40404040)
    elif TYPE == Q6_K:
        low = (unit[4 * (s % 2) + i] >> (4 * (s // 2))) & 0x0F0F0F0F
        high = unit[8 + i]
        if s < 2:
            return low | ((high << (4 - 2 * s)) & 0x30303030)
        else:
            return low | ((high >> (2 * s - 4)) & 0x30303030)
    else:
        nibbles = (unit[4 * (s // 2) + i] >> (4 * (s % 2))) & 0x0F0F0F0F
        if TYPE == Q5_K:
            m = unit[12 + i]
            nibbles = nibbles | ((m << 4 if s == 0 else m << (4 - s)) & 0x10101010)
        return nibbles


@triton.jit
def unit_scale(TYPE: tl.constexpr, unit, s: tl.constexpr):
    """The integer scale of sub-unit ``s``, times ``common_step / step``."""
    if TYPE == Q2_K:
        scales = unit[4 + s // 2]
        if s == 0 or s == 2:
            return (scales << 2) & 0x3C
        else:
            return (scales >> 16) & 0x0F
    elif TYPE == Q3_K:
        low = unit[8 + s // 2]
        high = unit[10]
        if s == 0:
            return (((low << 2) & 0x3C) | ((high << 6) & 0xC0)) - 128
        else:
            bits = (low >> (16 * (s % 2))) & 0x0F
            if s == 2:
                return (bits | ((high << 2) & 0x30)) - 32
            else:
                return (bits | ((high >> (12 if s == 1 else 14)) & 0x30)) - 32
    elif TYPE == Q6_K:
        return ((unit[12 + s // 2] >> (16 * (s % 2))) << 24) >> 24
    else:
        return (unit[8] >> (8 * s)) & 63


@triton.jit
def unit_minimum(TYPE: tl.constexpr, unit, s: tl.constexpr):
    """The integer minimum of sub-unit ``s``."""
    if TYPE == Q2_K:
        return (unit[4 + s // 2] >> (16 * (s % 2) + 4)) & 15
    else:
        return (unit[9] >> (8 * s)) & 63


@triton.jit
def unit_d(TYPE: tl.constexpr, unit):
    """The block's float scale d."""
    if TYPE == Q2_K:
        return unit[6]
    elif TYPE == Q3_K:
        return unit[11]
    elif TYPE == Q6_K:
        return unit[14]
    else:
        return unit[10]


@triton.jit
def unit_dmin(TYPE: tl.constexpr, unit):
    """The block's float scale of minima."""
    if TYPE == Q2_K:
        return unit[7]
    else:
        return unit[11]
