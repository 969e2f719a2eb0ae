"""Workspace: all device memory that routed batches of one model need between their launches.

Made at open for the largest batch, so a token allocates nothing and a captured graph finds the same
addresses again. One batch uses it at a time, on one stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tieredmoe.moe.kernels.device import Kernels
from tieredmoe.moe.kernels.fixed_rows import FixedRows
from tieredmoe.moe.kernels.plan import expert_plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tieredmoe.spec import ExpertLayout


class Workspace:
    """Buffers for batches of up to ``n_tokens`` tokens with ``top_k`` experts each.

    ``layouts`` are those of every layer to be served. ``nbytes`` is what it takes.
    """

    def __init__(
        self,
        layouts: Iterable[ExpertLayout],
        *,
        n_tokens: int,
        top_k: int,
        device: torch.device,
    ) -> None:
        distinct = set(layouts)
        plans = [expert_plan(layout) for layout in distinct]
        hidden = max(layout.by_name["gate"].shape[1] for layout in distinct)
        width = max(layout.by_name["gate"].shape[0] for layout in distinct)
        n_pairs = n_tokens * top_k
        self.n_tokens = n_tokens
        self.top_k = top_k
        self.device = device
        self.kernels = kernels = Kernels(device)
        # One row more than there are pairs: a unit that is not full writes the rest there.
        self.x = (
            FixedRows(n_tokens, hidden, device=device, kernels=kernels),
            FixedRows(
                n_tokens if any(plan.two_orders for plan in plans) else 0,
                hidden,
                device=device,
                kernels=kernels,
            ),
        )
        self.h = FixedRows(n_pairs + 1, width, device=device, kernels=kernels)
        self.y = torch.zeros((n_pairs + 1, hidden), dtype=torch.float32, device=device)
        self.out = torch.zeros((n_tokens, hidden), dtype=torch.float32, device=device)
        self.order = torch.zeros(n_pairs, dtype=torch.int32, device=device)
        n_apart = 0 if all(plan.fused for plan in plans) else n_pairs + 1
        self.gate = torch.zeros((n_apart, width), dtype=torch.float32, device=device)
        self.up = torch.zeros((n_apart, width), dtype=torch.float32, device=device)
        self.scratch = torch.zeros(hidden * width, dtype=torch.float32, device=device)
        self.record = torch.zeros(
            (1, max((p.layout.stride for p in plans if not p.has_kernels), default=0)),
            dtype=torch.uint8,
            device=device,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        tensors = (
            *(rows.words for rows in (*self.x, self.h)),
            *(self.y, self.out, self.order, self.gate, self.up, self.scratch, self.record),
        )
        return sum(tensor.nbytes for tensor in tensors)

    def __repr__(self) -> str:
        return f"<Workspace {self.n_tokens} tokens, top-{self.top_k}, {self.nbytes} bytes>"
