"""Turns float weights into the bytes of any supported ggml type, with the exact floats they mean.

Types that the ``gguf`` package can quantise are rounded from the given weights. For the others
(K-quants, IQ4_NL) it has no quantiser, so blocks are drawn at random, valid and of the weights'
standard deviation: to a test it does not matter which weights a model has, only that everyone
agrees on them. What the bytes mean is always the package's own dequantisation.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tieredmoe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_QUANTISED_BY_PACKAGE = frozenset(
    {
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.MXFP4,
    }
)


class _ScaleField(NamedTuple):
    """Where a block's f16 scales lie; ``offset_ratio`` is the dmin / d that makes the mean 0."""

    at: int
    offset_at: int | None = None
    offset_ratio: float = 0.0


# Ratios: mean quant times mean sub-block scale over mean sub-block offset, all fields uniform.
_RANDOM_BLOCKS: Mapping[GGMLQuantizationType, _ScaleField] = MappingProxyType(
    {
        GGMLQuantizationType.Q2_K: _ScaleField(80, 82, 1.5),
        GGMLQuantizationType.Q3_K: _ScaleField(108),
        GGMLQuantizationType.Q4_K: _ScaleField(0, 2, 7.5),
        GGMLQuantizationType.Q5_K: _ScaleField(0, 2, 15.5),
        GGMLQuantizationType.Q6_K: _ScaleField(208),
        GGMLQuantizationType.IQ4_NL: _ScaleField(0),
    }
)

ENCODABLE_TYPES: frozenset[GGMLQuantizationType] = _QUANTISED_BY_PACKAGE | _RANDOM_BLOCKS.keys()
"""The types that ``encode`` can write."""


def encoding_problem(n_columns: int, ggml_type: GGMLQuantizationType) -> str | None:
    """Why rows of ``n_columns`` weights cannot be written as ``ggml_type``; None if they can."""
    if ggml_type not in ENCODABLE_TYPES:
        known = ", ".join(sorted(known.name for known in ENCODABLE_TYPES))
        return f"type {ggml_type.name} cannot be written, only {known}"
    n_block = GGML_QUANT_SIZES[ggml_type][0]
    if n_columns % n_block:
        return f"rows of {n_columns} weights are not whole {ggml_type.name} blocks of {n_block}"
    return None


def encode(
    weights: NDArray[np.float32], ggml_type: GGMLQuantizationType, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Bytes of shape (…, row bytes), and the float32 weights of ``weights``' shape that they mean.

    Raises ``ConfigError`` where ``encoding_problem`` sees one.
    """
    problem = encoding_problem(weights.shape[-1], ggml_type)
    if problem is not None:
        raise ConfigError(problem)
    if ggml_type in _QUANTISED_BY_PACKAGE:
        data = np.ascontiguousarray(quantize(weights, ggml_type)).view(np.uint8)
    else:
        data = _random_blocks(weights, ggml_type, rng)
    decoded = dequantize(data, ggml_type).reshape(weights.shape)
    return data, decoded.astype(np.float32, copy=False)


def _random_blocks(
    weights: NDArray[np.float32], ggml_type: GGMLQuantizationType, rng: np.random.Generator
) -> NDArray[np.uint8]:
    n_block, block_nbytes = GGML_QUANT_SIZES[ggml_type]
    blocks = rng.integers(0, 256, (weights.size // n_block, block_nbytes), dtype=np.uint8)
    signs = rng.choice(np.array([-1.0, 1.0], dtype=np.float32), len(blocks))
    # Measured on these very blocks with unit scales, so no constant per type can be wrong.
    _set_scales(blocks, ggml_type, signs)
    unit_std = float(dequantize(blocks, ggml_type).std())
    _set_scales(blocks, ggml_type, signs * np.float32(weights.std() / unit_std))
    return blocks.reshape(*weights.shape[:-1], -1)


def _set_scales(
    blocks: NDArray[np.uint8], ggml_type: GGMLQuantizationType, scales: NDArray[np.float32]
) -> None:
    field = _RANDOM_BLOCKS[ggml_type]
    blocks[:, field.at : field.at + 2] = _f16_bytes(scales)
    if field.offset_at is not None:
        offsets = _f16_bytes(scales * field.offset_ratio)
        blocks[:, field.offset_at : field.offset_at + 2] = offsets


def _f16_bytes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return values.astype("<f2")[:, None].view(np.uint8)
