# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# (device code: the compiler infers types and inlines calls)
# mypy: ignore-errors
"""Kernels of the hyper-connections: streams joined and split again, for one token.

All weights of a split come from products with the whole of the streams, so there are two launches:
the first joins a run of channels and multiplies it with ``fn``, the second adds the parts up. What
a sub-block reads is wanted at once, the matrix of the next join only after it: so Sinkhorn's
iteration runs in a program of its own beside the sum of the streams.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def join_streams(
    streams,
    post,
    comb,
    first,
    second,
    fn,
    joined,
    parts,
    H: tl.constexpr,
    N: tl.constexpr,
    N_OUTPUTS: tl.constexpr,
    N_LOGITS: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: C channels of the ``joined`` streams [N, H], and their part of each logit.

    ``parts`` is [programs, WIDTH]: N_LOGITS products with ``fn`` [N_LOGITS, N H], then the sum of
    squares. The sub-block's output is ``first`` plus ``second``, as N_OUTPUTS says; without one the
    streams are only copied.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    c = tl.program_id(0) * C + tl.arange(0, C)
    inside = c < H
    logit = tl.arange(0, WIDTH)
    y = tl.zeros([C], tl.float32)
    if N_OUTPUTS > 0:
        y = tl.load(first + c, mask=inside, other=0.0)
    if N_OUTPUTS > 1:
        y += tl.load(second + c, mask=inside, other=0.0)
    products = tl.zeros([WIDTH, C], tl.float32)
    squares = tl.zeros([C], tl.float32)
    for d in tl.static_range(N):
        if N_OUTPUTS > 0:
            x = tl.load(post + d) * y
            for s in tl.static_range(N):
                stream = tl.load(streams + s * H + c, mask=inside, other=0.0)
                x += tl.load(comb + s * N + d) * stream
        else:
            x = tl.load(streams + d * H + c, mask=inside, other=0.0)
        tl.store(joined + d * H + c, x, mask=inside)
        squares += x * x
        at = logit[:, None] * (N * H) + (d * H + c)[None, :]
        rows = tl.load(fn + at, mask=(logit < N_LOGITS)[:, None] & inside[None, :], other=0.0)
        products += rows * x[None, :]
    part = tl.where(logit == N_LOGITS, tl.sum(squares, 0), tl.sum(products, 1))
    tl.store(parts + tl.program_id(0) * WIDTH + logit, part)


@triton.jit(do_not_specialize=["rms_eps", "hc_eps"])
def split_streams(
    joined,
    parts,
    scale,
    base,
    norm,
    x_out,
    post,
    comb,
    rms_eps: tl.float32,
    hc_eps: tl.float32,
    H: tl.constexpr,
    N: tl.constexpr,
    N_LOGITS: tl.constexpr,
    WIDTH: tl.constexpr,
    N_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    N_SINKHORN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: program 0 weighs ``joined`` into the normed ``x_out``, program 1 makes the rest.

    Of a head there is program 0 alone. PARTS and CHANNELS are powers of two above N_PARTS and H.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.arange(0, PARTS)
    squares = tl.load(parts + p * WIDTH + N_LOGITS, mask=p < N_PARTS, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / (N * H) + rms_eps)
    stream = tl.arange(0, N)
    if tl.program_id(0) == 0:
        pre = _logits(parts, scale, base, inverse, stream, WIDTH, N_PARTS, PARTS)
        pre = 1.0 / (1.0 + tl.exp(-pre)) + hc_eps
        c = tl.arange(0, CHANNELS)
        x = tl.zeros([CHANNELS], tl.float32)
        for s in tl.static_range(N):
            share = tl.sum(tl.where(stream == s, pre, 0.0), 0)
            x += share * tl.load(joined + s * H + c, mask=c < H, other=0.0)
        x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + rms_eps)
        tl.store(x_out + c, x * tl.load(norm + c, mask=c < H, other=0.0), mask=c < H)
    else:
        out = _logits(parts, scale, base, inverse, N + stream, WIDTH, N_PARTS, PARTS)
        tl.store(post + stream, 2.0 / (1.0 + tl.exp(-out)))
        cell = 2 * N + tl.arange(0, N * N)
        flat = _logits(parts, scale, base, inverse, cell, WIDTH, N_PARTS, PARTS)
        matrix = tl.reshape(flat, [N, N])
        matrix = tl.exp(matrix - tl.max(matrix, 1)[:, None])
        matrix = matrix / tl.sum(matrix, 1)[:, None] + hc_eps
        matrix = matrix / (tl.sum(matrix, 0)[None, :] + hc_eps)
        for _ in range(N_SINKHORN - 1):
            matrix = matrix / (tl.sum(matrix, 1)[:, None] + hc_eps)
            matrix = matrix / (tl.sum(matrix, 0)[None, :] + hc_eps)
        tl.store(comb + stream[:, None] * N + stream[None, :], matrix)


@triton.jit
def _logits(
    parts,
    scale,
    base,
    inverse,
    which,
    WIDTH: tl.constexpr,
    N_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Logits ``which`` from their parts."""
    p = tl.arange(0, PARTS)
    at = p[:, None] * WIDTH + which[None, :]
    products = tl.load(parts + at, mask=(p < N_PARTS)[:, None], other=0.0)
    return tl.sum(products, 0) * inverse * tl.load(scale + which) + tl.load(base + which)
