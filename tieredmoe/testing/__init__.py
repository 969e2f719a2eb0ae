"""What we test with, for others to test with: tiny models, a virtual-time loop, a hostile disk.

The contract suites are in ``tieredmoe.testing.contracts`` and need pytest; nothing here does.
"""

from tieredmoe.testing.disk import SimDisk
from tieredmoe.testing.faults import Fault, FaultPlan
from tieredmoe.testing.faulty import FaultySource
from tieredmoe.testing.loop import SimDeadlock, SimLoop, sim_run
from tieredmoe.testing.sim_worker import SimWorker
from tieredmoe.testing.synthetic import (
    RoutingStatistics,
    SyntheticModel,
    make_synthetic,
    text_like_tokens,
)
from tieredmoe.testing.tiny_gguf import (
    DeepSeekV4Shape,
    DeepSeekV4Weights,
    TypeMix,
    make_deepseek_v4,
    to_transformers,
    transformers_config,
)
from tieredmoe.testing.tiny_kimi import KimiK3Weights, make_kimi_k3
from tieredmoe.testing.tiny_kimi_shape import KimiK3Shape, KimiK3Types
from tieredmoe.testing.tiny_pack import TinyPack, host_arena, tiny_hierarchy, tiny_spec
from tieredmoe.testing.tiny_tokenizer import TinyVocabulary, tiny_vocabulary

__all__ = [
    "DeepSeekV4Shape",
    "DeepSeekV4Weights",
    "Fault",
    "FaultPlan",
    "FaultySource",
    "KimiK3Shape",
    "KimiK3Types",
    "KimiK3Weights",
    "RoutingStatistics",
    "SimDeadlock",
    "SimDisk",
    "SimLoop",
    "SimWorker",
    "SyntheticModel",
    "TinyPack",
    "TinyVocabulary",
    "TypeMix",
    "host_arena",
    "make_deepseek_v4",
    "make_kimi_k3",
    "make_synthetic",
    "sim_run",
    "text_like_tokens",
    "tiny_hierarchy",
    "tiny_spec",
    "tiny_vocabulary",
    "to_transformers",
    "transformers_config",
]
