"""``GGMLMOEPACKv1``: the pack that SGLang makes for Kimi; offsets and names, no digests.

Little-endian, packed: a header, an index sorted by layer and expert with the roles of an expert in
a fixed order (SGLang's is up, gate, down), then the slabs in that order, each 4096-aligned. Types
and shapes stand in the source alone.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from tieredmoe.errors import PackError
from tieredmoe.pack.foreign.index import (
    ROLES_PER_EXPERT,
    ForeignFormat,
    ForeignIndex,
    PackFile,
    require_data_start,
    require_entries,
    require_header,
    shown,
)
from tieredmoe.pack.foreign.places import place_layers, require_file_end
from tieredmoe.spec import PAGE_NBYTES, ROLES

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from tieredmoe.gguf import ExpertTensors
    from tieredmoe.pack.foreign.places import RecordPlaces

NAME = "GGMLMOEPACKv1"
MAGIC = NAME.encode().ljust(16, b"\0")
MANIFEST_FORMAT = "SGLANG-KIMI-GGMLMOEPACK-ADAPTER-v1"

VERSION = 1

HEADER = np.dtype(
    [
        ("magic", "S16"),
        ("version", "<u4"),
        ("header_nbytes", "<u4"),
        ("n_entries", "<u8"),
        ("data_start", "<u8"),
    ]
)
ENTRY = np.dtype(
    [
        ("tensor", "S128"),
        ("expert", "<i4"),
        ("reserved", "<u4"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
    ]
)


def _read_index(file: PackFile, experts: ExpertTensors) -> ForeignIndex:
    """The index of ``file``, compared with what its source's ``experts`` make of it.

    Raises ``PackError`` with the first thing that differs.
    """
    spec = experts.spec
    header = file.structs(HEADER, offset=0, count=1)[0]
    if header["version"] != VERSION:
        raise PackError(
            file.path,
            f"is {NAME} of version {header['version']}, and this tieredmoe reads version "
            f"{VERSION}; install a newer one, or run its source GGUF as it is",
        )
    n_entries = spec.n_records * ROLES_PER_EXPERT
    require_header(file.path, header, {"header_nbytes": HEADER.itemsize, "n_entries": n_entries})
    entries = file.structs(ENTRY, offset=HEADER.itemsize, count=n_entries)
    data_start, index_end = int(header["data_start"]), HEADER.itemsize + entries.nbytes
    require_data_start(file, data_start, index_end=index_end, alignment=PAGE_NBYTES)
    role_order = _role_order(file, experts, entries)
    places = place_layers(
        spec,
        data_start=data_start,
        role_order=role_order,
        role_alignment=PAGE_NBYTES,
        record_alignment=PAGE_NBYTES,
    )
    by_layer = entries.reshape(len(spec.layers), spec.n_experts * ROLES_PER_EXPERT)
    for i, (layer, of_layer) in enumerate(zip(spec.layers, by_layer, strict=True)):
        expected = _expected(experts, layer, places[layer])
        require_entries(file.path, of_layer, expected, first=i * len(of_layer))
    last = places[spec.layers[-1]]
    end = last.start + last.stride * (spec.n_experts - 1) + last.nbytes
    require_file_end(file.path, nbytes=file.nbytes, end=end)
    digest = hashlib.sha256(header.tobytes())
    digest.update(entries.view(np.uint8).data)
    manifest = {
        "format": MANIFEST_FORMAT,
        "complete": True,
        "expert_pack.size": file.nbytes,
        "expert_pack.magic": NAME,
        "expert_pack.index_count": n_entries,
        "expert_pack.data_start": data_start,
        "expert_pack.alignment": PAGE_NBYTES,
        "expert_pack.index_sha256": digest.hexdigest(),
        "expert_pack.physical_role_order": list(role_order),
    }
    return ForeignIndex(places, None, manifest)


def _expected(
    experts: ExpertTensors, layer: int, places: RecordPlaces
) -> dict[str, NDArray[Any] | bytes | int]:
    """All fields of all entries of one layer, in order."""
    n_experts = experts.spec.n_experts
    infos = [experts.tensors[layer, role] for role in places.role_offsets]
    expert = np.repeat(np.arange(n_experts, dtype=np.uint64), ROLES_PER_EXPERT)
    role_offsets = _tiled(n_experts, list(places.role_offsets.values()))
    return {
        "tensor": _tiled(n_experts, [info.name.encode() for info in infos], "S128"),
        "expert": expert.astype(np.int32),
        "reserved": 0,
        "offset": np.uint64(places.start) + expert * np.uint64(places.stride) + role_offsets,
        "nbytes": _tiled(n_experts, [info.nbytes // n_experts for info in infos]),
    }


def _role_order(
    file: PackFile, experts: ExpertTensors, entries: NDArray[np.void]
) -> tuple[str, ...]:
    """The order of an expert's roles in the file, from the names of its first three entries."""
    layer = experts.spec.layers[0]
    roles = {experts.tensors[layer, role].name.encode(): role for role in ROLES}
    names = entries["tensor"][:ROLES_PER_EXPERT].tolist()
    if set(names) != set(roles):
        raise PackError(
            file.path,
            f"begins with the tensors {', '.join(map(shown, names))}, and the source's first "
            f"routed layer is {layer}",
        )
    return tuple(roles[name] for name in names)


def _tiled(n_experts: int, per_role: list[Any], dtype: str = "<u8") -> NDArray[Any]:
    return np.tile(np.array(per_role, dtype), n_experts)


FORMAT = ForeignFormat(NAME, MAGIC, "source.shards.0.path", _read_index)
