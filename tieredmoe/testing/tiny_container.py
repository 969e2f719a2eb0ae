"""Writes GGUF files and split sets with the ``gguf`` package's writer, laid out as llama.cpp does.

The writer is the package's on purpose: what our own reader reads, somebody else has written.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.gguf_writer import GGUFWriter

from tieredmoe.errors import ConfigError, GGUFError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

ALIGNMENT_NBYTES = 32
"""What tensors are aligned to in a file that says nothing about it."""

_VALUE_TYPES: Mapping[str, GGUFValueType] = MappingProxyType(
    {
        "uint8": GGUFValueType.UINT8,
        "int8": GGUFValueType.INT8,
        "uint16": GGUFValueType.UINT16,
        "int16": GGUFValueType.INT16,
        "uint32": GGUFValueType.UINT32,
        "int32": GGUFValueType.INT32,
        "uint64": GGUFValueType.UINT64,
        "int64": GGUFValueType.INT64,
        "float32": GGUFValueType.FLOAT32,
        "float64": GGUFValueType.FLOAT64,
        "bool": GGUFValueType.BOOL,
    }
)


class StoredTensor(NamedTuple):
    """A tensor as it goes into a file: bytes of shape (…, row bytes)."""

    name: str
    data: NDArray[np.uint8]
    ggml_type: GGMLQuantizationType


def shard_tensors(
    tensors: Sequence[StoredTensor], n_shards: int
) -> tuple[tuple[StoredTensor, ...], ...]:
    """``tensors`` in ``n_shards`` runs of about equal count; ``ConfigError`` if too few."""
    if not 1 <= n_shards <= len(tensors):
        raise ConfigError(f"{len(tensors)} tensors cannot be split into {n_shards} shards")
    cuts = [i * len(tensors) // n_shards for i in range(n_shards + 1)]
    return tuple(tuple(tensors[cuts[i] : cuts[i + 1]]) for i in range(n_shards))


def write_shards(
    path: Path,
    *,
    architecture: str,
    metadata: Mapping[str, object],
    shards: Sequence[Sequence[StoredTensor]],
    alignment: int = ALIGNMENT_NBYTES,
    n_tensors_claimed: int | None = None,
) -> tuple[Path, ...]:
    """Write one file at ``path``, or the set ``STEM-0000i-of-0000n.gguf`` beside it.

    As with llama-gguf-split, only the first shard carries the model's metadata. Values: int is
    written as u32 (i64 where that is too narrow), float as f32, numpy scalars and arrays in their
    own type. ``n_tensors_claimed`` is what a set's shards say of the number of its tensors, by
    default the truth.

    Raises ``GGUFError`` if a file cannot be written; then nothing that was begun is left.
    """
    n_shards, n_tensors = len(shards), sum(map(len, shards))
    if n_tensors_claimed is not None:
        n_tensors = n_tensors_claimed
    if n_shards == 1:
        paths: tuple[Path, ...] = (path,)
    else:
        names = [f"{path.stem}-{i + 1:05d}-of-{n_shards:05d}.gguf" for i in range(n_shards)]
        paths = tuple(path.with_name(name) for name in names)
    begun: list[Path] = []
    target = path
    try:
        for index, (target, tensors) in enumerate(zip(paths, shards, strict=True)):
            pairs: dict[str, object] = {}
            if index == 0:
                pairs = {"general.architecture": architecture, **metadata}
            if n_shards > 1:
                pairs["split.no"] = np.uint16(index)
                pairs["split.count"] = np.uint16(n_shards)
                pairs["split.tensors.count"] = np.int32(n_tensors)
            begun.append(target.with_name(f"{target.name}.partial"))
            _write_file(begun[-1], pairs, tensors, alignment)
        for index, target in enumerate(paths):
            begun[index].replace(target)
            begun[index] = target
    except BaseException as error:
        for leftover in begun:
            leftover.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise GGUFError(target, f"cannot be written: {error.strerror}") from error
        raise
    return paths


def _write_file(
    path: Path, pairs: Mapping[str, object], tensors: Sequence[StoredTensor], alignment: int
) -> None:
    writer = GGUFWriter(path, arch="")  # writes none: in a later shard there must be none
    if alignment != ALIGNMENT_NBYTES:
        writer.add_custom_alignment(alignment)
    for key, value in pairs.items():
        add_pair(writer, key, value)
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.ggml_type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def add_pair(writer: GGUFWriter, key: str, value: object) -> None:
    """Add a metadata pair of the type that ``write_shards`` gives it."""
    if isinstance(value, np.ndarray):
        _add_array(writer, key, value.tolist(), _value_type(key, value.dtype.type()))
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        _add_array(writer, key, value, GGUFValueType.STRING)
    else:
        item = value.item() if isinstance(value, np.generic) else value
        writer.add_key_value(key, item, _value_type(key, value))


def _add_array(writer: GGUFWriter, key: str, items: list[object], item_type: GGUFValueType) -> None:
    if items:  # an empty array cannot be written; converters leave such keys out
        writer.add_key_value(key, items, GGUFValueType.ARRAY, sub_type=item_type)


def _value_type(key: str, value: object) -> GGUFValueType:
    if isinstance(value, np.generic) and value.dtype.name in _VALUE_TYPES:
        return _VALUE_TYPES[value.dtype.name]
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.UINT32 if 0 <= value < 1 << 32 else GGUFValueType.INT64
    if isinstance(value, float):
        return GGUFValueType.FLOAT32
    if isinstance(value, str):
        return GGUFValueType.STRING
    raise ConfigError(f"metadata {key}: {type(value).__name__} has no GGUF type")
