"""How many bytes the shared buffers of a model's products take, without allocating them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from tieredmoe.errors import ConfigError

if TYPE_CHECKING:
    from tieredmoe.spec import MoESpec

_META = torch.device("meta")
"""Where tensors have sizes and no memory: the buffers tell by themselves what they would take."""


def routed_nbytes(spec: MoESpec, *, n_tokens: int, on_device: bool) -> int:
    """What batches of up to ``n_tokens`` tokens take beside the experts themselves.

    Raises ``ConfigError`` for a device where there is no Triton, which the kernels are written in.
    """
    if not on_device:
        layouts = [layout.by_name["gate"].shape for layout in spec.layouts.values()]
        # An output row for each (token, expert) pair, and what one expert makes for all tokens.
        hidden, width = max(shape[1] for shape in layouts), max(shape[0] for shape in layouts)
        return 4 * n_tokens * (spec.top_k * hidden + 3 * width) + 8 * hidden * width
    workspace = _kernels().Workspace(
        spec.layouts.values(), n_tokens=n_tokens, top_k=spec.top_k, device=_META
    )
    return int(workspace.nbytes)


def linear_nbytes(n_columns: int) -> int:
    """What dense matrices of up to ``n_columns`` columns share on a device; raises likewise."""
    return int(_kernels().LinearWorkspace(n_columns, device=_META).nbytes)


def _kernels() -> Any:
    try:
        return import_module("tieredmoe.moe.kernels")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ConfigError(
            "planning for a GPU needs Triton, which torch's builds for CUDA bring and this one "
            "does not: pip install triton"
        ) from error
