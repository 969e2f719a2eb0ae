"""Every routed expert in a device's memory: the plain run that tiered runs there are measured with.

It looks like tiers in which everything is resident, so that the same kernels and the same decode
steps run over it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from tieredmoe.adapters.dense_experts import DenseExperts


class DenseTiers:
    """The records of ``dense`` as the slots of one arena on ``device``; tiers and arena in one."""

    def __init__(self, dense: DenseExperts, device: torch.device) -> None:
        spec = dense.spec
        n_slots = len(spec.layers) * spec.n_experts
        stride = max(layout.stride for layout in spec.layouts.values())
        self.tensor = torch.zeros((n_slots, stride), dtype=torch.uint8, device=device)
        tables = {}
        for n, (layer, records) in enumerate(dense.records.items()):
            first = n * spec.n_experts
            slots = self.tensor[first : first + spec.n_experts]
            slots[:, : records.shape[1]] = records.to(device)
            tables[layer] = torch.arange(
                first, first + spec.n_experts, dtype=torch.int32, device=device
            )
        self._tables = MappingProxyType(tables)

    def slot_of(self, layer: int) -> torch.Tensor:
        """int32 [experts]: the slot of each expert of ``layer``."""
        return self._tables[layer]

    async def acquire(self, layer: int, experts: Sequence[int]) -> DenseLease:
        """A lease on ``experts``: there is nothing to wait for."""
        return DenseLease(layer, tuple(dict.fromkeys(experts)))

    async def stream(self, layer: int, experts: Sequence[int]) -> AsyncGenerator[DenseLease, None]:
        """Yield one lease on all ``experts``."""
        yield await self.acquire(layer, experts)

    def count_executed(self, layer: int, n_pairs: int) -> None:
        """Ignore the audit: no counters are kept."""


class DenseLease:
    """A hold on experts that nobody takes away."""

    def __init__(self, layer: int, experts: tuple[int, ...]) -> None:
        self.layer = layer
        self.experts = experts

    @property
    def slots(self) -> Mapping[int, None]:
        """The experts, all there; where they lie, the table says."""
        return dict.fromkeys(self.experts)

    async def as_completed(self) -> AsyncIterator[int]:
        """Yield every expert."""
        for expert in self.experts:
            yield expert

    def wait_on(self, stream: object) -> None:
        """Order nothing: no copies are made."""

    def release(self) -> None:
        """Give nothing back."""
