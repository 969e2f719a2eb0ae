"""How many bytes the shared buffers of a model's products take, without allocating them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tieredmoe.spec import MoESpec

_META = torch.device("meta")
"""Where tensors have sizes and no memory: the buffers tell by themselves what they would take."""


def routed_nbytes(spec: MoESpec, *, n_tokens: int, on_device: bool) -> int:
    """What batches of up to ``n_tokens`` tokens take beside the experts themselves."""
    if not on_device:
        layouts = [layout.by_name["gate"].shape for layout in spec.layouts.values()]
        # An output row for each (token, expert) pair, and what one expert makes for all tokens.
        hidden, width = max(shape[1] for shape in layouts), max(shape[0] for shape in layouts)
        return 4 * n_tokens * (spec.top_k * hidden + 3 * width) + 8 * hidden * width
    from tieredmoe.moe.kernels import Workspace  # noqa: PLC0415 (Triton, which hosts may lack)

    return Workspace(
        spec.layouts.values(), n_tokens=n_tokens, top_k=spec.top_k, device=_META
    ).nbytes


def linear_nbytes(n_columns: int) -> int:
    """What dense matrices of up to ``n_columns`` columns share on a device."""
    from tieredmoe.moe.kernels import LinearWorkspace  # noqa: PLC0415 (Triton, as above)

    return LinearWorkspace(n_columns, device=_META).nbytes
