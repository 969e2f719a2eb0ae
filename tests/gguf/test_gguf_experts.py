from types import MappingProxyType

import attrs
import gguf
import numpy as np
import pytest

from tieredmoe.errors import GGUFError, MetadataError
from tieredmoe.gguf import (
    Metadata,
    TensorInfo,
    find_experts,
    open_inventory,
    predicting_layers,
)
from tieredmoe.testing.tiny_gguf import DeepSeekV4Shape, TypeMix, make_deepseek_v4

Q = gguf.GGMLQuantizationType
E, F, H = 8, 64, 128


@attrs.frozen
class Source:
    """Tensors and metadata of a model that has no bytes."""

    metadata: Metadata
    tensors: MappingProxyType

    def read(self, name):
        raise AssertionError("experts are found from headers alone")


def source(tensors, *, path="m.gguf", architecture="deepseek4", **keys):
    """A model of F32 tensors given as {name: shape}; ``keys`` replace (None: drop) metadata."""
    values = {"block_count": 2, "expert_count": E, "expert_used_count": 3, **keys}
    metadata = {f"{architecture}.{k}": v for k, v in values.items() if v is not None}
    return Source(
        Metadata({"general.architecture": architecture, **metadata}, path=path),
        MappingProxyType(
            {
                name: TensorInfo(name, 0, shape, int(np.prod(shape)) * 4, 0, 1_000_000 * i)
                for i, (name, shape) in enumerate(tensors.items())
            }
        ),
    )


def moe(layers=(0, 1), **changes):
    """Expert tensors of some layers; ``changes`` such as up_1=shape or down_0=None."""
    shapes = {"gate": (E, F, H), "up": (E, F, H), "down": (E, H, F)}
    wanted = {(layer, role): shape for layer in layers for role, shape in shapes.items()}
    for change, shape in changes.items():
        role, layer = change.split("_")
        wanted[int(layer), role] = shape
    return {f"blk.{n}.ffn_{r}_exps.weight": s for (n, r), s in wanted.items() if s is not None}


def refusal(model):
    with pytest.raises(GGUFError) as caught:
        find_experts(model)
    assert caught.value.path == "m.gguf"
    return caught.value.fact


def test_the_spec_is_that_of_the_file(data_dir):
    found = find_experts(open_inventory(data_dir / "tiny_mx.gguf"))
    spec = found.spec
    assert (spec.architecture, spec.n_experts, spec.top_k) == ("deepseek4", 8, 3)
    assert spec.layers == (0, 1, 2, 3, 4, 5)
    nbytes = 64 * 128 // 32 * 17
    assert [(r.name, r.ggml_type, r.shape, r.offset, r.nbytes) for r in spec.layouts[3].roles] == [
        ("gate", Q.MXFP4, (64, 128), 0, nbytes),
        ("up", Q.MXFP4, (64, 128), nbytes, nbytes),
        ("down", Q.MXFP4, (128, 64), 2 * nbytes, nbytes),
    ]
    assert spec.layouts[3].stride == 16384


def test_every_slab_holds_the_bytes_of_its_expert(data_dir):
    path = data_dir / "tiny_mx.gguf"
    data, found = path.read_bytes(), find_experts(open_inventory(path))
    theirs = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    for key in found.spec.keys():
        for role in ("gate", "up", "down"):
            slab = found.slab(key.layer, role, key.expert)
            expected = theirs[f"blk.{key.layer}.ffn_{role}_exps.weight"][key.expert].tobytes()
            assert data[slab.offset : slab.offset + slab.nbytes] == expected


@pytest.mark.parametrize("expert", [-1, 8])
def test_an_expert_beyond_the_layer_has_no_slab(expert):
    with pytest.raises(IndexError):
        find_experts(source(moe())).slab(0, "up", expert)


def test_types_may_differ_by_layer_and_role(tmp_path):
    types = TypeMix(
        gate=Q.Q2_K, up=Q.Q3_K, down=Q.Q4_K, experts={(1, "down"): Q.Q6_K, (0, "gate"): Q.IQ4_NL}
    )
    shape = DeepSeekV4Shape(hidden_size=256, moe_intermediate_size=256, num_hidden_layers=2)
    make_deepseek_v4(tmp_path / "m.gguf", shape=shape, types=types)
    layouts = find_experts(open_inventory(tmp_path / "m.gguf")).spec.layouts
    assert [role.ggml_type for role in layouts[0].roles] == [Q.IQ4_NL, Q.Q3_K, Q.Q4_K]
    assert [role.ggml_type for role in layouts[1].roles] == [Q.Q2_K, Q.Q3_K, Q.Q6_K]
    assert [role.nbytes for role in layouts[1].roles] == [256 * n for n in (84, 110, 210)]


def test_layers_beyond_block_count_are_not_routed():
    assert find_experts(source(moe(layers=(0, 1, 2)))).spec.layers == (0, 1)


