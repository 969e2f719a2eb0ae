"""Will it run, and with how much memory? All that can be told before a model is loaded."""

from __future__ import annotations

from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tieredmoe.adapters.machine import this_machine
from tieredmoe.adapters.memory_plan import plan_memory
from tieredmoe.adapters.model_needs import CHUNK_LENGTH
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.settings import integer_from, setting_problems
from tieredmoe.adapters.tokenizer import Tokenizer
from tieredmoe.config import HierarchyConfig
from tieredmoe.errors import ConfigError, raise_config_problems
from tieredmoe.gguf import GGUFInventory
from tieredmoe.pack import open_checkpoint

if TYPE_CHECKING:
    from tieredmoe.adapters.memory_plan import MemoryPlan
    from tieredmoe.adapters.protocol import Adapter
    from tieredmoe.pack import Checkpoint


class Checked(NamedTuple):
    """A model of which is known that it will run, and how."""

    source: Checkpoint
    adapter: Adapter
    tokenizer: Tokenizer | None
    plan: MemoryPlan


def check_model(
    source: Checkpoint | GGUFInventory | Path | str,
    config: HierarchyConfig | None = None,
    *,
    adapter: Adapter | None = None,
    n_context: int | None = None,
    chunk_length: int = CHUNK_LENGTH,
) -> Checked:
    """What ``open_model`` with the same arguments goes on from; reads headers, allocates nothing.

    Raises what would keep ``source`` (a GGUF or a pack, or its path) from running: what it is at
    all (``PackError``, ``GGUFError``), its architecture (``UnsupportedModelError``), metadata and
    tensors (``MetadataError`` listing all that is wrong), tokenizer (``TokenizerError``), experts
    (``GGUFError``), settings (``ConfigError``, for a GPU that is not there, too), and whether its
    memory and one layer's top-k of experts fit now (``BudgetError``). Blocks.
    """
    problems = setting_problems(
        [
            (name, value, "an integer, 1 or more", value is None or (integer_from(value) or 0) >= 1)
            for name, value in (("n_context", n_context), ("chunk_length", chunk_length))
        ]
    )
    raise_config_problems("open_model", problems)
    if isinstance(source, GGUFInventory | Path | str):
        source = open_checkpoint(source)
    adapter = _adapter(source, adapter)
    needs = adapter.needs(
        source, n_context=integer_from(n_context), chunk_length=index(chunk_length)
    )
    tokenizer = Tokenizer.from_metadata(source.metadata)
    config = config or HierarchyConfig()
    plan = plan_memory(source, needs, config, machine=this_machine(config))
    return Checked(source, adapter, tokenizer, plan)


def _adapter(source: Checkpoint, wanted: Adapter | None) -> Adapter:
    found = adapter_for(source.metadata)
    if wanted is not None and wanted.architecture != found.architecture:
        raise ConfigError(
            f"open_model: {source.path} is a {found.architecture!r}, and the adapter given is for "
            f"{wanted.architecture!r}"
        )
    return wanted or found
