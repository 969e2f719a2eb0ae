"""Tiered memory for the routed experts of giant mixture-of-experts models, on asyncio.

Importing this imports no torch: names that need it are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tieredmoe._version import __version__
from tieredmoe.budget import format_size, parse_size
from tieredmoe.chain import open_hierarchy
from tieredmoe.config import HierarchyConfig
from tieredmoe.errors import (
    BudgetError,
    ClosedError,
    ConfigError,
    DigestMismatchError,
    DirectIOUnavailableError,
    ExpertLoadError,
    GGUFError,
    MetadataError,
    PackError,
    PromptTooLongError,
    QueueFullError,
    ReadError,
    TieredMoEError,
    TokenizerError,
    UnsupportedModelError,
    WorkingSetTooLargeError,
)
from tieredmoe.gguf import open_inventory
from tieredmoe.hierarchy import Hierarchy
from tieredmoe.lease import Lease
from tieredmoe.pack import (
    create_pack,
    mirror_pack,
    open_checkpoint,
    open_foreign_pack,
    open_pack,
    split_pack,
    verify_pack,
)
from tieredmoe.source import Source
from tieredmoe.spec import ExpertKey, ExpertLayout, MoESpec, RoleSpec
from tieredmoe.stats import Stats
from tieredmoe.threaded import ThreadedHierarchy
from tieredmoe.threaded_lease import ThreadedLease
from tieredmoe.tier import Tier
from tieredmoe.trace import Event, EventKind

if TYPE_CHECKING:
    from tieredmoe.adapters import (
        Generation,
        GenerationReport,
        LanguageModel,
        MemoryPlan,
        Message,
        Piece,
        PromptCache,
        check_model,
        open_model,
    )

__all__ = [
    "BudgetError",
    "ClosedError",
    "ConfigError",
    "DigestMismatchError",
    "DirectIOUnavailableError",
    "Event",
    "EventKind",
    "ExpertKey",
    "ExpertLayout",
    "ExpertLoadError",
    "GGUFError",
    "Generation",
    "GenerationReport",
    "Hierarchy",
    "HierarchyConfig",
    "LanguageModel",
    "Lease",
    "MemoryPlan",
    "Message",
    "MetadataError",
    "MoESpec",
    "PackError",
    "Piece",
    "PromptCache",
    "PromptTooLongError",
    "QueueFullError",
    "ReadError",
    "RoleSpec",
    "Source",
    "Stats",
    "ThreadedHierarchy",
    "ThreadedLease",
    "Tier",
    "TieredMoEError",
    "TokenizerError",
    "UnsupportedModelError",
    "WorkingSetTooLargeError",
    "__version__",
    "check_model",
    "create_pack",
    "format_size",
    "mirror_pack",
    "open_checkpoint",
    "open_foreign_pack",
    "open_hierarchy",
    "open_inventory",
    "open_model",
    "open_pack",
    "parse_size",
    "split_pack",
    "verify_pack",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("tieredmoe.adapters"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
