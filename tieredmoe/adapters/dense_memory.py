"""Memory for many tensors in one allocation, each aligned for any type and any kernel."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING

import torch

from tieredmoe.adapters.streamed_layers import aligned
from tieredmoe.budget import format_size
from tieredmoe.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Mapping


def host_memory(sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """uint8 tensors of these bytes in one mapping of huge pages, their contents undefined.

    Raises ``BudgetError`` if the kernel refuses it.
    """
    nbytes = max(1, sum(map(aligned, sizes.values())))
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        raise BudgetError(
            f"the kernel refused {format_size(nbytes)} of host memory for the dense weights "
            f"({error}); free some, or raise the limit (ulimit -v, overcommit, container)"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, still right
        mapping.madvise(mmap.MADV_HUGEPAGE)
    # The tensors keep the mapping alive. Pages are touched first by what is copied into them.
    return _cut(torch.frombuffer(mapping, dtype=torch.uint8), sizes)


def device_memory(sizes: Mapping[str, int], *, device: torch.device) -> dict[str, torch.Tensor]:
    """The same on ``device``. Raises ``torch.OutOfMemoryError`` if it has no room for them."""
    nbytes = sum(map(aligned, sizes.values()))
    return _cut(torch.empty(nbytes, dtype=torch.uint8, device=device), sizes)


def _cut(memory: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    tensors, start = {}, 0
    for name, nbytes in sizes.items():
        tensors[name] = memory[start : start + nbytes]
        start += aligned(nbytes)
    return tensors
