"""Random blocks of quantised types: any bytes are valid weights once the blocks' scales are set.

Nothing is quantised: at tens of gigabytes that would take hours. Bytes are drawn in bulk, and one
field per block is overwritten so that the weights have the standard deviation wanted.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

N_SCALES = 65521
"""Scales drawn per type and deviation; a prime, so that they fall in step with nothing."""


class _Field(NamedTuple):
    """The bytes of a block that scale it, and the weights' standard deviation at scale 1.

    ``offset_ratio`` is the dmin / d that makes the mean 0, for types that have both, side by side.
    """

    at: int
    dtype: str
    unit_std: float
    offset_ratio: float | None = None


# Deviations follow from uniform bits: of int8 sqrt((2^16 - 1) / 12 + 1/4), of products by E[a²b²].
_FIELDS: Mapping[GGMLQuantizationType, _Field] = MappingProxyType(
    {
        GGMLQuantizationType.MXFP4: _Field(0, "<u1", 2.9262),
        GGMLQuantizationType.Q4_0: _Field(0, "<u2", 4.6368),
        GGMLQuantizationType.Q8_0: _Field(0, "<u2", 73.9020),
        GGMLQuantizationType.Q2_K: _Field(80, "<u4", 13.8744, 1.5),
        GGMLQuantizationType.Q3_K: _Field(108, "<u2", 43.3359),
        GGMLQuantizationType.Q6_K: _Field(208, "<u2", 1365.6),
    }
)

SCALED_TYPES: frozenset[GGMLQuantizationType] = frozenset(_FIELDS)
"""The types that ``BlockScales`` can set."""


class BlockScales:
    """Scales that give random blocks of ``ggml_type`` weights of mean 0 and deviation ``std``.

    Which scale a block gets depends on its number alone, so a tensor may be made in any pieces.
    """

    def __init__(
        self, ggml_type: GGMLQuantizationType, std: float, rng: np.random.Generator
    ) -> None:
        self._field = _FIELDS[ggml_type]
        self._block_nbytes = GGML_QUANT_SIZES[ggml_type][1]
        if ggml_type is GGMLQuantizationType.MXFP4:
            self._scales: NDArray[Any] = _exponents(std / self._field.unit_std, rng)
        else:
            self._scales = _halves(std / self._field.unit_std, self._field, rng)

    def put(self, data: NDArray[np.uint8], at: int, *, begin: int, end: int) -> None:
        """Scale the tensor's blocks that have bytes from ``begin`` to ``end`` of it, both in bytes.

        The tensor's first byte would be ``data[at]``, where ``at`` may be negative. Blocks at
        either edge are scaled whole: ``data`` must have room for them.
        """
        first = begin // self._block_nbytes
        n_blocks = -(-end // self._block_nbytes) - first
        fields = np.ndarray(
            (n_blocks,),
            self._field.dtype,
            buffer=data.data,
            offset=at + first * self._block_nbytes + self._field.at,
            strides=(self._block_nbytes,),
        )
        done = 0
        while done < n_blocks:
            start = (first + done) % N_SCALES
            piece = self._scales[start : start + n_blocks - done]
            fields[done : done + len(piece)] = piece
            done += len(piece)


def _exponents(scale: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """E8M0 exponents, two neighbours in the mixture whose mean square is ``scale``²."""
    low = int(np.floor(np.log2(scale)))
    share = ((scale / 2.0**low) ** 2 - 1) / 3
    return (127 + low + (rng.random(N_SCALES) < share)).astype(np.uint8)


def _halves(scale: float, field: _Field, rng: np.random.Generator) -> NDArray[Any]:
    """float16 of either sign, their sizes uniform around ``scale``, which is their mean square."""
    sizes = rng.uniform(0.6, 1.4, N_SCALES) * rng.choice([-1.0, 1.0], N_SCALES)
    scales = sizes * (scale / np.sqrt(np.mean(sizes**2)))
    if field.offset_ratio is None:
        packed: NDArray[Any] = scales.astype("<f2").view(field.dtype)
    else:
        pairs = np.stack([scales, scales * field.offset_ratio], axis=1).astype("<f2")
        packed = pairs.view(field.dtype)[:, 0]
    return packed
