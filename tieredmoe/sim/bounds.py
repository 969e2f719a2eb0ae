"""What no policy can do better than, whatever it knows.

A pass looks every expert up at most once per layer, so whatever it hits was resident when it began:
it cannot hit more than there are slots (the cap/W ceiling, W being a token's lookups). The first
use of an expert misses in any cache. And Belady's choices, with all of the future known, are the
least misses there can be: where each miss must take a slot ("belady", of ``simulate``), and where
an expert may be used from staging and dropped (here).
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from tieredmoe.sim.routing_trace import DECODE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.sim.replay import Step
    from tieredmoe.sim.routing_trace import RoutingTrace


def ceiling(trace: RoutingTrace, n_slots: int) -> float:
    """The highest hit rate of decoded tokens that ``n_slots`` allow: min(1, slots / W) for each.

    NaN without decoded tokens.
    """
    hits = lookups = 0
    for n in _decode_lookups(trace):
        lookups += n
        hits += min(n, n_slots)
    return hits / lookups if lookups else float("nan")


def compulsory_misses(trace: RoutingTrace) -> int:
    """Distinct experts used at all, in any phase: each misses once in any cache."""
    return len({(layer, expert) for layer, experts in trace.steps() for expert in experts})


def belady_with_bypass(steps: Sequence[Step], n_slots: int) -> list[int]:
    """The misses of each step if every victim, and what to keep at all, is chosen with foresight.

    After each step the ``n_slots`` experts stay, of those resident and those just used, whose next
    use is soonest. Source: Belady, IBM Systems Journal 5:2, 1966, with bypassing.
    """
    nexts = _next_uses(steps)
    resident: dict[tuple[int, int], float] = {}
    last: list[tuple[float, tuple[int, int]]] = []
    misses: list[int] = []
    for (layer, experts), next_use in zip(steps, nexts, strict=True):
        n_missed = 0
        for expert, use in zip(experts, next_use, strict=True):
            key = (layer, expert)
            n_missed += key not in resident
            resident[key] = use
            heappush(last, (-use, key))
        while len(resident) > n_slots:
            use, key = heappop(last)
            if resident.get(key) == -use:
                del resident[key]
        misses.append(n_missed)
    return misses


def _next_uses(steps: Sequence[Step]) -> list[list[float]]:
    """For each use, the step of the next one of the same expert; never is infinite."""
    next_of: defaultdict[tuple[int, int], float] = defaultdict(lambda: inf)
    nexts: list[list[float]] = []
    for i in range(len(steps) - 1, -1, -1):
        layer, experts = steps[i]
        nexts.append([next_of[layer, expert] for expert in experts])
        for expert in experts:
            next_of[layer, expert] = i
    nexts.reverse()
    return nexts


def _decode_lookups(trace: RoutingTrace) -> list[int]:
    """The lookups of each decoded pass."""
    steps = [len(step.experts) for step in trace.steps()]
    n_layers = len(trace.facts.layers)
    return [
        sum(steps[i * n_layers : (i + 1) * n_layers])
        for i, (start, _) in enumerate(trace.spans())
        if trace.phase[start] == DECODE
    ]
