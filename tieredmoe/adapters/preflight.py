"""Will it run? Everything that can be told of a model before hours of conversion or loading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.tokenizer import Tokenizer
from tieredmoe.chain import plan
from tieredmoe.config import HierarchyConfig
from tieredmoe.gguf import find_experts

if TYPE_CHECKING:
    from tieredmoe.gguf import TensorSource


def check_model(source: TensorSource, config: HierarchyConfig | None = None) -> None:
    """Raise what would keep ``source`` (a GGUF or a pack) from running; reads no weight.

    Its architecture (``UnsupportedModelError``), metadata and tensors (``MetadataError`` listing
    all that is wrong), tokenizer (``TokenizerError``), experts (``GGUFError``), and whether the
    budget of ``config`` holds one layer's top-k (``BudgetError``).
    """
    adapter_for(source.metadata).check(source)
    Tokenizer.from_metadata(source.metadata)
    plan(find_experts(source).spec, config or HierarchyConfig())
