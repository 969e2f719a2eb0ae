"""DeepSeek-V4: configuration, state, forward pass."""

from tieredmoe.adapters.deepseek_v4.config import DeepSeekV4Config
from tieredmoe.adapters.deepseek_v4.load import DeepSeekV4Adapter
from tieredmoe.adapters.deepseek_v4.model import DeepSeekV4Model
from tieredmoe.adapters.deepseek_v4.state import LayerState

__all__ = ["DeepSeekV4Adapter", "DeepSeekV4Config", "DeepSeekV4Model", "LayerState"]
