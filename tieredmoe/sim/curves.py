"""Hit rates over budgets: one replay per policy and number of slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from tieredmoe.sim.bounds import ceiling
from tieredmoe.sim.laboratory import BELADY
from tieredmoe.sim.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from tieredmoe.sim.routing_trace import ModelFacts, RoutingTrace


@attrs.frozen(eq=False)
class Curves:
    """Hit rates of decoded tokens at ``n_slots`` [S]: by policy, Belady's, and the ceiling's."""

    facts: ModelFacts
    n_slots: tuple[int, ...]
    hit_rates: Mapping[str, NDArray[np.float64]]
    belady: NDArray[np.float64]
    ceiling: NDArray[np.float64]


def hit_rate_curves(trace: RoutingTrace, policies: Sequence[str], n_slots: Sequence[int]) -> Curves:
    """Replay ``trace`` from a cold start for each of ``policies`` at each of ``n_slots``.

    Raises as ``simulate`` does. Takes policies × sizes times as long as one replay.
    """
    rates = {
        policy: np.array([simulate(trace, n_slots=n, policy=policy).hit_rate() for n in n_slots])
        for policy in (*policies, BELADY)
    }
    belady = rates[BELADY]
    return Curves(
        facts=trace.facts,
        n_slots=tuple(n_slots),
        hit_rates={policy: rates[policy] for policy in policies},
        belady=belady,
        ceiling=np.array([ceiling(trace, n) for n in n_slots]),
    )


def slots_between(facts: ModelFacts, n_sizes: int = 8) -> tuple[int, ...]:
    """Sizes to draw a curve over: from one layer's experts to all of the model's, evenly by ratio.

    W is one of them, since that is where recency begins to hit.
    """
    sizes = np.geomspace(max(facts.top_k, facts.cycle // 4), facts.n_records, n_sizes)
    return tuple(sorted({round(float(size)) for size in sizes} | {facts.cycle}))
