"""Which operations a decode step runs: torch's on the host, kernels on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.adapters.deepseek_v4.torch_operations import TorchOperations

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.deepseek_v4.config import AttentionConfig
    from tieredmoe.adapters.deepseek_v4.step_operations import StepOperations
    from tieredmoe.moe.linear import Linear


def operations_for(
    config: AttentionConfig, output: Linear, *, device: torch.device
) -> StepOperations:
    """Those for a model on ``device``; ``output`` is one of its matrices, to share their memory."""
    if device.type == "cpu":
        return TorchOperations()
    # Triton is there with a device's torch, and nowhere else.
    from tieredmoe.adapters.deepseek_v4.kernel_operations import KernelOperations  # noqa: PLC0415
    from tieredmoe.moe.kernels import DeviceLinear  # noqa: PLC0415

    assert isinstance(output, DeviceLinear), output
    return KernelOperations(config, output.workspace)
