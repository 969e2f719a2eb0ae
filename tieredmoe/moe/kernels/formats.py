"""Formats: which GGUF types the kernels read, and how activations are laid out for each.

A row of activations is 16-bit fixed point with one float32 scale per group, split into two planes
of signed bytes (value = 256 * high + low), in the order in which weight words yield their elements:
a warp's lanes then read neighbouring words. Types of one ``order`` share a row. Rejected: 8-bit
activations (llama.cpp's choice: 1 % noise on random data), and one order for all types (weights
would have to be shuffled in the inner loop).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import triton.language as tl
from gguf import GGMLQuantizationType as T

from tieredmoe.moe.dequant import block_size

if TYPE_CHECKING:
    from collections.abc import Mapping

# The same numbers as constants of device code.
F16 = tl.constexpr(T.F16.value)
BF16 = tl.constexpr(T.BF16.value)
Q4_0 = tl.constexpr(T.Q4_0.value)
Q8_0 = tl.constexpr(T.Q8_0.value)
Q2_K = tl.constexpr(T.Q2_K.value)
Q3_K = tl.constexpr(T.Q3_K.value)
Q4_K = tl.constexpr(T.Q4_K.value)
Q5_K = tl.constexpr(T.Q5_K.value)
Q6_K = tl.constexpr(T.Q6_K.value)
MXFP4 = tl.constexpr(T.MXFP4.value)

NIBBLES, WORDS, QUARTERS, FLOATS = range(4)
"""Orders of an activation row: nibble pairs of MXFP4, consecutive words, the words that share a
word of a K-quant, and plain float32."""

ORDER_NIBBLES = tl.constexpr(NIBBLES)
ORDER_WORDS = tl.constexpr(WORDS)
ORDER_QUARTERS = tl.constexpr(QUARTERS)
ORDER_FLOATS = tl.constexpr(FLOATS)


@attrs.frozen
class Format:
    """How one GGUF type is read: ``n_unit`` weights of a row at a time by one lane.

    Rows must start at multiples of ``alignment`` bytes from the arena's start, which is itself a
    multiple of 16. ``group`` activations share a scale.
    """

    ggml_type: int
    order: int
    n_unit: int
    group: int
    alignment: int

    @property
    def n_block(self) -> int:
        """Weights of a block: columns come in whole blocks."""
        return max(block_size(self.ggml_type)[0], self.n_unit if self.order == FLOATS else 1)

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block."""
        return block_size(self.ggml_type)[1]


def _formats() -> Mapping[int, Format]:
    rows = (
        Format(T.MXFP4, NIBBLES, n_unit=32, group=32, alignment=1),
        Format(T.Q4_0, WORDS, n_unit=32, group=32, alignment=2),
        Format(T.Q8_0, WORDS, n_unit=32, group=32, alignment=2),
        Format(T.Q2_K, QUARTERS, n_unit=64, group=64, alignment=4),
        Format(T.Q3_K, QUARTERS, n_unit=64, group=64, alignment=2),
        Format(T.Q4_K, QUARTERS, n_unit=64, group=64, alignment=4),
        Format(T.Q5_K, QUARTERS, n_unit=64, group=64, alignment=4),
        Format(T.Q6_K, QUARTERS, n_unit=64, group=64, alignment=2),
        Format(T.F16, FLOATS, n_unit=8, group=8, alignment=16),
        Format(T.BF16, FLOATS, n_unit=8, group=8, alignment=16),
    )
    return MappingProxyType({row.ggml_type: row for row in rows})


FORMATS = _formats()
"""By GGUF type number. A type that is not here goes through ``dequantise``."""


def row_words(order: int, n_columns: int) -> int:
    """32-bit words of one activation row: planes, sums and scales; a multiple of 4."""
    if order == FLOATS:
        return n_columns
    if order == QUARTERS:
        n = n_columns // 2 + n_columns // 64 + 2 * (n_columns // 16)
    else:
        n = n_columns // 2 + 3 * (n_columns // 32)
    return -(-n // 4) * 4
