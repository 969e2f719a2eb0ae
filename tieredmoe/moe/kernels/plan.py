"""Plan: which kernels serve the experts of a layout, decided from types and shapes alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs

from tieredmoe.moe.dequant import row_nbytes
from tieredmoe.moe.kernels.formats import FORMATS, Format
from tieredmoe.spec import ROLES

if TYPE_CHECKING:
    from tieredmoe.spec import ExpertLayout


@attrs.frozen
class ExpertPlan:
    """How experts of ``layout`` are executed.

    ``formats`` are those of gate, up and down, or None where a role has no kernel: then the whole
    expert is unpacked and multiplied by torch. ``fused``: gate and up go in one launch.
    """

    layout: ExpertLayout
    formats: tuple[Format, Format, Format] | None

    @property
    def has_kernels(self) -> bool:
        """Whether packed kernels read all three roles."""
        return self.formats is not None

    @property
    def fused(self) -> bool:
        """Whether gate and up are of one type, or need no kernel at all."""
        return self.formats is None or self.formats[0] == self.formats[1]

    @property
    def two_orders(self) -> bool:
        """Whether gate and up want the same activations in two orders."""
        return self.formats is not None and self.formats[0].order != self.formats[1].order


@functools.lru_cache(maxsize=256)
def expert_plan(layout: ExpertLayout) -> ExpertPlan:
    """The plan for ``layout``."""
    gate, up, down = (
        readable(role.ggml_type, role.shape, role.offset)
        for role in (layout.by_name[name] for name in ROLES)
    )
    if gate is None or up is None or down is None:
        return ExpertPlan(layout, None)
    return ExpertPlan(layout, (gate, up, down))


def readable(ggml_type: int, shape: tuple[int, int], offset: int = 0) -> Format | None:
    """The format in which kernels read such a matrix ``offset`` bytes after a multiple of 16.

    None where none can: for the type, for rows of no whole number of units, or for rows that start
    where the type's loads cannot. Matrices of 2 GiB and more are beyond 32-bit offsets.
    """
    kind = FORMATS.get(ggml_type)
    if kind is None or shape[1] % kind.n_block:
        return None
    n_row = row_nbytes(ggml_type, shape[1])
    if offset % kind.alignment or n_row % kind.alignment or offset + shape[0] * n_row >= 2**31:
        return None
    return kind
