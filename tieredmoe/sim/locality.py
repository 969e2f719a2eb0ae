"""What in a trace makes a cache work: overlap of tokens, skew, how soon experts come again.

All of it is of decoded tokens in their order, layer by layer; a prompt's chunks are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tieredmoe.sim.routing_trace import DECODE, NO_EXPERT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tieredmoe.sim.routing_trace import RoutingTrace


def lag_overlap(trace: RoutingTrace, lags: Sequence[int]) -> NDArray[np.float64]:
    """For each lag, the share of a token's experts that the token so many before it used too.

    The mean over tokens and layers; NaN for a lag that the trace is too short for.
    """
    used = _used(trace)
    means = np.full(len(lags), np.nan)
    for i, lag in enumerate(lags):
        assert lag > 0
        later = used[:, lag:]
        if later.any():
            means[i] = np.count_nonzero(later & used[:, :-lag]) / np.count_nonzero(later)
    return means


def use_counts(trace: RoutingTrace) -> NDArray[np.int64]:
    """How many decoded tokens used each expert, [L, E]."""
    counts: NDArray[np.int64] = _used(trace).sum(axis=1)
    return counts


def experts_touched(trace: RoutingTrace) -> NDArray[np.int64]:
    """How many experts of each layer were used at all, [L]."""
    touched: NDArray[np.int64] = np.count_nonzero(use_counts(trace), axis=1)
    return touched


def top_share(trace: RoutingTrace, part: float = 1 / 16) -> float:
    """The share of uses that falls on the most used ``part`` of a layer's experts, in the mean."""
    counts = np.sort(use_counts(trace), axis=1)[:, ::-1]
    n_top = max(1, round(part * counts.shape[1]))
    return float(np.mean(counts[:, :n_top].sum(axis=1) / np.maximum(1, counts.sum(axis=1))))


def reuse_in_tokens(trace: RoutingTrace) -> NDArray[np.int64]:
    """For each use of an expert but its first, how many tokens ago the last one was; unordered."""
    gaps = [
        np.diff(np.flatnonzero(of_expert))
        for of_layer in _used(trace)
        for of_expert in of_layer.T
        if of_expert.any()
    ]
    return np.concatenate(gaps) if gaps else np.empty(0, np.int64)


def reuse_in_slots(trace: RoutingTrace) -> NDArray[np.int64]:
    """For each use but the first, how many slots LRU needs for it to be a hit, in order of uses.

    That is the stack distance, the expert itself counted (Mattson et al., IBM Systems Journal 9:2,
    1970), of single lookups in the order of ranks; O(n log n).
    """
    decode = trace.experts[trace.phase == DECODE]
    layer = np.arange(len(trace.facts.layers))[:, None] * trace.facts.n_experts
    keys = np.where(decode == NO_EXPERT, -1, decode + layer).reshape(-1)
    uses: list[int] = keys[keys >= 0].tolist()
    last: dict[int, int] = {}
    tree = _Counts(len(uses))
    distances: list[int] = []
    for i, key in enumerate(uses):
        before = last.get(key)
        if before is not None:
            distances.append(tree.total - tree.up_to(before) + 1)
            tree.add(before, -1)
        tree.add(i, 1)
        last[key] = i
    return np.array(distances, np.int64)


class _Counts:
    """Counts at places 0 to n - 1 with prefix sums in O(log n) (Fenwick, 1994)."""

    def __init__(self, n: int) -> None:
        self._sums = [0] * (n + 1)
        self.total = 0

    def add(self, place: int, count: int) -> None:
        self.total += count
        i = place + 1
        while i < len(self._sums):
            self._sums[i] += count
            i += i & -i

    def up_to(self, place: int) -> int:
        """The counts of all places up to and with this one."""
        i, total = place + 1, 0
        while i:
            total += self._sums[i]
            i &= i - 1
        return total


def _used(trace: RoutingTrace) -> NDArray[np.bool_]:
    """Whether each decoded token used each expert, [L, T, E]."""
    decode = trace.experts[trace.phase == DECODE]
    n_tokens, n_layers, _ = decode.shape
    used = np.zeros((n_layers, n_tokens, trace.facts.n_experts), bool)
    token, row, rank = np.nonzero(decode != NO_EXPERT)
    used[row, token, decode[token, row, rank]] = True
    return used
