"""What an expert is: keys, byte layouts and the shape of a model's routed part. Frozen data only.

Everything above and below the tiers agrees on these types, and on how urgent a transfer is; none of
them knows a file, a device or a clock.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PAGE_NBYTES = 4096
"""Every record starts and ends on a multiple of this, which suits direct I/O on known disks."""

ROLES = ("gate", "up", "down")
"""The matrices of one routed expert, in the order in which a record holds them."""


class ExpertKey(NamedTuple):
    """Names one routed expert. ``layer`` is the model's own layer number, not a dense index.

    A NamedTuple because it is the hottest dict key of the library (lookup 107 ns against 1171 ns
    for a frozen attrs class).
    """

    layer: int
    expert: int


class Priority(IntEnum):
    """How urgent a transfer is: the smaller, the sooner. All but ``DEMAND`` are prefetch.

    Somebody waits for ``DEMAND``; ``CERTAIN`` will be asked for, ``LOOKAHEAD`` probably; ``WARMUP``
    fills memory that is empty.
    """

    DEMAND = 0
    CERTAIN = 1
    LOOKAHEAD = 2
    WARMUP = 3


@attrs.frozen
class RoleSpec:
    """One matrix of an expert: ``shape`` is (rows, columns) = (outputs, inputs) of the weights.

    ``offset`` counts bytes from the start of the record; ``ggml_type`` is a
    ``gguf.GGMLQuantizationType`` value.
    """

    name: str
    ggml_type: int
    shape: tuple[int, int]
    offset: int
    nbytes: int


@attrs.frozen
class ExpertLayout:
    """Where the roles of one layer's experts lie in their record of ``stride`` bytes."""

    roles: tuple[RoleSpec, ...]
    payload_nbytes: int
    stride: int

    @classmethod
    def build(cls, roles: Mapping[str, tuple[int, tuple[int, int], int]]) -> ExpertLayout:
        """Lay roles end to end in the order of ``ROLES``; the stride is the payload in whole pages.

        ``roles`` maps a role's name to (ggml_type, shape, nbytes).
        """
        specs: list[RoleSpec] = []
        offset = 0
        for name in ROLES:
            ggml_type, shape, nbytes = roles[name]
            specs.append(RoleSpec(name, ggml_type, shape, offset, nbytes))
            offset += nbytes
        return cls(tuple(specs), offset, -(-offset // PAGE_NBYTES) * PAGE_NBYTES)

    @cached_property
    def by_name(self) -> Mapping[str, RoleSpec]:
        """Roles by name."""
        return MappingProxyType({role.name: role for role in self.roles})


def _by_layer(layouts: Mapping[int, ExpertLayout]) -> Mapping[int, ExpertLayout]:
    return MappingProxyType(dict(sorted(layouts.items())))


@attrs.frozen
class MoESpec:
    """The routed part of a model: one layout per routed layer, experts per layer, top-k.

    ``layouts`` is ordered by layer. Layers may differ in type and size (community "dynamic" quants
    do); a slot is as large as the largest record.
    """

    architecture: str
    n_experts: int
    top_k: int
    layouts: Mapping[int, ExpertLayout] = attrs.field(converter=_by_layer)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The routed layers' numbers, ascending."""
        return tuple(self.layouts)

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of a slot that can hold any expert of the model."""
        return max(layout.stride for layout in self.layouts.values())

    @property
    def n_records(self) -> int:
        """Experts of the whole model."""
        return len(self.layouts) * self.n_experts

    @property
    def nbytes(self) -> int:
        """Bytes of all slots that would hold the whole model."""
        return self.n_records * self.slot_nbytes

    def keys(self) -> Iterator[ExpertKey]:
        """Every expert, layer by layer."""
        return (ExpertKey(layer, e) for layer in self.layouts for e in range(self.n_experts))
