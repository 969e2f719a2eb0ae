"""Whatever people publish becomes a pack, and comes back: types, fused tensors, shards, layers."""

import asyncio

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Q
from small_moe import convert, flip, make_small_moe, rebuild_source

from tieredmoe.errors import GGUFError
from tieredmoe.gguf import find_experts, open_inventory
from tieredmoe.pack import (
    create_pack,
    open_drives,
    open_pack,
    open_repair,
    open_virtual_pack,
    restore_pack,
    split_pack,
    verify_pack,
)
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.tiny_container import StoredTensor, write_shards

E, F, H = 3, 256, 256
BLOCKS = [Q.MXFP4, Q.Q8_0, Q.F16, Q.BF16, Q.F32, Q.Q2_K, Q.Q3_K, Q.Q6_K]
IQ = [Q.IQ1_S, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ3_XXS, Q.IQ3_S, Q.IQ4_NL, Q.IQ4_XS, Q.IQ1_M, Q.TQ1_0]


def tensor(rng, name, shape, ggml_type):
    n_block, nbytes = GGML_QUANT_SIZES[ggml_type]
    row = shape[-1] // n_block * nbytes
    return StoredTensor(name, rng.integers(0, 256, (*shape[:-1], row), np.uint8), ggml_type)


def experts(rng, layer, types, *, fused=False):
    gate, up, down = types
    name = f"blk.{layer}.ffn_{{}}_exps.weight"
    halves = (
        [tensor(rng, name.format("gate_up"), (E, 2 * F, H), gate)]
        if fused
        else [
            tensor(rng, name.format("gate"), (E, F, H), gate),
            tensor(rng, name.format("up"), (E, F, H), up),
        ]
    )
    return [*halves, tensor(rng, name.format("down"), (E, H, F), down)]


def write(tmp_path, tensors, *, n_layers, n_shards=1, **options):
    keys = {"block_count": n_layers, "expert_count": E, "expert_used_count": 2}
    return write_shards(
        tmp_path / "m.gguf",
        architecture="deepseek4",
        metadata={f"deepseek4.{key}": value for key, value in keys.items()},
        shards=[tensors[i::n_shards] for i in range(n_shards)],
        **options,
    )


