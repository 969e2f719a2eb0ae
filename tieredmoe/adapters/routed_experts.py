"""One layer's routed experts, from their provider to their weighted sum."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tieredmoe.moe.reference import RoutedBatch, expert_matrices

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tieredmoe.adapters.protocol import ExpertProvider
    from tieredmoe.adapters.routing import Routing
    from tieredmoe.moe.reference import Activation


async def run_routed(
    layer: int,
    x: torch.Tensor,
    routing: Routing,
    activation: Activation,
    experts: ExpertProvider,
    *,
    meanwhile: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of the experts' outputs, float32 [T, n] like ``x``, and ``meanwhile``'s.

    Asks the provider once for the distinct experts of all T tokens and executes every one that was
    chosen, in whatever order they come. ``meanwhile`` is called while the first ones are on their
    way; its result is handed through. Raises what the provider raises; then, or cancelled, it has
    given back what the provider lent and booked nothing as executed.
    """
    experts.routed(layer, routing.ids, routing.weights)
    batch = RoutedBatch(x, routing.ids, routing.weights, activation)
    layout = experts.spec.layouts[layer]
    async with contextlib.aclosing(experts.stream(layer, batch.experts)) as portions:
        other = meanwhile()
        async for portion in portions:
            for expert, record in portion:
                batch.add(expert, *expert_matrices(record, layout))
    routed = batch.finish()
    experts.executed(layer, batch.n_executed)
    return routed, other
