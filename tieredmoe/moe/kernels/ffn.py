# ruff: noqa: ANN001, ANN201, ANN202, PLR0917, RET505, RUF005
# (device code: the compiler infers types, prunes branches, knows no unpacking, inlines calls)
# mypy: ignore-errors
"""The routed FFN's kernels: gate and up with the activation, down, the sum over k.

A launch works on *units*: up to M (token, k) pairs of one expert, so weights are decoded once for
all of them. Units are named by the position of their first pair in the pairs sorted by expert, 16
bits each, in eight launch arguments: a launch on the experts that are ready needs no table of its
own in device memory. Every pair has a row of its own in each output. Experts are found through a
device table of slots, so a captured graph serves every token; a slot below 0 ends a program.

With PDL a launch starts while the one before it drains, and waits in here for its results. Each of
these kernels waits before it lets the next one start, so whatever came before the one in front has
ended: experts are found before the wait, for ids, their order and the table are made earlier, never
by the kernel in front. Rejected, as measured on an H200: loading weights before the wait or one
step ahead in the loop (for want of registers), prefetching them into the L2 cache, in bulk or row
by row, or those of down from gate and up (2 to 30 % slower), and letting the last program of down
do the sum (3 % slower).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tieredmoe.moe.kernels.fixed_point import store_row_part
from tieredmoe.moe.kernels.rows import row_dots

VARYING = [
    *(f"sel{i}" for i in range(8)),
    *("n_pairs", "spare", "gate_offset", "up_offset", "offset", "n_x"),
]
"""Arguments that differ between launches of one binary."""

UNALIGNED = ["ids", "weights", "out", "y"]
"""Tensors that may start anywhere."""


@triton.jit
def _position(sel0, sel1, sel2, sel3, sel4, sel5, sel6, sel7):
    """The sorted position that program axis 1 is to start at."""
    j = tl.program_id(1)
    word = j // 4
    a = tl.where(word == 0, sel0, tl.where(word == 1, sel1, tl.where(word == 2, sel2, sel3)))
    b = tl.where(word == 4, sel4, tl.where(word == 5, sel5, tl.where(word == 6, sel6, sel7)))
    both = tl.where(word < 4, a, b)
    return ((both >> (16 * (j % 4))) & 0xFFFF).to(tl.int32)


@triton.jit
def _pairs(ids, order, position, n_pairs, spare, M: tl.constexpr, SORTED: tl.constexpr):
    """The unit's expert, its M pairs, and where their output goes (``spare`` beyond the last)."""
    first = tl.load(order + position) if SORTED else position
    expert = tl.load(ids + first)
    pairs = (first,)
    rows = (first,)
    for m in tl.static_range(1, M):
        at = tl.minimum(position + m, n_pairs - 1)
        pair = tl.load(order + at)
        ours = (position + m < n_pairs) & (tl.load(ids + pair) == expert)
        pairs = pairs + (tl.where(ours, pair, first),)
        rows = rows + (tl.where(ours, pair, spare),)
    return expert, pairs, rows


