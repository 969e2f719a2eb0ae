"""One GGUF file's header: metadata and where every tensor lies, all checked before anyone reads on.

``parse_header`` is pure, so that a pack can run the same checks on header bytes that it keeps in
another file; ``read_header`` brings the bytes in. Little-endian versions 2 and 3 are read. Format:
spec: ggml docs/gguf.md. A header either yields offsets that lie inside the file, aligned and free
of overlap, or a ``GGUFError`` that says what is wrong: an offset that is off by a few bytes would
otherwise load as a plausible but wrong model.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC

from tieredmoe.errors import GGUFError
from tieredmoe.gguf.cursor import Cursor
from tieredmoe.gguf.files import opened, read_exactly
from tieredmoe.gguf.tensors import TensorInfo

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

N_DIMS_MAX = 4
"""ggml tensors have at most four dimensions."""

GIVEN_UP_MAGIC = b"HOLE"
"""The first bytes of a file whose tensors are being moved into a pack: it has holes by now.

Every program that reads GGUF refuses it so; with the real magic, zeros would pass for weights.
"""

MAGIC = GGUF_MAGIC.to_bytes(4, "little")
_VERSIONS = (2, 3)
_READ_NBYTES = 1 << 20
_BLOCKS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {int(ggml_type): sizes for ggml_type, sizes in GGML_QUANT_SIZES.items()}
)
# Name length, value type, one byte of value; name length, number of dimensions, type, offset.
_PAIR_NBYTES_MIN = 8 + 4 + 1
_TENSOR_NBYTES_MIN = 8 + 4 + 4 + 8


@attrs.frozen
class GGUFHeader:
    """What one file says about itself; tensor offsets count from the start of that file.

    ``metadata`` holds plain Python values, arrays as lists. ``tensors`` keeps the order of the
    header. ``data_offset`` is where tensor data begins, which is the length of the header with its
    padding. Every tensor's ``shard_index`` is 0 until headers are merged.
    """

    path: Path
    version: int
    alignment: int
    metadata: dict[str, object]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    file_nbytes: int


def parse_header(
    buffer: bytes | bytearray | memoryview, *, path: Path | str, file_nbytes: int
) -> GGUFHeader:
    """The header that ``buffer``, the first bytes of a file of ``file_nbytes``, holds.

    ``path`` is only named in messages. Raises ``GGUFError``; bytes after the header are ignored.
    """
    return _walk(Cursor(Path(path), buffer, file_nbytes=file_nbytes))


def read_header(path: Path | str) -> GGUFHeader:
    """The header of the file at ``path``; reads the header and at most 1 MiB more."""
    return load_header(Path(path))[0]


def load_header(path: Path, *, given_up: bool = False) -> tuple[GGUFHeader, os.stat_result]:
    """``read_header``, with the status of the very file that was read.

    With ``given_up`` the header of a file that has holes is read like any other's.
    """
    with opened(path) as (fd, status):
        buffer = bytearray()

        def extend(n_wanted: int) -> None:
            n_target = max(n_wanted, len(buffer) + _READ_NBYTES)
            piece = bytearray(min(n_target, status.st_size) - len(buffer))
            read_exactly(fd, memoryview(piece), offset=len(buffer), path=path)
            buffer.extend(piece)
            if given_up and buffer.startswith(GIVEN_UP_MAGIC):
                buffer[: len(MAGIC)] = MAGIC

        return _walk(Cursor(path, buffer, file_nbytes=status.st_size, extend=extend)), status


def _walk(cursor: Cursor) -> GGUFHeader:
    version = _version(cursor)
    n_tensors = cursor.count("number of tensors", item_nbytes_min=_TENSOR_NBYTES_MIN)
    n_pairs = cursor.count("number of metadata keys", item_nbytes_min=_PAIR_NBYTES_MIN)
    metadata = _metadata(cursor, n_pairs)
    alignment = _alignment(cursor.path, metadata)
    relative = _tensors(cursor, n_tensors)
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = tuple(attrs.evolve(info, offset=data_offset + info.offset) for info in relative)
    header = GGUFHeader(
        cursor.path, version, alignment, metadata, tensors, data_offset, cursor.file_nbytes
    )
    _check_names(header)
    _check_extents(header)
    return header


def _version(cursor: Cursor) -> int:
    if cursor.file_nbytes < len(MAGIC):
        raise GGUFError(cursor.path, f"is not a GGUF file: it has only {cursor.file_nbytes} bytes")
    magic = bytes(cursor.take(len(MAGIC), "magic"))
    if magic == GIVEN_UP_MAGIC:
        raise GGUFError(
            cursor.path,
            "is being given up for a pack, and parts of it are only there by now: finish with "
            "`tieredmoe pack create … --reclaim-source`, or get it back with `tieredmoe pack "
            "rollback`",
        )
    if magic != MAGIC:
        raise GGUFError(cursor.path, f"is not a GGUF file: it starts with {magic!r}")
    version = cursor.u32("version")
    if version in _VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise GGUFError(
            cursor.path, "is a big-endian GGUF; convert it with gguf-convert-endian from PyPI gguf"
        )
    if version == 1:
        raise GGUFError(cursor.path, "is GGUF version 1, which is obsolete; convert the model anew")
    raise GGUFError(cursor.path, f"has GGUF version {version}; versions 2 and 3 are supported")


def _metadata(cursor: Cursor, n_pairs: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(n_pairs):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise GGUFError(cursor.path, f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(f"metadata key {key!r}")
    return metadata


def _alignment(path: Path, metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool):
        raise GGUFError(path, f"general.alignment is {value!r}, not an integer")
    if value <= 0 or value & (value - 1):
        raise GGUFError(path, f"general.alignment is {value}, not a power of two")
    return value


def _tensors(cursor: Cursor, n_tensors: int) -> list[TensorInfo]:
    """All tensors; offsets count from the start of the data, as in the file.

    Types that are not known are told of together, since their names all have one remedy.
    """
    unknown: dict[int, list[str]] = {}
    tensors = [_tensor(cursor, unknown) for _ in range(n_tensors)]
    if unknown:
        facts = []
        for ggml_type, names in sorted(unknown.items()):
            more = f", and {len(names) - 1} more have" if len(names) > 1 else ""
            facts.append(f"tensor {names[0]!r} has the unknown type {ggml_type}{more}")
        raise GGUFError(cursor.path, *facts)
    return tensors


def _tensor(cursor: Cursor, unknown: dict[int, list[str]]) -> TensorInfo:
    """The next tensor; one whose type is not known has no bytes, and is added to ``unknown``."""
    name = cursor.string("a tensor name")
    n_dims = cursor.u32(f"number of dimensions of tensor {name!r}")
    if n_dims > N_DIMS_MAX:
        raise GGUFError(
            cursor.path, f"tensor {name!r} has {n_dims} dimensions; at most {N_DIMS_MAX} can be"
        )
    ne = [cursor.u64(f"shape of tensor {name!r}") for _ in range(n_dims)]
    ggml_type = cursor.u32(f"type of tensor {name!r}")
    offset = cursor.u64(f"offset of tensor {name!r}")
    shape = tuple(reversed(ne))
    if ggml_type not in _BLOCKS:
        unknown.setdefault(ggml_type, []).append(name)
        return TensorInfo(name, ggml_type, shape, 0, 0, offset)
    n_block, block_nbytes = _BLOCKS[ggml_type]
    n_row = ne[0] if ne else 1
    if n_row % n_block:
        raise GGUFError(
            cursor.path,
            f"rows of tensor {name!r} have {n_row} elements, not a multiple of the {n_block} in a "
            f"block of its type {ggml_type}",
        )
    nbytes = prod(ne) // n_block * block_nbytes
    return TensorInfo(name, ggml_type, shape, nbytes, 0, offset)


def _check_names(header: GGUFHeader) -> None:
    seen: set[str] = set()
    for info in header.tensors:
        if not info.name:
            raise GGUFError(header.path, "a tensor has no name")
        if info.name in seen:
            raise GGUFError(header.path, f"tensor {info.name!r} appears twice")
        seen.add(info.name)


def _check_extents(header: GGUFHeader) -> None:
    for info in header.tensors:
        if info.offset % header.alignment:
            raise GGUFError(
                header.path,
                f"tensor {info.name!r} starts {info.offset - header.data_offset} bytes into the "
                f"data, not on a multiple of the alignment {header.alignment}",
            )
    stored = sorted((info for info in header.tensors if info.nbytes), key=lambda info: info.offset)
    _check_overlaps(header.path, stored)
    data_end = stored[-1].offset + stored[-1].nbytes if stored else 0
    if data_end > header.file_nbytes:
        n_cut = sum(info.offset + info.nbytes > header.file_nbytes for info in stored)
        raise GGUFError(
            header.path,
            f"truncated: {data_end - header.file_nbytes} bytes are missing (the file has "
            f"{header.file_nbytes} bytes, its tensors end at {data_end}, {n_cut} of {len(stored)} "
            "tensors are incomplete); download or copy it again",
        )


def _check_overlaps(path: Path, stored: Sequence[TensorInfo]) -> None:
    for before, after in pairwise(stored):
        if before.offset + before.nbytes > after.offset:
            raise GGUFError(path, f"tensors {before.name!r} and {after.name!r} overlap")
