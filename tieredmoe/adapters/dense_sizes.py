"""How many bytes a model's dense tensors take and where: all that a memory plan asks of them."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import attrs

from tieredmoe.adapters.streamed_layers import aligned
from tieredmoe.moe.dequant import unpacked_by_host

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tieredmoe.gguf.tensors import TensorInfo

EMBEDDING = "token_embd.weight"

_LAYER = re.compile(r"blk\.([0-9]{1,6})\.")


@attrs.frozen(kw_only=True)
class DenseSizes:
    """Bytes of a model's dense tensors, by what can be done with them.

    Matrices stay in their quantised bytes. What is no matrix becomes float32, or int64 where it is
    a table of integers, and stays where the model computes, as do the matrices of no layer.
    """

    layers: Mapping[int, Mapping[str, int]]
    """bytes of each matrix by layer and name, in order of the layers"""
    others: Mapping[str, int]
    """the same for matrices of no layer: the head"""
    embedding_nbytes: int
    values_nbytes: int
    """all that is no matrix, as it is kept"""
    file_nbytes: int
    """all dense tensors, as they are in the file"""
    n_columns: int
    """inputs of the widest matrix that the model multiplies with"""
    unpacked_by_host: tuple[str, ...]
    """matrices of types that only the host can unpack: slow on a device, and not recordable"""

    @classmethod
    def of(
        cls,
        found: Mapping[str, TensorInfo],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        matrices: Collection[str],
        tables: Collection[str],
    ) -> DenseSizes:
        """Sizes of the tensors ``found``, by name; ``shapes`` has those that are to be read."""
        layers: dict[int, dict[str, int]] = {}
        others: dict[str, int] = {}
        multiplied = [name for name in shapes if name in matrices and name != EMBEDDING]
        for name in multiplied:
            match = _LAYER.match(name)
            group = others if match is None else layers.setdefault(int(match[1]), {})
            group[name] = found[name].nbytes
        return cls(
            layers={layer: layers[layer] for layer in sorted(layers)},
            others=others,
            embedding_nbytes=found[EMBEDDING].nbytes,
            values_nbytes=sum(
                math.prod(shape) * (8 if name in tables else 4)
                for name, shape in shapes.items()
                if name not in matrices
            ),
            file_nbytes=sum(found[name].nbytes for name in shapes),
            n_columns=max(shapes[name][1] for name in multiplied),
            unpacked_by_host=tuple(
                name for name in multiplied if unpacked_by_host(found[name].ggml_type)
            ),
        )

    def resident_nbytes(self, streamed: Collection[int] = ()) -> int:
        """Bytes of the matrices that stay where the model computes, when some layers stream.

        The two buffers that those pass through come on top.
        """
        kept = [sizes for layer, sizes in self.layers.items() if layer not in streamed]
        return sum(aligned(nbytes) for sizes in (*kept, self.others) for nbytes in sizes.values())
