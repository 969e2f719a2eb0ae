"""A Kimi-K3 in three shards, whole and in every way not whole: packed right, or refused by name."""

import asyncio
import logging
import os
import shutil

import pytest
from gguf import GGMLQuantizationType as Q

from tieredmoe.adapters import check_model
from tieredmoe.errors import GGUFError, MetadataError
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import create_pack, open_pack
from tieredmoe.spec import ExpertKey
from tieredmoe.testing import KimiK3Shape, KimiK3Types, make_kimi_k3

TYPES = KimiK3Types(
    attention=Q.Q8_0, values=Q.F16, latent=Q.Q8_0, gate=Q.Q8_0, up=Q.Q8_0, down=Q.F16,
    dense=Q.Q8_0, dense_down=Q.F16, embed=Q.F16, output=Q.F16,
)  # fmt: skip
SHAPE = KimiK3Shape(
    vocab_size=300,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    kda_head_dim=32,
    intermediate_size=64,
    num_experts=4,
    num_experts_per_token=2,
    routed_expert_hidden_size=32,
    moe_intermediate_size=32,
)
ROLES = ("gate", "up", "down")
FIRST, SECOND, THIRD = (f"k3-0000{i}-of-00003.gguf" for i in (1, 2, 3))


def make(folder, **settings):
    folder.mkdir(exist_ok=True)
    return make_kimi_k3(folder / "k3.gguf", shape=SHAPE, types=TYPES, **settings)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make(tmp_path_factory.mktemp("original"), n_shards=3)


@pytest.fixture
def folder(original, tmp_path):
    """A copy of the three shards, to be damaged."""
    for path in original.paths:
        shutil.copy(path, tmp_path)
    return tmp_path


def pack(source, dest):
    asyncio.run(create_pack(source, dest))
    return open_pack(dest)


def refusal(folder, source=FIRST):
    """What keeps the model from being packed; nothing may have been written."""
    before = sorted(folder.iterdir())
    with pytest.raises(GGUFError) as caught:
        pack(folder / source, folder / "k3.pack")
    assert sorted(folder.iterdir()) == before
    return str(caught.value)


def test_experts_in_three_shards_are_packed_from_any_of_them(original, folder):
    manifests = set()
    for source in (FIRST, SECOND, THIRD, "."):
        packed = pack(folder / source, folder / f"{source}.pack")
        manifests.add((packed.path / "manifest.json").read_bytes())
    assert len(manifests) == 1
    assert list(packed.spec.layers) == [1, 2, 3]
    inventory = open_inventory(original.paths[0])
    assert len(inventory.shards) == 3
    for name in inventory.tensors:
        assert packed.read(name).tobytes() == inventory.read(name).tobytes()


def test_a_record_holds_an_experts_three_matrices_though_they_are_in_different_files(tmp_path):
    made = make(tmp_path / "m", n_shards=38)
    packed, inventory = pack(made.paths[20], tmp_path / "k3.pack"), open_inventory(tmp_path / "m")
    assert len(inventory.shards) == 38
    n_apart = 0
    for layer in packed.spec.layers:
        extent = packed.locate(ExpertKey(layer, 3))
        data = packed.data_files[extent.file_index].read_bytes()[extent.offset :]
        names = {role: f"blk.{layer}.ffn_{role}_exps.weight" for role in ROLES}
        n_apart += len({inventory.tensors[name].shard_index for name in names.values()}) > 1
        for role in packed.spec.layouts[layer].roles:
            slabs = inventory.read(names[role.name]).reshape(4, -1)
            assert data[role.offset : role.offset + role.nbytes] == slabs[3].tobytes()
    assert n_apart > 0


def test_a_missing_shard_is_named(folder):
    (folder / SECOND).unlink()
    assert f"1 of 3 shards missing: {SECOND}" in refusal(folder, THIRD)


def test_a_truncated_shard_is_named_with_what_it_lacks(folder):
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 5)
    assert f"{SECOND} truncated: 5 bytes are missing" in refusal(folder)


def test_a_shard_of_another_splitting_is_named(folder, tmp_path):
    other = make(tmp_path / "other", n_shards=4)
    shutil.copy(other.paths[1], folder / SECOND)
    fact = refusal(folder)
    assert f"{SECOND}: split.count is 4, but this is shard 1 of 3" in fact


def test_shards_under_each_others_names_are_named(folder):
    (folder / SECOND).rename(folder / "kept")
    (folder / THIRD).rename(folder / SECOND)
    (folder / "kept").rename(folder / THIRD)
    fact = refusal(folder)
    assert f"{SECOND}: split.no is 2, but this is shard 1 of 3" in fact
    assert f"{THIRD}: split.no is 1, but this is shard 2 of 3" in fact


def test_a_stale_number_of_tensors_is_warned_of_once_and_the_pack_is_right(
    original, tmp_path, caplog
):
    made = make(tmp_path / "stale", n_shards=3, n_tensors_claimed=2760)
    packed = pack(made.paths[0], tmp_path / "k3.pack")
    (message,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert "split.tensors.count is 2760, but there are" in message
    assert f"there are {len(original)} tensors" in message
    inventory = open_inventory(original.paths[0])
    for name in inventory.tensors:
        assert packed.read(name).tobytes() == inventory.read(name).tobytes()


def test_with_a_stale_number_a_tensor_that_the_model_needs_is_still_missed_by_name(tmp_path):
    name = "blk.2.ffn_routed_norm.weight"
    made = make(tmp_path / "m", n_shards=3, n_tensors_claimed=2760, drop_tensors=[name])
    with pytest.raises(MetadataError, match=name):
        check_model(open_inventory(made.paths[0]))


def test_with_a_stale_number_missing_experts_are_refused_before_anything_is_written(tmp_path):
    name = "blk.2.ffn_up_exps.weight"
    make(tmp_path, n_shards=3, n_tensors_claimed=2760, drop_tensors=[name])
    assert "layer 2 lacks the up experts" in refusal(tmp_path)
