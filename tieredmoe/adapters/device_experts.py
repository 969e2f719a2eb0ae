"""Routed experts that lie and run on a device: what a model there sees of the tiers.

The ids of a layer come to the host, its experts into slots of the device's arena, in whatever order
and waves the tiers have them; kernels find them there by a table. The host never waits for the
device but for ids.
"""

from __future__ import annotations

from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from tieredmoe.adapters.device_graphs import current_stream
from tieredmoe.adapters.device_ids import HostIds
from tieredmoe.adapters.device_stepper import DeviceStepper
from tieredmoe.adapters.routing import Routing

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Iterator,
        Mapping,
        Sequence,
    )

    from tieredmoe.adapters.decode_step import DecodeStep
    from tieredmoe.adapters.device_batches import DeviceBatches
    from tieredmoe.moe.activation import FusedActivation

T = TypeVar("T")


class SlotLease(Protocol):
    """A hold on experts in slots of a device; see ``tieredmoe.lease.Lease``."""

    @property
    def experts(self) -> tuple[int, ...]:
        """The distinct experts held."""

    @property
    def slots(self) -> Mapping[int, object]:
        """The slots of those that have landed."""

    def as_completed(self) -> AsyncIterator[int]:
        """Yield every expert once: hits at once, then misses as they land."""

    def wait_on(self, stream: object) -> None:
        """Order all later work of ``stream`` after the copies of the landed experts."""

    def release(self) -> None:
        """Give every pin back, after what the streams of ``wait_on`` have been given."""


class SlotTiers(Protocol):
    """Tiers whose top is a device's arena: a ``Hierarchy``, or one on a thread of its own."""

    def acquire(self, layer: int, experts: Sequence[int]) -> Awaitable[SlotLease]:
        """A lease on ``experts``, as soon as each has a slot."""

    def stream(self, layer: int, experts: Sequence[int]) -> AsyncGenerator[SlotLease, None]:
        """Leases that together hold each expert once, as they land."""

    def count_executed(self, layer: int, n_pairs: int) -> None:
        """Book (token, expert) pairs that were computed: the audit of top-k."""


class DeviceExperts:
    """An ``ExpertProvider`` over ``tiers``, by kernels on the slots of their arena.

    One call at a time, and nothing else uses the workspace of ``batches`` meanwhile, as
    ``DeviceModel`` sees to. All its work goes to the stream on which the caller's goes.
    """

    def __init__(self, tiers: SlotTiers, batches: DeviceBatches) -> None:
        self.tiers = tiers
        self.batches = batches
        self._ids = HostIds(batches.device)
        self._is_running = False

    async def run(
        self,
        layer: int,
        x: torch.Tensor,
        routing: Routing,
        activation: FusedActivation,
        *,
        meanwhile: Callable[[], T],
    ) -> tuple[torch.Tensor, T]:
        """``ExpertProvider.run``; more tokens than the workspace is for go in several batches."""
        with self.turn():
            self._ids.send(routing.ids)
            other = meanwhile()
            host_ids = self._ids.wait()
            n = self.batches.n_tokens
            if len(host_ids) <= n:
                return await self._run(layer, x, routing, activation, host_ids), other
            sums = []
            for at in range(0, len(host_ids), n):
                rows = slice(at, at + n)
                part = Routing(routing.ids[rows], routing.weights[rows])
                total = await self._run(layer, x[rows], part, activation, host_ids[rows])
                sums.append(total.clone())
            return torch.cat(sums), other

    def stepper(self, step: DecodeStep[Any]) -> DeviceStepper:
        """What runs the tokens of ``step`` as recorded graphs."""
        return DeviceStepper(step, self)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Use the workspace; nobody else does."""
        assert not self._is_running, "two calls at a time share one workspace"
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    async def _run(
        self,
        layer: int,
        x: torch.Tensor,
        routing: Routing,
        activation: FusedActivation,
        host_ids: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        stream = current_stream(self.batches.device)
        batch = self.batches.open(layer, x, routing, activation, host_ids=host_ids)
        async with aclosing(self.tiers.stream(layer, batch.experts)) as leases:
            async for lease in leases:
                lease.wait_on(stream)
                batch.add(lease.experts)
        total = batch.finish()
        self.tiers.count_executed(layer, batch.n_executed)
        return total
