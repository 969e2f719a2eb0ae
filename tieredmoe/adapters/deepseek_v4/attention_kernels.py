# ruff: noqa: ANN001, ANN201, ANN202, PLR0917
# (device code: the compiler infers types and inlines calls)
# mypy: ignore-errors
"""Kernels of a token's attention: heads turned, its key kept, its window compressed, its shares.

Channels are handled as the pairs that turn together: vectors of the even and of the odd ones, the
pairs before the first that turns being turned by nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _turned(even, odd, turns, pair, sign, D: tl.constexpr, N_TURNING: tl.constexpr):
    """Pairs (a, b) by (cos, sin) of ``turns`` [N_TURNING, 2], which are the last ones' of D / 2."""
    k = pair - (D // 2 - N_TURNING)
    turning = (k >= 0) & (pair < D // 2)
    cosine = tl.load(turns + 2 * k, mask=turning, other=1.0)
    sine = tl.load(turns + 2 * k + 1, mask=turning, other=0.0) * sign
    return even * cosine - odd * sine, even * sine + odd * cosine


@triton.jit(do_not_specialize=["rms_eps", "sign"])
def turn_heads(
    x,
    turns,
    rms_eps: tl.float32,
    sign: tl.float32,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    N_TURNING: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: head ``program_id`` of ``x`` [heads, D] in place, normed first if asked for."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.arange(0, PAIRS)
    head = x + tl.program_id(0) * D + 2 * pair
    inside = pair < D // 2
    if not NORMED:
        inside &= pair >= D // 2 - N_TURNING
    even = tl.load(head, mask=inside, other=0.0)
    odd = tl.load(head + 1, mask=inside, other=0.0)
    if NORMED:
        inverse = 1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 0) / D + rms_eps)
        even *= inverse
        odd *= inverse
    even, odd = _turned(even, odd, turns, pair, sign, D, N_TURNING)
    tl.store(head, even, mask=inside)
    tl.store(head + 1, odd, mask=inside)


@triton.jit
def _store_normed(
    even, odd, norm, turns, rms_eps, pair, row, D: tl.constexpr, N_TURNING: tl.constexpr
):
    """A key to its row: normed, weighed, turned."""
    inside = pair < D // 2
    inverse = 1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 0) / D + rms_eps)
    even = even * inverse * tl.load(norm + 2 * pair, mask=inside, other=0.0)
    odd = odd * inverse * tl.load(norm + 2 * pair + 1, mask=inside, other=0.0)
    even, odd = _turned(even, odd, turns, pair, 1.0, D, N_TURNING)
    tl.store(row + 2 * pair, even, mask=inside)
    tl.store(row + 2 * pair + 1, odd, mask=inside)