def check_round_trip(paths, tmp_path):
    """Packed, verified, rebuilt by the format alone, restored by us; records as run in place."""
    originals = {path.name: path.read_bytes() for path in paths}
    asyncio.run(create_pack(paths[-1], tmp_path / "pack"))
    assert rebuild_source(tmp_path / "pack") == originals
    assert not asyncio.run(verify_pack(tmp_path / "pack")).damage
    asyncio.run(restore_pack(tmp_path / "pack", tmp_path / "back"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == originals
    pack, virtual = open_pack(tmp_path / "pack"), open_virtual_pack(paths[0])
    assert pack.spec == virtual.spec
    for key in virtual.spec.keys():
        assert record(pack, key) == record(virtual, key), key
    inventory = open_inventory(paths[0])
    for name in inventory.tensors:
        np.testing.assert_array_equal(pack.read(name), inventory.read(name))
    return pack


def record(model, key):
    """The bytes of an expert's roles, from where the model says that they are."""
    layout = model.spec.layouts[key.layer]
    parts = []
    for role in layout.roles:
        file_index, offset = model.extents(key).place(role.offset)
        with model.data_files[file_index].open("rb") as file:
            file.seek(offset)
            parts.append(file.read(role.nbytes))
    return parts


@pytest.mark.parametrize("types", [BLOCKS, IQ], ids=["usual", "iq"])
def test_types_may_differ_in_every_layer_and_role(tmp_path, types):
    rng = np.random.default_rng(0)
    tensors = []
    for layer, ggml_type in enumerate(types):
        others = types[(layer + 1) % len(types)], types[(layer + 3) % len(types)]
        tensors += experts(rng, layer, (ggml_type, *others))
    paths = write(tmp_path, tensors, n_layers=len(types))
    pack = check_round_trip(paths, tmp_path)
    found = [layout.roles[0].ggml_type for layout in pack.spec.layouts.values()]
    assert found == types


@pytest.mark.parametrize("alignment", [32, 64, 4096, 65536])
@pytest.mark.parametrize("n_shards", [1, 5])
def test_any_alignment_and_a_layer_in_many_shards(tmp_path, alignment, n_shards):
    rng = np.random.default_rng(1)
    tensors = [*experts(rng, 0, (Q.MXFP4,) * 3), *experts(rng, 1, (Q.Q2_K, Q.Q2_K, Q.Q3_K))]
    paths = write(tmp_path, tensors, n_layers=2, n_shards=n_shards, alignment=alignment)
    check_round_trip(paths, tmp_path)


def test_layers_of_multi_token_prediction_are_kept_among_the_dense_bytes(tmp_path):
    rng = np.random.default_rng(2)
    mtp = [tensor(rng, "blk.1.nextn.eh_proj.weight", (H, 2 * H), Q.F16)]
    tensors = [*experts(rng, 0, (Q.MXFP4,) * 3), *experts(rng, 1, (Q.Q8_0,) * 3), *mtp]
    pack = check_round_trip(write(tmp_path, tensors, n_layers=2), tmp_path)
    assert pack.spec.layers == (0,)


@pytest.fixture
def fused(tmp_path):
    """A model whose first layer has gate and up in one tensor; its second has not."""
    rng = np.random.default_rng(3)
    tensors = [
        *experts(rng, 0, (Q.Q4_0, Q.Q4_0, Q.Q6_K), fused=True),
        *experts(rng, 1, (Q.MXFP4, Q.MXFP4, Q.MXFP4)),
    ]
    return write(tmp_path, tensors, n_layers=2, n_shards=2), tensors


def test_fused_gate_and_up_are_two_roles_of_a_record(tmp_path, fused):
    paths, tensors = fused
    pack = check_round_trip(paths, tmp_path)
    assert pack.spec.layouts[0].roles[:2] == tuple(
        role for role in pack.spec.layouts[0].roles if role.name in {"gate", "up"}
    )
    gate_up = tensors[0].data
    for expert in range(E):
        gate, up, _ = record(pack, ExpertKey(0, expert))
        assert gate == gate_up[expert, :F].tobytes()
        assert up == gate_up[expert, F:].tobytes()


def test_a_fused_record_on_drives_is_read_and_restored(tmp_path, fused):
    paths, tensors = fused
    originals = {path.name: path.read_bytes() for path in paths}
    asyncio.run(create_pack(paths[0], tmp_path / "pack"))
    drives = [tmp_path / "a", tmp_path / "b"]
    asyncio.run(split_pack(tmp_path / "pack", drives, remove_original=True))
    read = open_drives(tmp_path / "pack").read(tensors[0].name)
    assert read.tobytes() == tensors[0].data.tobytes()
    asyncio.run(restore_pack(tmp_path / "pack", tmp_path / "back"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == originals


def test_a_fused_record_is_repaired_from_its_source(tmp_path, fused):
    paths, _ = fused
    asyncio.run(create_pack(paths[0], tmp_path / "pack"))
    pack, key = open_pack(tmp_path / "pack"), ExpertKey(0, 2)
    right = b"".join(record(pack, key))
    flip(tmp_path / "pack" / "experts-00000.bin", pack.locate(key).offset + 9)
    assert [each.key for each in asyncio.run(verify_pack(pack.path)).damage] == [key]
    repaired = bytearray(len(right))
    open_repair(pack, paths[0]).fill(key, memoryview(repaired))
    assert repaired == right


def test_a_fused_source_that_is_given_up_comes_back(tmp_path, fused):
    paths, _ = fused
    originals = {path.name: path.read_bytes() for path in paths}
    asyncio.run(create_pack(paths[0], tmp_path / "pack", reclaim_source=True))
    asyncio.run(restore_pack(tmp_path / "pack", tmp_path / "back"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == originals


@pytest.mark.parametrize("shape", [(E, 2 * F + 1, H), (2 * F, H)])
def test_a_fused_tensor_that_has_no_halves_is_named(tmp_path, shape):
    rng = np.random.default_rng(4)
    tensors = experts(rng, 0, (Q.F32,) * 3, fused=True)
    tensors[0] = tensor(rng, tensors[0].name, shape, Q.F32)
    paths = write(tmp_path, tensors, n_layers=1)
    with pytest.raises(GGUFError, match=r"gate_up_exps.weight has shape .* 2 rows, columns"):
        find_experts(open_inventory(paths[0]))


def test_a_gate_that_is_there_twice_is_named(tmp_path):
    rng = np.random.default_rng(5)
    tensors = experts(rng, 0, (Q.F32,) * 3, fused=True) + experts(rng, 0, (Q.F32,) * 3)[:1]
    paths = write(tmp_path, tensors, n_layers=1)
    with pytest.raises(GGUFError, match=r"layer 0 has .*gate_up_exps.weight and a tensor of its"):
        find_experts(open_inventory(paths[0]))


def test_trailing_bytes_and_a_size_that_is_no_page_are_kept(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf", n_shards=2, trailing=b"odd")
    convert(model, tmp_path / "pack")
    asyncio.run(restore_pack(tmp_path / "pack", tmp_path / "back"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == model.files
