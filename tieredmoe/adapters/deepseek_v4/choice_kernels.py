# ruff: noqa: ANN001, ANN201, ANN202, PLR0124, PLR0917
# (device code: the compiler infers types, inlines calls, has no isnan)
# mypy: ignore-errors
"""Kernels that choose for one token: compressed rows by their scores, experts by theirs.

Among equals the lower number is chosen, as everywhere. The best rows are found by counting, for
each, how many are better: one launch, where a sort of a few thousand takes several.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["scale"])
def score_rows(
    products,
    weights,
    position,
    scores,
    scale: tl.float32,
    N_ROWS: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: ``scores`` of B rows, -inf where they are not visible.

    ``products`` [N_HEADS, N_ROWS] are of queries and rows, ``weights`` [N_HEADS] to be scaled;
    HEADS is the power of two that holds them. Formula: ``Indexer.pick``.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n_visible = (tl.load(position) + 1) // RATIO
    row = tl.program_id(0) * B + tl.arange(0, B)
    h = tl.arange(0, HEADS)
    seen = row < n_visible
    at = h[:, None] * N_ROWS + row[None, :]
    product = tl.load(products + at, mask=(h < N_HEADS)[:, None] & seen[None, :], other=0.0)
    weight = tl.load(weights + h, mask=h < N_HEADS, other=0.0) * scale
    score = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)
    tl.store(scores + row, tl.where(seen, score, -float("inf")), mask=row < N_ROWS)


@triton.jit
def rank_rows(
    scores,
    picks,
    N_ROWS: tl.constexpr,
    N_PICKS: tl.constexpr,
    B: tl.constexpr,
    OTHERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel: the numbers of B rows, those among the N_PICKS best, to their ranks in ``picks``."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * B + tl.arange(0, B)
    mine = tl.load(scores + row, mask=row < N_ROWS, other=-float("inf"))
    rank = tl.zeros([B], tl.int32)
    for start in range(0, N_ROWS, OTHERS):
        other = start + tl.arange(0, OTHERS)
        theirs = tl.load(scores + other, mask=other < N_ROWS, other=-float("inf"))
        better = theirs[None, :] > mine[:, None]
        first = (theirs[None, :] == mine[:, None]) & (other[None, :] < row[:, None])
        rank += tl.sum((better | first).to(tl.int32), 1)
    tl.store(picks + rank, row.to(tl.int64), mask=(row < N_ROWS) & (rank < N_PICKS))


@triton.jit
def _score(logit):
    """The square root of softplus: ``log(1 + x)`` from ``log`` as HP's manual of 1982 has it."""
    e = tl.exp(-tl.abs(logit))
    u = 1.0 + e
    tail = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.sqrt(tl.maximum(logit, 0.0) + tail)


@triton.jit(do_not_specialize=["scale"])
def route_by_score(
    logits,
    bias,
    ids,
    weights,
    scale: tl.float32,
    N_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel, one program: the TOP_K experts of highest biased score, and their weights."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.arange(0, EXPERTS)
    inside = e < N_EXPERTS
    score = _score(tl.load(logits + e, mask=inside, other=0.0))
    left = score + tl.load(bias + e, mask=inside, other=0.0)
    # An undefined score comes first, as in a sort; there is an expert to choose in any case.
    left = tl.where(left != left, float("inf"), left)
    left = tl.where(inside, left, -float("inf"))
    k = tl.arange(0, K)
    chosen = tl.zeros([K], tl.int32)
    chosen_score = tl.zeros([K], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, 0), e, EXPERTS), 0)
        chosen = tl.where(k == i, best, chosen)
        chosen_score = tl.where(k == i, tl.sum(tl.where(e == best, score, 0.0), 0), chosen_score)
        left = tl.where(e == best, float("-inf"), left)
    tl.store(ids + k, chosen.to(tl.int64), mask=k < TOP_K)
    total = tl.sum(chosen_score, 0)
    tl.store(weights + k, chosen_score / (total + 1e-20) * scale, mask=k < TOP_K)


@triton.jit(do_not_specialize=["scale"])
def route_by_token(
    logits,
    table,
    token,
    ids,
    weights,
    scale: tl.float32,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Kernel, one program: the experts that ``table`` [vocab, TOP_K] has for the token's id."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    k = tl.arange(0, K)
    inside = k < TOP_K
    chosen = tl.load(table + tl.load(token) * TOP_K + k, mask=inside, other=0)
    score = tl.where(inside, _score(tl.load(logits + chosen)), 0.0)
    tl.store(ids + k, chosen, mask=inside)
    tl.store(weights + k, score / (tl.sum(score, 0) + 1e-20) * scale, mask=inside)
