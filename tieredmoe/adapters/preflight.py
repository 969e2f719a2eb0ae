"""Will it run? Everything that can be told of a model before hours of conversion or loading."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.tokenizer import Tokenizer
from tieredmoe.chain import plan
from tieredmoe.config import HierarchyConfig
from tieredmoe.gguf import GGUFInventory
from tieredmoe.pack import open_checkpoint

if TYPE_CHECKING:
    from tieredmoe.pack import Checkpoint


def check_model(
    source: Checkpoint | GGUFInventory | Path | str, config: HierarchyConfig | None = None
) -> None:
    """Raise what would keep ``source`` (a GGUF or a pack, or its path) from running; reads headers.

    What it is at all (``PackError``, ``GGUFError``), its architecture (``UnsupportedModelError``),
    metadata and tensors (``MetadataError`` listing all that is wrong), tokenizer
    (``TokenizerError``), experts (``GGUFError``), and whether the budget of ``config`` holds one
    layer's top-k (``BudgetError``). Blocks.
    """
    if isinstance(source, GGUFInventory | Path | str):
        source = open_checkpoint(source)
    adapter_for(source.metadata).check(source)
    Tokenizer.from_metadata(source.metadata)
    plan(source.spec, config or HierarchyConfig(), read_nbytes=source.slot_nbytes)
