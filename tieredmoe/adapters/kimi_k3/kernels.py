# ruff: noqa: ANN001, ANN201, ANN202, PLR0917, RUF005
# (device code: the compiler infers types, prunes branches, knows no unpacking, inlines calls)
# mypy: ignore-errors
"""Between the matrices of one token: the residual mix, the recurrence, the router.

Each kernel is what ``PlainOperations`` does in its method of that name, in float32. A layer's small
operations are thirty launches in torch; a launch costs as long as the reading of 5 MB of weights.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

VARYING = ["last", "n_terms", "restart"]
"""Arguments that change from launch to launch: specialising on them would add binaries."""


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _totals(parts, LOG: tl.constexpr):
    """The sums of 2^LOG tensors [n] as one tensor [2^LOG], in one trip between warps."""
    N: tl.constexpr = 2**LOG
    level = parts
    for depth in tl.static_range(LOG):
        # Number k with number k + half, so that they end up in order.
        joined = ()
        for k in tl.static_range(N >> (depth + 1)):
            joined = joined + (tl.join(level[k], level[k + (N >> (depth + 1))]),)
        level = joined
    return tl.sum(tl.reshape(level[0], [parts[0].shape[0], N]), 0)


@triton.jit
def _quarter(x, B: tl.constexpr):
    """Sums of four neighbours, which one lane holds: [B] to [B / 4]."""
    return tl.sum(tl.reshape(x, [B // 4, 4]), 1)


@triton.jit
def _shares(dots, squares, x_dot, x_square, last, H: tl.constexpr, LOG: tl.constexpr, EPS):
    """The softmax over the bank, [2^LOG] of which ``last`` count, and the stream."""
    row = tl.arange(0, 2**LOG)
    logits = _totals(dots, LOG) * tl.rsqrt(_totals(squares, LOG) / H + EPS)
    logits = tl.where(row < last, logits, float("-inf"))
    x_logit = tl.sum(x_dot, 0) * tl.rsqrt(tl.sum(x_square, 0) / H + EPS)
    highest = tl.maximum(tl.max(logits, 0), x_logit)
    p = tl.exp(logits - highest)
    x_p = tl.exp(x_logit - highest)
    total = tl.sum(p, 0) + x_p
    return p / total, x_p / total


@triton.jit(do_not_specialize=VARYING)
def mix(
    streams,
    first,
    second,
    score,
    weight,
    out,
    last: tl.int32,
    n_terms: tl.int32,
    restart: tl.int32,
    H: tl.constexpr,
    LOG_BANK: tl.constexpr,
    EPS: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: one program; ``2^LOG_BANK`` is at least ``last``, the number of streams in the bank.

    The stream stays in registers. The bank is read twice, the second time from the nearest cache,
    by lanes that own their channels: streams meet in a lane, so only sums cross between warps.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    CHUNKS: tl.constexpr = (H + B - 1) // B
    stream = ()
    scores = ()
    x_dot = tl.zeros([B // 4], tl.float32)
    x_square = tl.zeros([B // 4], tl.float32)
    for i in tl.static_range(CHUNKS):
        e = i * B + tl.arange(0, B)
        x = tl.load(streams + last * H + e, mask=(e < H) & (restart == 0), other=0.0)
        a = tl.load(first + e, mask=(e < H) & (n_terms > 0), other=0.0)
        x += a + tl.load(second + e, mask=(e < H) & (n_terms > 1), other=0.0)
        tl.store(streams + last * H + e, x, mask=e < H)
        s = tl.load(score + e, mask=e < H, other=0.0)
        x_dot += _quarter(x * s, B)
        x_square += _quarter(x * x, B)
        stream = stream + (x,)
        scores = scores + (s,)
    dots = ()
    squares = ()
    for r in tl.static_range(2**LOG_BANK):
        dot = tl.zeros([B // 4], tl.float32)
        square = tl.zeros([B // 4], tl.float32)
        for i in tl.static_range(CHUNKS):
            v = _banked(streams, r, i, last, H, B)
            dot += _quarter(v * scores[i], B)
            square += _quarter(v * v, B)
        dots = dots + (dot,)
        squares = squares + (square,)
    p, x_p = _shares(dots, squares, x_dot, x_square, last, H, LOG_BANK, EPS)
    read = ()
    energy = tl.zeros([B // 4], tl.float32)
    for i in tl.static_range(CHUNKS):
        h = x_p * stream[i]
        for r in tl.static_range(2**LOG_BANK):
            share = tl.sum(tl.where(tl.arange(0, 2**LOG_BANK) == r, p, 0.0), 0)
            h += share * _banked(streams, r, i, last, H, B)
        energy += _quarter(h * h, B)
        read = read + (h,)
    scale = tl.rsqrt(tl.sum(energy, 0) / H + EPS)
    for i in tl.static_range(CHUNKS):
        e = i * B + tl.arange(0, B)
        w = tl.load(weight + e, mask=e < H, other=0.0)
        tl.store(out + e, read[i] * scale * w, mask=e < H)


@triton.jit
def _banked(streams, r, i, last, H: tl.constexpr, B: tl.constexpr):
    """Chunk ``i`` of stream ``r`` of the bank, zeros if it has fewer."""
    e = i * B + tl.arange(0, B)
    return tl.load(streams + r * H + e, mask=(e < H) & (r < last), other=0.0)


@triton.jit
def _convolved(now, at, column, mask, ring, taps, position, W3: tl.constexpr, KERNEL: tl.constexpr):
    """The convolution's newest output through silu, for channels ``column``; keeps ``now`` there.

    ``taps`` is [3 width, KERNEL], the last one the current token's.
    """
    x = tl.load(now + at, mask=mask, other=0.0)
    tap = taps + column * KERNEL
    total = x * tl.load(tap + (KERNEL - 1), mask=mask, other=0.0)
    for age in tl.static_range(1, KERNEL):
        place = (position + (KERNEL - age)) % KERNEL
        past = tl.load(ring + place * W3 + column, mask=mask, other=0.0)
        total += past * tl.load(tap + (KERNEL - 1 - age), mask=mask, other=0.0)
    tl.store(ring + (position % KERNEL) * W3 + column, x, mask=mask)
    return total * _sigmoid(total)


@triton.jit
def recur(
    q_now,
    k_now,
    v_now,
    decays,
    strengths,
    gate,
    taps,
    bias,
    negative_rates,
    norm,
    ring,
    memory,
    position_at,
    out,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    KERNEL: tl.constexpr,
    BOUND: tl.constexpr,
    EPS: tl.constexpr,
    UNIT_EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: one program per head: its matrix is read once, kept in registers, written once.

    ``DP`` is the power of two at or above ``D``, the channels of a head.
    """
    W: tl.constexpr = HEADS * D
    head = tl.program_id(0)
    # Not written by the kernel in front of this one, so they may be read while that still runs.
    position = tl.load(position_at)
    c = tl.arange(0, DP)
    mask = c < D
    inside = mask[:, None] & mask[None, :]
    cell = c[:, None] * D + c[None, :]
    before = memory + ((position % 2) * HEADS + head) * (D * D)
    S = tl.load(before + cell, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = head * D + c
    q = _convolved(q_now, at, at, mask, ring, taps, position, 3 * W, KERNEL)
    k = _convolved(k_now, at, W + at, mask, ring, taps, position, 3 * W, KERNEL)
    v = _convolved(v_now, at, 2 * W + at, mask, ring, taps, position, 3 * W, KERNEL)
    q *= tl.rsqrt(tl.sum(q * q, 0) + UNIT_EPS) * (D**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + UNIT_EPS)
    f = tl.load(decays + at, mask=mask, other=0.0) + tl.load(bias + at, mask=mask, other=0.0)
    decay = tl.exp(BOUND * _sigmoid(-tl.load(negative_rates + head) * f))
    S *= decay[:, None]
    error = v - tl.sum(S * k[:, None], 0)
    S += k[:, None] * (error * _sigmoid(tl.load(strengths + head)))[None, :]
    after = memory + (((position + 1) % 2) * HEADS + head) * (D * D)
    tl.store(after + cell, S, mask=inside)
    o = tl.sum(S * q[:, None], 0)
    o *= tl.rsqrt(tl.sum(o * o, 0) / D + EPS) * tl.load(norm + c, mask=mask, other=0.0)
    o *= _sigmoid(tl.load(gate + at, mask=mask, other=0.0))
    tl.store(out + at, o, mask=mask)


@triton.jit
def choose(
    logits,
    bias,
    ids,
    weights,
    E: tl.constexpr,
    B: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: one program; the K experts of highest biased score, equal ones by number.

    ``B`` and ``KB`` are powers of two at or above ``E`` and ``K``.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.arange(0, B)
    valid = e < E
    score = _sigmoid(tl.load(logits + e, mask=valid, other=0.0))
    biased = score + tl.load(bias + e, mask=valid, other=0.0)
    # Undefined scores come first, as in a sort; whoever is no expert, or is chosen, comes last.
    biased = tl.where(biased == biased, biased, float("inf"))  # noqa: PLR0124 (a NaN is not)
    biased = tl.where(valid, biased, float("-inf"))
    place = tl.arange(0, KB)
    chosen = tl.zeros([KB], tl.int32)
    for i in range(K):
        best = tl.argmax(biased, 0)
        chosen = tl.where(place == i, best, chosen)
        biased = tl.where(e == best, float("-inf"), biased)
    weight = _sigmoid(tl.load(logits + chosen, mask=place < K, other=float("-inf")))
    weight = weight / (tl.sum(weight, 0) + 1e-20) * SCALE
    tl.store(ids + place, chosen.to(tl.int64), mask=place < K)
    tl.store(weights + place, weight, mask=place < K)
