"""Dequantisation, quantised matrices and the reference routed-expert FFN, in torch."""

from tieredmoe.moe.activation import FusedActivation, SiTU, SwiGLU
from tieredmoe.moe.dequant import dequantise
from tieredmoe.moe.linear import PackedLinear
from tieredmoe.moe.reference import (
    Activation,
    ExpertMatrices,
    Record,
    RoutedBatch,
    clamped_swiglu,
    expert_matrices,
)

__all__ = [
    "Activation",
    "ExpertMatrices",
    "FusedActivation",
    "PackedLinear",
    "Record",
    "RoutedBatch",
    "SiTU",
    "SwiGLU",
    "clamped_swiglu",
    "dequantise",
    "expert_matrices",
]
