# ruff: noqa: ANN001, ANN201, ANN202, PLR0917, PLR1714, RET505, RUF005, SIM109
# (device code: the compiler infers types, prunes branches, knows no unpacking, inlines calls)
# mypy: ignore-errors
"""Rows of packed weights: times activations, or as float32, for every type with a decoder.

The loop over a row is the same for all types and all kernels; results depend on the tile's shape,
never on which rows or activations a launch happens to do together.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tieredmoe.moe.kernels.blocks32 import dot_blocks, load_block, store_blocks
from tieredmoe.moe.kernels.blocks256 import load_unit
from tieredmoe.moe.kernels.dot256 import dot_units, store_units
from tieredmoe.moe.kernels.formats import BF16, F16, MXFP4, Q4_0, Q8_0
from tieredmoe.moe.kernels.words import masked_load


@triton.jit
def _floats(TYPE: tl.constexpr, word):
    """The two 16-bit floats of a word."""
    if TYPE == BF16:
        first = (word << 16).to(tl.float32, bitcast=True)
        second = (word & -65536).to(tl.float32, bitcast=True)
        return first, second
    else:
        first = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return first, second


@triton.jit
def _load_floats(p32, row_byte, u, mask, R: tl.constexpr, C: tl.constexpr):
    """Eight weights a lane, 16 bytes in one load: four words [C, R]."""
    # The type's alignment (see Format), which the compiler cannot follow through the offsets.
    row_word = tl.multiple_of(row_byte >> 2, 4)
    at = row_word[None, :, None] + (u * 4)[:, None, None]
    words = tl.load(p32 + (at + tl.arange(0, 4)[None, None, :]), mask=mask)
    even, odd = tl.split(tl.reshape(words, [C, R, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _dot_floats(TYPE: tl.constexpr, words, u, live, xs, sums, M: tl.constexpr, K: tl.constexpr):
    """Add eight products to each of the M sums; x lies in eight planes of floats."""
    new_sums = ()
    for m in tl.static_range(M):
        x = xs[m] + u
        total = sums[m]
        for i in tl.static_range(4):
            first, second = _floats(TYPE, words[i])
            xa = masked_load(x + 2 * i * (K // 8), live).to(tl.float32, bitcast=True)[:, None]
            xb = masked_load(x + (2 * i + 1) * (K // 8), live)
            xb = xb.to(tl.float32, bitcast=True)[:, None]
            total = tl.fma(first, xa + tl.zeros_like(first), total)
            total = tl.fma(second, xb + tl.zeros_like(second), total)
        new_sums = new_sums + (total,)
    return new_sums


@triton.constexpr_function
def units_in(TYPE, K):
    """Units of a row of K weights."""
    if TYPE in (F16, BF16):
        return K // 8
    return K // 32 if TYPE in (MXFP4, Q4_0, Q8_0) else K // 64


@triton.jit
def _load(
    TYPE: tl.constexpr, p32, row_byte, u, mask, R: tl.constexpr, C: tl.constexpr, EMU: tl.constexpr
):
    if TYPE == F16 or TYPE == BF16:
        return _load_floats(p32, row_byte, u, mask, R, C)
    elif TYPE == MXFP4 or TYPE == Q4_0 or TYPE == Q8_0:
        return load_block(TYPE, p32, row_byte, u, mask, EMU)
    else:
        return load_unit(TYPE, p32, row_byte, u, mask, EMU)


@triton.jit
def _dot(
    TYPE: tl.constexpr, w, u, live, xs, sums, M: tl.constexpr, K: tl.constexpr, EMU: tl.constexpr
):
    if TYPE == F16 or TYPE == BF16:
        return _dot_floats(TYPE, w, u, live, xs, sums, M, K)
    elif TYPE == MXFP4 or TYPE == Q4_0 or TYPE == Q8_0:
        return dot_blocks(TYPE, w, u, live, xs, sums, M, K, EMU)
    else:
        return dot_units(TYPE, w, u, live, xs, sums, M, K, EMU)


@triton.jit
def row_dots(
    TYPE: tl.constexpr,
    base,
    row_byte,
    xs,
    M: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    EMU: tl.constexpr,
):
    """M tensors float32 [R]: the rows of K weights at ``base + row_byte`` times M activation rows.

    ``base`` is a uint8 pointer at a multiple of 16, ``xs`` a tuple of M int32 pointers to rows in
    the type's order; ``C`` units of a row are done at a time; where they do not divide it,
    lanes beyond its end do the last unit again, times zero.
    """
    p32 = base.to(tl.pointer_type(tl.int32))
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros([C, R], tl.float32),)
    UNITS: tl.constexpr = units_in(TYPE, K)
    lane = tl.arange(0, C)
    for start in range(0, UNITS, C):
        u = start + lane
        live = None
        if UNITS % C != 0:
            live = u < UNITS
            u = tl.minimum(u, UNITS - 1)
        w = _load(TYPE, p32, row_byte, u, None, R, C, EMU)
        sums = _dot(TYPE, w, u, live, xs, sums, M, K, EMU)
    totals = ()
    for m in tl.static_range(M):
        totals = totals + (tl.sum(sums[m], 0),)
    return totals


@triton.jit(do_not_specialize=["expert", "offset", "n_rows"])
def unpack_rows(
    arena,
    slot_nbytes: tl.int64,
    slot_of,
    expert: tl.int32,
    offset: tl.int64,
    out,
    n_rows: tl.int32,
    TYPE: tl.constexpr,
    K: tl.constexpr,
    ROW_NBYTES: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
    EMU: tl.constexpr,
):
    """Kernel: rows at ``offset`` of the slot of ``expert``, as float32 ``out`` [n_rows, K]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slot_of + expert).to(tl.int64)
    if slot < 0:
        return
    row = tl.program_id(0) * R + tl.arange(0, R)
    mask = (row < n_rows)[None, :]
    # A multiple of 4 goes into the pointer, so that what remains fits 32 bits.
    base = arena + slot * slot_nbytes + (offset & -4)
    p32 = base.to(tl.pointer_type(tl.int32))
    row_byte = (offset & 3).to(tl.int32) + tl.minimum(row, n_rows - 1) * ROW_NBYTES
    p = out + (row.to(tl.int64) * K)[None, :]
    u = tl.program_id(1) * C + tl.arange(0, C)
    if TYPE == MXFP4 or TYPE == Q4_0 or TYPE == Q8_0:
        store_blocks(TYPE, load_block(TYPE, p32, row_byte, u, mask, EMU), u, p, mask, EMU)
    elif TYPE == F16 or TYPE == BF16:
        for i in tl.static_range(4):
            word = tl.load(p32 + ((row_byte >> 2)[None, :] + (u * 4 + i)[:, None]))
            first, second = _floats(TYPE, word)
            tl.store(p + (u * 8 + 2 * i)[:, None], first, mask=mask)
            tl.store(p + (u * 8 + 2 * i + 1)[:, None], second, mask=mask)
    else:
        store_units(TYPE, load_unit(TYPE, p32, row_byte, u, mask, EMU), u, p, mask)
