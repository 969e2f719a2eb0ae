"""Models: what turns tokens and experts into logits, and the high-level API over them."""

from tieredmoe.adapters.chat import Message
from tieredmoe.adapters.generation import Generation, GenerationReport, Piece
from tieredmoe.adapters.language_model import LanguageModel
from tieredmoe.adapters.memory_plan import MemoryPlan
from tieredmoe.adapters.opening import open_model
from tieredmoe.adapters.preflight import check_model
from tieredmoe.adapters.prompt_cache import PromptCache

__all__ = [
    "Generation",
    "GenerationReport",
    "LanguageModel",
    "MemoryPlan",
    "Message",
    "Piece",
    "PromptCache",
    "check_model",
    "open_model",
]
