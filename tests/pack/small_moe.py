"""Small MoE models in GGUF files, of random bytes in every odd layout a pack has to keep."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Q

from tieredmoe.pack import ConversionReport, create_pack
from tieredmoe.testing.tiny_container import StoredTensor, write_shards

SHAPES = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
UNIFORM = {"gate": Q.MXFP4, "up": Q.MXFP4, "down": Q.MXFP4}
MIXED = (
    UNIFORM,
    {"gate": Q.Q8_0, "up": Q.Q4_0, "down": Q.F16},
    {"gate": Q.F32, "up": Q.F32, "down": Q.BF16},
)


class SmallMoE(NamedTuple):
    """The files, and the bytes of every slab by (layer, role, expert)."""

    paths: tuple[Path, ...]
    slabs: dict[tuple[int, str, int], bytes]

    @property
    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.paths}


def make_small_moe(
    path: Path,
    *,
    types: Sequence[dict[str, Q]] = (UNIFORM, UNIFORM),
    n_experts: int = 4,
    alignment: int = 32,
    n_shards: int = 1,
    trailing: bytes = b"",
    seed: int = 0,
) -> SmallMoE:
    """``n_shards`` deals the tensors out in turn, so a layer's roles are in different files."""
    rng = np.random.default_rng(seed)
    tensors, slabs = [], {}
    for layer, of_layer in enumerate(types):
        tensors.append(_random(rng, f"blk.{layer}.attn_norm.weight", (1001 + layer,), Q.F32))
        for role, shape in SHAPES.items():
            tensor = _random(
                rng, f"blk.{layer}.ffn_{role}_exps.weight", (n_experts, *shape), of_layer[role]
            )
            tensors.append(tensor)
            for expert in range(n_experts):
                slabs[layer, role, expert] = tensor.data[expert].tobytes()
    tensors.append(_random(rng, "output.weight", (7, 32), Q.Q8_0))
    paths = write_shards(
        path,
        architecture="deepseek4",
        metadata={
            "deepseek4.block_count": len(types),
            "deepseek4.expert_count": n_experts,
            "deepseek4.expert_used_count": min(2, n_experts),
        },
        shards=[tensors[i::n_shards] for i in range(n_shards)],
        alignment=alignment,
    )
    for shard in paths:
        with shard.open("ab") as file:
            file.write(trailing)
    return SmallMoE(paths, slabs)


def rebuild_source(pack: Path) -> dict[str, bytes]:
    """The source files, from the pack alone and by FORMAT.md alone: none of our code is used."""
    manifest = json.loads((pack / "manifest.json").read_bytes())
    experts = [(pack / file["name"]).read_bytes() for file in manifest["expert_files"]]
    layers = {layer["layer"]: layer for layer in manifest["layers"]}
    sources = {}
    for shard in manifest["shards"]:
        dense = (pack / shard["dense_file"]["name"]).read_bytes()
        rebuilt, at = b"", 0
        for segment in shard["segments"]:
            if "layer" not in segment:
                rebuilt += dense[at : at + segment["nbytes"]]
                at += segment["nbytes"]
                continue
            layer = layers[segment["layer"]]
            names = {"gate_up": ("gate", "up")}.get(segment["role"], (segment["role"],))
            roles = [role for role in layer["roles"] if role["name"] in names]
            for expert in range(manifest["model"]["n_experts"]):
                for role in roles:
                    start = layer["start"] + expert * layer["stride"] + role["offset"]
                    rebuilt += experts[layer["file"]][start : start + role["nbytes"]]
        assert at == len(dense)
        sources[shard["name"]] = rebuilt
    return sources


def pack_files(pack: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(pack.iterdir())}


def convert(model: SmallMoE, dest: Path, **options) -> ConversionReport:
    return asyncio.run(create_pack(model.paths[0], dest, **options))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x40
    file.write_bytes(data)


def _random(rng, name, shape, ggml_type) -> StoredTensor:
    n_block, block_nbytes = GGML_QUANT_SIZES[ggml_type]
    row = shape[-1] // n_block * block_nbytes
    return StoredTensor(name, rng.integers(0, 256, (*shape[:-1], row), np.uint8), ggml_type)