@triton.jit
def _tanh(z):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * z))


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """SwiGLU clamped at A (0: not), or SiTU with beta A and linear beta B, in float32.

    Formulas: DeepSeek-V4 inference/model.py, ``Expert.forward``; Kimi-K3 modelling code, ``SiTU``.
    """
    if ACTIVATION == 0:
        if A > 0:
            # Comparisons, unlike minimum and maximum, let NaN through.
            gate = tl.where(gate > A, A, gate)
            up = tl.where(up > A, A, tl.where(up < -A, -A, up))
        return gate / (1.0 + tl.exp(-gate)) * up
    else:
        return (A * _tanh(gate / A)) / (1.0 + tl.exp(-gate)) * (B * _tanh(up / B))


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def gate_up(
    arena,
    slot_nbytes: tl.int64,
    slot_of,
    ids,
    order,
    n_pairs: tl.int32,
    spare: tl.int32,
    x,
    x_stride: tl.int32,
    h,
    h_stride: tl.int32,
    gate_offset: tl.int32,
    up_offset: tl.int32,
    sel0: tl.int64,
    sel1: tl.int64,
    sel2: tl.int64,
    sel3: tl.int64,
    sel4: tl.int64,
    sel5: tl.int64,
    sel6: tl.int64,
    sel7: tl.int64,
    TOP_K: tl.constexpr,
    TYPE: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    ROW_NBYTES: tl.constexpr,
    H_ORDER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    SORTED: tl.constexpr,
    PDL: tl.constexpr,
    EMU: tl.constexpr,
):
    """Kernel: R rows of gate and up of a unit's expert, activated, into h's activation rows."""
    position = _position(sel0, sel1, sel2, sel3, sel4, sel5, sel6, sel7)
    start = tl.program_id(0) * R
    expert, pairs, rows = _pairs(ids, order, position, n_pairs, spare, M, SORTED)
    slot = tl.load(slot_of + expert).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if slot < 0:
        return
    base = arena + slot * slot_nbytes
    # Rows of gate and up alternate, so that one pass over x serves both.
    r = tl.arange(0, 2 * R)
    row = tl.minimum(start + r // 2, N - 1)
    row_byte = tl.where(r % 2 == 0, gate_offset, up_offset) + row * ROW_NBYTES
    xs = ()
    for m in tl.static_range(M):
        xs = xs + (x + (pairs[m] // TOP_K).to(tl.int64) * x_stride,)
    both = row_dots(TYPE, base, row_byte, xs, M, K, 2 * R, C, EMU)
    for m in tl.static_range(M):
        gate, up = tl.split(tl.reshape(both[m], [R, 2]))
        v = activated(gate, up, ACTIVATION, A, B)
        store_row_part(v, start, h + rows[m].to(tl.int64) * h_stride, N, R, H_ORDER)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def expert_rows(
    arena,
    slot_nbytes: tl.int64,
    slot_of,
    ids,
    order,
    n_pairs: tl.int32,
    spare: tl.int32,
    x,
    x_stride: tl.int32,
    y,
    offset: tl.int32,
    sel0: tl.int64,
    sel1: tl.int64,
    sel2: tl.int64,
    sel3: tl.int64,
    sel4: tl.int64,
    sel5: tl.int64,
    sel6: tl.int64,
    sel7: tl.int64,
    X_PER_ROW: tl.constexpr,
    TYPE: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    ROW_NBYTES: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    SORTED: tl.constexpr,
    PDL: tl.constexpr,
    EMU: tl.constexpr,
):
    """Kernel: R rows of one matrix of a unit's expert, float32, into y [pairs + 1, N].

    ``X_PER_ROW`` pairs share an activation row: 1 for down, top-k for gate or up.
    """
    position = _position(sel0, sel1, sel2, sel3, sel4, sel5, sel6, sel7)
    start = tl.program_id(0) * R
    expert, pairs, rows = _pairs(ids, order, position, n_pairs, spare, M, SORTED)
    slot = tl.load(slot_of + expert).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if slot < 0:
        return
    base = arena + slot * slot_nbytes
    row = start + tl.arange(0, R)
    row_byte = offset + tl.minimum(row, N - 1) * ROW_NBYTES
    xs = ()
    for m in tl.static_range(M):
        xs = xs + (x + (pairs[m] // X_PER_ROW).to(tl.int64) * x_stride,)
    values = row_dots(TYPE, base, row_byte, xs, M, K, R, C, EMU)
    for m in tl.static_range(M):
        tl.store(y + rows[m].to(tl.int64) * N + row, values[m], mask=row < N)


@triton.jit
def activate(
    gate,
    up,
    h,
    h_stride: tl.int32,
    N: tl.constexpr,
    R: tl.constexpr,
    H_ORDER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: ``gate`` and ``up``, float32 [rows, N], activated, into h's activation rows."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * R
    e = start + tl.arange(0, R)
    g = tl.load(gate + pair * N + e, mask=e < N, other=0.0)
    u = tl.load(up + pair * N + e, mask=e < N, other=0.0)
    v = activated(g, u, ACTIVATION, A, B)
    store_row_part(v, start, h + pair * h_stride, N, R, H_ORDER)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def sort_pairs(
    ids,
    order,
    n_pairs: tl.int32,
    N: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: pair numbers by expert, then by number: ``order`` int32 [n_pairs]; B pairs each.

    ``N`` is at least ``n_pairs``.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.program_id(0) * B + tl.arange(0, B)
    mine = tl.load(ids + p, mask=p < n_pairs, other=0)
    rank = tl.zeros([B], tl.int32)
    for start in range(0, N, B):
        q = start + tl.arange(0, B)
        other = tl.load(ids + q, mask=q < n_pairs, other=0)
        before = (other[None, :] < mine[:, None]) | (
            (other[None, :] == mine[:, None]) & (q[None, :] < p[:, None])
        )
        rank += tl.sum((before & (q < n_pairs)[None, :]).to(tl.int32), 1)
    tl.store(order + rank, p, mask=p < n_pairs)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def combine(
    y,
    weights,
    out,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: the weighted sum over k in routing order, float32 [tokens, N]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * R + tl.arange(0, R)
    mask = e < N
    total = tl.zeros([R], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = t * TOP_K + k
        row = tl.load(y + pair * N + e, mask=mask, other=0.0)
        total = tl.fma(row, tl.zeros([R], tl.float32) + tl.load(weights + pair), total)
    tl.store(out + t * N + e, total, mask=mask)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def matrix_rows(
    matrix,
    x,
    x_stride: tl.int32,
    y,
    n_x: tl.int32,
    TYPE: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    ROW_NBYTES: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
    EMU: tl.constexpr,
):
    """Kernel: R rows of one dense matrix times M activation rows, float32 y [n_x, N].

    Grid axis 0 goes over the activation rows, so that programs on the same weights run together.
    """
    first = tl.program_id(0) * M
    start = tl.program_id(1) * R
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = start + tl.arange(0, R)
    row_byte = tl.minimum(row, N - 1) * ROW_NBYTES
    xs = ()
    for m in tl.static_range(M):
        xs = xs + (x + tl.minimum(first + m, n_x - 1) * x_stride,)
    values = row_dots(TYPE, matrix, row_byte, xs, M, K, R, C, EMU)
    for m in tl.static_range(M):
        at = y + (first + m).to(tl.int64) * N
        tl.store(at + row, values[m], mask=(row < N) & (first + m < n_x))
