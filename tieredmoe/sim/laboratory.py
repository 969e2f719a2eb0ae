"""The policies that a replay can run: production's, those for comparison, and the one that knows.

The latter two are for replays only, so they have no names in a configuration.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from tieredmoe.errors import ConfigError
from tieredmoe.policies import POLICIES
from tieredmoe.sim.arc import ARCPolicy
from tieredmoe.sim.belady import BeladyPolicy
from tieredmoe.sim.fifo import FIFOPolicy
from tieredmoe.sim.lfu import LFUPolicy
from tieredmoe.sim.sieve import SIEVEPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tieredmoe.policies import EvictionPolicy, PolicyFactory
    from tieredmoe.sim.replay import Step
    from tieredmoe.sim.routing_trace import ModelFacts

COMPARED: Mapping[str, PolicyFactory] = MappingProxyType(
    {"fifo": FIFOPolicy, "lfu": LFUPolicy, "sieve": SIEVEPolicy, "arc": ARCPolicy}
)
"""Policies of the literature, for comparison."""

BELADY = "belady"

REPLAYABLE = (*POLICIES, *COMPARED, BELADY)
"""The names of all."""


def replayable_policy(
    name: str, *, n_slots: int, facts: ModelFacts, steps: Sequence[Step]
) -> EvictionPolicy:
    """The policy called ``name`` for a replay of ``steps``; raises ``ConfigError`` for others."""
    if name == BELADY:
        return BeladyPolicy(steps)
    factory = POLICIES.get(name) or COMPARED.get(name)
    if factory is None:
        raise ConfigError(f"unknown policy {name!r}; a replay knows: {', '.join(REPLAYABLE)}")
    return factory(n_slots=n_slots, layers=facts.layers, top_k=facts.top_k)
