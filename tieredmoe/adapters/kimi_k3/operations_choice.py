"""Which operations a decode step runs: torch's on the host, fused ones on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.adapters.kimi_k3.operations import Operations, PlainOperations

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.kimi_k3.config import KimiK3Config
    from tieredmoe.moe.linear import Linear


def operations_for(config: KimiK3Config, output: Linear, *, device: torch.device) -> Operations:
    """Those for a model on ``device``; ``output`` is one of its matrices, to share their memory."""
    if device.type == "cpu":
        return PlainOperations(config.kda)
    # Triton is there with a device's torch, and nowhere else.
    from tieredmoe.adapters.kimi_k3.device_operations import DeviceOperations  # noqa: PLC0415
    from tieredmoe.moe.kernels import DeviceLinear  # noqa: PLC0415

    assert isinstance(output, DeviceLinear), output
    return DeviceOperations(config, output.workspace)
