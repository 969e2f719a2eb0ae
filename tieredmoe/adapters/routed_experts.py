"""One layer's routed experts on the host, from their records to their weighted sum."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from tieredmoe.moe.reference import Record, RoutedBatch, expert_matrices

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tieredmoe.adapters.routing import Routing
    from tieredmoe.moe.reference import Activation
    from tieredmoe.spec import MoESpec

T = TypeVar("T")

Portion = Iterable[tuple[int, Record]]
"""Experts that are there now, with their records; usable until the iteration goes on."""


class Records(Protocol):
    """Where the records of experts come from, into host memory."""

    @property
    def spec(self) -> MoESpec:
        """Layouts of the records that ``stream`` hands out."""

    def executed(self, layer: int, n_pairs: int) -> None:
        """``n_pairs`` (token, expert) pairs of ``layer`` have been computed: the audit of top-k."""

    def stream(self, layer: int, experts: Sequence[int]) -> AsyncGenerator[Portion, None]:
        """Yield portions that together hold each of ``experts`` (distinct) exactly once.

        Transfers may begin at the call, so it pays to compute something before iterating. A portion
        is given back when the iteration goes on or the generator is closed: whoever stops early
        calls ``aclose`` (``contextlib.aclosing``). Raises ``ExpertLoadError`` for an expert that
        cannot be had.
        """


async def run_routed(
    layer: int,
    x: torch.Tensor,
    routing: Routing,
    activation: Activation,
    records: Records,
    *,
    meanwhile: Callable[[], T],
) -> tuple[torch.Tensor, T]:
    """``ExpertProvider.run`` by the reference: float32 throughout, in the caller's thread.

    Asks ``records`` once for the distinct experts of all tokens.
    """
    batch = RoutedBatch(x, routing.ids, routing.weights, activation)
    layout = records.spec.layouts[layer]
    async with contextlib.aclosing(records.stream(layer, batch.experts)) as portions:
        other = meanwhile()
        async for portion in portions:
            for expert, record in portion:
                batch.add(expert, *expert_matrices(record, layout))
    routed = batch.finish()
    records.executed(layer, batch.n_executed)
    return routed, other
