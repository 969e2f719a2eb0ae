"""Routed experts leased from a hierarchy: what a model on the host sees of the tiers."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tieredmoe.adapters.routed_experts import run_routed
from tieredmoe.adapters.stepper import EagerStepper

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    import torch

    from tieredmoe.adapters.decode_step import DecodeStep
    from tieredmoe.adapters.routed_experts import Portion
    from tieredmoe.adapters.routing import Routing
    from tieredmoe.hierarchy import Hierarchy
    from tieredmoe.memory.protocol import HostSlot
    from tieredmoe.moe.reference import Activation
    from tieredmoe.spec import MoESpec
    from tieredmoe.threaded import ThreadedHierarchy

T = TypeVar("T")


class TieredExperts:
    """An ``ExpertProvider`` over ``hierarchy``, whose top tier is host memory.

    Every portion is a lease, released when the iteration goes on; the records are views of the
    slots, not copies.
    """

    def __init__(self, hierarchy: Hierarchy | ThreadedHierarchy) -> None:
        self._hierarchy = hierarchy

    async def run(
        self,
        layer: int,
        x: torch.Tensor,
        routing: Routing,
        activation: Activation,
        *,
        meanwhile: Callable[[], T],
    ) -> tuple[torch.Tensor, T]:
        """``ExpertProvider.run``, on the host; books the pairs that were computed."""
        return await run_routed(layer, x, routing, activation, self, meanwhile=meanwhile)

    def stepper(self, step: DecodeStep[Any]) -> EagerStepper:
        """What runs the tokens of ``step``, segment by segment."""
        return EagerStepper(step, self)

    @property
    def spec(self) -> MoESpec:
        """Layouts of the records."""
        return self._hierarchy.spec

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
