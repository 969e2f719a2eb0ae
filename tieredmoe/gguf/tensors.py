"""What a tensor in a model file is, and the one way in which dense weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tieredmoe.gguf.metadata import Metadata


@attrs.frozen
class TensorInfo:
    """One tensor: ``shape`` in numpy order (slowest axis first, the reverse of ggml's ``ne``).

    ``offset`` counts from the start of the file of shard ``shard_index``; ``ggml_type`` is a
    ``gguf.GGMLQuantizationType`` value.
    """

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    nbytes: int
    shard_index: int
    offset: int


class TensorSource(Protocol):
    """A model's metadata and dense tensors, from GGUF shards or from a pack's own copy."""

    @property
    def metadata(self) -> Metadata:
        """Key-value metadata of the model."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, expert tensors included (those cannot be read through a pack)."""

    def read(self, name: str) -> NDArray[np.uint8]:
        """The raw bytes of one tensor, a fresh writable 1-D array of ``nbytes``.

        Raises ``KeyError`` for an unknown name and ``GGUFError``/``PackError`` when the file ends
        early.
        """
