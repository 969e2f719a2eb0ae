"""GGUF blocks to float32 in torch, on any device, bit-equal to the ``gguf`` package.

A block is a run of weights with its scales; its bytes are the file's. Each supported type has one
function here from blocks ``[n, block_nbytes]`` to values ``[n, weights_per_block]``; it does the
same float32 operations in the same order as ggml, so no rounding differs. Types without one go
through the ``gguf`` package on the host: slower, never wrong.

Rejected: bfloat16 or float16 results (they round; a kernel may do that, the reference may not), and
``transformers``' port of the same functions (it refuses MXFP4, the type of the models served here).
"""

from __future__ import annotations

import functools
import math
from types import MappingProxyType
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T

from tieredmoe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ALIGNMENT_NBYTES = 64
"""F32 bytes are used in place only from this alignment on. BLAS may round differently on buffers of
another alignment, and a result must not depend on where a record happens to lie."""


@functools.lru_cache(maxsize=256)
def block_size(ggml_type: int) -> tuple[int, int]:
    """Weights and bytes of one block of ``ggml_type``.

    Raises ``UnsupportedModelError`` for a number that no known type has.
    """
    try:
        n_weights, n_bytes = gguf.GGML_QUANT_SIZES[T(ggml_type)]
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"tensor type {ggml_type} is unknown; convert the file to one of: {_supported()}"
        ) from error
    return n_weights, n_bytes


def row_nbytes(ggml_type: int, n_columns: int) -> int:
    """Bytes of a row of ``n_columns`` weights; ``ValueError`` if they are not whole blocks."""
    n_weights, n_bytes = block_size(ggml_type)
    if n_columns % n_weights:
        raise ValueError(
            f"a row of {n_columns} weights is no whole number of {T(ggml_type).name} blocks "
            f"of {n_weights}"
        )
    return n_columns // n_weights * n_bytes


def check_type(ggml_type: int) -> None:
    """Return if ``dequantise`` can read ``ggml_type``, raise ``UnsupportedModelError`` if not."""
    n_weights, n_bytes = block_size(ggml_type)
    dequantise(torch.zeros(n_bytes, dtype=torch.uint8), ggml_type, (n_weights,))


def unpacked_by_host(ggml_type: int) -> bool:
    """Whether ``dequantise`` takes bytes of ``ggml_type`` to the host and back."""
    return ggml_type != T.F32 and ggml_type not in _CONVERTERS


def dequantise(raw: torch.Tensor, ggml_type: int, shape: Sequence[int]) -> torch.Tensor:
    """The float32 values of ``raw``, shaped ``shape``: bit for bit those of the ``gguf`` package.

    ``raw`` is uint8 of any shape that holds exactly the tensor's bytes; the result is on its
    device. F32 data is viewed in place where its alignment allows, everything else is new memory.
    Raises ``UnsupportedModelError`` for a type that neither this module nor ``gguf`` can read and
    ``ValueError`` when the byte count does not fit the shape.
    """
    expected = row_nbytes(ggml_type, shape[-1]) * math.prod(shape[:-1])
    if raw.dtype != torch.uint8 or raw.numel() != expected:
        raise ValueError(
            f"{T(ggml_type).name} weights of shape {tuple(shape)} are {expected} bytes, "
            f"not {raw.numel()} elements of {raw.dtype}"
        )
    if ggml_type == T.F32:
        return _viewed(raw, torch.float32, alignment=ALIGNMENT_NBYTES).view(*shape)
    convert = _CONVERTERS.get(ggml_type)
    if convert is None:
        return _through_gguf(raw, ggml_type, shape)
    return convert(raw.reshape(-1, block_size(ggml_type)[1])).reshape(*shape)


def _viewed(
    packed: torch.Tensor, dtype: torch.dtype, *, alignment: int | None = None
) -> torch.Tensor:
    """Bytes as wider numbers: in place where they are contiguous and aligned, else of a copy."""
    packed = packed.contiguous()
    n = dtype.itemsize
    if packed.data_ptr() % (alignment or n) or packed.storage_offset() % n:
        packed = packed.clone()
    return packed.view(dtype)


def _through_gguf(raw: torch.Tensor, ggml_type: int, shape: Sequence[int]) -> torch.Tensor:
    rows = raw.reshape(-1, row_nbytes(ggml_type, shape[-1])).cpu().numpy()
    try:
        # Bytes that are no sensible scale (inf, nan) are data to us, not an event worth a warning.
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(rows, T(ggml_type))
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"weights of type {T(ggml_type).name} cannot be dequantised; "
            f"convert the file to one of: {_supported()}"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(raw.device).view(*shape)


def _supported() -> str:
    return ", ".join(sorted(("F32", *(T(kind).name for kind in _CONVERTERS))))


# --- one function per type: blocks uint8 [n, block_nbytes] -> float32 [n, weights_per_block]
# Formulas: ggml, ggml-quants.c (dequantize_row_*), as restated by the gguf package.


def _half(two_bytes: torch.Tensor) -> torch.Tensor:
    """float16 fields ``[n, 2]`` as float32 ``[n, 1]``."""
    return _viewed(two_bytes, torch.float16).float()


