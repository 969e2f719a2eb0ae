"""Finds the adapter of a file by the architecture that its metadata names."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from tieredmoe.adapters.deepseek_v4 import DeepSeekV4Adapter
from tieredmoe.adapters.kimi_k3 import KimiK3Adapter
from tieredmoe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieredmoe.adapters.protocol import Adapter
    from tieredmoe.gguf.metadata import Metadata

_ADAPTERS: Mapping[str, Adapter] = MappingProxyType(
    {adapter.architecture: adapter for adapter in (DeepSeekV4Adapter(), KimiK3Adapter())}
)


def adapter_for(metadata: Metadata) -> Adapter:
    """The adapter of the architecture in ``metadata``.

    Raises ``UnsupportedModelError`` that names the architecture found and those supported, and
    ``MetadataError`` when the file names none.
    """
    architecture = metadata.architecture
    adapter = _ADAPTERS.get(architecture)
    if adapter is None:
        where = "" if metadata.path is None else f"{metadata.path}: "
        raise UnsupportedModelError(
            f"{where}architecture {architecture!r} is not supported; "
            f"supported: {', '.join(sorted(_ADAPTERS))}"
        )
    return adapter