def test_layers_of_multi_token_prediction_are_not_routed():
    tensors = {**moe(layers=(0, 1, 2)), "blk.2.nextn.eh_proj.weight": (H, 2 * H)}
    assert find_experts(source(tensors, block_count=3)).spec.layers == (0, 1)


def test_dense_leading_layers_are_not_routed():
    tensors = {"blk.0.ffn_gate.weight": (F, H), **moe(layers=(1, 2))}
    assert find_experts(source(tensors, block_count=3)).spec.layers == (1, 2)


def test_the_number_of_experts_is_the_tensors_where_the_key_is_absent():
    assert find_experts(source(moe(), expert_count=None)).spec.n_experts == E


def test_another_architecture_needs_no_code():
    found = find_experts(source(moe(), architecture="kimi-k3"))
    assert found.spec.architecture == "kimi-k3"


@pytest.mark.parametrize(
    ("tensors", "fact"),
    [
        (moe(up_1=None), "layer 1 lacks the up experts"),
        (moe(gate_0=None, up_0=None), "layer 0 lacks the gate and up experts"),
        (
            moe(gate_0=None, up_0=None) | {"blk.0.ffn_gate_up_exps.weight": (E, 2 * F + 1, H)},
            "blk.0.ffn_gate_up_exps.weight has shape (8, 129, 128), not (experts, 2 rows, columns)",
        ),
        (moe(up_1=(4, F, H)), "blk.1.ffn_up_exps.weight holds 4 experts, not 8"),
        (moe(up_0=(E, 2 * F, H)), "layer 0: gate is (64, 128), but up is (128, 128)"),
        (moe(down_1=(E, F, H)), "layer 1: down is (64, 128), not the transpose of gate (64, 128)"),
        (moe(gate_0=(F, H)), "blk.0.ffn_gate_exps.weight has shape (64, 128), not (experts, rows"),
        (moe(gate_0=(E, 0, H)), "blk.0.ffn_gate_exps.weight has shape (8, 0, 128)"),
        (moe(gate_0=()), "blk.0.ffn_gate_exps.weight has shape ()"),
    ],
)
def test_a_faulty_expert_tensor_is_named(tensors, fact):
    assert fact in refusal(source(tensors))


@pytest.mark.parametrize("top_k", [0, -1, 9])
def test_an_impossible_top_k_is_named(top_k):
    fact = refusal(source(moe(), expert_used_count=top_k))
    assert f"deepseek4.expert_used_count is {top_k}, of 8 experts" in fact


def test_what_no_manifest_could_say_is_refused_before_a_conversion():
    many = {f"blk.0.ffn_{role}_exps.weight": (65537, 1, 1) for role in ("gate", "up", "down")}
    assert "65537 experts in a layer; at most 65536" in refusal(source(many, expert_count=65537))
    assert "general.architecture is empty" in refusal(source(moe(), architecture=""))


def test_layers_of_prediction_are_those_beyond_the_count_or_with_tensors_of_it():
    extra = {"blk.1.nextn.eh_proj.weight": (8,), "blk.7.attn_norm.weight": (8,)}
    assert predicting_layers(source({**moe(), **extra})) == (1, 7)


def test_every_fault_is_in_one_error():
    tensors = moe(down_0=None, up_1=(4, F, H), down_1=(E, F, F))
    fact = refusal(source(tensors, expert_used_count=99))
    for part in ("is 99", "layer 0 lacks the down", "holds 4 experts", "not the transpose"):
        assert part in fact


@pytest.mark.parametrize(
    "tensors", [{"blk.0.ffn_gate.weight": (F, H)}, moe(layers=(2,)), {}], ids=len
)
def test_a_model_without_routed_experts_is_named(tensors):
    assert "has no routed experts: architecture 'deepseek4'" in refusal(source(tensors))


def test_a_layer_number_beyond_any_model_is_no_layer():
    name = f"blk.{'9' * 5000}.ffn_gate_exps.weight"
    assert "no routed experts" in refusal(source({name: (E, F, H)}))


def test_all_missing_keys_are_in_one_error():
    with pytest.raises(
        MetadataError, match=r"deepseek4\.block_count, deepseek4\.expert_used_count"
    ):
        find_experts(source(moe(), block_count=None, expert_used_count=None))


@pytest.mark.parametrize("n_layers", [2**40, 7, 0, -1])
def test_a_layer_count_that_the_tensors_cannot_fill_is_named(n_layers):
    with pytest.raises(MetadataError, match=rf"deepseek4\.block_count is {n_layers}, not a count"):
        find_experts(source(moe(), block_count=n_layers))


def test_a_model_without_a_file_can_be_refused_too():
    with pytest.raises(GGUFError, match="the model: has no routed experts"):
        find_experts(source({}, path=None))