def _fields(packed: torch.Tensor, width: int, *, group: int) -> torch.Tensor:
    """``width``-bit fields of bytes ``[n, m]``, as ``[n, m / group * 8 / width, group]``.

    Within a group of bytes all lowest fields come first, then all next ones, and so on.
    """
    fields = packed.reshape(len(packed), -1, 1, group) >> _shifts(width, packed.device)
    return (fields & ((1 << width) - 1)).flatten(1, 2)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Bit planes of bytes ``[n, m]``: ``[n, 8, m]``, lowest bit first."""
    return _fields(packed, 1, group=packed.shape[1])


def _f16(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks)


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return _viewed(blocks, torch.bfloat16).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return torch.mul(blocks[:, 2:].view(torch.int8), _half(blocks[:, :2]))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _fields(blocks[:, 2:], 4, group=16).flatten(1).view(torch.int8) - 8
    return torch.mul(q, _half(blocks[:, :2]))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    low = _fields(blocks[:, 6:], 4, group=16).flatten(1)
    # Bit j of the four bytes read as one little-endian word belongs to weight j.
    high = _fields(blocks[:, 2:6], 1, group=1).flatten(1)
    return torch.mul((low | (high << 4)).view(torch.int8) - 16, _half(blocks[:, :2]))


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]
    d = (_half(blocks[:, 80:82]) * (scales & 15)).unsqueeze(2)
    m = (_half(blocks[:, 82:84]) * (scales >> 4)).unsqueeze(2)
    q = _fields(blocks[:, 16:80], 2, group=32).reshape(-1, 16, 16)
    return torch.mul(q, d).sub_(m).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _fields(blocks[:, 32:96], 2, group=32)
    high = _bits(blocks[:, :32])
    # The mask bit is set where nothing is to be subtracted.
    q = low.view(torch.int8) - ((high ^ 1) << 2).view(torch.int8)
    scale_low = _fields(blocks[:, 96:104], 4, group=8).flatten(1)
    scale_high = _fields(blocks[:, 104:108], 2, group=4).flatten(1)
    scales = (scale_low | (scale_high << 4)).view(torch.int8) - 32
    d = (_half(blocks[:, 108:110]) * scales).unsqueeze(2)
    return torch.mul(q.reshape(-1, 16, 16), d).flatten(1)


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight 6-bit scales and mins of Q4_K and Q5_K from their 12 bytes, both ``[n, 8]``."""
    first, second, third = packed.split(4, dim=1)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    mins = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    return scales, mins


def _scaled_minus_min(blocks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``d * scale * q - dmin * min`` over the sub-blocks of Q4_K and Q5_K; ``q`` is [n, 8, 32]."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    d = (_half(blocks[:, :2]) * scales).unsqueeze(2)
    m = (_half(blocks[:, 2:4]) * mins).unsqueeze(2)
    return torch.mul(q, d).sub_(m).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_minus_min(blocks, _fields(blocks[:, 16:144], 4, group=32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _fields(blocks[:, 48:176], 4, group=32)
    return _scaled_minus_min(blocks, low | (_bits(blocks[:, 16:48]) << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _fields(blocks[:, :128], 4, group=64).flatten(1)
    high = _fields(blocks[:, 128:192], 2, group=32).flatten(1)
    q = (low | (high << 4)).view(torch.int8) - 32
    d = (_half(blocks[:, 208:210]) * blocks[:, 192:208].view(torch.int8)).unsqueeze(2)
    return torch.mul(q.reshape(-1, 16, 16), d).flatten(1)


def _scaled_nibbles(
    packed: torch.Tensor, pairs: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """The values of 32 nibbles ``packed`` [n, 16], all low ones first, times ``scales`` [n, 1].

    ``pairs`` has two values for each byte: one look-up serves two weights, the costly step here.
    """
    both = pairs.index_select(0, packed.int().view(-1)).view(torch.float32).view(-1, 16, 2)
    values = torch.empty((len(packed), 2, 16), device=packed.device)
    return torch.mul(both.mT, scales.unsqueeze(2), out=values).flatten(1)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_nibbles(blocks[:, 2:], _iq4_nl_pairs(blocks.device), _half(blocks[:, :2]))


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    scales = _mxfp4_scales(blocks.device).index_select(0, blocks[:, 0].int())
    return _scaled_nibbles(blocks[:, 1:], _mxfp4_pairs(blocks.device), scales.unsqueeze(1))


# Constant tables, made once per device: without the cache each call would copy them to the device.


@functools.lru_cache(maxsize=16)
def _shifts(width: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device).view(1, 1, -1, 1)


@functools.lru_cache(maxsize=16)
def _iq4_nl_pairs(device: torch.device) -> torch.Tensor:
    values = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return _pairs(values, device)


@functools.lru_cache(maxsize=16)
def _mxfp4_pairs(device: torch.device) -> torch.Tensor:
    """E2M1 values, doubled as in ggml; code 8 is +0, not -0."""
    return _pairs((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), device)


def _pairs(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """For each byte the float32 values of its low and high nibble, as one int64: [256]."""
    table = torch.tensor(values, dtype=torch.float32)
    byte = torch.arange(256)
    pairs = torch.stack((table[byte & 15], table[byte >> 4]), dim=1)
    return pairs.view(torch.int64).view(-1).to(device)


@functools.lru_cache(maxsize=16)
def _mxfp4_scales(device: torch.device) -> torch.Tensor:
    """Half of each E8M0 scale: ``2^(e-128)``, subnormal for e < 2; 255 is not NaN in ggml."""
    e = torch.arange(256, dtype=torch.int32)
    bits = torch.where(e < 2, 0x00200000 << e, (e - 1) << 23)
    return bits.view(torch.float32).to(device)


_CONVERTERS: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        T.F16: _f16,
        T.BF16: _bf16,
        T.Q8_0: _q8_0,
        T.Q4_0: _q4_0,
        T.Q5_0: _q5_0,
        T.Q2_K: _q2_k,
        T.Q3_K: _q3_k,
        T.Q4_K: _q4_k,
        T.Q5_K: _q5_k,
        T.Q6_K: _q6_k,
        T.IQ4_NL: _iq4_nl,
        T.MXFP4: _mxfp4,
    }
)
