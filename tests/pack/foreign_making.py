"""Small models packed in the formats of others, and ways to change one field of such a file."""

import struct
from pathlib import Path
from typing import NamedTuple

from small_moe import UNIFORM, SmallMoE, make_small_moe

from tieredmoe.spec import ROLES
from tieredmoe.testing.foreign_packs import make_ggmlmoe, make_sglang_v1

MAKERS = {"v1": make_sglang_v1, "ggml": make_ggmlmoe}

V1_HEADER = struct.Struct("<24sIIIIQQQIIII32s32s32s")
V1_ENTRY = struct.Struct("<HHBBH16s80sQQQQQQ32s32s32s4Q16s16sQQ")
GGML_HEADER = struct.Struct("<16sIIQQ")
GGML_ENTRY = struct.Struct("<128siIQQ")
STRUCTS = {"v1": (V1_HEADER, V1_ENTRY), "ggml": (GGML_HEADER, GGML_ENTRY)}


class Made(NamedTuple):
    """A foreign pack at ``path`` with its manifest, and the model it was made from."""

    path: Path
    manifest: Path
    model: SmallMoE

    def right(self, key) -> bytes:
        """The payload of an expert in the uniform layout."""
        layer, expert = key
        return b"".join(self.model.slabs[layer, role, expert] for role in ROLES)


def make(directory, form, *, types=(UNIFORM, UNIFORM), n_experts=4, n_shards=1, **options) -> Made:
    (directory / "source").mkdir(exist_ok=True)
    model = make_small_moe(
        directory / "source" / "model.gguf", types=types, n_experts=n_experts, n_shards=n_shards
    )
    path = directory / f"{form}.pack"
    return Made(path, MAKERS[form](model.paths[0], path, **options), model)


def header(path, form) -> list:
    return list(STRUCTS[form][0].unpack_from(path.read_bytes()))


def entry(path, form, number) -> list:
    of_header, of_entry = STRUCTS[form]
    return list(of_entry.unpack_from(path.read_bytes(), of_header.size + number * of_entry.size))


def set_header(path, form, field, value) -> None:
    values = header(path, form)
    values[field] = value
    data = bytearray(path.read_bytes())
    STRUCTS[form][0].pack_into(data, 0, *values)
    path.write_bytes(data)


def set_entry(path, form, number, field, value) -> None:
    of_header, of_entry = STRUCTS[form]
    values = entry(path, form, number)
    values[field] = value
    data = bytearray(path.read_bytes())
    of_entry.pack_into(data, of_header.size + number * of_entry.size, *values)
    path.write_bytes(data)