@triton.jit(do_not_specialize=["rms_eps"])
def keep_key(
    kv,
    norm,
    turns,
    position,
    window,
    rms_eps: tl.float32,
    N_WINDOW: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    N_TURNING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel, one program: ``kv`` [D] as the key of the position, in its place of the ring."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.arange(0, PAIRS)
    even = tl.load(kv + 2 * pair, mask=pair < D // 2, other=0.0)
    odd = tl.load(kv + 2 * pair + 1, mask=pair < D // 2, other=0.0)
    row = window + (tl.load(position) % N_WINDOW) * D
    _store_normed(even, odd, norm, turns, rms_eps, pair, row, D, N_TURNING)


@triton.jit
def _add_places(
    values,
    gates,
    first,
    skipped,
    best,
    total,
    even,
    odd,
    pair,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    N_PLACES: tl.constexpr,
    S: tl.constexpr,
):
    """Take N_PLACES places from ``first`` on, except ``skipped``, into a running softmax.

    ``best`` and ``total`` (pairs of vectors) are the largest gates so far and the sums of their
    exponentials, ``even`` and ``odd`` the sums of values weighed by those.
    """
    best_even, best_odd = best
    total_even, total_odd = total
    inside = (pair < D // 2)[None, :]
    for start in range(0, N_PLACES, S):
        place = first + start + tl.arange(0, S)
        at = place[:, None] * WIDTH + 2 * pair[None, :]
        taken = inside & (place != skipped)[:, None]
        ge = tl.load(gates + at, mask=taken, other=-float("inf"))
        go = tl.load(gates + at + 1, mask=taken, other=-float("inf"))
        ve = tl.load(values + at, mask=taken, other=0.0)
        vo = tl.load(values + at + 1, mask=taken, other=0.0)
        new_even = tl.maximum(best_even, tl.max(ge, 0))
        new_odd = tl.maximum(best_odd, tl.max(go, 0))
        we = tl.exp(ge - new_even[None, :])
        wo = tl.exp(go - new_odd[None, :])
        old_even = tl.exp(best_even - new_even)
        old_odd = tl.exp(best_odd - new_odd)
        total_even = total_even * old_even + tl.sum(we, 0)
        total_odd = total_odd * old_odd + tl.sum(wo, 0)
        even = even * old_even + tl.sum(we * ve, 0)
        odd = odd * old_odd + tl.sum(wo * vo, 0)
        best_even, best_odd = new_even, new_odd
    return (best_even, best_odd), (total_even, total_odd), even, odd


@triton.jit(do_not_specialize=["rms_eps"])
def compress(
    new_values,
    new_gates,
    bias,
    values,
    gates,
    norm,
    turns,
    position,
    rows,
    rms_eps: tl.float32,
    RATIO: tl.constexpr,
    OVERLAPS: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    N_TURNING: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel, one program: a token into the ring; the row of the window that it closes, if it does.

    The token itself is taken from where it came from, so nothing just written is read.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    WIDTH: tl.constexpr = 2 * D if OVERLAPS else D
    p = tl.load(position)
    pair = tl.arange(0, PAIRS)
    inside = pair < D // 2
    place = p % (2 * RATIO) if OVERLAPS else p % RATIO
    biases = bias + (p % RATIO) * WIDTH
    if OVERLAPS:
        for i in tl.static_range(2):
            e = 2 * pair + i
            v = tl.load(new_values + e, mask=inside, other=0.0)
            g = tl.load(new_gates + e, mask=inside, other=0.0)
            g += tl.load(biases + e, mask=inside, other=0.0)
            tl.store(values + place * WIDTH + e, v, mask=inside)
            tl.store(gates + place * WIDTH + e, g, mask=inside)
    OWN: tl.constexpr = D if OVERLAPS else 0
    own = OWN + 2 * pair
    even = tl.load(new_values + own, mask=inside, other=0.0)
    odd = tl.load(new_values + own + 1, mask=inside, other=0.0)
    gate_even = tl.load(new_gates + own, mask=inside, other=0.0)
    gate_even += tl.load(biases + own, mask=inside, other=0.0)
    gate_odd = tl.load(new_gates + own + 1, mask=inside, other=0.0)
    gate_odd += tl.load(biases + own + 1, mask=inside, other=0.0)
    tl.store(values + place * WIDTH + own, even, mask=inside)
    tl.store(values + place * WIDTH + own + 1, odd, mask=inside)
    tl.store(gates + place * WIDTH + own, gate_even, mask=inside)
    tl.store(gates + place * WIDTH + own + 1, gate_odd, mask=inside)
    if p % RATIO == RATIO - 1:
        best = (gate_even, gate_odd)
        total = (tl.full([PAIRS], 1.0, tl.float32), tl.full([PAIRS], 1.0, tl.float32))
        first = place - (RATIO - 1)
        best, total, even, odd = _add_places(
            values + OWN,
            gates + OWN,
            first,
            place,
            best,
            total,
            even,
            odd,
            pair,
            D,
            WIDTH,
            RATIO,
            S,
        )
        if OVERLAPS:
            before = (first + RATIO) % (2 * RATIO)
            best, total, even, odd = _add_places(
                values, gates, before, place, best, total, even, odd, pair, D, WIDTH, RATIO, S
            )
        row = rows + (p // RATIO) * D
        _store_normed(
            even / total[0], odd / total[1], norm, turns, rms_eps, pair, row, D, N_TURNING
        )


@triton.jit(do_not_specialize=["scale"])
def share_out(
    scores,
    sinks,
    picks,
    position,
    scale: tl.float32,
    N: tl.constexpr,
    N_WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    PICKED: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: products ``scores`` [heads, N] of a head become its shares, in place.

    Columns are places of the ring, then rows: all of them, or those of ``picks``. What is not
    visible at the position gets 0, and the head's sink takes its share.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p = tl.load(position)
    n_visible = 0
    if RATIO > 0:
        n_visible = (p + 1) // RATIO
    line = scores + tl.program_id(0).to(tl.int64) * N
    sink = tl.load(sinks + tl.program_id(0))
    best = sink
    total = 1.0
    for start in range(0, N, B):
        j = start + tl.arange(0, B)
        row = j - N_WINDOW
        if PICKED:
            row = tl.load(picks + row, mask=(row >= 0) & (j < N), other=0)
        seen = (j < N) & tl.where(j < N_WINDOW, j <= p, row < n_visible)
        score = tl.load(line + j, mask=seen, other=-float("inf")) * scale
        new = tl.maximum(best, tl.max(score, 0))
        total = total * tl.exp(best - new) + tl.sum(tl.exp(score - new), 0)
        best = new
    for start in range(0, N, B):
        j = start + tl.arange(0, B)
        row = j - N_WINDOW
        if PICKED:
            row = tl.load(picks + row, mask=(row >= 0) & (j < N), other=0)
        seen = (j < N) & tl.where(j < N_WINDOW, j <= p, row < n_visible)
        score = tl.load(line + j, mask=seen, other=-float("inf")) * scale
        tl.store(line + j, tl.exp(score - best) / total, mask=j < N)
