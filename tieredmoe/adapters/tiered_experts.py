"""Routed experts leased from a hierarchy: what a model sees of the tiers."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import torch

    from tieredmoe.adapters.protocol import Portion
    from tieredmoe.hierarchy import Hierarchy
    from tieredmoe.memory.protocol import HostSlot
    from tieredmoe.spec import MoESpec


class TieredExperts:
    """An ``ExpertProvider`` over ``hierarchy``, whose top tier is host memory.

    Every portion is a lease, released when the iteration goes on; the records are views of the
    slots, not copies.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._hierarchy = hierarchy

    @property
    def spec(self) -> MoESpec:
        """Layouts of the records."""
        return self._hierarchy.spec

    def routed(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Ignore the routing: nothing here predicts yet."""

    def executed(self, layer: int, n_pairs: int) -> None:
        """Book the (token, expert) pairs that were computed: the audit of top-k."""
        self._hierarchy.count_executed(layer, n_pairs)

    async def stream(self, layer: int, experts: Sequence[int]) -> AsyncGenerator[Portion, None]:
        """Yield ``experts`` as they land, hits first, in waves if the tier cannot hold all."""
        async with aclosing(self._hierarchy.stream(layer, experts)) as leases:
            async for lease in leases:
                yield [
                    (expert, cast("HostSlot", slot).view) for expert, slot in lease.slots.items()
                ]
