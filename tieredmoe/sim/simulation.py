"""A trace through simulated tiers: what each layer of each pass hit and missed, in arrays.

The tiers are those of production (``replay_steps``, ``replay_kept``); here their outcomes are kept
by pass and layer, so that rates by layer and over time, bytes and step times all come from one run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from tieredmoe.errors import BudgetError
from tieredmoe.policies import make_policy
from tieredmoe.residency import Residency
from tieredmoe.sim.kept import replay_kept
from tieredmoe.sim.laboratory import replayable_policy
from tieredmoe.sim.replay import Step, replay_steps
from tieredmoe.sim.routing_trace import DECODE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tieredmoe.sim.routing_trace import ModelFacts, RoutingTrace
    from tieredmoe.spec import ExpertKey


@attrs.frozen(eq=False)
class CacheRun:
    """What a replay counted, all [P passes, L layers]: distinct experts asked for, and outcomes.

    ``misses`` are those of the top tier, ``reads`` what no tier had, so ``misses - reads`` came
    from RAM; ``evictions`` are of the top tier, counted at the layer that needed the slot.
    ``phase`` [P] is each pass's.
    """

    facts: ModelFacts
    policy: str
    n_slots: int
    n_ram_slots: int
    phase: NDArray[np.int8]
    lookups: NDArray[np.int64]
    misses: NDArray[np.int64]
    reads: NDArray[np.int64]
    evictions: NDArray[np.int64]

    def hit_rate(self, *, phase: int | None = DECODE) -> float:
        """Hits of the top tier per lookup, of one phase or (None) of all; NaN without lookups."""
        return _share_left(self.misses, self.lookups, self._of(phase))

    def kept_rate(self, *, phase: int | None = DECODE) -> float:
        """Lookups that needed no read, per lookup: hits of any tier; NaN without lookups."""
        return _share_left(self.reads, self.lookups, self._of(phase))

    def hit_rate_by_layer(self, *, phase: int | None = DECODE) -> NDArray[np.float64]:
        """Hits of the top tier per lookup, [L]; NaN for a layer without lookups."""
        chosen = self._of(phase)
        lookups = self.lookups[chosen].sum(axis=0).astype(float)
        lookups[lookups == 0] = np.nan
        rate: NDArray[np.float64] = 1 - self.misses[chosen].sum(axis=0) / lookups
        return rate

    def hit_rate_over_time(self, n_passes: int) -> NDArray[np.float64]:
        """Hits of the top tier per lookup, of every ``n_passes`` passes that follow each other."""
        starts = np.arange(0, len(self.phase), n_passes)
        lookups = np.add.reduceat(self.lookups.sum(axis=1), starts) if len(starts) else starts
        misses = np.add.reduceat(self.misses.sum(axis=1), starts) if len(starts) else starts
        return 1 - misses / np.maximum(1, lookups)

    def _of(self, phase: int | None) -> NDArray[np.bool_]:
        return np.ones(len(self.phase), bool) if phase is None else self.phase == phase


def simulate(
    trace: RoutingTrace, *, n_slots: int, policy: str = "lrfu", n_ram_slots: int = 0
) -> CacheRun:
    """``trace`` from a cold start through ``n_slots`` under ``policy`` (one of ``REPLAYABLE``).

    With ``n_ram_slots`` a tier below them keeps what is evicted, as production's does. The union of
    a chunk that has more experts than there are slots is served in waves. Raises ``BudgetError``
    for fewer slots than a token's experts of one layer, and ``ConfigError`` for an unknown policy.
    """
    facts = trace.facts
    if n_slots < facts.top_k:
        raise BudgetError(
            f"{n_slots} slots cannot hold the {facts.top_k} experts that one layer of one token "
            "needs; give the top tier more memory"
        )
    places: list[int] = []
    steps: list[Step] = []
    for place, step in enumerate(trace.steps()):
        for wave in _waves(step, n_slots):
            places.append(place)
            steps.append(wave)
    made = replayable_policy(policy, n_slots=n_slots, facts=facts, steps=steps)
    top = Residency(n_slots, made)
    lookups, misses, reads, evictions = np.zeros((4, trace.n_passes * len(facts.layers)), np.int64)
    evicted = 0
    outcomes = _outcomes(steps, top, n_ram_slots, facts)
    spans = list(trace.spans())
    for place, step, missed in zip(places, steps, outcomes, strict=True):
        if trace.probabilities is not None:
            i, row = divmod(place, len(facts.layers))
            top.observe(
                step.layer, trace.probabilities[slice(*spans[i]), row].mean(axis=0, dtype=float)
            )
        lookups[place] += len(step.experts)
        misses[place] += len(missed[0])
        reads[place] += len(missed[-1])
        evictions[place] += top.evictions - evicted
        evicted = top.evictions
    shape = (trace.n_passes, len(facts.layers))
    return CacheRun(
        facts=facts,
        policy=policy,
        n_slots=n_slots,
        n_ram_slots=n_ram_slots,
        phase=trace.phase[[start for start, _ in spans]],
        lookups=lookups.reshape(shape),
        misses=misses.reshape(shape),
        reads=reads.reshape(shape),
        evictions=evictions.reshape(shape),
    )


def _waves(step: Step, n_slots: int) -> Iterator[Step]:
    if len(step.experts) <= n_slots:
        yield step
        return
    for start in range(0, len(step.experts), n_slots):
        yield Step(step.layer, step.experts[start : start + n_slots])


def _outcomes(
    steps: list[Step], top: Residency, n_ram_slots: int, facts: ModelFacts
) -> Iterator[list[list[ExpertKey]]]:
    """What each tier missed, step by step."""
    if not n_ram_slots:
        return ([missed] for missed in replay_steps(steps, top))
    lru = make_policy("lru", n_slots=n_ram_slots, layers=facts.layers, top_k=facts.top_k)
    return replay_kept(steps, (top, Residency(n_ram_slots, lru)))


def _share_left(
    gone: NDArray[np.int64], all_of: NDArray[np.int64], chosen: NDArray[np.bool_]
) -> float:
    n_all = int(all_of[chosen].sum())
    return (n_all - int(gone[chosen].sum())) / n_all if n_all else float("nan")
