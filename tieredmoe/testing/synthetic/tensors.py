"""A tensor of a synthetic model: what it is called, how large it is, and where its bytes come from.

Large quantised tensors are random blocks with scales; what steers a model (norms, biases, routers,
tables) is drawn value by value and held in memory until its file is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

if TYPE_CHECKING:
    from numpy.typing import NDArray

Draw = Callable[[np.random.Generator, tuple[int, ...]], "NDArray[Any]"]
"""Values of a given size; of random blocks only the standard deviation is taken from it."""


@attrs.frozen
class SyntheticTensor:
    """One tensor: its size in numpy order, its type, and the distribution of its values."""

    name: str
    size: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    draw: Draw

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        n_block, block_nbytes = GGML_QUANT_SIZES[self.ggml_type]
        return math.prod(self.size) // n_block * block_nbytes

    @property
    def is_expert(self) -> bool:
        """Whether it holds routed experts."""
        return self.name.endswith("_exps.weight")

    def std(self, rng: np.random.Generator) -> float:
        """The standard deviation of its values, from a few rows of them."""
        return float(self.draw(rng, (16, self.size[-1])).std())

    def encoded(self, rng: np.random.Generator) -> NDArray[np.uint8]:
        """Its bytes, drawn value by value."""
        values = self.draw(rng, self.size)
        if self.ggml_type is GGMLQuantizationType.I32:
            return values.astype("<i4").reshape(-1).view(np.uint8)
        return quantize(values.astype(np.float32), self.ggml_type).reshape(-1).view(np.uint8)


def normal(mean: float, std: float) -> Draw:
    """Normal values."""
    return lambda rng, size: mean + std * rng.standard_normal(size)


def scaled(gain: float) -> Draw:
    """Normal values that map unit variance to ``gain``²."""
    return lambda rng, size: gain / size[-1] ** 0.5 * rng.standard_normal(size)
