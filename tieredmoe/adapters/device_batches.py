"""Routed batches of one arena: what joins the packed kernels to a model's layers.

The only file of the adapters that needs Triton; it is imported where there is a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tieredmoe.moe.kernels import DeviceRoutedBatch, execute_resident, expert_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tieredmoe.adapters.decode_step import RoutedLayer
    from tieredmoe.adapters.routing import Routing
    from tieredmoe.moe.activation import FusedActivation
    from tieredmoe.moe.kernels import Workspace
    from tieredmoe.spec import MoESpec


class DeviceArena(Protocol):
    """Slots in a device's memory, and the table of who is in them; both stay where they are."""

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [slots, slot_nbytes] on the device."""

    def slot_of(self, layer: int) -> torch.Tensor:
        """int32 [experts] on the device: the slot of each expert of ``layer``, -1 if absent."""


class DeviceBatches:
    """Makes the batches of all layers of ``spec``, whose experts lie in ``arena``.

    They share ``workspace``, so one is open at a time.
    """

    def __init__(self, spec: MoESpec, arena: DeviceArena, workspace: Workspace) -> None:
        self.device = workspace.device
        self._spec = spec
        self._arena = arena
        self._work = workspace

    @property
    def n_tokens(self) -> int:
        """Tokens of the largest batch."""
        return self._work.n_tokens

    def open(
        self,
        layer: int,
        x: torch.Tensor,
        routing: Routing,
        activation: FusedActivation,
        *,
        host_ids: Sequence[Sequence[int]],
    ) -> DeviceRoutedBatch:
        """A batch of up to ``n_tokens`` tokens; ``host_ids`` are the ids of ``routing``."""
        return DeviceRoutedBatch(
            x,
            routing.ids.contiguous(),
            routing.weights.contiguous(),
            activation,
            host_ids=host_ids,
            layout=self._spec.layouts[layer],
            arena=self._arena.tensor,
            slot_of=self._arena.slot_of(layer),
            workspace=self._work,
        )

    def has_kernels(self, layer: int) -> bool:
        """Whether ``execute_resident`` can serve ``layer``: packed kernels know all its types."""
        return expert_plan(self._spec.layouts[layer]).has_kernels

    def execute_resident(self, routed: RoutedLayer) -> None:
        """Enqueue the weighted sum of one token's experts, all of which are resident by then."""
        execute_resident(
            routed.x,
            routed.routing.ids,
            routed.routing.weights,
            routed.activation,
            layout=self._spec.layouts[routed.layer],
            arena=self._arena.tensor,
            slot_of=self._arena.slot_of(routed.layer),
            workspace=self._work,
            out=routed.out,
        )
