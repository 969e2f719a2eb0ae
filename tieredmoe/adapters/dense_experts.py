"""Every routed expert in host memory: the plain run that tiered runs are measured against."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tieredmoe.adapters.routed_experts import run_routed
from tieredmoe.adapters.stepper import EagerStepper
from tieredmoe.gguf.experts import find_experts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from tieredmoe.adapters.decode_step import DecodeStep
    from tieredmoe.adapters.protocol import Progress
    from tieredmoe.adapters.routed_experts import Portion
    from tieredmoe.adapters.routing import Routing
    from tieredmoe.gguf.tensors import TensorSource
    from tieredmoe.moe.reference import Activation
    from tieredmoe.spec import MoESpec

T = TypeVar("T")


class DenseExperts:
    """An ``ExpertProvider`` whose experts are always there; it observes nothing.

    ``records`` maps a layer to uint8 [experts, stride], each row a record in the layer's layout.
    """

    def __init__(self, spec: MoESpec, records: Mapping[int, torch.Tensor]) -> None:
        self._spec = spec
        self._records = MappingProxyType(dict(records))

    @classmethod
    def load(
        cls,
        source: TensorSource,
        *,
        device: torch.device | None = None,
        progress: Progress | None = None,
    ) -> DenseExperts:
        """Read every expert of ``source``, whose expert tensors must be readable (a GGUF's are).

        The records end on ``device``, the CPU by default. Takes the memory of all experts. Raises
        what ``find_experts`` and ``TensorSource.read`` raise.
        """
        experts = find_experts(source)
        spec = experts.spec
        n_total = sum(info.nbytes for info in experts.tensors.values())
        n_done = 0
        records = {}
        for layer, layout in spec.layouts.items():
            layer_records = torch.zeros((spec.n_experts, layout.stride), dtype=torch.uint8)
            for role in layout.roles:
                info = experts.tensors[layer, role.name]
                # Gate and up may be halves of one tensor.
                begin = info.offset - source.tensors[info.name].offset
                slabs = torch.from_numpy(source.read(info.name)).view(spec.n_experts, -1)
                layer_records[:, role.offset : role.offset + role.nbytes] = slabs[
                    :, begin : begin + role.nbytes
                ]
                n_done += info.nbytes
                if progress is not None:
                    progress(n_done, n_total)
            records[layer] = layer_records.to(device or torch.device("cpu"))
        return cls(spec, records)

    @property
    def spec(self) -> MoESpec:
        """Layouts of the records."""
        return self._spec

    @property
    def records(self) -> Mapping[int, torch.Tensor]:
        """All records, by layer: uint8 [experts, stride]."""
        return self._records

    def record(self, layer: int, expert: int) -> torch.Tensor:
        """The record of one expert, a view: uint8 [stride]."""
        return self._records[layer][expert]

    async def run(
        self,
        layer: int,
        x: torch.Tensor,
        routing: Routing,
        activation: Activation,
        *,
        meanwhile: Callable[[], T],
    ) -> tuple[torch.Tensor, T]:
        """``ExpertProvider.run`` by the reference, on the records' device."""
        return await run_routed(layer, x, routing, activation, self, meanwhile=meanwhile)

    def stepper(self, step: DecodeStep[Any]) -> EagerStepper:
        """What runs the tokens of ``step``, segment by segment."""
        return EagerStepper(step, self)

    def executed(self, layer: int, n_pairs: int) -> None:
        """Ignore the audit: no counters are kept."""

    async def stream(self, layer: int, experts: Sequence[int]) -> AsyncGenerator[Portion, None]:
        """Yield all ``experts`` at once, in the order asked for."""
        yield [(expert, self.record(layer, expert)) for expert in experts]
