# ruff: noqa: ANN001, ANN201, PLR0917, RET505, RUF005
# (device code: the compiler infers types, prunes branches, knows no unpacking, inlines calls)
# mypy: ignore-errors
"""Decoders of blocks of 32 weights (MXFP4, Q4_0, Q8_0), and what a row of them does with x.

Blocks lie back to back and start at any byte (17, 18 or 34 bytes each): the aligned words around
one are loaded and funnel-shifted into place. Tiles are [blocks, rows]: the lanes of a warp then
walk along a row, and their loads coalesce. Formulas: ggml, ggml-quants.c.
"""

import triton
import triton.language as tl

from tieredmoe.moe.kernels.formats import MXFP4, Q4_0
from tieredmoe.moe.kernels.words import (
    dp4a,
    e2m1_words,
    funnel,
    half,
    half_power,
    load_pair,
    masked_load,
    signed_byte,
)


@triton.constexpr_function
def plane(TYPE, j, second):
    """Which word of a block's activations meets word ``j`` of a pair (see ``block_words``)."""
    if TYPE == Q4_0:
        return j + 4 * second
    return 2 * j + second


@triton.constexpr_function
def element(TYPE, word, i):
    """Which weight of the block byte ``i`` of plane ``word`` is."""
    if TYPE == MXFP4:
        return 4 * (word // 2) + 2 * (word % 2) + i // 2 + 16 * (i % 2)
    return 4 * word + i


@triton.jit
def load_block(TYPE: tl.constexpr, p32, row_byte, u, mask, EMU: tl.constexpr):
    """Blocks ``u`` [C] of the rows at ``row_byte`` [R]: (data words..., float32 scale) [C, R].

    Undefined, and not read, where ``mask`` is false.
    """
    NBYTES: tl.constexpr = 17 if TYPE == MXFP4 else (18 if TYPE == Q4_0 else 34)
    byte = row_byte[None, :] + (u * NBYTES)[:, None]
    p = p32 + (byte >> 2)
    shift = (byte & 3) << 3
    a0 = tl.load(p, mask=mask)
    a1 = tl.load(p + 1, mask=mask)
    a2 = tl.load(p + 2, mask=mask)
    a3 = tl.load(p + 3, mask=mask)
    a4 = tl.load(p + 4, mask=mask)
    if TYPE == MXFP4:
        scale = half_power((a0 >> shift) & 255)
        to_data = shift + 8
    else:
        scale = half(a0 >> shift)
        to_data = shift + 16
    w0 = funnel(a0, a1, to_data, EMU)
    w1 = funnel(a1, a2, to_data, EMU)
    w2 = funnel(a2, a3, to_data, EMU)
    w3 = funnel(a3, a4, to_data, EMU)
    if NBYTES == 34:
        a5 = tl.load(p + 5, mask=mask)
        a6 = tl.load(p + 6, mask=mask)
        a7 = tl.load(p + 7, mask=mask)
        a8 = tl.load(p + 8, mask=mask)
        w4 = funnel(a4, a5, to_data, EMU)
        w5 = funnel(a5, a6, to_data, EMU)
        w6 = funnel(a6, a7, to_data, EMU)
        w7 = funnel(a7, a8, to_data, EMU)
        return w0, w1, w2, w3, w4, w5, w6, w7, scale
    else:
        return w0, w1, w2, w3, scale


@triton.jit
def block_words(TYPE: tl.constexpr, block, j: tl.constexpr, zero, EMU: tl.constexpr):
    """Two words of four weight bytes: planes 2j and 2j+1 of x, for Q4_0 planes j and j+4."""
    if TYPE == MXFP4:
        return e2m1_words(block[j], zero, EMU)
    elif TYPE == Q4_0:
        return block[j] & 0x0F0F0F0F, (block[j] >> 4) & 0x0F0F0F0F
    else:
        return block[2 * j], block[2 * j + 1]


@triton.jit
def dot_blocks(
    TYPE: tl.constexpr,
    block,
    u,
    live,
    xs,
    sums,
    M: tl.constexpr,
    K: tl.constexpr,
    EMU: tl.constexpr,
):
    """Add the products of ``block`` with each of the M activation rows to ``sums``.

    Only where ``live`` (None: everywhere). ``xs`` are M pointers to fixed-point rows, ``sums`` M
    float32 [C, R]; their new values are returned. Integer sums are exact; one float multiplication
    per block and row.
    """
    N: tl.constexpr = K // 32
    OFFSET: tl.constexpr = -16 if TYPE == MXFP4 else (-8 if TYPE == Q4_0 else 0)
    scale = block[8] if len(block) == 9 else block[4]
    highs = ()
    lows = ()
    dxs = ()
    for m in tl.static_range(M):
        dxs = dxs + (masked_load(xs[m] + K // 2 + 2 * N + u, live).to(tl.float32, bitcast=True),)
        if OFFSET == 0:
            highs = highs + (tl.zeros_like(block[0]),)
            lows = lows + (tl.zeros_like(block[0]),)
        else:
            high, low = load_pair(xs[m] + K // 2 + 2 * u)
            highs = highs + (tl.zeros_like(block[0]) + (high * OFFSET)[:, None],)
            lows = lows + (tl.zeros_like(block[0]) + (low * OFFSET)[:, None],)
    # Zero, for scales are not negative; the compiler cannot know.
    zero = (dxs[0].to(tl.int32, bitcast=True) >> 31)[:, None]
    for j in tl.static_range(4):
        va, vb = block_words(TYPE, block, j, zero, EMU)
        new_highs = ()
        new_lows = ()
        for m in tl.static_range(M):
            xa, ya = load_pair(xs[m] + 2 * plane(TYPE, j, 0) * N + 2 * u)
            xb, yb = load_pair(xs[m] + 2 * plane(TYPE, j, 1) * N + 2 * u)
            high = dp4a(va, xa[:, None], highs[m], False, EMU)
            low = dp4a(va, ya[:, None], lows[m], False, EMU)
            new_highs = new_highs + (dp4a(vb, xb[:, None], high, False, EMU),)
            new_lows = new_lows + (dp4a(vb, yb[:, None], low, False, EMU),)
        highs = new_highs
        lows = new_lows
    new_sums = ()
    for m in tl.static_range(M):
        total = (highs[m] * 256 + lows[m]).to(tl.float32)
        new_sums = new_sums + (sums[m] + total * (scale * dxs[m][:, None]),)
    return new_sums


@triton.jit
def store_blocks(TYPE: tl.constexpr, block, u, out, row_mask, EMU: tl.constexpr):
    """Write the 32 values of each block, float32, to ``out`` [1, R] + its place in the row."""
    OFFSET: tl.constexpr = -16 if TYPE == MXFP4 else (-8 if TYPE == Q4_0 else 0)
    scale = block[8] if len(block) == 9 else block[4]
    p = out + (u * 32)[:, None]
    zero = (u >> 31)[:, None]
    for j in tl.static_range(4):
        va, vb = block_words(TYPE, block, j, zero, EMU)
        for i in tl.static_range(4):
            a = (signed_byte(va, i) + OFFSET).to(tl.float32) * scale
            b = (signed_byte(vb, i) + OFFSET).to(tl.float32) * scale
            tl.store(p + element(TYPE, plane(TYPE, j, 0), i), a, mask=row_mask)
            tl.store(p + element(TYPE, plane(TYPE, j, 1), i), b, mask=row_mask)
