"""Kimi-K3: configuration, state, forward pass."""

from tieredmoe.adapters.kimi_k3.config import KimiK3Config
from tieredmoe.adapters.kimi_k3.load import KimiK3Adapter
from tieredmoe.adapters.kimi_k3.model import KimiK3Model
from tieredmoe.adapters.kimi_k3.state import KdaState

__all__ = ["KdaState", "KimiK3Adapter", "KimiK3Config", "KimiK3Model"]
