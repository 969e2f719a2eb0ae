"""What a model on disk is said to be: forms, types, sizes, and whatever is not as in most files."""

import asyncio

import numpy as np
import pytest
from drive_stage import mirror, split
from gguf import GGMLQuantizationType as Q
from gguf.constants import GGML_QUANT_SIZES
from small_moe import MIXED, UNIFORM, convert, make_small_moe

from tieredmoe.pack import create_pack, inspect_model, open_checkpoint
from tieredmoe.pack.inspection import layer_ranges
from tieredmoe.testing.foreign_packs import make_ggmlmoe
from tieredmoe.testing.tiny_container import StoredTensor, write_shards

E, N = 3, 256


def tensor(name, shape, ggml_type=Q.Q8_0):
    n_block, nbytes = GGML_QUANT_SIZES[ggml_type]
    return StoredTensor(
        name, np.zeros((*shape[:-1], shape[-1] // n_block * nbytes), np.uint8), ggml_type
    )


def experts(layer, ggml_type=Q.Q8_0, roles=("gate", "up", "down")):
    """Square matrices, so that every role has one shape."""
    return [
        tensor(
            f"blk.{layer}.ffn_{role}_exps.weight",
            (E, 2 * N if role == "gate_up" else N, N),
            ggml_type,
        )
        for role in roles
    ]


def write(tmp_path, *shards, n_layers=1, **options):
    keys = {"block_count": n_layers, "expert_count": E, "expert_used_count": 2}
    return write_shards(
        tmp_path / "m.gguf",
        architecture="deepseek4",
        metadata={f"deepseek4.{key}": value for key, value in keys.items()},
        shards=shards,
        **options,
    )[0]


def unusual(path, fact):
    """The one unusual thing with ``fact`` in it, of the file and of the pack made of it."""
    (found,) = [each for each in inspect_model(path).unusual if fact in each]
    return found


def test_numbers_of_a_gguf_are_those_of_its_tensors(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=2, n_experts=4)
    found = inspect_model(model.paths[1])
    spec = open_checkpoint(model.paths[0]).spec
    slabs_nbytes = sum(map(len, model.slabs.values()))
    assert (found.form, found.architecture, found.n_layers) == ("gguf", "deepseek4", 2)
    assert (found.n_experts, found.top_k, found.routed_layers) == (4, 2, (0, 1))
    assert found.experts_nbytes == slabs_nbytes == sum(found.types_nbytes["experts"].values())
    assert found.dense_nbytes == sum(found.types_nbytes["dense"].values())
    assert found.token_experts == 4
    assert found.token_nbytes == slabs_nbytes // 2
    assert found.slot_nbytes == spec.slot_nbytes
    assert found.slots_per_gib == 2**30 / spec.slot_nbytes
    assert [file.path for file in found.files] == list(model.paths)
    assert [file.alignment for file in found.files] == [32, 32]
    assert found.digests is found.source_digest is None


def test_padding_is_what_is_read_or_stored_beside_the_weights(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf")
    convert(model, tmp_path / "pack")
    layout = next(iter(open_checkpoint(model.paths[0]).spec.layouts.values()))
    packed = inspect_model(tmp_path / "pack")
    assert packed.padding_share == pytest.approx(1 - layout.payload_nbytes / layout.stride)
    assert inspect_model(model.paths[0]).padding_share > packed.padding_share


def test_neighbouring_layers_that_are_alike_are_one_entry(tmp_path):
    path = make_small_moe(tmp_path / "m.gguf", types=(UNIFORM, UNIFORM, *MIXED[1:])).paths[0]
    found = inspect_model(path)
    assert [each.layers for each in found.layers] == [(0, 1), (2,), (3,)]
    assert [role.type for role in found.layers[1].roles] == ["Q8_0", "Q4_0", "F16"]
    assert [(role.rows, role.columns) for role in found.layers[0].roles] == [
        (32, 64), (32, 64), (64, 32),
    ]  # fmt: skip
    assert "slots are as large as the largest" in unusual(path, "different types")


def test_every_form_is_named(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=2)
    convert(model, tmp_path / "pack")
    convert(model, tmp_path / "other")
    packed = inspect_model(tmp_path / "pack")
    assert (packed.form, packed.digests) == ("pack", "xxh3-128")
    assert packed.source_digest == open_checkpoint(tmp_path / "pack").manifest.source_digest.hex()
    split(tmp_path / "pack", tmp_path / "a", tmp_path / "b")
    mirror(tmp_path / "other", tmp_path / "copy")
    shared, copied = inspect_model(tmp_path / "pack"), inspect_model(tmp_path / "other")
    assert (shared.form, shared.drives) == ("split pack", (tmp_path / "a", tmp_path / "b"))
    assert (copied.form, copied.drives) == (
        "mirrored pack",
        (tmp_path / "other", tmp_path / "copy"),
    )
    make_ggmlmoe(model.paths[0], tmp_path / "g.pack")
    assert inspect_model(tmp_path / "g.pack").form == "GGMLMOEPACKv1"
    for each in (packed, shared, copied):
        assert each.layers == inspect_model(model.paths[0]).layers


def test_a_sound_ordinary_file_has_nothing_unusual(tmp_path):
    assert inspect_model(make_small_moe(tmp_path / "m.gguf").paths[0]).unusual == ()


def test_fused_gate_and_up_are_named_by_layer_in_file_and_pack(tmp_path):
    fused = ("gate_up", "down")
    path = write(
        tmp_path,
        [*experts(0), *experts(1, roles=fused), *experts(2, roles=fused)],
        n_layers=3,
    )
    asyncio.run(create_pack(path, tmp_path / "pack"))
    for model in (path, tmp_path / "pack"):
        assert unusual(model, "ffn_gate_up_exps").startswith("layers 1-2: gate and up are one")


def test_layers_of_multi_token_prediction_are_named_and_counted_apart(tmp_path):
    mtp = [*experts(2), tensor("blk.2.nextn.eh_proj.weight", (N, N))]
    beyond = [tensor("blk.3.attn_norm.weight", (N,))]
    path = write(tmp_path, [*experts(0), *experts(1), *mtp, *beyond], n_layers=3)
    asyncio.run(create_pack(path, tmp_path / "pack"))
    nbytes = sum(each.data.nbytes for each in (*mtp, *beyond))
    for model in (path, tmp_path / "pack"):
        found = inspect_model(model)
        assert (found.n_layers, found.routed_layers) == (2, (0, 1))
        fact = unusual(model, "multi-token prediction")
        assert fact == (f"layers 2-3: multi-token prediction, {nbytes:,} bytes; kept, and not run")


def test_another_alignment_is_named(tmp_path):
    assert unusual(write(tmp_path, experts(0), alignment=4096), "alignment") == (
        "general.alignment is 4096, not 32"
    )


def test_experts_of_a_layer_in_several_shards_are_named_in_file_and_pack(tmp_path):
    gate, up, down = experts(1)
    path = write(tmp_path, [*experts(0), gate], [up, down, *experts(2)], n_layers=3)
    asyncio.run(create_pack(path, tmp_path / "pack"))
    for model in (path, tmp_path / "pack"):
        assert unusual(model, "more than one source file").startswith("layers 1: ")


def test_tensors_of_experts_beside_their_matrices_are_named(tmp_path):
    bias = tensor("blk.0.ffn_gate_exps.bias", (E, N))
    path = write(tmp_path, [*experts(0), bias])
    assert "experts have more than three matrices; 1 are kept as dense" in unusual(path, bias.name)


def test_a_stale_number_of_tensors_is_named(tmp_path):
    path = write(tmp_path, experts(0)[:1], experts(0)[1:])
    data = path.read_bytes()
    at = data.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    path.write_bytes(data[:at] + (9).to_bytes(4, "little") + data[at + 4 :])
    other = path.with_name("m-00002-of-00002.gguf")
    data = other.read_bytes()
    at = data.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    other.write_bytes(data[:at] + (9).to_bytes(4, "little") + data[at + 4 :])
    assert "split.tensors.count is 9, but there are 3 tensors" in unusual(path, "split")


def test_layer_ranges_read_as_people_write_them():
    assert layer_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert layer_ranges([]) == ""
