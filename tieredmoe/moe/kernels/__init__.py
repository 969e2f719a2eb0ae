"""Kernels on packed GGUF bytes in device memory: routed experts and dense matrices, in Triton."""

from tieredmoe.moe.activation import FusedActivation, SiTU, SwiGLU
from tieredmoe.moe.kernels.fixed_rows import FixedRows
from tieredmoe.moe.kernels.linear import DeviceLinear, LinearWorkspace
from tieredmoe.moe.kernels.plan import ExpertPlan, expert_plan, readable
from tieredmoe.moe.kernels.resident import execute_resident
from tieredmoe.moe.kernels.routed import DeviceRoutedBatch
from tieredmoe.moe.kernels.workspace import Workspace

__all__ = [
    "DeviceLinear",
    "DeviceRoutedBatch",
    "ExpertPlan",
    "FixedRows",
    "FusedActivation",
    "LinearWorkspace",
    "SiTU",
    "SwiGLU",
    "Workspace",
    "execute_resident",
    "expert_plan",
    "readable",
]
