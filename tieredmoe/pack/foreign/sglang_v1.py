"""``SGLANG-EXPERTPACK-v1``: SGLang's pack for DeepSeek, with a SHA-256 of every slab.

Little-endian, packed: a header, an index sorted by layer, expert and role, then one object per
expert (gate, up, down end to end, padded to the alignment). Every layer of the model is routed.
"""

from __future__ import annotations

import hashlib
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tieredmoe.errors import PackError
from tieredmoe.pack.foreign.index import (
    ROLES_PER_EXPERT,
    ForeignFormat,
    ForeignIndex,
    PackFile,
    require_data_start,
    require_entries,
    require_header,
)
from tieredmoe.pack.foreign.places import RecordPlaces, place_layers, require_file_end
from tieredmoe.spec import ROLES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from tieredmoe.gguf import ExpertTensors
    from tieredmoe.spec import MoESpec

NAME = "SGLANG-EXPERTPACK-v1"
MAGIC = NAME.encode().ljust(24, b"\0")

VERSION = 1
FLAGS = 0b11
"""Bit 0: payloads are the source's bytes; bit 1: an object holds all three roles."""

ALIGNMENT_MAX = 1 << 30
TRANSFORM = b"identity-v1"

HEADER = np.dtype(
    [
        ("magic", "S24"),
        ("version", "<u4"),
        ("header_nbytes", "<u4"),
        ("entry_nbytes", "<u4"),
        ("flags", "<u4"),
        ("n_entries", "<u8"),
        ("data_start", "<u8"),
        ("alignment", "<u8"),
        ("n_layers", "<u4"),
        ("n_experts", "<u4"),
        ("top_k", "<u4"),
        ("n_roles", "<u4"),
        ("model_sha256", "V32"),
        ("source_sha256", "V32"),
        ("config_sha256", "V32"),
    ]
)
ENTRY = np.dtype(
    [
        ("layer", "<u2"),
        ("expert", "<u2"),
        ("role", "u1"),
        ("rank", "u1"),
        ("ggml_type", "<u2"),
        ("type_name", "S16"),
        ("tensor", "S80"),
        ("tensor_offset", "<u8"),
        ("tensor_nbytes", "<u8"),
        ("source_offset", "<u8"),
        ("source_nbytes", "<u8"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("tensor_sha256", "V32"),
        ("source_sha256", "u1", (32,)),
        ("sha256", "u1", (32,)),
        ("dims", "<u8", (4,)),
        ("quant_scheme", "S16"),
        ("transform", "S16"),
        ("block_size", "<u8"),
        ("generation", "<u8"),
    ]
)

_LAYOUT: Mapping[str, object] = MappingProxyType(
    {
        "format": NAME,
        "version": VERSION,
        "complete": True,
        "layout": "triplet_identity",
        "role_order": list(ROLES),
        "transform.id": TRANSFORM.decode(),
    }
)
"""What the manifest of every pack of this format says."""


def _read_index(file: PackFile, experts: ExpertTensors) -> ForeignIndex:
    """The index of ``file``, compared with what its source's ``experts`` make of it.

    Raises ``PackError`` with the first thing that differs.
    """
    spec = experts.spec
    header = file.structs(HEADER, offset=0, count=1)[0]
    n_entries = spec.n_records * ROLES_PER_EXPERT
    _require_header(file, header, spec)
    _require_regular(file.path, spec)
    entries = file.structs(ENTRY, offset=HEADER.itemsize, count=n_entries)
    if not entries["nbytes"].any():
        raise PackError(
            file.path, "is not whole: its index was never written, for its making was stopped"
        )
    alignment, data_start = int(header["alignment"]), int(header["data_start"])
    index_end = HEADER.itemsize + entries.nbytes
    require_data_start(file, data_start, index_end=index_end, alignment=alignment)
    places = place_layers(
        spec,
        data_start=data_start,
        role_order=ROLES,
        role_alignment=1,
        record_alignment=alignment,
    )
    by_layer = entries.reshape(len(spec.layers), spec.n_experts * ROLES_PER_EXPERT)
    for layer, of_layer in zip(spec.layers, by_layer, strict=True):
        expected = _expected(experts, layer, places[layer], of_layer)
        require_entries(file.path, of_layer, expected, first=layer * len(of_layer))
    last = places[spec.layers[-1]]
    end = last.start + last.stride * spec.n_experts
    require_file_end(file.path, nbytes=file.nbytes, end=end)
    manifest = {
        **_LAYOUT,
        "alignment": alignment,
        "pack_size": file.nbytes,
        "index_count": n_entries,
        "index_sha256": hashlib.sha256(entries.view(np.uint8).data).hexdigest(),
        "data_start": data_start,
        "object_stride": last.stride,
    }
    # A copy, so that the digests alone stay in memory and not the index they were a field of.
    digests = by_layer["sha256"].reshape(*by_layer.shape[:1], spec.n_experts, -1, 32).copy()
    return ForeignIndex(places, dict(zip(spec.layers, digests, strict=True)), manifest)


def _require_header(file: PackFile, header: np.void, spec: MoESpec) -> None:
    """The file is of the version and kind that is understood here, and its counts fit ``spec``."""
    if header["version"] != VERSION:
        raise PackError(
            file.path,
            f"is {NAME} of version {header['version']}, and this tieredmoe reads version "
            f"{VERSION}; install a newer one, or run its source GGUF as it is",
        )
    if header["flags"] != FLAGS:
        raise PackError(
            file.path,
            f"has flags {header['flags']:#x}, and only {FLAGS:#x} is understood: the source's "
            "bytes, all roles of an expert in one object",
        )
    require_header(
        file.path,
        header,
        {
            "header_nbytes": HEADER.itemsize,
            "entry_nbytes": ENTRY.itemsize,
            "n_roles": ROLES_PER_EXPERT,
            "n_layers": len(spec.layers),
            "n_experts": spec.n_experts,
            "top_k": spec.top_k,
            "n_entries": spec.n_records * ROLES_PER_EXPERT,
        },
    )
    alignment = int(header["alignment"])
    if not 1 <= alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
        raise PackError(
            file.path, f"has alignment {alignment}, which is no power of two up to 1 GiB"
        )


def _require_regular(path: Path, spec: MoESpec) -> None:
    """The model is one that the format can hold, which has one stride and counts layers from 0."""
    if spec.layers != tuple(range(len(spec.layers))):
        raise PackError(
            path, f"numbers its layers from 0 on, and the source routes layers {spec.layers}"
        )
    sizes = {role.nbytes for layout in spec.layouts.values() for role in layout.roles}
    if len(sizes) > 1:
        raise PackError(
            path, f"holds matrices of one size, and the source's have {sorted(sizes)} bytes"
        )


def _expected(
    experts: ExpertTensors, layer: int, places: RecordPlaces, found: NDArray[np.void]
) -> dict[str, NDArray[Any] | bytes | int]:
    """The fields that addressing and meaning rest on, for all entries of one layer in order."""
    n_experts = experts.spec.n_experts
    infos = [experts.tensors[layer, role] for role in ROLES]
    types = [GGMLQuantizationType(info.ggml_type) for info in infos]
    nbytes = [info.nbytes // n_experts for info in infos]

    def per_role(values: list[Any], dtype: str = "<u8") -> NDArray[Any]:
        return np.tile(np.array(values, dtype), (n_experts, *([1] * (np.ndim(values) - 1))))

    expert = np.repeat(np.arange(n_experts, dtype=np.uint64), ROLES_PER_EXPERT)
    names = per_role([of_type.name.encode() for of_type in types], "S16")
    sizes = per_role(nbytes)
    role_offsets = per_role([places.role_offsets[role] for role in ROLES])
    return {
        "layer": layer,
        "expert": expert,
        "role": per_role(list(range(ROLES_PER_EXPERT))),
        "tensor": per_role([info.name.encode() for info in infos], "S80"),
        "ggml_type": per_role(list(types)),
        "type_name": names,
        "quant_scheme": names,
        "transform": TRANSFORM,
        "rank": 2,
        "dims": per_role([[*info.shape[:0:-1], 0, 0] for info in infos]),
        "block_size": per_role([GGML_QUANT_SIZES[of_type][0] for of_type in types]),
        "tensor_nbytes": per_role([info.nbytes for info in infos]),
        "source_nbytes": sizes,
        # Where the tensor was in the source does not matter, where the slab was in it does.
        "source_offset": found["tensor_offset"] + expert * sizes,
        "source_sha256": found["sha256"],
        "offset": np.uint64(places.start) + expert * np.uint64(places.stride) + role_offsets,
        "nbytes": sizes,
    }


FORMAT = ForeignFormat(NAME, MAGIC, "source.path", _read_index)
