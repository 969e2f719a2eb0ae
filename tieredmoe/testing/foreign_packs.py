"""Makes small packs in SGLang's two formats from a GGUF, digests, index and manifest included.

Written with ``struct`` from the formats' byte layout and apart from our reader on purpose: two
descriptions of one format find each other's mistakes. For tests and for trying things out: whole
tensors go through memory, and nothing is resumed.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tieredmoe.errors import PackError
from tieredmoe.gguf import find_experts, open_inventory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tieredmoe.gguf import ExpertTensors, GGUFInventory, TensorInfo
    from tieredmoe.spec import MoESpec

_V1_HEADER = struct.Struct("<24sIIIIQQQIIII32s32s32s")
_V1_ENTRY = struct.Struct("<HHBBH16s80sQQQQQQ32s32s32s4Q16s16sQQ")
_GGML_HEADER = struct.Struct("<16sIIQQ")
_GGML_ENTRY = struct.Struct("<128siIQQ")

_PAGE_NBYTES = 4096


class _Slab(NamedTuple):
    """One role of one expert, as bytes of the source."""

    layer: int
    expert: int
    role: str
    info: TensorInfo
    tensor: bytes
    nbytes: int

    @property
    def start(self) -> int:
        return self.expert * self.nbytes

    @property
    def data(self) -> bytes:
        return self.tensor[self.start : self.start + self.nbytes]


def make_sglang_v1(gguf: Path | str, path: Path, *, alignment: int = _PAGE_NBYTES) -> Path:
    """Write ``gguf``'s experts to ``path`` as SGLANG-EXPERTPACK-v1, and the manifest beside it.

    The manifest is ``<path>.manifest.json``; returned is its path. Raises ``GGUFError`` for a file
    that is no MoE model and ``PackError`` where SGLang's tool would refuse: a split source, layers
    that are not 0, 1, 2, …, roles that differ in size.
    """
    inventory, experts = _opened(gguf)
    spec = experts.spec
    sizes = {role.nbytes for layout in spec.layouts.values() for role in layout.roles}
    layers = tuple(range(len(spec.layers)))
    if len(inventory.shards) > 1 or spec.layers != layers or len(sizes) > 1:
        raise PackError(
            path, "needs one source file, experts in every layer and all roles of one size"
        )
    identity, config_digest = _sha256(spec.architecture.encode()), _sha256(b"config")
    source_digest = _sha256(inventory.shards[0].path.read_bytes())
    n_entries = 3 * spec.n_records
    data_start = _rounded(_V1_HEADER.size + n_entries * _V1_ENTRY.size, alignment)

    index, payload = bytearray(), bytearray()
    for slab in _slabs(inventory, experts, ("gate", "up", "down")):
        if slab.role == "gate":
            payload += bytes(-len(payload) % alignment)
        index += _v1_entry(slab, data_start + len(payload), generation=(identity, source_digest))
        payload += slab.data
    payload += bytes(-len(payload) % alignment)
    header = _V1_HEADER.pack(
        b"SGLANG-EXPERTPACK-v1",
        1,
        _V1_HEADER.size,
        _V1_ENTRY.size,
        0b11,
        n_entries,
        data_start,
        alignment,
        len(spec.layers),
        spec.n_experts,
        spec.top_k,
        3,
        identity,
        source_digest,
        config_digest,
    )
    path.write_bytes((header + index).ljust(data_start, b"\0") + payload)
    return _v1_manifest(
        path, inventory, spec, index=bytes(index), alignment=alignment, data_start=data_start
    )


def make_ggmlmoe(
    gguf: Path | str, path: Path, *, role_order: Sequence[str] = ("up", "gate", "down")
) -> Path:
    """Write ``gguf``'s experts to ``path`` as GGMLMOEPACKv1, with an adapter manifest beside it.

    SGLang keeps that manifest in a cache of its own; here it is ``<path>.manifest.json``, and its
    path is returned. Raises ``GGUFError`` for a file that is no MoE model.
    """
    inventory, experts = _opened(gguf)
    spec = experts.spec
    n_entries = 3 * spec.n_records
    data_start = _rounded(_GGML_HEADER.size + n_entries * _GGML_ENTRY.size, _PAGE_NBYTES)
    index = bytearray(
        _GGML_HEADER.pack(b"GGMLMOEPACKv1", 1, _GGML_HEADER.size, n_entries, data_start)
    )
    payload = bytearray()
    for slab in _slabs(inventory, experts, role_order):
        payload += bytes(-len(payload) % _PAGE_NBYTES)
        index += _GGML_ENTRY.pack(
            slab.info.name.encode(), slab.expert, 0, data_start + len(payload), slab.nbytes
        )
        payload += slab.data
    path.write_bytes(index.ljust(data_start, b"\0") + payload)
    manifest = {
        "complete": True,
        "format": "SGLANG-KIMI-GGMLMOEPACK-ADAPTER-v1",
        "model": {
            "num_experts": spec.n_experts,
            "num_experts_per_token": spec.top_k,
            "active_moe_layer_ids": list(spec.layers),
        },
        "source": {
            "shards": [
                {"index": i, "path": str(shard.path.absolute()), "size": shard.file_nbytes}
                for i, shard in enumerate(inventory.shards)
            ]
        },
        "expert_pack": {
            "path": str(path.absolute()),
            "size": data_start + len(payload),
            "magic": "GGMLMOEPACKv1",
            "index_count": n_entries,
            "data_start": data_start,
            "alignment": _PAGE_NBYTES,
            "index_sha256": hashlib.sha256(index).hexdigest(),
            "physical_role_order": list(role_order),
        },
    }
    return _written(path.with_name(f"{path.name}.manifest.json"), manifest)


def _v1_manifest(
    path: Path,
    inventory: GGUFInventory,
    spec: MoESpec,
    *,
    index: bytes,
    alignment: int,
    data_start: int,
) -> Path:
    pack, source = path.read_bytes(), inventory.shards[0]
    manifest = {
        "format": "SGLANG-EXPERTPACK-v1",
        "version": 1,
        "complete": True,
        "layout": "triplet_identity",
        "role_order": ["gate", "up", "down"],
        "alignment": alignment,
        "pack_path": str(path.absolute()),
        "pack_size": len(pack),
        "pack_sha256": hashlib.sha256(pack).hexdigest(),
        "header_bytes": _V1_HEADER.size,
        "index_count": 3 * spec.n_records,
        "index_entry_bytes": _V1_ENTRY.size,
        "index_sha256": hashlib.sha256(index).hexdigest(),
        "data_start": data_start,
        "object_count": spec.n_records,
        "object_stride": (len(pack) - data_start) // spec.n_records,
        "model": {
            "num_layers": len(spec.layers),
            "num_routed_experts": spec.n_experts,
            "top_k": spec.top_k,
            "single_gpu": True,
        },
        "source": {
            "path": str(source.path.absolute()),
            "size": source.file_nbytes,
            "sha256": hashlib.sha256(source.path.read_bytes()).hexdigest(),
            "gguf_data_offset": source.data_offset,
            "tensor_count": len(inventory.tensors),
        },
        "transform": {"id": "identity-v1", "reversible": True},
    }
    return _written(path.with_name(f"{path.name}.manifest.json"), manifest)


def _opened(gguf: Path | str) -> tuple[GGUFInventory, ExpertTensors]:
    inventory = open_inventory(gguf)
    return inventory, find_experts(inventory)


def _slabs(
    inventory: GGUFInventory, experts: ExpertTensors, role_order: Sequence[str]
) -> Iterator[_Slab]:
    """Every slab in the order of the file: by layer, expert and role."""
    for layer in experts.spec.layers:
        infos = {role: experts.tensors[layer, role] for role in role_order}
        tensors = {role: inventory.read(info.name).tobytes() for role, info in infos.items()}
        for expert in range(experts.spec.n_experts):
            for role, info in infos.items():
                nbytes = info.nbytes // experts.spec.n_experts
                yield _Slab(layer, expert, role, info, tensors[role], nbytes)


def _v1_entry(slab: _Slab, pack_offset: int, *, generation: tuple[bytes, bytes]) -> bytes:
    info, name = slab.info, GGMLQuantizationType(slab.info.ggml_type).name.encode()
    identity, source_digest = (digest.hex() for digest in generation)
    of_object = _sha256(f"{identity}:{source_digest}:{slab.layer}:{slab.expert}".encode())
    n_rows, n_columns = info.shape[1:]
    return _V1_ENTRY.pack(
        slab.layer,
        slab.expert,
        ("gate", "up", "down").index(slab.role),
        2,
        info.ggml_type,
        name,
        info.name.encode(),
        info.offset,
        info.nbytes,
        info.offset + slab.start,
        slab.nbytes,
        pack_offset,
        slab.nbytes,
        _sha256(slab.tensor),
        _sha256(slab.data),
        _sha256(slab.data),
        *(n_columns, n_rows, 0, 0),
        name,
        b"identity-v1",
        GGML_QUANT_SIZES[GGMLQuantizationType(info.ggml_type)][0],
        int.from_bytes(of_object[:8], "little") or 1,
    )


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _rounded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _written(path: Path, manifest: dict[str, object]) -> Path:
    path.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path
